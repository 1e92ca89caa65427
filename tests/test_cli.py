"""The front door: help, the whole path from text to story, mistakes in one line, Ctrl-C."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from mdsd import cli
from mdsd.cli import (
    EvaluateConfig,
    ExportConfig,
    ImportConfig,
    SampleConfig,
    main,
    preset_in,
    resuming,
)
from mdsd.config import PRESETS, ConfigError, ModelConfig
from mdsd.model.generate import Sampling
from mdsd.training.checkpoint import checkpoints, load_run
from mdsd.training.data import PrepareConfig, TokenData
from mdsd.training.logs import read_log
from mdsd.training.step import TrainConfig, train_step
from mdsd.training.tokenizer import gpt2_tokenizer

SHAPES = (
    "--model.hidden-size 16 --model.num-hidden-layers 2 --model.num-attention-heads 2 "
    "--model.kv-lora-rank 8 --model.q-lora-rank 8 --model.intermediate-size 16 "
    "--model.moe-intermediate-size 8 --model.max-position-embeddings 256"
).split()
SHORT = "--batch-size 2 --seq-len 16 --eval-batches 1 --warmup-steps 1 --device cpu".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "little-world"
    few = ["--stories", "60", "--val-fraction", "0.2", "--workers", "1"]
    assert main(["prepare", "--source", "bundled", "--out", str(out), *few]) == 0
    return out


def training(data: Path, out: Path, steps: int, *more: str) -> list[str]:
    """Arguments of a training that takes a second."""
    where = ["--data", str(data), "--out", str(out)]
    return ["train", *where, "--preset", "tiny", "--steps", str(steps), *SHORT, *SHAPES, *more]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(training(data, out, 4)) == 0
    return out


@pytest.fixture
def ask(capsys):
    """Return a function that runs a command and gives its status, story and remarks."""

    def run_main(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run_main


# --- help ---------------------------------------------------------------------------------------

OPTIONS = {
    "prepare": [PrepareConfig],
    "train": [TrainConfig, ModelConfig],
    "sample": [SampleConfig, Sampling],
    "evaluate": [EvaluateConfig, Sampling],
    "export": [ExportConfig],
    "import": [ImportConfig],
}


def help_text(capsys, monkeypatch, *command: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    return out


def test_help_lists_the_commands(capsys, monkeypatch):
    text = help_text(capsys, monkeypatch)
    assert all(f"• {command} " in text for command in OPTIONS)


@pytest.mark.parametrize("command", OPTIONS)
def test_help_explains_every_option(command, capsys, monkeypatch):
    text = help_text(capsys, monkeypatch, command)
    assert f"\n  mdsd {command} --" in text  # an example on a line of its own
    entries = text.split("--help", 1)[1].replace("│", " ")  # behind the example
    words = " ".join(entries.split())
    for options in OPTIONS[command]:
        prefix = "model." if options is ModelConfig else ""
        names = [field.name for field in fields(options) if field.name != "rope_scaling"]
        for name in names:  # but YaRN's class, which no preset to train has
            option = f"--{prefix}{name.replace('_', '-')}"
            explained = re.search(rf" {option}(, --\S+| \S+) [^(]", words)  # not "(default: …)"
            assert explained, f"{option} has no help"


def test_help_shows_the_numbers_of_the_preset(capsys, monkeypatch):
    text = help_text(capsys, monkeypatch, "train", "--preset", "mini")
    assert f"(default: {PRESETS['mini'].intermediate_size})" in text


@pytest.mark.parametrize("arguments", ["--preset mini", "--out x --preset=mini --steps 3"])
def test_the_preset_is_found_among_the_arguments(arguments):
    assert preset_in(["train", *arguments.split()]) == PRESETS["mini"]
    assert preset_in(["train", "--out", "x"]) == PRESETS["tiny"]
    with pytest.raises(ConfigError, match="tiny, mini"):
        preset_in(["train", "--preset"])


# --- the whole path -----------------------------------------------------------------------------


def test_from_text_to_story_and_on(data, tmp_path, ask):
    out = tmp_path / "run"
    status, story, remarks = ask(*training(data, out, 2))
    assert (status, story) == (0, "")
    assert "tokens/s" in remarks
    assert str(out / "loss.png") in remarks
    assert "mdsd sample --run" in remarks
    model, tokenizer = load_run(out)
    assert (model.config.hidden_size, len(model.layers)) == (16, 2)
    assert model.config.vocab_size == tokenizer.vocab_size == TokenData(data).meta["vocab_size"]
    status, story, remarks = ask("sample", "--run", out, "--prompt", "One day, Tom")
    assert status == 0
    assert story.startswith("One day, Tom")
    assert remarks == ""
    status, story, remarks = ask(
        "evaluate", "--run", out, "--stories", 3, "--show", 2, "--max-new-tokens", 9
    )
    assert status == 0
    assert story.count("(not coherent: ") == 2
    assert "0 of 3 stories are coherent" in remarks
    assert "nats a token" in remarks
    status, _, _ = ask(*training(data, out, 5, "--resume"))
    assert status == 0
    steps = [line["step"] for line in read_log(out / "log.jsonl") if line["split"] == "train"]
    assert steps == [1, 2, 3, 4, 5]


def test_out_to_others_and_back(run, tmp_path, ask):
    folder, back = tmp_path / "hf" / "tiny", tmp_path / "imported"
    status, story, remarks = ask("export", "--run", run, "--out", folder)
    assert (status, story) == (0, "")
    assert "rare words may become other tokens" in remarks  # the vocabulary is cut
    assert f"pipeline('text-generation', {str(folder)!r})" in remarks
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(folder))
    status, story, remarks = ask("import", "--folder", folder, "--out", back)
    assert (status, story) == (0, "")
    assert "Note" not in remarks
    assert f"mdsd sample --run {back}" in remarks
    (before, words), (after, same_words) = load_run(run), load_run(back)
    assert before.config == after.config
    assert words.to_meta() == same_words.to_meta()
    for name, tensor in before.state_dict().items():
        assert tensor.equal(after.state_dict()[name]), name
    one, two = (ask("sample", "--run", where, "--max-new-tokens", 30)[1] for where in (run, back))
    assert one == two


def test_the_next_command_can_be_typed_as_shown(run, tmp_path, ask):
    folder, back = tmp_path / "hf tiny", tmp_path / "größe and more"
    ask("export", "--run", run, "--out", folder)
    _, _, remarks = ask("import", "--folder", folder, "--out", back)
    assert f'mdsd sample --run "{back}" --prompt' in remarks


def test_importing_refuses_the_tokenizer_of_a_larger_model(run, tmp_path, ask):
    folder = tmp_path / "hf"
    ask("export", "--run", run, "--out", folder)
    meta = json.dumps(gpt2_tokenizer().to_meta())
    (folder / "tokenizer_meta.json").write_text(meta, encoding="utf-8")
    told = explained(*ask("import", "--folder", folder, "--out", tmp_path / "new"))
    assert "has 50,257 tokens and the model" in told
    assert not (tmp_path / "new").exists()


def test_importing_says_what_is_missing(run, tmp_path, ask):
    folder = tmp_path / "hf"
    assert ask("export", "--run", run, "--out", folder)[0] == 0
    (folder / "mtp.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    status, _, remarks = ask("import", "--folder", folder, "--out", tmp_path / "new")
    assert status == 0
    assert "Note: 0 of 1 configured MTP modules are there" in remarks
    assert len(load_run(tmp_path / "new")[0].mtp) == 0
    (folder / "tokenizer_meta.json").unlink()
    told = explained(*ask("import", "--folder", folder, "--out", tmp_path / "newer"))
    assert "tokenizer_meta.json" in told
    assert "from_pretrained" in told
    assert not (tmp_path / "newer").exists()


def test_preparing_says_what_it_made(tmp_path, ask):
    out = tmp_path / "d"
    status, story, remarks = ask("prepare", "--out", out, "--stories", 40, "--workers", 1)
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    assert (status, story) == (0, "")
    assert f"{meta['splits']['train']['tokens']:,} tokens to train on" in remarks
    assert f"a vocabulary of {meta['vocab_size']:,}" in remarks


def test_a_vocabulary_that_is_asked_for_is_kept(data, tmp_path, ask):
    assert ask(*training(data, tmp_path / "run", 1, "--model.vocab-size", "700"))[0] == 0
    assert load_run(tmp_path / "run")[0].config.vocab_size == 700


def test_the_seed_decides_the_story(run, ask):
    one, same, other = (
        ask("sample", "--run", run, "--max-new-tokens", 20, "--seed", seed)[1] for seed in (1, 1, 2)
    )
    assert one == same != other
    cold = [ask("sample", "--run", run, "--temperature", 0, "--seed", seed)[1] for seed in (1, 2)]
    assert cold[0] == cold[1]


def test_max_new_tokens_shortens_the_story(run, ask):
    short, long = (
        ask("sample", "--run", run, "--temperature", 0, "--max-new-tokens", n)[1] for n in (2, 40)
    )
    assert len("One day,") < len(short) < len(long)
    assert ask("sample", "--run", run, "--max-new-tokens", 0)[1] == "One day,\n"


def test_speculation_tells_the_same_greedy_story_and_what_it_saved(run, ask):
    greedy = "sample", "--run", run, "--temperature", 0, "--max-new-tokens", 20
    plain, (status, story, remarks) = ask(*greedy), ask(*greedy, "--speculative")
    assert (status, story) == plain[:2]
    assert re.search(r"\d+ passes .* gave [12]\.\d\d tokens each: of \d+ .*, \d+% were", remarks)
    assert plain[2] == ""


# --- mistakes -----------------------------------------------------------------------------------

MISTAKES = {  # arguments → words of the explanation
    "missing run": ("sample --run nowhere", "nowhere is no run folder"),
    "missing run to evaluate": ("evaluate --run nowhere", "nowhere is no run folder"),
    "no stories to evaluate": ("evaluate --run {run} --stories -1", "at least 1"),
    "no tokens to tell": ("sample --run {run} --max-new-tokens -1", "at least 0"),
    "a published model to train": ("train --data {data} --out new --preset deepseek-v3", "GiB"),
    "folder of somebody else": ("train --data {data} --out {data}", "holds other files"),
    "unknown device": ("sample --run {run} --device abacus", "this machine has"),
    "top-p in percent": ("sample --run {run} --top-p 90", "up to 1"),
    "top-k of none": ("sample --run {run} --top-k 0", "at least 1"),
    "negative temperature": ("sample --run {run} --temperature -1", "0 (greedy) or 0.001"),
    "missing data": ("train --data nowhere --out new", "mdsd prepare"),
    "unknown preset": ("train --data {data} --out new --preset huge", "tiny, mini"),
    "impossible experts": ("train --data {data} --out new --model.n-routed-experts 7", "n_group"),
    "impossible width": ("train --data {data} --out new --model.hidden-size 0", "at least 1"),
    "no steps": ("train --data {data} --out new --steps 0", "at least 1"),
    "sequences too long": ("train --data {data} --out new --seq-len 9999", "512"),
    "vocabulary too small": ("train --data {data} --out new --model.vocab-size 9", "9 tokens"),
    "run folder taken": ("train --data {data} --out {run}", "already holds a run"),
    "nothing to resume": ("train --data {data} --out new --resume", "no run to resume"),
    "another model": ("train --data {data} --out {run} --resume", "4 was asked for"),
    "run folder below a file": ("train --data {data} --out {file}/new", "cannot write"),
    "data folder taken": ("prepare --out {data}", "already holds a data set"),
    "data folder below a file": ("prepare --out {file}/new --stories 9", "cannot write"),
    "missing source": ("prepare --out new --source none.txt", "none.txt does not exist"),
    "no stories": ("prepare --out new --stories 0", "1 or more"),
    "missing run to export": ("export --run nowhere --out new", "nowhere is no run folder"),
    "export folder taken": ("export --run {run} --out {data}", "not empty"),
    "export folder below a file": ("export --run {run} --out {file}/new", "cannot write"),
    "missing folder to import": ("import --folder nowhere --out new", "nowhere holds no config"),
    "a run to import": ("import --folder {run} --out new", "model_type is None"),
    "empty source": ("prepare --out new --source {file}", "stor"),
}


def explained(status: int, story: str, remarks: str) -> str:
    """The one line that explains a mistake."""
    lines = [line for line in remarks.splitlines() if "/s]" not in line]  # progress bars
    assert (status, story) == (1, "")
    assert len(lines) == 1, remarks
    assert lines[0].startswith("mdsd: ")
    return lines[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_in_one_line(mistake, data, run, tmp_path, ask, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    command, words = MISTAKES[mistake]
    places = {"{data}": data, "{run}": run, "{file}": tmp_path / "empty.txt"}
    arguments = command.split()
    if "train" in arguments and "--steps" not in arguments:
        arguments += ["--steps", "1"]  # should the mistake be let through
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    assert words in explained(*ask(*arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]  # nothing half made


def test_a_prompt_longer_than_the_model_reads(run, ask):
    status, _, remarks = ask("sample", "--run", run, "--prompt", "a " * 300)
    assert explained(status, "", remarks).endswith("the model reads 256")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_is_not_writable(data, tmp_path, ask):
    tmp_path.chmod(0o500)
    assert "cannot write" in explained(*ask(*training(data, tmp_path / "run", 1)))
    assert "cannot write" in explained(*ask("prepare", "--out", tmp_path / "d", "--stories", 9))


def test_a_full_disk_is_explained_too(run, ask, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mdsd.cli.load_run", full)
    assert "No space left" in explained(*ask("sample", "--run", run))


def test_ctrl_c_outside_training_ends_quietly(run, ask, monkeypatch):
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mdsd.cli.load_run", press)
    assert ask("sample", "--run", run) == (130, "", "mdsd: stopped\n")


# --- as a program -------------------------------------------------------------------------------

PROGRAM = [sys.executable, "-m", "mdsd"]
posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT for another process")


def test_python_m_mdsd_is_the_program(run):
    """In an old Windows code page as well: what it cannot write becomes a question mark."""
    told = subprocess.run(
        [*PROGRAM, "sample", "--run", run, "--prompt", "λ → x", "--max-new-tokens", "0"],
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        timeout=60,
    )
    assert (told.returncode, told.stdout.splitlines(), told.stderr) == (0, [b"? ? x"], b"")
    refused = subprocess.run([*PROGRAM, "sample", "--run", "none"], capture_output=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.startswith(b"mdsd: none is no run folder")


START = """
import os, signal, threading, time
def press():
    time.sleep({delay})
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
import sys
sys.argv = ["mdsd", "train", "--data", "nowhere", "--out", "nowhere"]
sys.orig_argv = ["python", "-m", "mdsd", *sys.argv[1:]]
import mdsd
time.sleep(5)
"""


@posix
@pytest.mark.parametrize("delay", [0.05, 0.4])
def test_ctrl_c_while_the_program_starts_shows_no_traceback(delay):
    """torch takes a second to load, in which Python itself would answer with a traceback."""
    told = subprocess.run(
        [sys.executable, "-c", START.format(delay=delay)], capture_output=True, timeout=60
    )
    assert told.returncode == -signal.SIGINT
    assert told.stderr == b""


def test_a_library_that_is_imported_leaves_ctrl_c_alone():
    code = "import signal, mdsd; assert signal.getsignal(2) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def pressing(monkeypatch, number: signal.Signals) -> None:
    """Let the signal come in the third step of the next training."""

    def step(state, *rest):
        if state.step == 2:
            signal.raise_signal(number)
        return train_step(state, *rest)

    usual = cli.train
    monkeypatch.setattr(cli, "train", lambda *given, **more: usual(*given, **more | {"step": step}))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_training_says_the_command_that_goes_on(
    data, tmp_path, ask, monkeypatch, number, status
):
    monkeypatch.setattr(sys, "argv", ["mdsd"])
    with monkeypatch.context() as stopping:
        pressing(stopping, number)
        told = ask(*training(data, tmp_path / "a run", 9))
    assert told[0] == status
    command = told[2].splitlines()[-1]
    if os.name == "posix":
        words = shlex.split(command)
        assert words[0] == "mdsd"
        assert ask(*words[1:])[0] == 0
    assert checkpoints(tmp_path / "a run")[-1].step == 9


def test_the_command_that_goes_on_is_said_once_and_runs_as_it_was_begun(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/lib/mdsd/__main__.py"])
    for given in (["--steps", "9"], ["--resume", "--steps", "9"], ["--no-resume", "--steps", "9"]):
        assert resuming(["train", *given]) == "python -m mdsd train --steps 9 --resume"


def test_a_damaged_checkpoint_is_a_line_and_not_a_place_in_the_code(data, tmp_path, ask):
    out = tmp_path / "run"
    save = ["--save-every", "1"]
    assert ask(*training(data, out, 3, *save))[0] == 0
    (checkpoints(out)[-1].path / "training.pt").write_bytes(b"damaged")
    status, _, remarks = ask(*training(data, out, 3, *save, "--resume"))
    assert status == 0
    notes = [line for line in remarks.splitlines() if line.startswith("Note: ")]
    assert len(notes) == 1
    assert "step-00000003 is damaged" in notes[0]
    assert "Warning" not in remarks


# --- plot ---------------------------------------------------------------------------------------


def test_plot_explains_itself(capsys, monkeypatch):
    text = help_text(capsys, monkeypatch, "plot")
    assert "mdsd plot runs/tiny runs/other --out runs.png" in text
    assert "Folders that" in text


def test_plot_draws_one_run_or_several(run, ask, tmp_path):
    for number in (1, 2, 5):
        out = tmp_path / f"pictures/{number}.png"
        status, story, remarks = ask("plot", *[run] * number, "--out", out)
        assert (status, story) == (0, "")
        assert str(out) in remarks
        assert out.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn(run, ask, tmp_path):
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    for folder, text in ((empty, ""), (damaged, '{"step": 1}\n{"st\n{"step": 3}\n')):
        folder.mkdir()
        (folder / "log.jsonl").write_text(text, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    assert "no run to draw" in explained(*ask("plot"))
    assert "holds no log.jsonl" in explained(*ask("plot", run, tmp_path / "nowhere"))
    assert "no whole line yet" in explained(*ask("plot", run, empty))
    assert "damaged in line 2" in explained(*ask("plot", damaged))
    assert ".png" in explained(*ask("plot", run, "--out", tmp_path / "runs.mp3"))
    assert sorted(tmp_path.rglob("*")) == before


@posix
def test_ctrl_c_during_training_saves_and_resume_finishes(data, tmp_path, ask):
    out = tmp_path / "run"
    program = subprocess.Popen(
        [*PROGRAM, *training(data, out, 100_000)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not read_log(out / "log.jsonl") and time.monotonic() < deadline:
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    story, remarks = program.communicate(timeout=60)
    assert (program.returncode, story) == (130, "")
    assert "Traceback" not in remarks
    told, command = remarks.splitlines()[-2:]
    step = checkpoints(out)[-1].step
    assert told.startswith(f"mdsd: stopped after step {step} of")
    assert command.strip() == shlex.join(
        ["python", "-m", "mdsd", *training(data, out, 100_000), "--resume"]
    )
    assert ask(*training(data, out, step + 3, "--resume"))[0] == 0
    steps = [line["step"] for line in read_log(out / "log.jsonl") if line["split"] == "train"]
    assert steps == list(range(1, step + 4))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_full_memory_is_said_in_one_line(error, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    assert cli.main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mdsd: memory is full: lower --batch-size")


def test_other_runtime_errors_stay_what_they_are(monkeypatch):
    def fail(_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "run_command", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])
