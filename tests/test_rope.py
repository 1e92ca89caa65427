"""RoPE and YaRN: against complex numbers, what their papers promise, and `transformers`."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mdsd.config import ConfigError, ModelConfig, YarnConfig, from_dict, preset, to_dict
from mdsd.model.rope import (
    frequencies,
    rotate,
    rotate_half_split,
    rotation,
    softmax_scale,
    to_half_split,
    to_interleaved,
    yarn_frequencies,
    yarn_magnitude,
    yarn_mscale,
    yarn_ramp,
)

V3 = preset("deepseek-v3")
YARN = YarnConfig(factor=8.0, original_max_position_embeddings=64)

widths = st.integers(1, 32).map(lambda half: 2 * half)
thetas = st.sampled_from([100.0, 10_000.0, 500_000.0])
seeds = st.integers(0, 2**31)
yarns = st.builds(
    YarnConfig,
    factor=st.floats(1.0, 64.0),
    original_max_position_embeddings=st.integers(64, 8192),
    beta_fast=st.floats(8.0, 64.0),
    beta_slow=st.floats(0.5, 4.0),
)
quick = settings(max_examples=40, deadline=None)


def config(width: int, theta: float = 10_000.0, yarn: YarnConfig | None = None) -> ModelConfig:
    return preset("tiny", qk_rope_head_dim=width, rope_theta=theta, rope_scaling=yarn)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotate_complex(x: Tensor, start: int, speeds: Tensor) -> Tensor:
    """Multiply pairs of x (…, T, R), as complex numbers in float64, by exp(i·position·speed)."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    positions = torch.arange(start, start + x.shape[-2], dtype=torch.float64)
    turned = pairs * torch.exp(1j * torch.outer(positions, speeds.double()))
    return torch.view_as_real(turned).flatten(-2)


@quick
@given(seeds, widths, thetas, st.integers(0, 500), st.none() | yarns)
def test_rotation_is_the_complex_product(seed, width, theta, start, yarn):
    x = normal(seed, 2, 3, 7, width)
    speeds = frequencies(width, theta) if yarn is None else yarn_frequencies(width, theta, yarn)
    turned = rotate(x, rotation(config(width, theta, yarn), start, 7))
    expected = rotate_complex(x, start, speeds)
    torch.testing.assert_close(turned.double(), expected, atol=5e-4, rtol=1e-4)


@quick
@given(seeds, widths, st.none() | yarns, st.integers(0, 300), st.integers(0, 300))
def test_scores_depend_on_the_distance_alone(seed, width, yarn, start, shift):
    q, k = normal(seed, 2, 5, width)
    made = config(width, yarn=yarn)
    here, there = rotation(made, start, 5), rotation(made, start + shift, 5)
    scores = rotate(q, here) @ rotate(k, here).mT
    moved = rotate(q, there) @ rotate(k, there).mT
    torch.testing.assert_close(scores, moved, atol=3e-3, rtol=1e-3)


def test_the_direction_of_time_counts():
    """The same query and key score differently when their places are exchanged."""
    q, k = normal(3, 2, 1, 8).expand(2, 5, 8)
    table = rotation(config(8), 0, 5)
    scores = rotate(q, table) @ rotate(k, table).mT
    assert not torch.isclose(scores[4, 0], scores[0, 4], atol=1e-2)


@quick
@given(seeds, widths, st.none() | yarns)
def test_norms_stay_and_position_zero_is_the_identity(seed, width, yarn):
    x = normal(seed, 2, 9, width)
    turned = rotate(x, rotation(config(width, yarn=yarn), 0, 9))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])


def test_a_table_continues_where_another_ends():
    for made in (config(16), config(16, yarn=YARN)):
        whole = rotation(made, 0, 200)
        assert torch.equal(torch.cat([rotation(made, 0, 77), rotation(made, 77, 123)], 1), whole)
        assert whole.shape == (2, 200, 8)
        assert whole.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_of_x_stays(dtype):
    x, table = normal(0, 3, 8), rotation(config(8), 5, 3)
    turned = rotate(x.to(dtype), table)
    assert turned.dtype == dtype
    torch.testing.assert_close(turned.float(), rotate(x, table), atol=3e-2, rtol=3e-2)


@quick
@given(seeds, widths)
def test_layouts_convert_and_agree(seed, width):
    x, y = normal(seed, 2, 6, width)
    table = rotation(config(width), 11, 6)
    assert torch.equal(to_interleaved(to_half_split(x)), x)
    assert torch.equal(to_half_split(to_interleaved(x)), x)
    a, b = (rotate_half_split(to_half_split(z), table) for z in (x, y))
    torch.testing.assert_close(to_interleaved(a), rotate(x, table))
    torch.testing.assert_close(a @ b.mT, rotate(x, table) @ rotate(y, table).mT)


def test_half_split_pairs_first_and_second_half():
    assert to_half_split(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    cos_sin = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])  # a quarter turn of pair 0
    assert rotate_half_split(x, cos_sin).tolist() == [[0, 0, 1, 0]]
    assert rotate(x, cos_sin).tolist() == [[0, 1, 0, 0]]


def test_frequencies_fall_from_one_by_equal_factors():
    speeds = frequencies(64, 10_000.0)
    assert speeds[0] == 1
    torch.testing.assert_close(speeds[1:] / speeds[:-1], torch.full((31,), 10_000 ** (-1 / 32)))


@quick
@given(widths, thetas, st.integers(64, 8192))
def test_yarn_with_factor_one_is_plain(width, theta, length):
    yarn = YarnConfig(factor=1.0, original_max_position_embeddings=length)
    torch.testing.assert_close(yarn_frequencies(width, theta, yarn), frequencies(width, theta))
    made = config(width, theta, yarn)
    assert softmax_scale(made) == made.qk_head_dim**-0.5


@quick
@given(widths, thetas, yarns)
def test_yarn_slows_between_nothing_and_the_factor(width, theta, yarn):
    plain, stretched = frequencies(width, theta), yarn_frequencies(width, theta, yarn)
    slowing = plain / stretched
    assert (slowing >= 1 - 1e-5).all()
    assert (slowing <= yarn.factor * (1 + 1e-5)).all()
    assert (slowing.diff() >= -1e-4).all()  # slower pairs are never slowed less
    assert (stretched.diff() < 0).all()  # and the order of the pairs stays


@quick
@given(yarns)
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(yarn):
    plain, stretched = frequencies(64, 10_000.0), yarn_frequencies(64, 10_000.0, yarn)
    turns = yarn.original_max_position_embeddings * plain / (2 * math.pi)
    kept, slowed = turns >= yarn.beta_fast * 1.5, turns <= yarn.beta_slow / 1.5
    torch.testing.assert_close(stretched[kept], plain[kept])
    torch.testing.assert_close(stretched[slowed], plain[slowed] / yarn.factor)


def test_yarn_at_the_size_of_v3():
    assert V3.rope_scaling is not None
    plain, stretched = frequencies(64, 10_000.0), yarn_frequencies(64, 10_000.0, V3.rope_scaling)
    assert torch.equal(stretched[:11], plain[:11])
    ramp = (torch.arange(11, 23) - 10) / 13  # from pair 10 to pair 23
    torch.testing.assert_close(stretched[11:23] / plain[11:23], 1 - ramp * (1 - 1 / 40))
    torch.testing.assert_close(stretched[23:], plain[23:] / 40)


def test_mscale_sharpens_by_its_square():
    assert yarn_mscale(1.0, 1.0) == yarn_mscale(0.5, 1.0) == 1
    assert yarn_mscale(40.0, 1.0) == pytest.approx(0.1 * math.log(40) + 1)
    assert softmax_scale(V3) == pytest.approx(192**-0.5 * 1.8738542)


def test_mscale_turns_up_in_the_table_only_where_it_differs_from_mscale_all_dim():
    norms = rotation(config(8, yarn=YARN), 3, 4).square().sum(0)
    torch.testing.assert_close(norms, torch.ones(4, 4))
    table_only = YarnConfig(factor=8.0, mscale=1.0, mscale_all_dim=0.0)
    made = config(8, yarn=table_only)
    norms = rotation(made, 3, 4).square().sum(0)
    torch.testing.assert_close(norms, torch.full((4, 4), yarn_mscale(8.0, 1.0) ** 2))
    assert softmax_scale(made) == made.qk_head_dim**-0.5


def test_gradients_turn_back():
    """A rotation is orthogonal: its gradient is the rotation by the opposite angle."""
    x = normal(0, 3, 8).requires_grad_()
    table = rotation(config(8), 4, 3)
    upstream = normal(1, 3, 8)
    (rotate(x, table) * upstream).sum().backward()
    assert x.grad is not None
    back = table * torch.tensor([1.0, -1.0])[:, None, None]
    torch.testing.assert_close(x.grad, rotate(upstream, back))


# The published numbers of V3 and V2.


def test_the_published_numbers_of_v3_to_the_digit():
    yarn = V3.rope_scaling
    assert yarn is not None
    assert yarn_ramp(64, V3.rope_theta, yarn) == (10, 23)
    assert round(yarn_mscale(40.0, 1.0), 6) == 1.368888
    assert round(yarn_mscale(40.0, 1.0) ** 2, 6) == 1.873854
    assert round(softmax_scale(V3), 6) == 0.135234
    assert yarn_magnitude(yarn) == 1.0
    assert V3.max_position_embeddings == 4096 * 40


def test_the_two_weights_of_v2_cancel_in_the_table():
    yarn = YarnConfig(factor=40.0, mscale=0.707, mscale_all_dim=0.707)
    assert yarn_magnitude(yarn) == 1.0
    made = config(64, yarn=yarn)
    assert softmax_scale(made) * made.qk_head_dim**0.5 == pytest.approx(1.589626, abs=1e-6)


# Equal to `transformers`, over settings that include the borders of each rule.

# A file may leave a field out: then YaRN's default counts, and no `mscale_all_dim` at all.
published = st.fixed_dictionaries(
    {
        "factor": st.sampled_from([1.0, 4.0, 40.0]) | st.floats(1.0, 128.0),
        "original_max_position_embeddings": st.sampled_from([7, 64, 4096]) | st.integers(1, 32768),
    },
    optional={
        "beta_fast": st.floats(0.1, 64.0),
        "beta_slow": st.floats(0.1, 8.0),
        "mscale": st.sampled_from([0.0, 0.707, 1.0]) | st.floats(0.01, 2.0),
        "mscale_all_dim": st.sampled_from([0.0, 0.707, 1.0]) | st.floats(0.01, 2.0),
    },
)
bases = st.sampled_from([1.5, 10.0, 10_000.0, 8e6]) | st.floats(1.01, 1e6)
forms = st.sampled_from(["rope_scaling, type", "rope_scaling, rope_type", "rope_parameters"])
SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 4,
}


def rope_fields(theta: float, yarn: dict[str, float], form: str) -> dict[str, Any]:
    """Write `yarn` as one of the forms in which configurations are published."""
    if form == "rope_parameters":
        return {form: {"rope_type": "yarn", "rope_theta": theta, **yarn}}
    name, spelling = form.split(", ")
    return {"rope_theta": theta, name: {spelling: "yarn", **yarn}}


def transformers_config(width: int, rope: dict[str, Any]) -> Any:
    """Return a `DeepseekV3Config` of `transformers` with these rotary settings."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()  # it warns of a length other than factor × original
    return transformers.DeepseekV3Config(
        qk_rope_head_dim=width, num_key_value_heads=2, **SIZES, **copy.deepcopy(rope)
    )


def ours(width: int, theta: float, yarn: dict[str, float], form: str) -> ModelConfig:
    """Read the same settings as a configuration file of ours."""
    plain = to_dict(preset("tiny", qk_rope_head_dim=width, **SIZES))
    del plain["rope_theta"], plain["rope_scaling"]
    return from_dict(plain | rope_fields(theta, yarn, form))


@settings(max_examples=200, deadline=None)
@given(widths, bases, published, forms)
@example(
    64, 10_000.0, {"factor": 40.0, "original_max_position_embeddings": 4096}, "rope_parameters"
)
@example(8, 10_000.0, {"factor": 1.0, "original_max_position_embeddings": 64}, "rope_parameters")
@example(  # no pair completes a turn: the ramp is empty at its lower end
    8, 10_000.0, {"factor": 4.0, "original_max_position_embeddings": 6}, "rope_scaling, type"
)
@example(  # every pair turns often: the ramp is clipped at its upper end
    8, 2.0, {"factor": 4.0, "original_max_position_embeddings": 300}, "rope_scaling, type"
)
@example(  # the scale is left alone, the table is lengthened
    8,
    10_000.0,
    {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.5, "mscale_all_dim": 0.0},
    "rope_parameters",
)
def test_frequencies_table_and_scale_equal_transformers(width, theta, yarn, form):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    theirs = transformers_config(width, rope_fields(theta, yarn, form))
    made = ours(width, theta, yarn, form)
    scaling = made.rope_scaling
    assert scaling is not None
    try:
        low, high = yarn_ramp(width, theta, scaling)
    except ConfigError:
        event("refused")
        assert runs_backward(width, theta, scaling)
        return
    event("empty ramp" if low == high else "ramp")
    event("clipped above" if high == width - 1 else "not clipped above")
    embedding = modeling.DeepseekV3RotaryEmbedding(theirs)
    speeds = yarn_frequencies(width, theta, scaling)
    torch.testing.assert_close(speeds, embedding.inv_freq, rtol=3e-7, atol=0)
    assert yarn_magnitude(scaling) == pytest.approx(embedding.attention_scaling, rel=1e-12)
    attention = modeling.DeepseekV3Attention(theirs, 0)
    assert softmax_scale(made) == pytest.approx(attention.scaling, rel=1e-12)
    cos, sin = embedding(torch.zeros(1), torch.arange(30)[None])  # (1, T, R), each half the pairs
    table = torch.stack([cos[0, :, : width // 2], sin[0, :, : width // 2]])
    torch.testing.assert_close(rotation(made, 0, 30), table, rtol=1e-5, atol=1e-5)


def runs_backward(width: int, theta: float, yarn: YarnConfig) -> bool:
    """Whether the published ramp would end before it begins, and slow the wrong pairs."""

    def pair(turns: float) -> float:
        period = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(period) / (2 * math.log(theta))

    first, last = math.floor(pair(yarn.beta_fast)), math.ceil(pair(yarn.beta_slow))
    return max(first, 0) > min(last, width - 1)


@quick
@given(widths, bases)
def test_plain_frequencies_equal_transformers_to_the_bit(width, theta):
    """Angles grow with the position: at 160,000 tokens a last bit is a hundredth of a radian."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    theirs = transformers_config(width, {"rope_theta": theta})
    speeds, magnitude = modeling.DeepseekV3RotaryEmbedding.compute_default_rope_parameters(theirs)
    assert torch.equal(frequencies(width, theta), speeds)
    assert magnitude == 1.0


@pytest.mark.parametrize(
    ("theta", "changes", "named"),
    [
        (1.0, {}, "rope_theta is 1.0"),
        (0.5, {}, "rope_theta is 0.5"),
        (10_000.0, {"beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast=1.0 must exceed"),
        (10_000.0, {"original_max_position_embeddings": 2}, "backward, from pair 0"),
        (1.5, {"original_max_position_embeddings": 4096}, "backward, from pair"),
    ],
)
def test_a_ramp_that_would_slow_the_wrong_pairs_is_refused(theta, changes, named):
    yarn = YarnConfig(**{"factor": 4.0, "original_max_position_embeddings": 64} | changes)
    with pytest.raises(ConfigError, match=named):
        yarn_frequencies(64, theta, yarn)
