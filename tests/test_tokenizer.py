"""GPT-2's encoding, whole and cut: every text comes back, and metadata is enough to decode."""

import base64
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsd.config import MdsdError
from mdsd.training import tokenizer as module
from mdsd.training.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    GPT2_VOCAB,
    Tokenizer,
    TokenizerError,
    gpt2_ids,
    gpt2_tokenizer,
    story_ids,
)

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
AWKWARD = [
    "",
    "\0",
    "😀 👩‍👩‍👧",
    "e\u0301 é",
    END_OF_TEXT,
    "a\r\n\tb  ",
    "\ufeff",
    "\U0010ffff",
    "日本語",
]


def cut_to(text: str) -> Tokenizer:
    return gpt2_tokenizer().cut(np.bincount(gpt2_ids(text), minlength=GPT2_VOCAB))


FULL, CUT = gpt2_tokenizer(), cut_to("The cat saw the cat. The dog ran.")
both = pytest.mark.parametrize("tokenizer", [FULL, CUT], ids=["full", "cut"])


def test_gpt2_ids_are_the_published_ones():
    assert FULL.encode("hello world") == [31373, 995]
    assert (FULL.vocab_size, FULL.eot_id) == (50257, 50256)


def test_the_pattern_is_the_one_that_tiktoken_has():
    public = pytest.importorskip("tiktoken_ext.openai_public")
    assert public.r50k_pat_str == GPT2_PATTERN


@both
@given(UNICODE)
@settings(deadline=None)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)


@both
@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_come_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@both
def test_the_name_of_a_special_token_is_ordinary_text(tokenizer):
    assert tokenizer.eot_id not in tokenizer.encode(f"a {END_OF_TEXT} b")
    assert tokenizer.decode([tokenizer.eot_id]) == END_OF_TEXT


@pytest.mark.parametrize("text", ["ab\ud800", "\udc00", "\ud83d\ude00"])
def test_a_lone_surrogate_is_named_with_its_place(text):
    place = next(i for i, c in enumerate(text) if 0xD800 <= ord(c) < 0xE000)
    for encode in (FULL.encode, CUT.encode, lambda t: story_ids(["fine", t])):
        with pytest.raises(TokenizerError, match=f"character {place} is U\\+D"):
            encode(text)
    assert issubclass(TokenizerError, MdsdError)


def test_a_cut_counts_from_the_most_frequent():
    counts = np.zeros(GPT2_VOCAB, dtype=np.int64)
    counts[[995, 31373, 262, 100]] = [5, 9, 5, 1]
    cut = FULL.cut(counts)
    assert cut.kept_ids[:4] == (31373, 262, 995, 100)  # equal counts keep GPT-2's order
    assert cut.vocab_size == 3 + 256 + 1  # 100 is a single byte
    assert set(cut.tokens) >= {bytes([b]) for b in range(256)}
    assert cut.tokens[cut.eot_id] == END_OF_TEXT.encode()


def test_a_text_outside_is_spelled_in_bytes():
    assert len(FULL.encode(" elephant")) == 1
    ids = CUT.encode(" elephant cat")
    assert [CUT.tokens[i] for i in ids] == [*(bytes([b]) for b in b" elephant"), b" cat"]


@given(st.lists(st.integers(0, GPT2_VOCAB - 1), max_size=30))
@settings(deadline=None)
def test_the_lookup_agrees_with_a_loop(ids):
    own = {token: i for i, token in enumerate(CUT.tokens)}
    slow = []
    for id_ in ids:
        token = FULL.tokens[id_]
        slow += [own[token]] if token in own else [own[bytes([b])] for b in token]
    assert CUT.from_gpt2(np.array(ids, dtype=np.int64)).tolist() == slow


def test_a_cut_can_be_cut_again():
    ids = CUT.encode("The dog")
    again = CUT.cut(np.bincount(ids, minlength=CUT.vocab_size))
    assert again.vocab_size < CUT.vocab_size
    assert again.decode(again.encode("The dog and the cat 😀")) == "The dog and the cat 😀"
    assert len(again.encode("The dog")) == len(ids)


@given(st.lists(st.one_of(UNICODE, st.sampled_from(AWKWARD))))
@settings(deadline=None)
def test_stories_together_are_encoded_as_one_by_one(stories):
    slow = [id_ for story in stories for id_ in [*gpt2_ids(story).tolist(), GPT2_VOCAB - 1]]
    assert story_ids(stories).tolist() == slow


@both
def test_metadata_brings_the_tokenizer_back(tokenizer):
    meta = json.loads(json.dumps(tokenizer.to_meta()))
    again = Tokenizer.from_meta({**meta, "more": 1})
    assert (again.to_meta(), again.kept_ids) == (tokenizer.to_meta(), tokenizer.kept_ids)


def test_a_cut_is_decodable_from_the_metadata_alone():
    meta = json.loads(json.dumps(CUT.to_meta()))
    spelled = [base64.b64decode(meta["kept_bytes"][i]) for i in CUT.encode("The zebra 😀 ran.")]
    assert b"".join(spelled).decode() == "The zebra 😀 ran."


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "other"},
        {"vocab_size": 7},
        {"eot_id": 3},
        {"kept_ids": None},
        {"kept_ids": "abc"},
        {"kept_ids": [1.5]},
        {"kept_ids": [1, 2]},
        {"kept_ids": [*CUT.kept_ids[:-1], CUT.kept_ids[0]]},
        {"kept_ids": [*CUT.kept_ids, GPT2_VOCAB]},
        {"kept_bytes": None},
        {"kept_bytes": [*CUT.to_meta()["kept_bytes"][1:], "YQ=="]},
    ],
    ids=str,
)
def test_metadata_that_contradicts_itself_is_refused(change):
    with pytest.raises(TokenizerError):
        Tokenizer.from_meta({**CUT.to_meta(), **change})


def test_missing_metadata_is_refused():
    with pytest.raises(TokenizerError, match="tokenizer"):
        Tokenizer.from_meta({})


@both
@pytest.mark.parametrize("id_", [-1, 50257])
def test_ids_outside_are_refused(tokenizer, id_):
    with pytest.raises(TokenizerError, match=f"id {id_} is outside"):
        tokenizer.decode([0, id_])


def test_half_a_character_is_replaced():
    ids = CUT.encode("é")
    assert CUT.decode(ids[:1]) == "\ufffd"
    assert CUT.decode_bytes(np.array(ids[:1])) == "é".encode()[:1]


def test_damaged_ranks_are_refused(tmp_path, monkeypatch):
    damaged = tmp_path / "gpt2.tiktoken"
    damaged.write_bytes(module.resource("gpt2.tiktoken").read_bytes()[:-1])
    monkeypatch.setattr(module, "resource", lambda name: damaged)
    with pytest.raises(TokenizerError, match="sha256"):
        module.gpt2_encoding.__wrapped__()


def test_nothing_is_written_to_the_folder_for_temporary_files(tmp_path, root):
    code = "import mdsd.training.tokenizer as t; print(t.gpt2_tokenizer().encode('hello'))"
    places = dict.fromkeys(["TMPDIR", "TEMP", "TMP"], str(tmp_path))
    env = {**os.environ, **places, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout == "[31373]\n", run.stderr
    assert not list(tmp_path.iterdir())
