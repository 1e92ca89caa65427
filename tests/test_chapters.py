"""The rules that every chapter and every exported module keeps.

Each rule is a function that takes sources and returns a list of complaints, so that a small bad
example can prove that the rule is able to fail. The tests at the end of each section run it on the
repository.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
# Written by hand, not exported: the front door and what the package shows of itself.
BY_HAND = {"__init__", "__main__", "_modidx", "cli"}
MODULES = sorted(p for p in (ROOT / "mdsd").rglob("*.py") if p.stem not in BY_HAND)

each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
each_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda p: p.relative_to(ROOT / "mdsd").as_posix()
)


@dataclass
class Cell:
    """A notebook's cell, with what the rules ask about."""

    kind: str
    source: str
    count: int | None
    outputs: list[dict[str, Any]]
    metadata: dict[str, Any]

    @property
    def tags(self) -> list[str]:
        return self.metadata.get("tags", [])

    @property
    def exported(self) -> bool:
        return bool(re.search(r"^#\| *exporti?\b", self.source, re.M))


def none(problems: list[str]) -> None:
    """Fail with the complaints alone, not with the notebooks that they are about."""
    assert not problems, "\n" + "\n".join(problems)


def load(path: Path) -> list[Cell]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        Cell(
            c["cell_type"],
            "".join(c["source"]),
            c.get("execution_count"),
            c.get("outputs", []),
            c["metadata"],
        )
        for c in cells
    ]


def code(source: str, count: int | None = 1, **more: Any) -> Cell:
    return Cell("code", source, count, more.get("outputs", []), more.get("metadata", {}))


def prose(source: str) -> Cell:
    return Cell("markdown", source, None, [], {})


def parse(source: str) -> ast.Module:
    """Parse a cell; lines that speak to IPython or the shell are no Python and become `pass`."""
    if source.lstrip().startswith("%%"):
        return ast.Module([], [])
    return ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M))


# Rule: a chapter imports only from earlier chapters.


def exported_module(cells: list[Cell]) -> str | None:
    """Return the module that a notebook's `#| default_exp` names, as `mdsd.model.mla`."""
    for cell in cells:
        if found := re.search(r"^#\| *default_exp +(\S+)", cell.source, re.M):
            return f"mdsd.{found[1]}"
    return None


def reexports(init_source: str) -> dict[str, str]:
    """Map the names that `mdsd/__init__.py` imports to the module that each comes from."""
    return {
        alias.asname or alias.name: f"mdsd.{node.module}" if node.level else str(node.module)
        for node in ast.walk(ast.parse(init_source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def imported(tree: ast.AST, module: str, names: dict[str, str], known: set[str]) -> set[str]:
    """Return the modules of mdsd that a source imports, relative imports and re-exports resolved.

    `module` is where the source stands, `names` what the package re-exports and `known` every
    module that exists, to tell `from mdsd.model import mla` from a name inside `mdsd.model`.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.split(".")[0] == "mdsd")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: -node.level]
                base = ".".join([*parts, base] if base else parts)
            if base.split(".")[0] != "mdsd":
                continue
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else names.get(alias.name, base))
    return found


def late_imports(order: list[str], importer: str, imports: set[str]) -> list[str]:
    """Complain about each import of a module that is not exported by an earlier chapter."""
    allowed = order[: order.index(importer) + 1]
    return [
        f"{importer} imports {name}, which no earlier chapter exports"
        for name in sorted(imports)
        if name not in allowed
    ]


def reading_order() -> list[str]:
    return [m for path in CHAPTERS if (m := exported_module(load(path)))]


def package_names() -> dict[str, str]:
    return reexports((ROOT / "mdsd" / "__init__.py").read_text(encoding="utf-8"))


def test_late_imports_are_found():
    order = ["mdsd.config", "mdsd.model.rope", "mdsd.model.mla"]
    names = {"LatentCache": "mdsd.model.mla"}
    for source in (
        "from mdsd.model.mla import LatentCache",
        "from .mla import LatentCache",
        "from mdsd import LatentCache",
        "from mdsd.model import mla",
        "def later():\n    import mdsd.model.mla",
        "from mdsd.cli import main",
        "import mdsd",
    ):
        imports = imported(ast.parse(source), "mdsd.model.rope", names, set(order))
        assert late_imports(order, "mdsd.model.rope", imports), source
    for source in ("from mdsd.config import ModelConfig", "from ..config import X", "import torch"):
        imports = imported(ast.parse(source), "mdsd.model.rope", names, set(order))
        assert not late_imports(order, "mdsd.model.rope", imports), source


@each_chapter
def test_a_chapter_imports_only_earlier_chapters(path: Path):
    cells, order = load(path), reading_order()
    module = exported_module(cells)
    assert module, f"{path.name} has no #| default_exp"
    # The welcome shows the finished package, so its own experiments may import all of it. What it
    # exports still comes first in the book and may import nothing.
    welcome = path.stem.startswith("00")
    sources = [c.source for c in cells if c.kind == "code" and (c.exported or not welcome)]
    imports = set().union(
        *(imported(parse(s), module, package_names(), set(order)) for s in sources)
    )
    none(late_imports(order, module, imports))


@each_module
def test_a_module_imports_only_earlier_modules(path: Path):
    order = reading_order()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if module not in order:
        pytest.fail(f"no chapter exports {module}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    none(late_imports(order, module, imported(tree, module, package_names(), set(order))))


def test_the_book_lists_every_chapter_in_reading_order():
    contents = (ROOT / "book" / "_toc.yml").read_text(encoding="utf-8")
    listed = re.findall(r"file: +chapters/(\S+)", contents)
    assert listed == [path.stem for path in CHAPTERS]


# Rule: no star imports, and no name defined in two modules.


def star_imports(tree: ast.AST) -> list[str]:
    return [
        f"line {node.lineno}: from {node.module} import *"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)
    ]


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines at its top level; `__all__` and its like are none."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
    return {name for name in names if not re.fullmatch(r"__\w+__|_all_", name)}


def defined_twice(modules: dict[str, ast.Module]) -> list[str]:
    homes: dict[str, list[str]] = {}
    for module, tree in modules.items():
        for name in defined_names(tree):
            homes.setdefault(name, []).append(module)
    return [f"{name}: {', '.join(where)}" for name, where in homes.items() if len(where) > 1]


def test_star_imports_and_doubles_are_found():
    assert star_imports(ast.parse("def f():\n    from torch import *"))
    assert not star_imports(ast.parse("from torch import nn"))
    a, b = ast.parse("EPS = 1\ndef f(): pass"), ast.parse("EPS: float = 2\nclass G: pass")
    assert defined_twice({"a": a, "b": b}) == ["EPS: a, b"]


@each_chapter
def test_no_star_imports(path: Path):
    assert not [s for c in load(path) if c.kind == "code" for s in star_imports(parse(c.source))]


def test_no_star_imports_in_the_package():
    for path in (ROOT / "mdsd").rglob("*.py"):
        assert not star_imports(ast.parse(path.read_text(encoding="utf-8"))), path


def test_no_name_is_defined_in_two_modules():
    trees = {p.stem: ast.parse(p.read_text(encoding="utf-8")) for p in MODULES}
    none(defined_twice(trees))


# Rule: everything public is documented.


def undocumented(tree: ast.AST, prefix: str = "") -> list[str]:
    """List public functions, classes and methods without a docstring.

    A method that only fills in a name set by a base class elsewhere is still public: say what
    this one does.
    """
    missing = []
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            missing.append(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            missing += undocumented(node, f"{prefix}{node.name}.")
    return missing


def test_missing_docstrings_are_found():
    tree = ast.parse("class A:\n    'A.'\n    def f(self): pass\ndef _g(): pass\ndef h(): 'H.'")
    assert undocumented(tree) == ["A.f"]


@each_module
def test_everything_public_has_a_docstring(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the chapter's title cell needs a line `> what the module is`"
    none(undocumented(tree))


# Rule: a chapter is saved after one run from the top, small, and complete.

LONGEST_CELL = 40  # lines
LARGEST_TEXT = 60_000  # bytes of outputs a notebook without its figures
LARGEST_FIGURES = 250_000  # bytes of figures a notebook
WORDS = range(700, 3201)


def not_run_from_the_top(cells: list[Cell]) -> list[str]:
    codes = [c for c in cells if c.kind == "code"]
    problems = [f"empty code cell at position {i}" for i, c in enumerate(codes) if not c.source]
    if [c.count for c in codes] != list(range(1, len(codes) + 1)):
        problems.append("execution counts are not 1, 2, 3 …: run from the top and save")
    for cell in codes:
        for output in cell.outputs:
            if output["output_type"] == "error" and "raises-exception" not in cell.tags:
                problems.append(f"cell {cell.count} holds an error output")
            if output.get("name") == "stderr" and "nbval-ignore-output" not in cell.tags:
                problems.append(f"cell {cell.count} holds a warning or a progress bar")
    return problems


def too_large(cells: list[Cell]) -> list[str]:
    outputs = [o for c in cells for o in c.outputs]
    pictures = [v for o in outputs for m, v in o.get("data", {}).items() if m.startswith("image/")]
    figures = len(json.dumps(pictures))
    text = len(json.dumps(outputs)) - figures
    problems = []
    if text > LARGEST_TEXT:
        problems.append(f"{text:,} bytes of outputs besides the figures")
    if figures > LARGEST_FIGURES:
        problems.append(f"{figures:,} bytes of figures")
    for cell in cells:
        lines = len(cell.source.splitlines())
        if cell.kind == "code" and lines > LONGEST_CELL:
            first = next(s for s in cell.source.splitlines() if s and not s.startswith("#|"))
            problems.append(f"a code cell of {lines} lines: {first}")
    return problems


def checks(tree: ast.AST) -> int:
    """Count the asserts of a cell, torch's and numpy's included."""
    return sum(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Attribute) and node.attr.startswith("assert_"))
        for node in ast.walk(tree)
    )


def incomplete(cells: list[Cell]) -> list[str]:
    """Complain about missing parts: title, checks, exercises with solutions, summary, reading."""
    text = "\n\n".join(c.source for c in cells if c.kind == "markdown")
    problems = []
    if not re.match(r"# .+\n\n> .+", cells[0].source):
        problems.append("the first cell is not `# Title`, an empty line and `> one line`")
    headings = re.findall(r"^## +(.+?) *$", text, re.M)
    if headings[-2:] != ["Summary", "Further reading"]:
        problems.append("does not end with Summary and Further reading")
    exercises = text.partition("\n## Exercises")[2]
    if exercises.count("<details>") < 3:
        problems.append("fewer than three exercises with a folded solution")
    asserts = sum(checks(parse(c.source)) for c in cells if c.kind == "code")
    if asserts < 5:
        problems.append(f"{asserts} asserts, fewer than five")
    words = len(re.sub(r"```.*?```", "", text, flags=re.S).split())
    if words not in WORDS:
        problems.append(f"{words} words of prose")
    return problems


def without_alt_text(cells: list[Cell]) -> list[str]:
    """Complain about figures that somebody who cannot see them learns nothing from."""
    problems = []
    for cell in cells:
        shows = any(m.startswith("image/") for o in cell.outputs for m in o.get("data", {}))
        if shows and not cell.metadata.get("mystnb", {}).get("image", {}).get("alt"):
            problems.append(f"cell {cell.count} shows a figure without alt text")
        if cell.kind == "markdown" and re.search(r"!\[\s*\]\(", cell.source):
            problems.append(f"an image without alt text: {cell.source[:40]!r}")
    return problems


def test_unhealthy_notebooks_are_found():
    error = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
    warning = {"output_type": "stream", "name": "stderr", "text": ["careful"]}
    assert not_run_from_the_top([code("1", 2)])
    assert not_run_from_the_top([code("1", None)])
    assert not_run_from_the_top([code("", 1)])
    assert not_run_from_the_top([code("1", 1, outputs=[error])])
    assert not_run_from_the_top([code("1", 1, outputs=[warning])])
    assert not not_run_from_the_top(
        [code("1", 1, outputs=[error], metadata={"tags": ["raises-exception"]}), code("2", 2)]
    )
    assert too_large([code("x\n" * 41)])
    assert too_large([code("x", outputs=[{"text": "x" * 60_001}])])
    assert too_large([code("x", outputs=[{"data": {"image/png": "x" * 250_001}}])])
    assert not too_large([code("x\n" * 40)])
    assert checks(ast.parse("assert x\ntorch.testing.assert_close(a, b)")) == 2


def test_incomplete_notebooks_are_found():
    solution = "<details><summary>Solution</summary>\n\nSo.\n\n</details>\n\n"
    good = [
        prose("# Title\n\n> One line."),
        prose("word " * 800),
        code("assert 1\n" * 5),
        prose("## Exercises\n\n" + solution * 3),
        prose("## Summary\n\nSo.\n\n## Further reading\n\n1. That."),
    ]
    assert not incomplete(good)
    assert incomplete([prose("# Title"), *good[1:]])
    for missing in range(1, len(good)):
        assert incomplete(good[:missing] + good[missing + 1 :]), missing
    assert incomplete([*good[:3], prose("## Exercises\n\n" + solution * 2), good[4]])


def test_figures_without_alt_text_are_found():
    figure = [{"output_type": "display_data", "data": {"image/png": "…"}}]
    alt = {"mystnb": {"image": {"alt": "A line that falls."}}}
    assert without_alt_text([code("plot()", outputs=figure)])
    assert without_alt_text([prose("![](a.svg)")])
    assert not without_alt_text(
        [code("plot()", outputs=figure, metadata=alt), prose("![A box](a.svg)")]
    )


@each_chapter
def test_a_chapter_is_saved_after_one_run(path: Path):
    none(not_run_from_the_top(load(path)))


@each_chapter
def test_a_chapter_is_small(path: Path):
    none(too_large(load(path)))


@each_chapter
def test_a_chapter_is_complete(path: Path):
    problems = incomplete(load(path))
    if path.stem.startswith("00"):  # a welcome has nothing to prove yet
        problems = [p for p in problems if "assert" not in p and "exercises" not in p]
    none(problems)


@each_chapter
def test_figures_have_alt_text(path: Path):
    none(without_alt_text(load(path)))


# Rule: nothing in the repository knows the machine it was made on.

MACHINE_PATH = re.compile(
    r"(?<![\w.:/])(/(?:home|root|Users|work|workspace|mnt)/\w|[A-Z]:\\Users\\)"
)
TEXT_FILES = {".py", ".md", ".ipynb", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".css", ".js"}
TEXT_FILES |= {".bib", ".html", ".svg", ".json", ""}


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [p for name in listed.stdout.split("\0") if name and (p := ROOT / name).is_file()]


def machine_paths(text: str) -> list[str]:
    return [found[1] for found in MACHINE_PATH.finditer(text)]


def test_machine_paths_are_found():
    assert machine_paths('File "' + "/" + 'home/me/mdsd/loop.py"')
    assert machine_paths("C:" + r"\Users\me")
    assert not machine_paths("https://example.org/home/me, book/home/me and /etc/hosts")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_no_file_names_a_path_of_a_machine():
    texts = [p for p in tracked_files() if p.suffix in TEXT_FILES]
    assert texts
    named = {p.name: machine_paths(p.read_text(encoding="utf-8")) for p in texts}
    assert not {name: paths for name, paths in named.items() if paths}


# Rule: the package is what the notebooks export.


def differing(committed: Path, exported: Path) -> list[str]:
    """Name the files of the package that two folders do not share byte for byte."""
    files = {
        p.relative_to(folder).as_posix()
        for folder in (committed, exported)
        for p in folder.rglob("*.py")
    }
    return sorted(
        name
        for name in files
        if not ((committed / name).is_file() and (exported / name).is_file())
        or (committed / name).read_text("utf-8") != (exported / name).read_text("utf-8")
    )


def test_differing_files_are_found(tmp_path: Path):
    for folder, text in (("a", "x = 1"), ("b", "x = 2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.py").write_text(text, encoding="utf-8")
    (tmp_path / "b" / "new.py").write_text("", encoding="utf-8")
    assert differing(tmp_path / "a", tmp_path / "b") == ["config.py", "new.py"]
    assert not differing(tmp_path / "a", tmp_path / "a")


def test_the_package_is_what_the_notebooks_export(tmp_path: Path):
    pytest.importorskip("nbdev")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    skip = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for folder in ("chapters", "mdsd"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skip)
    for module in MODULES:
        (tmp_path / module.relative_to(ROOT)).unlink()
    export = "from nbdev.doclinks import nbdev_export; nbdev_export()"
    subprocess.run([sys.executable, "-c", export], cwd=tmp_path, check=True)
    none(differing(ROOT / "mdsd", tmp_path / "mdsd"))
