"""A data set is written whole or not at all, the same by any number of threads."""

import errno
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tyro

from mdsd.training import prepare as module
from mdsd.training import sources
from mdsd.training.corpus import generate_stories
from mdsd.training.prepare import FILES, PrepareConfig, assign_split, prepare
from mdsd.training.sources import Chunk, DataError
from mdsd.training.tokenizer import Tokenizer

END = "<|endoftext|>"
STORIES = [f"Story {i}: {word} saw the cat {i % 7} times." for i, word in enumerate(["Tim"] * 400)]


def write_stories(path: Path, stories: list[str] = STORIES) -> Path:
    path.write_text("".join(f"{story}\n{END}\n" for story in stories), encoding="utf-8")
    return path


def config(tmp_path: Path, **changes: object) -> PrepareConfig:
    source = tmp_path / "stories.txt"
    if not source.exists():
        write_stories(source)
    return PrepareConfig(**{"source": str(source), "out": tmp_path / "out", **changes})


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_back(folder: Path, split: str) -> list[str]:
    """Read the stories of a split with nothing but numpy and the metadata."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    ids = np.fromfile(folder / f"{split}.bin", dtype="<u2").tolist()
    tokenizer = Tokenizer.from_meta(meta)
    assert ids[-1] == meta["eot_id"]
    groups = itertools.groupby(ids, lambda id_: id_ == meta["eot_id"])
    return [tokenizer.decode(group) for is_end, group in groups if not is_end]


# What is written


@pytest.mark.parametrize("vocabulary", ["cut", "full"])
def test_every_story_comes_back(tmp_path, vocabulary):
    meta = prepare(config(tmp_path, vocabulary=vocabulary))
    read = {split: read_back(tmp_path / "out", split) for split in ("train", "val")}
    assert sorted(read["train"] + read["val"]) == sorted(STORIES)
    for split, stories in read.items():
        expected = [s for s in STORIES if assign_split(s, 0, 0.05) == split]
        assert stories == expected  # in the order of the source
        assert meta["splits"][split]["stories"] == len(expected)
    assert meta["vocab_size"] == 50257 if vocabulary == "full" else meta["vocab_size"] < 800


def test_the_metadata_describe_the_files(tmp_path):
    meta = prepare(config(tmp_path, seed=4))
    assert snapshot(tmp_path / "out").keys() == FILES
    assert json.loads((tmp_path / "out" / "meta.json").read_text(encoding="utf-8")) == meta
    assert (meta["format"], meta["version"], meta["dtype"]) == ("mdsd-tokens", 1, "uint16")
    assert (meta["seed"], meta["tokenizer"]) == (4, "gpt2")
    for split in meta["splits"].values():
        data = (tmp_path / "out" / split["file"]).read_bytes()
        assert split["sha256"] == hashlib.sha256(data).hexdigest()
        assert split["tokens"] * 2 == len(data)
        ids = np.frombuffer(data, dtype="<u2")
        assert (ids == meta["eot_id"]).sum() == split["stories"]
        assert ids.max() < meta["vocab_size"]


def test_ids_are_in_the_order_of_their_frequency(tmp_path):
    prepare(config(tmp_path))
    ids = [np.fromfile(tmp_path / "out" / f"{s}.bin", dtype="<u2") for s in ("train", "val")]
    counts = np.bincount(np.concatenate(ids))
    assert (np.diff(counts) <= 0).all()


def test_bundled_stories_carry_their_probability(tmp_path):
    meta = prepare(config(tmp_path, source="bundled", stories=300, val_fraction=0.2))
    told = list(itertools.islice(generate_stories("easy", 0), 300))
    assert sum(split["stories"] for split in meta["splits"].values()) == 300
    total = sum(split["nats"] for split in meta["splits"].values())
    assert total == pytest.approx(sum(story.nats for story in told))
    assert set(read_back(tmp_path / "out", "val")) <= {story.text for story in told}


@pytest.mark.parametrize("source", ["bundled", "text"])
def test_the_number_of_threads_changes_nothing(tmp_path, source, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 500)
    more = {"source": "bundled", "stories": 600} if source == "bundled" else {}
    for workers in (1, 2, 5):
        prepare(config(tmp_path, out=tmp_path / str(workers), workers=workers, **more))
    assert snapshot(tmp_path / "1") == snapshot(tmp_path / "2") == snapshot(tmp_path / "5")


def test_the_size_of_chunks_changes_nothing(tmp_path, monkeypatch):
    prepare(config(tmp_path, out=tmp_path / "whole"))
    monkeypatch.setattr(sources, "CHUNK", 300)
    monkeypatch.setattr(module, "CHUNK", 50)  # of the second pass
    prepare(config(tmp_path, out=tmp_path / "small"))
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "small")


def test_the_split_depends_on_the_text_and_the_seed_alone():
    shares = [assign_split(s, 0, 0.25) for s in (f"story {i}" for i in range(4000))]
    assert 0.22 < shares.count("val") / 4000 < 0.28
    other = [assign_split(f"story {i}", 1, 0.25) for i in range(4000)]
    both = sum(a == b == "val" for a, b in zip(shares, other, strict=True))
    assert 0.04 < both / 4000 < 0.085  # independent: 1/16
    assert [assign_split(s, -3, 0.5) for s in "ab"] == [assign_split(s, -3, 0.5) for s in "ab"]


def test_the_hub_keeps_its_own_split(tmp_path, monkeypatch):
    chunks = [Chunk(["a", " ", "b"], 3, "hub", "train"), Chunk(["c"], 1, "hub", "val")]
    monkeypatch.setattr(module, "hub_chunks", lambda workers: iter(chunks))
    meta = prepare(config(tmp_path, source="tinystories"))
    assert read_back(tmp_path / "out", "train") == ["a", "b"]
    assert read_back(tmp_path / "out", "val") == ["c"]
    assert meta["val_fraction"] is None


def test_nothing_is_printed(tmp_path, capsys):
    prepare(config(tmp_path))
    assert capsys.readouterr() == ("", "")


def test_a_progress_bar_goes_to_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    prepare(config(tmp_path))
    out, err = capsys.readouterr()
    assert out == ""
    assert "prepare: 100%" in err


def test_the_command_line_is_generated(capsys):
    parsed = tyro.cli(PrepareConfig, args=["--source", "a.txt", "--out", "d", "--overwrite"])
    assert (parsed.source, parsed.out, parsed.overwrite) == ("a.txt", Path("d"), True)
    with pytest.raises(SystemExit):
        tyro.cli(PrepareConfig, args=["--help"])
    text = capsys.readouterr().out
    assert "--val-fraction" in text
    assert "Number of bundled stories" in text


# What is refused


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no story"),
        (f"\n{END}\n  \n{END}\n", "holds no story"),
        ("only one story\n", r"ends each in a \.txt|ends each"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_without_stories_is_refused(tmp_path, content, says):
    (tmp_path / "stories.txt").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(DataError, match=says):
        prepare(config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["stories.txt"]


def test_a_lone_surrogate_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "bad \\ud800"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl.*character 4 is U\+D800"):
        prepare(config(tmp_path, source=str(path)))


@pytest.mark.parametrize(
    "change", [{"stories": 0}, {"val_fraction": 0.0}, {"val_fraction": 1.0}, {"workers": 0}]
)
def test_impossible_numbers_are_refused(tmp_path, change):
    with pytest.raises(DataError, match=next(iter(change))):
        config(tmp_path, **change)


def test_a_folder_with_other_files_is_never_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(DataError, match=r"other files \(thesis\.txt\)"):
        prepare(config(tmp_path, overwrite=True))
    assert snapshot(out) == {"thesis.txt": b"years of work"}
    with pytest.raises(DataError, match="is a file"):
        prepare(config(tmp_path, out=out / "thesis.txt", overwrite=True))


# What survives


@pytest.fixture
def old(tmp_path):
    """Prepare a data set that the following attempts should leave alone."""
    prepare(config(tmp_path))
    (tmp_path / "stories.txt").unlink()
    write_stories(tmp_path / "stories.txt", ["Quite", "different", "stories"] * 50)
    return snapshot(tmp_path / "out")


def untouched(tmp_path: Path, old: dict[str, bytes]) -> bool:
    names = {path.name for path in tmp_path.iterdir()}
    return names == {"out", "stories.txt"} and snapshot(tmp_path / "out") == old


def test_a_data_set_is_replaced_only_if_asked(tmp_path, old):
    with pytest.raises(DataError, match="already holds a data set"):
        prepare(config(tmp_path))
    assert untouched(tmp_path, old)
    prepare(config(tmp_path, overwrite=True, val_fraction=0.5))
    assert not untouched(tmp_path, old)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stories.txt"}
    assert "Quite" in read_back(tmp_path / "out", "train") + read_back(tmp_path / "out", "val")


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    prepare(config(tmp_path))
    assert snapshot(tmp_path / "out").keys() == FILES


def fail_after(calls: int, real, error: BaseException):
    """Let a function work a few times and then raise."""
    count = itertools.count()

    def wrapped(*args: object, **options: object):
        if next(count) >= calls:
            raise error
        return real(*args, **options)

    return wrapped


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("name", "calls"),
    [("write_tokens", 0), ("recode", 0), ("recode", 1), ("describe", 0), ("encode_chunk", 0)],
)
@pytest.mark.parametrize("error", [FULL_DISK, KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_failure_on_the_way_leaves_the_old_data(tmp_path, old, monkeypatch, name, calls, error):
    monkeypatch.setattr(module, name, fail_after(calls, getattr(module, name), error))
    with pytest.raises(DataError if error is FULL_DISK else type(error)):
        prepare(config(tmp_path, overwrite=True, val_fraction=0.5))
    assert untouched(tmp_path, old)


class FullFile:
    """A file on a disk that fills up in the middle of a write."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data):
        self.file.write(bytes(data)[:10])
        raise FULL_DISK


def test_a_full_disk_is_told_and_leaves_the_old_data(tmp_path, old, monkeypatch):
    def open_full(path: Path, mode: str) -> FullFile:
        return FullFile(path.open(mode))

    monkeypatch.setattr(module, "open", open_full, raising=False)
    with pytest.raises(DataError, match=r"cannot write .*out: the disk is full"):
        prepare(config(tmp_path, overwrite=True, val_fraction=0.5))
    assert untouched(tmp_path, old)


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("error", [PermissionError(13, "in use"), KeyboardInterrupt()], ids=repr)
def test_a_failed_swap_is_taken_back(tmp_path, old, monkeypatch, calls, error):
    real, count = Path.rename, itertools.count()

    def rename(self: Path, target: Path) -> Path:
        if next(count) == calls:
            raise error
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((DataError, KeyboardInterrupt)):
        prepare(config(tmp_path, overwrite=True, val_fraction=0.5))
    assert untouched(tmp_path, old)


@pytest.mark.skipif(os.name == "nt", reason="cannot ask there whether a process runs")
def test_what_a_killed_run_left_is_removed(tmp_path):
    nobody = 2**22 + 1  # above the highest number of a process
    (tmp_path / f".out.{nobody}.partial").mkdir()
    (tmp_path / f".out.{os.getppid()}.partial").mkdir()  # of a run that goes on
    prepare(config(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", "stories.txt", f".out.{os.getppid()}.partial"}


@pytest.mark.skipif(os.name == "nt", reason="cannot ask there whether a process runs")
def test_a_run_killed_in_the_swap_gives_the_old_data_back(tmp_path, old):
    (tmp_path / "out").rename(tmp_path / f".out.{2**22 + 1}.old")
    with pytest.raises(DataError, match="already holds a data set"):
        prepare(config(tmp_path))
    assert untouched(tmp_path, old)


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_run_leaves_the_old_data(tmp_path, old, root):
    code = (
        "from pathlib import Path; from mdsd.training.prepare import PrepareConfig, prepare;"
        f"out = Path({str(tmp_path / 'out')!r});"
        "prepare(PrepareConfig(out=out, stories=10**9, overwrite=True))"
    )
    env = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.Popen([sys.executable, "-c", code], env=env)
    partial = tmp_path / f".out.{run.pid}.partial" / "train.bin"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert snapshot(tmp_path / "out") == old
    prepare(config(tmp_path, overwrite=True, val_fraction=0.5))
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stories.txt"}


# Memory

MEASURE = r"""
import re, sys
from pathlib import Path
from mdsd.training import prepare, sources
sources.CHUNK = prepare.CHUNK = 1 << 16
prepare.prepare(prepare.PrepareConfig(source=sys.argv[1], out=Path(sys.argv[2])))
print(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory differently")
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_input(tmp_path, root, kind):
    env = {**os.environ, "PYTHONPATH": str(root)}
    peaks = {}
    for copies in (1, 8):
        path = tmp_path / f"{copies}.{kind}"
        stories = (f"{i} {' '.join(str(i * j) for j in range(150))}" for i in range(1500 * copies))
        if kind == "txt":
            write_stories(path, list(stories))
        else:
            lines = "\n".join(json.dumps({"text": story}) for story in stories)
            path.write_text(lines, encoding="utf-8")
        command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / path.stem)]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        peaks[path.stat().st_size] = int(run.stdout) * 1024
    (small, low), (large, high) = sorted(peaks.items())
    assert large - small > 6_000_000
    assert high - low < 0.3 * (large - small), peaks


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes(tmp_path, seed):
    with pytest.raises(DataError, match=f"seed is {seed}"):
        config(tmp_path, seed=seed)


def test_the_root_of_a_disk_is_no_data_set(tmp_path):
    with pytest.raises(DataError, match="root of a disk"):
        prepare(config(tmp_path, out=Path(tmp_path.anchor), overwrite=True))


def test_genuine_stories_come_back_letter_by_letter(tmp_path, real_stories):
    out = tmp_path / "out"
    meta = prepare(PrepareConfig(source=str(real_stories), out=out))
    stories = [s.strip() for s in real_stories.read_text(encoding="utf-8").split(END)]
    told = read_back(out, "train") + read_back(out, "val")
    assert sorted(told) == sorted(story for story in stories if story)
    assert sum(split["stories"] for split in meta["splits"].values()) == len(told)
