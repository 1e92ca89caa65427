"""Generation: the cache changes nothing, draws follow the filtered softmax, text stays whole."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsd.config import PRESETS, ConfigError, ModelConfig, YarnConfig
from mdsd.model.decode import Reader
from mdsd.model.generate import (
    Sampling,
    continue_stories,
    generate,
    generate_rows,
    keep_top_k,
    keep_top_p,
    left_pad,
    next_token,
    prompt_ids,
    sample_stories,
    story_loss,
    stream_text,
    tell_story,
)
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.tokenizer import Tokenizer, gpt2_tokenizer, story_ids

CONFIG = replace(
    PRESETS["tiny"], vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    kv_lora_rank=12, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    intermediate_size=32, moe_intermediate_size=16, max_position_embeddings=24,
)  # fmt: skip
GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=1.0, seed=3)


@cache
def model_of(config: ModelConfig = CONFIG, seed: int = 0) -> MiniDeepSeek:
    """A model with weights so large that each token depends on those before it."""
    torch.manual_seed(seed)
    return MiniDeepSeek(replace(config, initializer_range=0.3)).double().eval()


@cache
def tokenizer() -> Tokenizer:
    """GPT-2's tokenizer, cut to the bytes and a few words."""
    counts = torch.zeros(gpt2_tokenizer().vocab_size, dtype=torch.long).numpy()
    counts[story_ids(["One day, Tom had a kite. He was glad."])] = 1
    return gpt2_tokenizer().cut(counts)


@cache
def storyteller() -> MiniDeepSeek:
    return model_of(replace(CONFIG, vocab_size=tokenizer().vocab_size, max_position_embeddings=64))


def ids(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (length,), generator=random).tolist()


SHAPES = {"num_hidden_layers": [1, 3], "num_attention_heads": [1, 3], "q_lora_rank": [None, 8],
          "n_shared_experts": [0, 1], "first_k_dense_replace": [0, 2], "n_group": [2, 4],
          "num_nextn_predict_layers": [0, 1]}  # fmt: skip
shapes = st.fixed_dictionaries({name: st.sampled_from(few) for name, few in SHAPES.items()})


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(0, 99), st.integers(1, 20), st.sampled_from([GREEDY, DRAWN]))
def test_the_cache_changes_nothing(changes, seed, length, sampling):
    model, prompt = model_of(replace(CONFIG, **changes), seed), ids(length, seed)
    cached = list(generate(model, prompt, 99, sampling))
    whole = list(generate(model, prompt, 99, sampling, use_cache=False))
    assert cached == whole
    assert len(cached) == 24 - length + 1


def test_the_cache_reads_each_token_once(monkeypatch):
    model, lengths, read = model_of(), [], Reader.__call__

    def counting(self, tokens, latents):
        lengths.append(tokens.shape[1])
        return read(self, tokens, latents)

    monkeypatch.setattr(Reader, "__call__", counting)
    for use_cache in (True, False):
        list(generate(model, ids(5), 4, GREEDY, use_cache=use_cache))
    assert lengths == [5, 1, 1, 1, 5, 6, 7, 8]


def rows_of(prompts: list[list[int]], length: int, sampling: Sampling, stop_id=None, model=None):
    """The rows that `generate_rows` makes, as lists."""
    columns = list(generate_rows(model or model_of(), prompts, length, sampling, stop_id=stop_id))
    return torch.stack(columns, dim=1).tolist()


def test_each_row_is_generated_as_if_alone():
    prompts = [ids(6, seed) for seed in range(4)]
    alone = [list(generate(model_of(), prompt, 15, GREEDY)) for prompt in prompts]
    assert rows_of(prompts, 15, GREEDY) == alone
    assert min(len(set(row)) for row in alone) > 3  # no constant text, which anything would equal


@settings(max_examples=25, deadline=None)
@given(
    shapes,
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.sampled_from([None, YarnConfig(factor=4.0, original_max_position_embeddings=6)]),
    st.booleans(),
)
def test_prompts_of_any_lengths_get_what_each_gets_alone(changes, lengths, yarn, use_cache):
    """Token by token, as long as the longest row has room, with a cache and without."""
    model = model_of(replace(CONFIG, rope_scaling=yarn, **changes))
    prompts, room = (
        [ids(length, seed) for seed, length in enumerate(lengths)],
        24 - max(lengths) + 1,
    )
    columns = list(generate_rows(model, prompts, 99, GREEDY, use_cache=use_cache))
    assert len(columns) == room
    alone = [list(generate(model, prompt, room, GREEDY)) for prompt in prompts]
    assert torch.stack(columns, dim=1).tolist() == alone


def test_short_prompts_are_filled_up_in_front():
    tokens, padding = left_pad([[5, 6, 7], [9], [3, 4]])
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 9], [0, 3, 4]]
    assert padding.tolist() == [0, 2, 1]


@pytest.mark.parametrize(("prompts", "words"), [([[1], []], "empty"), ([[1], [2] * 25], "25")])
def test_one_prompt_that_cannot_be_continued_stops_all(prompts, words):
    with pytest.raises(ConfigError, match=words):
        next(generate_rows(model_of(), prompts, 5, GREEDY))


def test_the_seed_alone_decides():
    def told(seed: int) -> list[int]:
        return list(generate(model_of(), [1, 2], 15, replace(DRAWN, seed=seed)))

    first, state = told(1), torch.get_rng_state()
    assert told(2) != first
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(1)  # whatever else is drawn
    assert told(1) == first


def test_stop_id_ends_one_text_and_is_left_out():
    text = list(generate(model_of(), [1, 2], 20, GREEDY))
    stop = text[7]
    assert list(generate(model_of(), [1, 2], 20, GREEDY, stop_id=stop)) == text[: text.index(stop)]


def test_a_row_that_has_stopped_waits_for_the_others():
    prompts = [ids(4, seed) for seed in range(4)]
    free = rows_of(prompts, 20, GREEDY)
    stop = free[0][3]
    ends = [row.index(stop) if stop in row else 20 for row in free]
    length = min(max(ends) + 1, 20)
    expected = [row[:end] + [stop] * (length - end) for row, end in zip(free, ends, strict=True)]
    assert rows_of(prompts, 20, GREEDY, stop) == expected
    assert rows_of(prompts[:1], 20, GREEDY, stop) == [free[0][: ends[0] + 1]]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("length", "room"), [(24, 1), (23, 2), (1, 24)])
def test_a_text_ends_where_the_model_does(length, room, use_cache):
    for limit, told in ((99, room), (room - 1, room - 1)):
        text = generate(model_of(), ids(length), limit, GREEDY, use_cache=use_cache)
        assert len(list(text)) == told


@pytest.mark.parametrize(("length", "words"), [(25, "25 tokens.*reads 24"), (0, "empty")])
def test_a_prompt_that_cannot_be_continued(length, words):
    with pytest.raises(ConfigError, match=words):
        next(generate(model_of(), ids(length), 5, GREEDY))


a_logit = st.integers(-4, 4).map(float) | st.floats(-30, 30, width=32) | st.just(-math.inf)
some_logits = st.lists(a_logit, min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf)


@settings(deadline=None)
@given(some_logits, st.integers(1, 14))
def test_top_k_keeps_the_k_largest(values, k):
    logits, kept = torch.tensor([values]), keep_top_k(torch.tensor([values]), k)
    assert kept.sort(descending=True).values[0, :k].tolist() == sorted(values, reverse=True)[:k]
    assert (kept > -math.inf).sum() == min(k, (logits > -math.inf).sum())
    assert bool(((kept == logits) | (kept == -math.inf)).all())  # nothing moves


@settings(deadline=None)
@given(some_logits, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_nucleus(values, p):
    logits = torch.tensor([values], dtype=torch.float64)
    kept, probability = keep_top_p(logits, p)[0], logits.softmax(-1)[0]
    inside = probability[kept > -math.inf]
    assert bool(((kept == logits[0]) | (kept == -math.inf)).all())
    assert all(inside.min() >= outside for outside in probability[kept == -math.inf])
    assert inside.sum() >= p - 1e-9
    assert inside.sum() - inside.min() < p + 1e-9  # without its least likely it falls short


@settings(deadline=None)
@given(some_logits, st.permutations(range(12)), st.integers(1, 9), st.floats(0.01, 1))
def test_each_row_is_filtered_apart(values, order, k, p):
    row = torch.tensor(values)
    rows = torch.stack([row, row[[place for place in order if place < len(row)]], 2 * row])
    for keep, limit in ((keep_top_k, k), (keep_top_p, p)):
        assert torch.equal(keep(rows, limit), torch.cat([keep(one[None], limit) for one in rows]))


@settings(deadline=None)
@given(some_logits, st.sampled_from([GREEDY, Sampling(top_k=1), Sampling(top_p=1e-9)]))
def test_the_likeliest_token(values, sampling):
    """Temperature 0, one token to choose from, a nucleus of one: all take a largest logit."""
    token = next_token(torch.tensor([values]), sampling, torch.Generator())
    assert values[int(token)] == pytest.approx(max(values), abs=1e-5)
    assert sampling != GREEDY or int(token) == torch.tensor(values).argmax()


LOGITS = [2.0, 1.0, 1.5, -1.0, 0.0, -math.inf, 0.5, -2.0]


def expected(sampling: Sampling) -> list[float]:
    """The distribution that `sampling` promises, by a loop over the tokens in order."""
    weight = [math.exp(value / sampling.temperature) for value in LOGITS]
    order = sorted(range(len(LOGITS)), key=lambda token: -weight[token])[: sampling.top_k]
    total, share = sum(weight[token] for token in order), [0.0] * len(LOGITS)
    for token in order:
        if sum(share) < total * (sampling.top_p or 1):
            share[token] = weight[token]
    return [kept / sum(share) for kept in share]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1, None, None), (0.5, None, None), (2, None, 1), (1, 3, None), (1, None, 0.8),
     (2, None, 0.8), (1, 4, 0.7)],
)  # fmt: skip
def test_draws_follow_the_filtered_softmax(temperature, top_k, top_p):
    """Pearson's chi-square; 7 degrees of freedom exceed 24.3 once in a thousand seeds."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits, generator = torch.tensor([LOGITS] * 20_000), torch.Generator().manual_seed(5)
    count = next_token(logits, sampling, generator).bincount(minlength=len(LOGITS))
    mean = len(logits) * torch.tensor(expected(sampling), dtype=torch.float64)
    assert count[mean == 0].sum() == 0
    assert ((count - mean) ** 2 / mean)[mean > 0].sum() < 24.3


REFUSED = {"temperature": [-1, -1e-9, math.inf, math.nan], "top_k": [0, -1],
           "top_p": [0, -0.1, 1.01, 90, math.nan]}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, v) for name in REFUSED for v in REFUSED[name]])
def test_settings_that_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Sampling(**{name: value})


texts = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(texts, st.data())
def test_streamed_text_is_the_decoded_text(text, data):
    tokens = tokenizer().encode(text)
    tokens = tokens[: data.draw(st.integers(0, len(tokens)))]  # a cut, within a character too
    tokens = tokens[data.draw(st.integers(0, len(tokens))) :]
    pieces = list(stream_text(tokenizer(), tokens))
    assert "".join(pieces) == tokenizer().decode(tokens)
    assert all(pieces)


@settings(deadline=None)
@given(texts)
def test_no_piece_holds_half_a_character(text):
    """After every token, what has been told is all that is whole, and no more."""
    told, tokens, fed = "", tokenizer().encode(text), []

    def feed():
        for token in tokens:
            assert told == tokenizer().decode_bytes(fed).decode("utf-8", errors="ignore")
            fed.append(token)
            yield token

    for piece in stream_text(tokenizer(), feed()):
        told += piece
    assert told == text


def test_stories_end_at_the_end_of_text():
    """Cutting what goes on without a stop at the first end of text gives the same stories."""
    eot, start = tokenizer().eot_id, prompt_ids(tokenizer(), "Tom")
    assert start == [eot, *tokenizer().encode("Tom")]

    def text_of(row: list[int]) -> str:
        return "Tom" + tokenizer().decode(row[: row.index(eot)] if eot in row else row)

    free = rows_of([start] * 40, 50, DRAWN, model=storyteller())
    limits = {"prompt": "Tom", "max_new_tokens": 50}
    stories = sample_stories(storyteller(), tokenizer(), 40, DRAWN, **limits)
    assert stories == [text_of(row) for row in free]
    seeds = [replace(DRAWN, seed=seed) for seed in range(30)]
    told = [list(tell_story(storyteller(), tokenizer(), "Tom", 30, seed)) for seed in seeds]
    alone = [list(generate(storyteller(), start, 30, seed)) for seed in seeds]
    assert ["".join(pieces) for pieces in told] == [text_of(row) for row in alone]
    assert all(pieces[0] == "Tom" and len(pieces) > 1 for pieces in told)
    assert all(any(eot in row for row in rows) for rows in (free, alone))


def test_as_many_stories_as_asked_for():
    def told(count: int, sampling: Sampling, length: int) -> list[str]:
        limits = {"prompt": "One day,", "max_new_tokens": length}
        return sample_stories(storyteller(), tokenizer(), count, sampling, **limits)

    stories = told(5, DRAWN, 12)
    assert len(stories) == len(set(stories)) == 5  # each row draws for itself
    assert all(story.startswith("One day,") and story != "One day," for story in stories)
    assert told(2, DRAWN, 0) == ["One day,"] * 2
    alone = "".join(tell_story(storyteller(), tokenizer(), "One day,", 20, GREEDY))
    assert told(2, GREEDY, 20) == [alone] * 2


def test_stories_from_different_beginnings():
    beginnings = ["One day, Tom", "", "He was glad. Tom"]
    told = continue_stories(storyteller(), tokenizer(), beginnings, GREEDY, max_new_tokens=20)
    alone = ["".join(tell_story(storyteller(), tokenizer(), b, 20, GREEDY)) for b in beginnings]
    assert told == alone
    assert len(set(told)) == 3


STORIES = ["One day, Tom had a kite.", "Tom was glad.", "He had a day.", "A", "One, two, three"] * 8


def test_story_loss_is_that_of_each_story_alone():
    """40 stories are two batches; padding has no influence, and each token counts the same."""
    total, count = 0.0, 0
    for story in STORIES:
        tokens = [*prompt_ids(tokenizer(), story), tokenizer().eot_id]
        log_p = storyteller()(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1).tolist()
        total -= sum(row[token] for row, token in zip(log_p, tokens[1:], strict=True))
        count += len(tokens) - 1
    assert story_loss(storyteller(), tokenizer(), STORIES) == pytest.approx(total / count, rel=1e-5)
