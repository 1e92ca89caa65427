"""Stretching a model, its loss by position, and needles in haystacks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mdsd.config import ConfigError, ModelConfig, YarnConfig, preset
from mdsd.model.context import (
    loss_by_position,
    needle_accuracy,
    plant_needle,
    stretch,
    with_config,
)
from mdsd.model.rope import rotation, yarn_frequencies, yarn_mscale
from mdsd.model.transformer import MiniDeepSeek

CONFIG = preset(
    "tiny",
    vocab_size=31,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    max_position_embeddings=32,
    initializer_range=0.3,
)
YARN = YarnConfig(factor=4.0, original_max_position_embeddings=32)
quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def build(seed: int, config: ModelConfig = CONFIG) -> MiniDeepSeek:
    """A model with weights so large, and biases so uneven, that every part of it shows."""
    torch.manual_seed(seed)
    model = MiniDeepSeek(config).eval()
    with torch.no_grad():
        for gate in model.gates():
            gate.e_score_correction_bias.normal_()
    return model


def tokens_of(seed: int, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (rows, length), generator=generator)


# Loss by position.


@quick
@given(seeds, st.integers(1, 3), st.integers(2, 33))
def test_each_loss_is_the_surprise_at_the_next_token(seed, rows, length):
    model, tokens = build(seed), tokens_of(seed, rows, length)
    losses = loss_by_position(model, tokens)
    assert losses.shape == (rows, length - 1)
    for b in range(rows):
        for t in (0, length // 2 - 1, length - 2):
            read = model(tokens[b : b + 1, : t + 1])[0, -1].detach()  # nothing after t
            surprise = -read.double().softmax(-1)[tokens[b, t + 1]].log()
            torch.testing.assert_close(losses[b, t].double(), surprise, rtol=1e-4, atol=1e-4)


@quick
@given(seeds)
def test_the_mean_is_the_loss_that_training_reports(seed):
    model, tokens = build(seed), tokens_of(seed, 3, 20)
    main = model(tokens[:, :-1], tokens[:, 1:]).main
    torch.testing.assert_close(loss_by_position(model, tokens).mean(), main.detach())


def test_measuring_leaves_no_trace():
    model = build(0).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = loss_by_position(model, tokens_of(0, 2, 10))
    assert not losses.requires_grad
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(0, 5), (2, 1), (2, 0), (5,), (1, 2, 3)])
def test_tokens_without_a_pair_are_refused(shape):
    with pytest.raises(ConfigError, match=r"expected \(B, T\+1\)"):
        loss_by_position(build(0), torch.zeros(shape, dtype=torch.long))


def test_tokens_beyond_the_model_are_refused():
    model = build(0)
    assert loss_by_position(model, tokens_of(0, 1, 33)).shape == (1, 32)
    with pytest.raises(ConfigError, match="33 tokens exceed max_position_embeddings=32"):
        loss_by_position(model, tokens_of(0, 1, 34))


# Copies under another configuration.


def test_a_copy_has_weights_of_its_own():
    model = build(1)
    other = with_config(model, replace(CONFIG, max_position_embeddings=64))
    ours, theirs = other.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not {t.data_ptr() for t in ours.values()} & {t.data_ptr() for t in theirs.values()}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in model.parameters())


def test_a_copy_can_be_trained():
    other = stretch(build(1), YARN).train()
    tokens = tokens_of(1, 2, 100)
    other(tokens[:, :-1], tokens[:, 1:]).total(0.3, 1e-4).backward()
    assert all(parameter.requires_grad for parameter in other.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_copy_keeps_mode_and_dtype(training, dtype):
    model = build(0).to(dtype).train(training)
    other = stretch(model, YARN)
    assert other.training == training
    assert {p.dtype for p in other.parameters()} == {dtype}
    assert not any(t.is_meta for t in (*other.parameters(), *other.buffers()))


def test_copying_draws_no_random_numbers():
    model = build(0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    stretch(model, YARN)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_another_shape_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch"):
        with_config(build(0), replace(CONFIG, vocab_size=32))


# Stretching.


@quick
@given(seeds, st.floats(1.0, 16.0), st.integers(8, 32))
def test_a_stretched_model_computes_with_yarn(seed, factor, original):
    """Equal to a model that was built with these settings and given the same weights."""
    model = build(seed)
    yarn = YarnConfig(factor=factor, original_max_position_embeddings=original)
    stretched = stretch(model, yarn)
    longest = int(factor * original)
    assert stretched.config == replace(CONFIG, rope_scaling=yarn, max_position_embeddings=longest)
    built = MiniDeepSeek(stretched.config).eval()
    built.load_state_dict(model.state_dict())
    tokens = tokens_of(seed, 1, longest)
    torch.testing.assert_close(stretched(tokens), built(tokens))
    assert model.config == CONFIG


def test_the_parts_of_yarn_arrive_in_attention():
    """Frequencies and temperature both change logits, each by itself, in the direction asked."""
    model, tokens = build(3), tokens_of(3, 1, 32)
    neutral = replace(YARN, mscale=1e-9, mscale_all_dim=1e-9)
    plain, cool, hot = model(tokens), stretch(model, neutral)(tokens), stretch(model, YARN)(tokens)
    assert not torch.allclose(plain, cool, atol=1e-2)
    assert not torch.allclose(cool, hot, atol=1e-2)
    table = rotation(stretch(model, YARN).config, 0, 32)
    speeds = yarn_frequencies(8, CONFIG.rope_theta, YARN)
    torch.testing.assert_close(table[1, 1], speeds.sin())
    by_hand = model.lm_head(model.states(tokens, table)[0])  # plain softmax scale
    torch.testing.assert_close(by_hand, cool)
    assert yarn_mscale(4.0, 1.0) > 1


@quick
@given(seeds, st.integers(8, 32))
def test_a_factor_of_one_changes_no_logits(seed, original):
    model = build(seed)
    same = stretch(model, YarnConfig(factor=1.0, original_max_position_embeddings=original))
    tokens = tokens_of(seed, 2, original)
    torch.testing.assert_close(same(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    assert same.config.max_position_embeddings == original


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"factor": 0.5}, "factor is 0.5"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"factor": float("inf")}, "factor is inf"),
        ({"original_max_position_embeddings": 33}, "is 33, but the model reads 32 tokens"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"beta_fast": 0.1, "beta_slow": 32.0}, "would run backward"),
    ],
)
def test_impossible_stretches_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        stretch(build(0), replace(YARN, **changes))


def test_a_second_stretch_is_refused():
    once = stretch(build(0), YARN)
    with pytest.raises(ConfigError, match=r"stretched already, by a factor of 4\.0"):
        stretch(once, YARN)


# Needles.

numbers = st.lists(st.integers(0, 9), max_size=30)


@given(numbers, st.floats(0, 1), st.integers(0, 9))
def test_a_needle_stands_behind_the_end_of_a_sentence(hay, depth, stop):
    needle, question = torch.tensor([50, 51, 52]), torch.tensor([50, 51])
    prompt = plant_needle(torch.tensor(hay, dtype=torch.long), needle, question, depth, stop)
    values = prompt.tolist()
    assert values[-2:] == [50, 51]
    place = values.index(50)
    assert values[place : place + 3] == [50, 51, 52]
    assert values[:place] + values[place + 3 : -2] == hay  # the hay is whole and in order
    assert place <= round(depth * len(hay))
    assert place == 0 or hay[place - 1] == stop
    assert stop not in hay[place : round(depth * len(hay))]  # as deep as asked, where it can be


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_a_depth_outside_the_haystack_is_refused(depth):
    token = torch.tensor([1])
    with pytest.raises(ConfigError, match="between 0"):
        plant_needle(token, token, token, depth, 1)


def test_accuracy_counts_the_prompts_that_the_model_continues_rightly():
    model = build(0)
    prompts = [tokens_of(seed, 1, 5 + seed)[0] for seed in range(8)]
    right = [int(model(prompt[None])[0, -1].argmax()) for prompt in prompts]
    assert needle_accuracy(model, prompts, right) == 1.0
    mixed = [answer if i < 6 else (answer + 1) % 31 for i, answer in enumerate(right)]
    assert needle_accuracy(model, prompts, mixed) == 0.75


def test_accuracy_needs_prompts_that_the_model_can_read():
    with pytest.raises(ConfigError, match="no prompts"):
        needle_accuracy(build(0), [], [])
    with pytest.raises(ConfigError, match="40 tokens exceed"):
        needle_accuracy(build(0), [tokens_of(0, 1, 40)[0]], [1])
    with pytest.raises(ValueError, match="zip"):
        needle_accuracy(build(0), [tokens_of(0, 1, 4)[0]], [1, 2])
