"""The README keeps its promises: its script runs, its files exist, its commands are understood."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    return [text for name, text in blocks if name == language]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8", timeout=300)


def options(line: str) -> tuple[str, list[str]]:
    """Return a line's command of the front door and the options that it uses."""
    words = shlex.split(line, comments=True)
    return words[1], [w for w in words if w.startswith("--")]


def test_the_script_runs_as_printed(tmp_path: Path):
    (script,) = fenced("python")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = run(sys.executable, "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "upon a time a small model learned one story by heart."


def test_linked_and_listed_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    (tree,) = (block for block in fenced("") if block.startswith("chapters/"))
    listed, folder = [], ""
    for indent, name in re.findall(r"^( *)(\S+)  ", tree, re.M):
        listed.append(folder + name if indent else name)
        folder = folder if indent else name
    assert len(links) > 10
    assert len(listed) > 10
    assert not [name for name in links + listed if not (ROOT / name).exists()]


def test_every_chapter_is_listed_in_order():
    listed = re.findall(r"\]\(chapters/(\S+)\.ipynb\)", README)
    assert listed == sorted(path.stem for path in (ROOT / "chapters").glob("*.ipynb"))


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)(?=`| +#)", README))
    assert "quickstart" in named
    assert not [name for name in named if not re.search(rf"^{name}:", makefile, re.M)]


@pytest.mark.parametrize("command", ["prepare", "train", "sample", "evaluate", "export", "import"])
def test_the_command_line_knows_the_options(command: str):
    text = "\n".join(fenced("bash") + fenced(""))
    lines = [options(line) for line in re.findall(r"^mdsd .*", text, re.M)]
    used = {option for name, found in lines if name == command for option in found}
    assert used
    help_text = run(sys.executable, "-m", "mdsd", command, "--help", cwd=ROOT)
    assert help_text.returncode == 0, help_text.stderr
    known = set(re.findall(r"--[a-z][a-z-]*", help_text.stdout))
    assert not used - known
