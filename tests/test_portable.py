"""The tokenizer in files for other programs: the same ids for GPT-2, close for a cut vocabulary."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsd.training.corpus import generate_stories
from mdsd.training.portable import (
    byte_letters,
    last_merge,
    merges,
    save_tokenizer,
    tokenizer_json,
    tokenizer_of,
)
from mdsd.training.tokenizer import (
    END_OF_TEXT,
    GPT2_VOCAB,
    Tokenizer,
    TokenizerError,
    gpt2_ids,
    gpt2_tokenizer,
    gpt2_tokens,
)

tokenizers = pytest.importorskip("tokenizers")

UNICODE = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda s: END_OF_TEXT not in s)
AWKWARD = [
    "",
    " ",
    "  a",
    "a\n\n b\n ",
    "\r\n\t",
    "don't I'LL '  's",
    "\u3000日本語",
    "😀\0\U0010ffff",
]


def cut_to(stories: list[str]) -> Tokenizer:
    counts = sum(np.bincount(gpt2_ids(story), minlength=GPT2_VOCAB) for story in stories)
    return gpt2_tokenizer().cut(counts)


def bundled(level: str, seed: int, count: int) -> list[str]:
    return [story.text for story in islice(generate_stories(level, seed), count)]


def theirs(tokenizer: Tokenizer) -> "tokenizers.Tokenizer":
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(tokenizer)))


def ids(other: "tokenizers.Tokenizer", text: str) -> list[int]:
    return other.encode(text, add_special_tokens=False).ids


FULL = gpt2_tokenizer()
CUT = cut_to(["The cat saw the cat. The dog ran, and a firefly glowed."])
FULL_THERE, CUT_THERE = theirs(FULL), theirs(CUT)


def test_the_letters_are_gpt2s():
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert all(letter.isprintable() and not letter.isspace() for letter in letters)
    assert letters[ord("a")] == "a"
    assert (letters[ord(" ")], letters[ord("\n")]) == ("Ġ", "Ċ")


def test_merges_are_gpt2s():
    learned = merges()
    assert len(learned) == 50_000
    assert learned[:3] == [[b" ", b"t"], [b" ", b"a"], [b"h", b"e"]]  # the published file's first
    assert [a + b for a, b in learned] == list(gpt2_tokens()[256:-1])
    assert last_merge(b" the", {b" t": 0, b"he": 1, b" the": 2}) == [b" t", b"he"]


@pytest.mark.parametrize("text", [*AWKWARD, "hello world"])
def test_the_whole_vocabulary_gives_the_same_ids_for_chosen_texts(text):
    assert ids(FULL_THERE, text) == FULL.encode(text)
    assert FULL_THERE.decode(FULL.encode(text)) == text


@given(UNICODE)
@settings(max_examples=300)
def test_the_whole_vocabulary_gives_the_same_ids(text):
    assert ids(FULL_THERE, text) == FULL.encode(text)


@given(UNICODE)
@settings(max_examples=300)
def test_a_cut_vocabulary_gives_known_ids_and_the_text_back(text):
    encoded = ids(CUT_THERE, text)
    assert all(0 <= id_ < CUT.vocab_size and id_ != CUT.eot_id for id_ in encoded)
    assert CUT_THERE.decode(encoded, skip_special_tokens=False) == text
    assert CUT.decode(encoded) == text


@given(UNICODE)
def test_a_cut_vocabulary_never_needs_more_tokens_than_ours(text):
    assert len(ids(CUT_THERE, text)) <= len(CUT.encode(text))


@pytest.mark.parametrize("tokenizer", [FULL, CUT], ids=["full", "cut"])
def test_a_text_begins_with_the_end_of_the_one_before(tokenizer):
    other = theirs(tokenizer)
    assert other.encode("The cat").ids == [tokenizer.eot_id, *tokenizer.encode("The cat")]
    assert other.encode("").ids == [tokenizer.eot_id]
    assert other.encode("a", "b").ids == [tokenizer.eot_id, *ids(other, "a"), *ids(other, "b")]
    assert ids(other, f"a{END_OF_TEXT}b")[1] == tokenizer.eot_id  # here the name is the token


def same(tokenizer: Tokenizer, stories: list[str]) -> float:
    """Share of the stories that become the same tokens."""
    other = theirs(tokenizer)
    return sum(ids(other, story) == tokenizer.encode(story) for story in stories) / len(stories)


def test_easy_stories_become_the_same_tokens():
    assert same(cut_to(bundled("easy", 0, 2000)), bundled("easy", 1, 500)) == 1


def test_most_rich_stories_become_the_same_tokens():
    share = same(cut_to(bundled("rich", 0, 4000)), bundled("rich", 1, 500))
    assert 0.8 < share < 1  # chapter 09c says 0.89


def test_most_genuine_stories_become_the_same_tokens(real_stories: Path):
    text = real_stories.read_text(encoding="utf-8")
    stories = [story.strip() for story in text.split(END_OF_TEXT) if story.strip()][:4000]
    assert 0.9 < same(cut_to(stories), stories[:1000]) < 1


def test_transformers_loads_the_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, tokenizer in (("full", FULL), ("cut", CUT)):
        (tmp_path / name).mkdir()
        save_tokenizer(tokenizer, tmp_path / name, 512)
        other = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert other("The cat").input_ids == [tokenizer.eot_id, *tokenizer.encode("The cat")]
        assert other.bos_token_id == other.eos_token_id == other.pad_token_id == tokenizer.eot_id
        assert (len(other), other.model_max_length) == (tokenizer.vocab_size, 512)
        assert other.decode(tokenizer.encode(" The  cat ,")) == " The  cat ,"
        assert other.padding_side == "left"


def test_our_own_tokenizer_comes_back(tmp_path):
    assert tokenizer_of(tmp_path) is None
    save_tokenizer(CUT, tmp_path, 512)
    assert tokenizer_of(tmp_path).to_meta() == CUT.to_meta()
    for damage in ("{", "[]", "{}", "null", "[" * 200_000):
        (tmp_path / "tokenizer_meta.json").write_text(damage, encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"tokenizer_meta\.json is damaged"):
            tokenizer_of(tmp_path)
