"""Prepared data are opened only if they are whole; batches depend on seed and step alone."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mdsd.training.data import DataError, PrepareConfig, TokenData, batch, eval_batches, prepare


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "out"
    prepare(PrepareConfig(out=folder, stories=200, val_fraction=0.2))
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """Copy the data set, to be damaged."""
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change_meta(folder: Path, **changes: object) -> None:
    path = folder / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**meta, **changes}), encoding="utf-8")


# Opening


def test_a_data_set_is_opened(original):
    data = TokenData(str(original))
    assert data.tokenizer.vocab_size == data.meta["vocab_size"]
    for name in ("train", "val"):
        split = data.split(name)
        assert isinstance(split, np.memmap)
        assert split.dtype == np.uint16
        assert len(split) == data.meta["splits"][name]["tokens"]
        assert split[-1] == data.tokenizer.eot_id
    with pytest.raises(ValueError, match="read-only"):
        data.split("val")[0] = 1


def break_missing_folder(folder: Path) -> str:
    for path in folder.iterdir():
        path.unlink()
    return "holds no data set"


def break_missing_split(folder: Path) -> str:
    (folder / "val.bin").unlink()
    return r"val\.bin is missing"


def break_truncated(folder: Path) -> str:
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    return r"train\.bin has \d+ bytes, expected \d+"


def break_longer(folder: Path) -> str:
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes() + b"\0\0")
    return r"train\.bin has \d+ bytes, expected \d+"


def break_emptied(folder: Path) -> str:
    (folder / "train.bin").write_bytes(b"")
    return "missing or empty"


def break_json(folder: Path) -> str:
    path = folder / "meta.json"
    path.write_text(path.read_text(encoding="utf-8")[:-100], encoding="utf-8")
    return "is damaged"


def break_foreign_list(folder: Path) -> str:
    (folder / "meta.json").write_text("[1]", encoding="utf-8")
    return "not the description"


def break_foreign(folder: Path) -> str:
    change_meta(folder, format="other")
    return "not the description"


def break_newer(folder: Path) -> str:
    change_meta(folder, version=2)
    return "version 2.*update mdsd"


def break_no_splits(folder: Path) -> str:
    change_meta(folder, splits={})
    return "is damaged"


def break_tokenizer(folder: Path) -> str:
    change_meta(folder, vocab_size=5)
    return "vocab_size"


def break_ids(folder: Path) -> str:
    ids = np.fromfile(folder / "val.bin", dtype="<u2")
    ids[-1] = 60_000
    ids.tofile(folder / "val.bin")
    return "holds the id 60000"


BREAKERS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("damage", BREAKERS, ids=lambda f: f.__name__.removeprefix("break_"))
def test_a_damaged_data_set_is_refused(folder, damage):
    says = damage(folder)
    with pytest.raises(DataError, match=says):
        TokenData(folder)


def test_unknown_places_are_refused(original, tmp_path):
    with pytest.raises(DataError, match="holds no data set"):
        TokenData(tmp_path / "nowhere")
    with pytest.raises(DataError, match="unknown split 'test'"):
        TokenData(original).split("test")


# Random batches


TOKENS = np.arange(1000, dtype=np.uint16)


def test_targets_are_the_next_tokens():
    x, y = batch(TOKENS, batch_size=5, seq_len=8, seed=0, step=3)
    assert x.shape == y.shape == (5, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_a_batch_depends_on_seed_and_step_alone():
    first = [batch(TOKENS, 4, 8, 7, step)[0] for step in range(6)]
    batch(TOKENS, 9, 3, 1, 1)
    np.random.seed(0)  # noqa: NPY002 - a global state that others may set
    torch.manual_seed(5)
    later = [batch(TOKENS, 4, 8, 7, step)[0] for step in reversed(range(6))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, later, strict=True))
    assert len({tuple(x.flatten().tolist()) for x in first}) == 6
    assert not torch.equal(first[0], batch(TOKENS, 4, 8, 8, 0)[0])
    assert not torch.equal(first[1], batch(TOKENS, 4, 8, 1, 7)[0])


def test_the_memory_map_gives_the_batches_of_the_array(original):
    tokens = TokenData(original).split("train")
    in_memory = np.array(tokens)
    for step in range(3):
        for a, b in zip(
            batch(tokens, 4, 32, 0, step), batch(in_memory, 4, 32, 0, step), strict=True
        ):
            assert torch.equal(a, b)


def test_every_start_is_equally_likely():
    tokens = np.arange(24, dtype=np.uint16)
    starts = torch.cat([batch(tokens, 100, 4, 0, step)[0][:, 0] for step in range(200)])
    counts = torch.bincount(starts, minlength=20)
    assert len(counts) == 20  # the last window ends with the last token
    expected = len(starts) / 20
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_the_shortest_data_give_one_window():
    x, y = batch(TOKENS[:9], 3, 8, 0, 0)
    assert torch.equal(x, torch.arange(8).expand(3, 8))
    assert torch.equal(y, torch.arange(1, 9).expand(3, 8))


@pytest.mark.parametrize(
    "draw", [lambda t: batch(t, 2, 8, 0, 0), lambda t: list(eval_batches(t, 2, 8))]
)
def test_too_few_tokens_are_refused(draw):
    with pytest.raises(DataError, match=r"8 tokens holds no window of 8 \+ 1.*seq_len"):
        draw(TOKENS[:8])


# Evaluation


@pytest.mark.parametrize("length", [9, 16, 17, 100, 1000])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_evaluation_sees_each_token_once(length, batch_size):
    targets, previous = [], []
    for x, y in eval_batches(TOKENS[:length], batch_size, 8):
        assert x.shape == y.shape
        assert len(x) <= batch_size
        previous += x.flatten().tolist()
        targets += y.flatten().tolist()
    seen = (length - 1) // 8 * 8
    assert targets == list(range(1, seen + 1))
    assert previous == list(range(seen))


def test_evaluation_can_be_limited():
    batches = list(eval_batches(TOKENS, 4, 8, limit=2))
    assert [len(x) for x, _ in batches] == [4, 4]
    assert torch.equal(torch.cat([x for x, _ in batches]).flatten(), torch.arange(64))


# The files of the repository


def test_the_table_of_data_names_every_file_with_its_sha256(root):
    data = root / "data"
    text = (data / "README.md").read_text(encoding="utf-8")
    files = (p for p in sorted(data.rglob("*")) if p.suffix in {".tiktoken", ".toml", ".txt"})
    lines = [
        f"| `{path.relative_to(data).as_posix()}` | "
        f"`{hashlib.sha256(path.read_bytes()).hexdigest()}` |"
        for path in files
    ]
    table = re.findall(r"^\| `.*$", text, re.M)
    assert table == lines, "the table in data/README.md should read:\n" + "\n".join(lines)
