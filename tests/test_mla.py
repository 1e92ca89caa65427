"""Multi-head latent attention: against explicit loops, in three forms, in chunks, in batches."""

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mdsd.config import ModelConfig, YarnConfig, preset
from mdsd.counting import parameter_shapes
from mdsd.model import mla
from mdsd.model.mla import (
    LatentCache,
    MultiHeadLatentAttention,
    absorbing_pays,
    attend,
    attend_latents,
    causal_mask,
    multiplications,
    split_heads,
    times_heads,
)
from mdsd.model.rope import rotation

LENGTH = 13
CONFIGS = {
    "query latent": preset("tiny"),
    "direct queries": preset("tiny", q_lora_rank=None),
    "YaRN": preset(
        "tiny", rope_scaling=YarnConfig(factor=4.0, original_max_position_embeddings=16)
    ),
    "wide values": preset("tiny", v_head_dim=56, num_attention_heads=3),
    "values as wide as queries": preset("tiny", v_head_dim=48),
    "a latent narrower than a head": preset("tiny", kv_lora_rank=24, q_lora_rank=None),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def build(config: ModelConfig, seed: int = 0) -> MultiHeadLatentAttention:
    """Build an attention whose norms and scores matter: weights of size 1, gains that differ."""
    torch.manual_seed(seed)
    attention = MultiHeadLatentAttention(config)
    with torch.no_grad():
        for parameter in attention.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return attention


def inputs(config: ModelConfig, batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(batch, length, config.hidden_size, generator=generator)


def whole(attention: MultiHeadLatentAttention, h: Tensor) -> Tensor:
    return attention(h, rotation(attention.config, 0, h.shape[1]))


def in_chunks(
    attention: MultiHeadLatentAttention,
    h: Tensor,
    sizes: list[int],
    cache: LatentCache | None = None,
) -> Tensor:
    cache, parts = LatentCache() if cache is None else cache, []
    for chunk in h.split(sizes, dim=1):
        table = rotation(attention.config, cache.length, chunk.shape[1])
        parts.append(attention(chunk, table, cache))
        cache.advance(chunk.shape[1])
    return torch.cat(parts, dim=1)


# The reference: plain Python loops in float64, written from the paper's equations.


def norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return x / (sum(v * v for v in x.tolist()) / len(x) + 1e-6) ** 0.5 * weight


def turn_by_hand(x: Tensor, position: int, config: ModelConfig) -> Tensor:
    result, width = x.clone(), len(x)
    for i in range(0, width, 2):
        angle = position * speed_by_hand(i // 2, config)
        cos, sin = math.cos(angle), math.sin(angle)
        result[i], result[i + 1] = x[i] * cos - x[i + 1] * sin, x[i] * sin + x[i + 1] * cos
    return result


def speed_by_hand(pair: int, config: ModelConfig) -> float:
    width, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    speed = theta ** (-2 * pair / width)
    if yarn is None:
        return speed
    length = yarn.original_max_position_embeddings
    at = [
        width * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(theta))
        for beta in (yarn.beta_fast, yarn.beta_slow)
    ]
    low, high = max(math.floor(at[0]), 0), min(math.ceil(at[1]), width - 1)
    part = min(max((pair - low) / (high - low), 0.0), 1.0)
    return speed * (1 - part) + speed / yarn.factor * part


def scale_by_hand(config: ModelConfig) -> float:
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    yarn = config.rope_scaling
    return scale if yarn is None else scale * (0.1 * math.log(yarn.factor) + 1) ** 2


def head_by_hand(
    attention: MultiHeadLatentAttention, h: Tensor, head: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values of one head, token by token, from h (T, D)."""
    config, weight = attention.config, {n: p.double() for n, p in attention.named_parameters()}
    nope, value, latent = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    q_up = weight["q_proj.weight" if config.q_lora_rank is None else "q_b_proj.weight"]
    q_up = q_up[head * config.qk_head_dim : (head + 1) * config.qk_head_dim]
    kv_up = weight["kv_b_proj.weight"][head * (nope + value) : (head + 1) * (nope + value)]
    queries, keys, values = [], [], []
    for t, x in enumerate(h):
        c_q = x
        if config.q_lora_rank is not None:
            c_q = norm_by_hand(weight["q_a_proj.weight"] @ x, weight["q_a_layernorm.weight"])
        down = weight["kv_a_proj_with_mqa.weight"] @ x
        c_kv = norm_by_hand(down[:latent], weight["kv_a_layernorm.weight"])
        q = q_up @ c_q
        queries.append(torch.cat([q[:nope], turn_by_hand(q[nope:], t, config)]))
        keys.append(torch.cat([kv_up[:nope] @ c_kv, turn_by_hand(down[latent:], t, config)]))
        values.append(kv_up[nope:] @ c_kv)
    return queries, keys, values


def attention_by_hand(attention: MultiHeadLatentAttention, h: Tensor) -> Tensor:
    """Attend from h (T, D) in loops over heads, queries and keys; (T, D) in float64."""
    config, h = attention.config, h.double()
    mixed = [[] for _ in h]
    for head in range(config.num_attention_heads):
        queries, keys, values = head_by_hand(attention, h, head)
        for t in range(len(h)):
            scores = [float(queries[t] @ keys[s]) * scale_by_hand(config) for s in range(t + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
            mixed[t].append(mean)
    return torch.stack([attention.o_proj.weight.double() @ torch.cat(parts) for parts in mixed])


@each_config
@torch.no_grad()
def test_equal_to_explicit_loops(config):
    attention, h = build(config), inputs(config)
    expected = torch.stack([attention_by_hand(attention, one) for one in h])
    assert expected.std() > 0.3  # a test on vanishing numbers would prove nothing
    torch.testing.assert_close(whole(attention, h).double(), expected, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_scores_are_far_from_uniform():
    """The scale and the norms only show where attention is not a plain mean."""
    attention, config = build(CONFIGS["query latent"]), CONFIGS["query latent"]
    queries, keys, _ = head_by_hand(attention, inputs(config)[0].double(), 0)
    scores = torch.stack(queries) @ torch.stack(keys).mT * scale_by_hand(config)
    assert scores.std() > 0.5


# Chunks, padding, and the two forms, in float64: what is equal is equal to ten digits.

FORMS = {  # what may decide between expanded and absorbed
    "rule": absorbing_pays,
    "expanded": lambda config, new, held: False,
    "absorbed": lambda config, new, held: True,
}
some_config = st.sampled_from([*CONFIGS])
some_form = st.sampled_from([*FORMS])
some_sizes = st.lists(st.integers(1, LENGTH), min_size=1, max_size=LENGTH)
exactly = {"atol": 1e-10, "rtol": 1e-9}


@contextmanager
def decided_by(form: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "absorbing_pays", FORMS[form])
        yield


@functools.cache
def exact(name: str) -> MultiHeadLatentAttention:
    return build(CONFIGS[name]).double().requires_grad_(False)


@settings(max_examples=60, deadline=None)
@given(some_sizes, some_config, some_form)
def test_any_chunks_equal_one_pass(sizes, name, form):
    attention, h = exact(name), inputs(CONFIGS[name], length=sum(sizes)).double()
    with decided_by(form):
        pieces = in_chunks(attention, h, sizes)
    torch.testing.assert_close(pieces, whole(attention, h), **exactly)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data(), some_config, some_form,
    st.sampled_from([0.0, 1e4]),
)  # fmt: skip
def test_padded_rows_equal_each_row_alone(lengths, data, name, form, filler):
    """Prompts of any lengths, filled up in front, then read on in any chunks."""
    config, attention, longest = CONFIGS[name], exact(name), max(lengths)
    longest += data.draw(st.integers(0, 2), "places that are padding in every row")
    sizes = data.draw(some_sizes.map(lambda sizes: sizes[:4]), "sizes of the next chunks")
    total = longest + sum(sizes)
    texts = inputs(config, len(lengths), total).double()
    padding = torch.tensor([longest - length for length in lengths])
    hidden = torch.arange(total) < padding[:, None]  # (B, total)
    filled = texts.masked_fill(hidden[..., None], filler)
    with decided_by(form):
        out = in_chunks(attention, filled, [longest, *sizes], LatentCache(padding))
    assert out.isfinite().all()  # the pads' own results, too
    for row, text, start in zip(out, texts, padding.tolist(), strict=True):
        alone = attention(text[None, start:], rotation(config, start, total - start))[0]
        torch.testing.assert_close(row[start:], alone, **exactly)


@each_config
@torch.no_grad()
def test_where_a_text_begins_does_not_matter(config):
    attention, h = build(config), inputs(config)
    for start in (1, 7, 100):
        moved = attention(h, rotation(config, start, LENGTH))
        torch.testing.assert_close(moved, whole(attention, h), atol=1e-3, rtol=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.data(), some_config, some_form)
def test_a_cache_that_is_set_back_goes_on_exactly(data, name, form):
    """Keep some tokens, read others, forget them, read the right ones: nothing remains of them."""
    config, attention = CONFIGS[name], exact(name)
    right, wrong = (inputs(config, seed=seed).double() for seed in (1, 2))
    kept = data.draw(st.integers(0, LENGTH), "tokens kept")
    extra = data.draw(st.integers(0, LENGTH), "tokens read and forgotten")
    latents = LatentCache(torch.tensor([0, 2]))
    with decided_by(form):
        first = in_chunks(attention, right[:, :kept], [kept], latents)
        in_chunks(attention, wrong[:, :extra], [extra], latents)
        latents.length = kept
        rest = data.draw(st.integers(0, LENGTH - kept), "size of the next chunk")
        second = in_chunks(attention, right[:, kept:], [rest, LENGTH - kept - rest], latents)
        together = in_chunks(attention, right, [LENGTH], LatentCache(torch.tensor([0, 2])))
    torch.testing.assert_close(torch.cat([first, second], 1), together, **exactly)


@each_config
@pytest.mark.parametrize("padding", [None, torch.tensor([0, 3])])
def test_the_forms_have_the_same_gradients(config, padding):
    attention, h = build(config).double(), inputs(config).double().requires_grad_()
    weights, table = (
        torch.randn(2, LENGTH, config.hidden_size).double(),
        rotation(config, 0, LENGTH),
    )
    if padding is not None:
        weights[1, :3] = 0  # what becomes of pads is nobody's concern
    found = []
    for form in (attention.expanded, attention.absorbed):
        out = form(*attention.queries(h, table), attention.latents(h, table), padding)
        out = attention.o_proj(out.transpose(1, 2).flatten(-2))
        gradients = torch.autograd.grad((weights * out).sum(), [h, *attention.parameters()])
        found.append([out * (weights != 0), *gradients])
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(one, other, **exactly)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 5), st.integers(0, 9))
def test_latents_are_attended_to_as_keys_and_values_of_every_head(heads, new, cached, pads):
    held = new + cached
    query = torch.randn(2, heads, new, 6, dtype=torch.double)
    latents = torch.randn(2, held, 6, dtype=torch.double)
    padding = torch.tensor([0, min(pads, held - 1)])
    copies = latents[:, None].expand(-1, heads, -1, -1)
    for known in (None, padding):
        expected = attend(query, copies, copies, 0.7, known)
        torch.testing.assert_close(attend_latents(query, latents, 0.7, known), expected, **exactly)


@settings(max_examples=30, deadline=None)
@given(*[st.integers(0, 4)] * 2, *[st.integers(1, 4)] * 3)
def test_each_head_is_multiplied_by_its_own_matrix(batch, new, heads, width, out):
    x = torch.randn(batch, new, heads, width).transpose(1, 2)
    weight = torch.randn(heads, width, out)
    expected = torch.stack([x[:, head] @ weight[head] for head in range(heads)], 1)
    torch.testing.assert_close(times_heads(x, weight), expected)


@torch.inference_mode()
def test_a_single_query_makes_no_mask(monkeypatch):
    def refuse(*_: object) -> Tensor:
        raise AssertionError("no mask is needed")

    config = CONFIGS["query latent"]
    attention, h = build(config), inputs(config)
    expected = whole(attention, h)
    monkeypatch.setattr(mla, "causal_mask", refuse)
    pieces = in_chunks(attention, h, [LENGTH - 2, 1, 1])
    torch.testing.assert_close(pieces, expected, atol=1e-4, rtol=1e-3)


class Largest(TorchDispatchMode):
    """Remember how many numbers the largest tensor has that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given_to = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given_to:
                self.numbers = max(self.numbers, tensor.numel())
        return out


@each_config
@torch.no_grad()
def test_absorbed_decoding_makes_no_key_or_value(config):
    """One token among 500: no tensor is as large as the cache, let alone the heads' keys."""
    attention, latents = build(config), torch.randn(2, 500, config.cache_width)
    token = attention.queries(inputs(config, length=1), rotation(config, 499, 1))
    largest = {}
    for form in (attention.expanded, attention.absorbed):
        with Largest() as seen:
            form(*token, latents)
        largest[form.__name__] = seen.numbers
    assert largest["absorbed"] < latents.numel() / 3
    assert largest["expanded"] >= 2 * config.num_attention_heads * 500 * config.qk_head_dim


@each_config
@torch.no_grad()
def test_decoding_uses_the_absorbed_form_and_training_never(config, monkeypatch):
    used = []
    for name in ("expanded", "absorbed"):
        form = getattr(MultiHeadLatentAttention, name)
        monkeypatch.setattr(
            MultiHeadLatentAttention,
            name,
            lambda *args, name=name, form=form: used.append(name) or form(*args),
        )
    attention, h = build(config), inputs(config)
    whole(attention, h)
    in_chunks(attention, h, [8, 4, 1])
    narrow = 2 * config.kv_lora_rank < config.qk_nope_head_dim + config.v_head_dim
    assert used == ["expanded", "absorbed" if narrow else "expanded", "absorbed", "absorbed"]


a_width = st.integers(1, 64)


@settings(deadline=None)
@given(a_width, a_width, a_width, a_width, st.integers(1, 300), st.integers(0, 3000))
def test_the_rule_is_the_published_inequality(latent, plain, rotary, value, new, cached):
    """1/T > 1/S + (2 d_c − d_h − d_v) / (d_c (d_h + d_v)), in whole numbers."""
    config = preset(
        "tiny", kv_lora_rank=latent, qk_nope_head_dim=plain, qk_rope_head_dim=2 * rotary,
        v_head_dim=value,
    )  # fmt: skip
    held, up = new + cached, latent * (plain + value)
    left, right = held * up, new * up + new * held * (2 * latent - plain - value)
    assert absorbing_pays(config, new, held) == (left > right)


@pytest.mark.parametrize("name", ["tiny", "mini", "deepseek-v3"])
def test_multiplications_are_those_of_the_shapes(name):
    """Count the products of each einsum and matmul from the shapes that meet in it."""
    config, new, held = preset(name), 5, 40
    c, r, d, v = (config.kv_lora_rank, config.qk_rope_head_dim,
                  config.qk_nope_head_dim, config.v_head_dim)  # fmt: skip
    keys, values = held * c * d, held * c * v
    expanded = keys + values + new * held * (d + r) + new * held * v
    moved, mean = new * d * c, new * c * v
    absorbed = moved + new * held * (c + r) + new * held * c + mean
    assert multiplications(config, new, held) == (expanded, absorbed)


@torch.no_grad()
def test_a_batch_is_its_rows():
    config = CONFIGS["query latent"]
    attention, h = build(config), inputs(config, batch=4)
    together = in_chunks(attention, h, [4, 1, 8])
    alone = torch.cat([in_chunks(attention, one[None], [6, 7]) for one in h])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_two_generations_do_not_disturb_each_other():
    config = CONFIGS["query latent"]
    attention, texts = build(config), [inputs(config, 1, seed=seed) for seed in (1, 2)]
    caches = [LatentCache(), LatentCache()]
    parts: list[list[Tensor]] = [[], []]
    for t in range(LENGTH):
        for text, latents, part in zip(texts, caches, parts, strict=True):
            part.append(attention(text[:, t : t + 1], rotation(config, t, 1), latents))
            latents.advance(1)
    for text, part in zip(texts, parts, strict=True):
        expected = whole(attention, text)
        torch.testing.assert_close(torch.cat(part, 1), expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_no_token_sees_a_later_one():
    config = CONFIGS["query latent"]
    attention, h = build(config), inputs(config)
    before = whole(attention, h)
    for t in range(1, LENGTH):
        changed = h.clone()
        changed[:, t:] += 1
        after = whole(attention, changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(after[:, t], before[:, t], atol=1e-2)


def test_gradients_reach_earlier_tokens_only_and_every_weight():
    config = CONFIGS["query latent"]
    attention, h = build(config), inputs(config).requires_grad_()
    whole(attention, h)[:, 5].square().sum().backward()
    assert h.grad is not None
    assert (h.grad[:, :6].abs().amax((0, 2)) > 0).all()
    assert not h.grad[:, 6:].any()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@each_config
def test_parameters_are_those_of_the_configuration(config):
    found = {n: tuple(p.shape) for n, p in MultiHeadLatentAttention(config).named_parameters()}
    prefix = "layers.0.self_attn."
    expected = {
        name.removeprefix(prefix): shape
        for name, shape in parameter_shapes(config).items()
        if name.startswith(prefix)
    }
    assert found == expected


# The cache.


@torch.no_grad()
def test_the_cache_keeps_a_latent_and_a_rotary_key_a_token():
    for config in CONFIGS.values():
        attention, cache = build(config), LatentCache()
        attention(inputs(config), rotation(config, 0, LENGTH), cache, layer=1)
        cache.advance(LENGTH)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        assert cache.layers.keys() == {1}
        assert cache.layers[1].shape == (2, LENGTH, width)


def test_the_cache_grows_by_doubling_and_forgets_nothing():
    config = CONFIGS["query latent"]
    cache, said, capacities = LatentCache(), [], []
    for step in range(70):
        new = torch.randn(2, 3 if step == 0 else 1, config.cache_width)
        said.append(new)
        for layer in range(config.num_hidden_layers):
            kept = cache.extend(layer, new + layer)
            assert torch.equal(kept, torch.cat(said, 1) + layer)
        cache.advance(new.shape[1])
        capacities.append(cache.layers[0].shape[1])
    assert cache.length == 72
    assert sorted(set(capacities)) == [3, 6, 12, 24, 48, 96]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_of_another_batch_size_is_refused(batch):
    config = CONFIGS["query latent"]
    cache = LatentCache()
    cache.extend(0, torch.randn(batch, 4, config.cache_width))
    with pytest.raises(ValueError, match=f"batch size of {batch}, not 3"):
        cache.extend(0, torch.randn(3, 4, config.cache_width))


# The parts.


def test_split_heads_cuts_each_head():
    x = torch.randn(2, 3, 4 * (5 + 6))
    first, second = split_heads(x, 4, 5, 6)
    assert first.shape == (2, 4, 3, 5)
    for head in range(4):
        assert torch.equal(first[:, head], x[..., 11 * head : 11 * head + 5])
        assert torch.equal(second[:, head], x[..., 11 * head + 5 : 11 * head + 11])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12))
def test_the_mask_is_the_tail_of_the_square_one(queries, cached):
    keys = queries + cached
    square = torch.ones(keys, keys, dtype=torch.bool).tril()
    assert torch.equal(causal_mask(queries, keys, torch.device("cpu")), square[cached:])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.lists(st.integers(0, 18), min_size=1, max_size=4))
def test_the_mask_hides_pads_from_all_but_themselves(queries, cached, paddings):
    keys, padding = queries + cached, torch.tensor(paddings)
    mask = causal_mask(queries, keys, torch.device("cpu"), padding)
    assert mask.shape == (len(paddings), 1, queries, keys)
    for row, pads in enumerate(paddings):
        for t in range(queries):
            query = cached + t
            seen = {k for k in range(query + 1) if k >= pads or k == query}
            assert set(mask[row, 0, t].nonzero().flatten().tolist()) == seen
    assert mask.any(-1).all()


@pytest.mark.parametrize("width", [4, 8, 11])
def test_attend_takes_values_of_any_width(width):
    query, keys, values = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 11)
    values = values[..., :width]
    scores = (query @ keys.mT * 0.7).masked_fill(
        ~causal_mask(2, 7, torch.device("cpu")), -torch.inf
    )
    torch.testing.assert_close(attend(query, keys, values, 0.7), scores.softmax(-1) @ values)


# Low precision and other devices.


@pytest.fixture
def every_warning():
    """Let torch repeat warnings that it would give only once a process, to another test."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@each_config
@pytest.mark.usefixtures("every_warning")
def test_autocast_stays_near_float32_and_gives_no_warning(config):
    attention, h = build(config), inputs(config)
    with torch.no_grad():
        exact = whole(attention, h)
    cache = LatentCache()
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        rough = whole(attention, h)
        with torch.no_grad():
            in_pieces = in_chunks(attention, h, [LENGTH - 2, 1, 1], cache)
        rough.float().square().mean().backward()
    assert rough.dtype == cache.layers[0].dtype == torch.bfloat16
    for out in (rough, in_pieces):
        assert (out - exact).square().mean().sqrt() < 0.03 * exact.std()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in attention.parameters())


def test_a_bfloat16_model_decodes_with_a_bfloat16_cache():
    config = CONFIGS["YaRN"]
    attention, h = build(config).requires_grad_(False), inputs(config)
    exact = whole(attention, h)
    rough = in_chunks(attention.bfloat16(), h.bfloat16(), [5, 1, 7])
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).square().mean().sqrt() < 0.04 * exact.std()


def test_the_meta_device_carries_the_shapes():
    config = preset("deepseek-v3")
    with torch.device("meta"):
        attention = MultiHeadLatentAttention(config)
        h, table = torch.empty(1, 4, config.hidden_size), torch.empty(2, 4, 32)
        assert attention(h, table).shape == (1, 4, config.hidden_size)


@pytest.mark.skipif(
    not (torch.cuda.is_available() or torch.backends.mps.is_available()), reason="needs a GPU"
)
def test_a_gpu_gives_the_same():
    device = torch.device("cuda" if torch.cuda.is_available() else "mps")
    config = CONFIGS["query latent"]
    attention, h = build(config).requires_grad_(False), inputs(config)
    exact = whole(attention, h)
    attention, cache, parts = attention.to(device), LatentCache(), []
    for chunk in h.to(device).split([5, 1, 7], dim=1):
        table = rotation(config, cache.length, chunk.shape[1]).to(device)
        parts.append(attention(chunk, table, cache))
        cache.advance(chunk.shape[1])
    assert cache.layers[0].device.type == device.type
    torch.testing.assert_close(torch.cat(parts, 1).cpu(), exact, atol=1e-3, rtol=1e-3)
