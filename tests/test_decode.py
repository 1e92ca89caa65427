"""The prepared decoder gives the model's logits, whatever the model, the batch and the cache."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mdsd.config import PRESETS, ConfigError, ModelConfig, YarnConfig
from mdsd.model import decode
from mdsd.model.decode import (
    Decoder,
    PreparedExperts,
    PreparedNorm,
    Reader,
    decodable,
    hidden_places,
    last_logits,
)
from mdsd.model.fp8 import convert_to_fp8
from mdsd.model.mla import LatentCache, causal_mask
from mdsd.model.moe import MixtureOfExperts
from mdsd.model.norm import RMSNorm
from mdsd.model.transformer import MiniDeepSeek

CONFIG = replace(
    PRESETS["tiny"], vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
    kv_lora_rank=12, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    intermediate_size=32, moe_intermediate_size=16, max_position_embeddings=24,
    n_group=1, topk_group=1, initializer_range=0.3,
)  # fmt: skip
YARN = YarnConfig(factor=4.0, original_max_position_embeddings=6, mscale=0.7, mscale_all_dim=0.4)
exactly = {"atol": 1e-10, "rtol": 1e-9}
closely = {"atol": 3e-6, "rtol": 1e-5}  # the gate and the logits are float32 in a float64 model

SHAPES = {
    "num_attention_heads": [1, 3], "q_lora_rank": [None, 8], "qk_nope_head_dim": [8, 5],
    "v_head_dim": [8, 11], "n_shared_experts": [0, 1, 2], "first_k_dense_replace": [0, 1, 9],
    "n_group": [1, 2, 4], "norm_topk_prob": [True, False], "routed_scaling_factor": [1.0, 2.5],
    "rope_scaling": [None, YARN], "num_nextn_predict_layers": [0, 1],
}  # fmt: skip
shapes = st.fixed_dictionaries({name: st.sampled_from(few) for name, few in SHAPES.items()})


def build(config: ModelConfig, seed: int = 0) -> MiniDeepSeek:
    """A model in float64 whose norms and balance biases matter."""
    torch.manual_seed(seed)
    model = MiniDeepSeek(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
    for gate in model.gates():
        gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    return model


@cache
def plain_model() -> MiniDeepSeek:
    return build(CONFIG)


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=random)


def stepwise(read, tokens: Tensor, latents: LatentCache) -> Tensor:
    """Logits (B, T, V) of tokens (B, T) that `read` takes one by one."""
    return torch.stack([read(tokens[:, t : t + 1], latents) for t in range(tokens.shape[1])], 1)


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(0, 99), st.integers(1, 4), st.integers(0, 7), st.data())
def test_steps_are_the_models(changes, seed, batch, held, data):
    """Any shape, one row or more, padded or not, behind a prompt or behind nothing."""
    model = build(replace(CONFIG, **changes), seed)
    pads = data.draw(st.lists(st.integers(0, held + 2), min_size=batch, max_size=batch), "padding")
    padding = data.draw(st.sampled_from([None, torch.tensor(pads)]), "with padding")
    tokens = some_tokens(batch, held + 5, seed)
    caches, found = [LatentCache(padding), LatentCache(padding)], []
    ways = [lambda new, latents: last_logits(model, new, latents), Decoder(model)]
    for latents, way in zip(caches, ways, strict=True):
        if held:
            last_logits(model, tokens[:, :held], latents)
        found.append(stepwise(way, tokens[:, held:], latents))
    assert found[0].isfinite().all()
    assert found[0].std() > 0.1  # not the equality of vanishing numbers
    torch.testing.assert_close(found[1], found[0], **closely)
    assert caches[0].length == caches[1].length == held + 5
    for layer, kept in caches[0].layers.items():
        torch.testing.assert_close(
            caches[1].layers[layer][:, : held + 5], kept[:, : held + 5], **closely
        )


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 10), st.integers(0, 10))
def test_a_cache_that_is_set_back_goes_on_exactly(kept, wrong):
    model, tokens = plain_model(), some_tokens(2, 15)
    decoder, latents = Decoder(model), LatentCache()
    whole = model(tokens)
    stepwise(decoder, tokens[:, :kept], latents)
    if wrong:
        stepwise(decoder, some_tokens(2, wrong, 1), latents)
    latents.length = kept
    torch.testing.assert_close(
        stepwise(decoder, tokens[:, kept:], latents), whole[:, kept:], **closely
    )


def test_model_and_decoder_take_turns_at_one_cache():
    """As speculation does: two tokens at once, the second refused, then a single one."""
    model, tokens, latents = plain_model(), some_tokens(1, 12), LatentCache()
    whole, read = model(tokens), Reader(model)
    read(tokens[:, :4], latents)
    for place in range(4, 11):
        both = read(tokens[:, place : place + 2], latents)
        torch.testing.assert_close(both, whole[:, place + 1], **closely)
        latents.length = place
        one = read(tokens[:, place : place + 1], latents)
        torch.testing.assert_close(one, whole[:, place], **closely)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 7))
def test_hidden_places_are_those_that_the_mask_hides(pads, held):
    latents = LatentCache(torch.tensor(pads))
    latents.length = held
    seen = causal_mask(1, held + 1, torch.device("cpu"), latents.padding)[:, 0]
    hidden = hidden_places(latents)
    assert hidden is not None
    assert torch.equal(hidden, ~seen)
    assert hidden_places(LatentCache()) is None


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(-6, 3), st.sampled_from([1e-6, 1e-3]))
def test_the_prepared_norm_is_the_norm(width, size, eps):
    """From vectors far below ε to large ones, and for zero."""
    norm = RMSNorm(width, eps=eps).double().requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    x = 10.0**size * torch.randn(3, width, dtype=torch.double)
    x[2] = 0
    torch.testing.assert_close(PreparedNorm(norm)(x), norm(x), **exactly)


# Which models are prepared, and how.


def test_other_layers_dtypes_and_autocast_take_the_models_own_step(monkeypatch):
    def refuse(model: MiniDeepSeek):
        raise AssertionError("this model cannot be prepared")

    monkeypatch.setattr(decode, "Decoder", refuse)
    config = replace(CONFIG, hidden_size=32, initializer_range=0.1)
    half = MiniDeepSeek(config).bfloat16().eval()
    eight = convert_to_fp8(MiniDeepSeek(config)).eval()
    wide = MiniDeepSeek(config).eval()
    token = some_tokens(1, 1)
    with torch.inference_mode():
        for model in (half, eight):
            assert not decodable(model)
            assert torch.equal(Reader(model)(token, LatentCache()), model(token)[:, -1])
        with torch.autocast("cpu", torch.bfloat16):
            assert not decodable(wide)
            assert torch.equal(Reader(wide)(token, LatentCache()), wide(token)[:, -1])
    assert decodable(wide)
    assert decodable(plain_model())


def test_single_tokens_of_a_decodable_model_are_the_decoders(monkeypatch):
    made = []
    monkeypatch.setattr(decode, "Decoder", lambda model: made.append(model) or Decoder(model))
    read, latents = Reader(plain_model()), LatentCache()
    read(some_tokens(1, 5), latents)
    assert made == []
    for _ in range(3):
        read(some_tokens(1, 1), latents)
    assert made == [plain_model()]  # prepared once


def test_logits_are_float32_or_wider_and_leave_no_graph():
    model = MiniDeepSeek(CONFIG)  # its parameters learn
    decoder = Decoder(model)
    assert not decoder.layers[0][0].out.requires_grad
    with torch.no_grad():
        assert Reader(model)(some_tokens(2, 1), LatentCache()).dtype == torch.float32


def test_experts_are_not_copied():
    moe = MixtureOfExperts(CONFIG).requires_grad_(False)
    prepared = PreparedExperts(moe)
    stacks = moe.experts.gate_up_proj, moe.experts.down_proj
    for views, stack in zip((prepared.gate_ups, prepared.downs), stacks, strict=True):
        assert {view.untyped_storage().data_ptr() for view in views} == {
            stack.untyped_storage().data_ptr()
        }


def test_a_text_that_is_too_long_is_refused():
    model, latents = plain_model(), LatentCache()
    last_logits(model, some_tokens(1, 24), latents)
    with pytest.raises(ConfigError, match="25 tokens"):
        Decoder(model)(some_tokens(1, 1), latents)


class Counted(TorchDispatchMode):
    """Count operations."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_step_takes_far_fewer_operations():
    model, token = plain_model(), some_tokens(1, 1)
    decoder, totals = Decoder(model), []
    for way in (lambda new, latents: last_logits(model, new, latents), decoder):
        latents = LatentCache()
        last_logits(model, some_tokens(1, 9), latents)
        with Counted() as counted:
            way(token, latents)
        totals.append(counted.total)
    assert totals[1] < 0.7 * totals[0]
