"""Stories from files, the generator and the hub: each kind is read right or refused clearly."""

import json
import os
import socket
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdsd.training import sources
from mdsd.training.corpus import generate_stories
from mdsd.training.sources import (
    Chunk,
    DataError,
    bundled_chunks,
    find_files,
    hub_chunks,
    hub_obstacle,
    interleave,
    local_chunks,
    map_in_order,
)

END = "<|endoftext|>"


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def read(path: Path, column: str = "text", separator: str = END) -> list[str]:
    chunks = list(local_chunks([path], column, separator))
    assert sum(chunk.done for chunk in chunks) == path.stat().st_size
    return [story for chunk in chunks for story in chunk.stories]


def refused(path: Path, *parts: str, **options: str) -> None:
    with pytest.raises(DataError) as info:
        read(path, **options)
    for part in (path.name, *parts):
        assert part in str(info.value)


# Text


@pytest.mark.parametrize(
    ("content", "stories"),
    [
        (f"one\n{END}\ntwo\nlines\n\nand more\n{END}\n", ["one\n", "two\nlines\n\nand more\n", ""]),
        (f"one\n{END}\ntwo", ["one\n", "two"]),
        (f"one\r\n{END} \r\ntwo\r\n", ["one\n", "two\n"]),
        (b"\xef\xbb\xbf" + f"one\n{END}\n".encode(), ["one\n", ""]),
        ("one\n\nstill one\n", ["one\n\nstill one\n"]),
        (f"a line that ends in {END}\n", [f"a line that ends in {END}\n"]),
        ("", [""]),
    ],
)
def test_a_line_ends_a_story(tmp_path, content, stories):
    assert read(write(tmp_path / "a.txt", content)) == stories


def test_an_empty_separator_means_a_blank_line(tmp_path):
    path = write(tmp_path / "a.TXT", "one\nmore\n\n\ntwo\n")
    assert [s for s in read(path, separator="") if s] == ["one\nmore\n", "two\n"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_bad_utf8_is_named_with_its_byte(tmp_path, name):
    good = f"good é\n{END}\n" if name == "a.txt" else '{"text": "good é"}\n'
    path = write(tmp_path / name, good.encode() + b"bad \xff byte\n")
    refused(path, "not UTF-8", f"byte {len(good.encode()) + 4} is 0xff")


def test_the_byte_is_right_after_a_byte_order_mark(tmp_path):
    refused(write(tmp_path / "a.txt", b"\xef\xbb\xbfab\xff"), "byte 5 is 0xff")


def test_a_binary_file_is_refused(tmp_path):
    refused(write(tmp_path / "a.txt", b"PK\x03\x04ab\0\0"), "binary", "byte 6")
    refused(write(tmp_path / "a.jsonl", b"\0"), "binary")


def test_a_story_without_end_is_refused_before_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST", 1000)
    refused(write(tmp_path / "a.txt", "word word word\n" * 100), "no line", "separator")
    refused(write(tmp_path / "b.txt", "word" * 1000), "longer than any story")
    refused(write(tmp_path / "b.jsonl", "word" * 1000), "longer than any story")


# Tables


def test_json_lines_are_read(tmp_path):
    rows = [{"text": "one\n\0 é 😀", "n": 1}, {"n": 2, "text": ""}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(row) for row in rows))
    assert read(path) == ["one\n\0 é 😀", ""]
    assert read(write(tmp_path / "b.jsonl", '{"story": "x"}\n'), column="story") == ["x"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"text": "cut', ["line 2", "not JSON"]),
        ("[" * 100_000, ["line 2", "not JSON"]),
        ('{"story": "x", "id": 1}', ["line 2", "'text'", "story, id", "text_column"]),
        ('["x"]', ["line 2", "'text'", "['x']"]),
        ('{"text": null}', ["line 2", "None", "no text"]),
    ],
)
def test_json_lines_that_hold_no_story_are_refused(tmp_path, line, parts):
    refused(write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line), *parts)


def test_parquet_is_read(tmp_path):
    stories = [f"story {i} é" for i in range(1000)]
    assert read(write_parquet(tmp_path / "a.parquet", id=range(1000), text=stories)) == stories


def test_parquet_that_holds_no_story_is_refused(tmp_path):
    refused(write_parquet(tmp_path / "a.parquet", story=["x"], id=[1]), "'text'", "story, id")
    refused(write_parquet(tmp_path / "b.parquet", text=["x", None]), "row 2", "None")
    refused(write_parquet(tmp_path / "c.parquet", text=[1, 2]), "row 1", "no text")
    refused(write(tmp_path / "d.parquet", "this is text, not Parquet"), "cannot be read as Parquet")


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=["story " * 50] * 3000)
    data = bytearray(path.read_bytes())
    data[4:200] = os.urandom(196)
    refused(write(path, bytes(data)), "cannot be read as Parquet")


# Files and folders


def test_files_of_a_folder_come_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.parquet", "sub/a.TXT", "README.md"):
        write(tmp_path / name, "")
    names = [file.relative_to(tmp_path).as_posix() for file in find_files(tmp_path)]
    assert names == ["a.jsonl", "b.txt", "sub/a.TXT", "sub/c.parquet"]


@pytest.mark.parametrize("kind", ["missing", "unknown", "folder"])
def test_what_cannot_be_a_source_is_refused(tmp_path, kind):
    write(tmp_path / "folder" / "a.csv", "")
    path = {"missing": "nowhere.txt", "unknown": "folder/a.csv", "folder": "folder"}[kind]
    says = {"missing": "does not exist", "unknown": "unknown kind", "folder": "no file of a known"}
    with pytest.raises(DataError, match=says[kind]):
        find_files(tmp_path / path)


def deny(*args: object, **options: object) -> None:
    raise PermissionError(13, "Permission denied", "some/place")


def test_an_unreadable_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(DataError, match="cannot read the folder some/place: Permission denied"):
        find_files(tmp_path)


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "x")
    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        read(path)


# The generator


def test_bundled_stories_keep_their_probabilities():
    chunks = list(bundled_chunks("easy", 3, 600))
    told = generate_stories("easy", 3)
    for chunk in chunks:
        for text, nats in zip(chunk.stories, chunk.nats, strict=True):
            assert (text, nats) == next(told)[:2]
    assert sum(chunk.done for chunk in chunks) == 600


# Threads


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order(workers):
    def slow(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    assert list(map_in_order(slow, range(40), workers)) == [i * i for i in range(40)]


def test_reading_stays_a_few_items_ahead():
    taken = []
    results = map_in_order(lambda item: item, (taken.append(i) or i for i in range(100)), 2)
    next(results)
    assert len(taken) <= 6
    results.close()


def test_an_error_in_a_thread_arrives():
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda item: 1 // item, [1, 0, 1], 2))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shards_take_turns_whatever_the_number_of_threads(workers):
    sizes = (3, 1, 2)
    shards = [iter([Chunk([f"{s}{i}"], 1, "") for i in range(n)]) for s, n in enumerate(sizes)]
    told = [chunk.stories[0] for chunk in interleave(shards, workers)]
    assert told == ["00", "10", "20", "01", "21", "02"]


# The hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Put local Parquet files in the place of the hub: four shards of training stories."""
    datasets = pytest.importorskip("datasets")
    load = datasets.load_dataset
    files = {"train": [], "validation": [str(tmp_path / "val.parquet")]}
    for shard in range(4):
        stories = [f"train {shard} {i}" for i in range(1500)]
        files["train"].append(str(write_parquet(tmp_path / f"{shard}.parquet", text=stories)))
    write_parquet(tmp_path / "val.parquet", text=["val"] * 7)

    def local(name: str, split: str, streaming: bool):
        assert name == "roneneldan/TinyStories"
        assert streaming
        return load("parquet", data_files=files, split=split, streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr(sources, "hub_obstacle", lambda: None)
    return datasets, monkeypatch


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_are_streamed_with_their_own_splits(hub, workers):
    chunks = list(hub_chunks(workers))
    assert [c.split for c in chunks] == ["train"] * 8 + ["val"]
    assert [c.stories[0] for c in chunks[:5]] == [f"train {s} 0" for s in range(4)] + [
        "train 0 1000"
    ]
    assert sum(len(c.stories) for c in chunks) == sum(c.done for c in chunks) == 6007


def test_a_hub_that_fails_on_the_way_is_told(hub):
    datasets, monkeypatch = hub

    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"failed: gone.*--source bundled.*\.txt"):
        list(hub_chunks(2))


def test_an_offline_hub_is_told_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set.*--source bundled.*\.txt"):
        next(hub_chunks(1))


def test_a_refused_connection_is_told(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DataError, match=rf"127\.0\.0\.1:{port}.*--source bundled"):
        next(hub_chunks(1))


def test_a_silent_hub_is_given_up(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        assert hub_obstacle(seconds=0.5)
        assert time.monotonic() - start < 5
