"""The whole model: its tensors, its two behaviors, what may reach what, and where learning goes."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mdsd.config import ConfigError, ModelConfig, YarnConfig, preset
from mdsd.counting import parameter_shapes
from mdsd.model.mla import LatentCache
from mdsd.model.moe import MixtureOfExperts
from mdsd.model.mtp import IGNORED
from mdsd.model.transformer import Losses, MiniDeepSeek

LENGTH = 40  # tokens of a test sequence; YaRN below stretches from 16

SMALL = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    kv_lora_rank=24,
    q_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    max_position_embeddings=64,
    rope_scaling=YarnConfig(factor=4.0, original_max_position_embeddings=16),
)

VARIANTS = {
    "small": {},
    "direct queries": {"q_lora_rank": None},
    "no shared expert": {"n_shared_experts": 0},
    "two shared experts": {"n_shared_experts": 2},
    "dense": {"first_k_dense_replace": 4},
    "experts from the first layer": {"first_k_dense_replace": 0},
    "no MTP": {"num_nextn_predict_layers": 0},
    "three MTP modules": {"num_nextn_predict_layers": 3},
    "no groups": {"n_group": 1, "topk_group": 1, "rope_scaling": None},
}

each_variant = pytest.mark.parametrize(
    "config", [replace(SMALL, **changes) for changes in VARIANTS.values()], ids=VARIANTS.keys()
)


def build(config: ModelConfig = SMALL, seed: int = 0, hard: bool = True) -> MiniDeepSeek:
    """Return a seeded model, by default with weights so large that every part of it matters."""
    torch.manual_seed(seed)
    model = MiniDeepSeek(config).eval()
    if hard:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5) if parameter.dim() > 1 else parameter.normal_(1, 0.3)
            for gate in model.gates():
                gate.e_score_correction_bias.normal_(0, 0.3)
    return model


def random_tokens(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL.vocab_size, (batch, length), generator=generator)


def logits_of(model: MiniDeepSeek, tokens: Tensor, cache: LatentCache | None = None) -> Tensor:
    with torch.no_grad():
        out = model(tokens, cache=cache)
    assert isinstance(out, Tensor)
    return out


def losses_of(model: MiniDeepSeek, tokens: Tensor, targets: Tensor) -> Losses:
    out = model(tokens, targets)
    assert isinstance(out, Losses)
    return out


# Its tensors.


def shapes_of(model: MiniDeepSeek) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


@each_variant
def test_the_model_has_the_tensors_that_were_counted(config: ModelConfig):
    assert shapes_of(MiniDeepSeek(config)) == list(parameter_shapes(config).items())


@pytest.mark.parametrize("name", ["tiny", "mini", "deepseek-v2-lite", "deepseek-v3"])
def test_every_preset_can_be_built_on_the_meta_device(name: str):
    with torch.device("meta"):
        model = MiniDeepSeek(preset(name))
    assert shapes_of(model) == list(parameter_shapes(preset(name)).items())
    assert {buffer.numel() for buffer in model.buffers()} == {preset(name).n_routed_experts}


@each_variant
def test_the_same_seed_gives_the_same_model_and_weights_their_spread(config: ModelConfig):
    model, again = build(config, hard=False), build(config, hard=False)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
        if p.dim() > 1:
            assert p.std().item() == pytest.approx(config.initializer_range, rel=0.15), name
            assert abs(p.mean().item()) < config.initializer_range / 5, name
        else:
            assert torch.equal(p, torch.ones_like(p)), name


# Its two behaviors.


@each_variant
def test_the_first_loss_is_that_of_a_guess(config: ModelConfig):
    tokens = random_tokens()
    losses = losses_of(build(config, hard=False), tokens[:, :-1], tokens[:, 1:])
    for loss in (losses.main, *losses.mtp):
        assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.1)


@each_variant
def test_losses_have_their_shapes_and_are_finite(config: ModelConfig):
    tokens = random_tokens()
    losses = losses_of(build(config), tokens[:, :-1], tokens[:, 1:])
    depth = config.num_nextn_predict_layers
    blocks = config.num_hidden_layers + depth
    mixtures = sum(not config.is_dense(layer) for layer in range(blocks))
    assert losses.main.shape == losses.balance.shape == ()
    assert losses.mtp.shape == (depth,)
    assert losses.expert_load.shape == (mixtures, config.n_routed_experts)
    assert losses.expert_load.dtype == torch.int64
    positions = [LENGTH - 1] * (mixtures - depth) + [LENGTH - 2 - k for k in range(depth)]
    copies = [2 * config.num_experts_per_tok * n for n in positions[-mixtures:]] if mixtures else []
    assert losses.expert_load.sum(1).tolist() == copies
    assert losses.total(0.3, 0.1).isfinite()


@each_variant
def test_the_main_loss_is_the_cross_entropy_of_the_logits(config: ModelConfig):
    model, tokens = build(config), random_tokens()
    expected = F.cross_entropy(
        logits_of(model, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    losses = losses_of(model, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(losses.main, expected, rtol=0, atol=1e-4)


def test_logits_are_float32_in_a_half_precision_model():
    assert logits_of(build().bfloat16(), random_tokens()).dtype == torch.float32


def test_the_total_weighs_its_parts():
    load = torch.zeros(0, 8)
    losses = Losses(torch.tensor(2.0), torch.tensor([3.0, 5.0]), torch.tensor(1.5), load)
    assert losses.total(0.3, 0.01).item() == pytest.approx(2 + 0.3 * 4 + 0.01 * 1.5)
    without = losses._replace(mtp=torch.zeros(0))
    assert without.total(0.3, 0.01).item() == pytest.approx(2 + 0.01 * 1.5)


def test_a_batch_is_the_mean_of_its_sequences():
    model, tokens = build(), random_tokens(batch=3)
    whole = losses_of(model, tokens[:, :-1], tokens[:, 1:])
    parts = [losses_of(model, row[None, :-1], row[None, 1:]) for row in tokens]
    for i in range(3):  # main, MTP and the sequence-wise balance
        mean = torch.stack([part[i] for part in parts]).mean(0)
        torch.testing.assert_close(whole[i], mean, rtol=0, atol=1e-4)
    assert torch.equal(whole.expert_load, sum(part.expert_load for part in parts))


# Ignored targets.


def test_ignored_targets_carry_no_loss_and_hide_no_token():
    model, tokens = build(), random_tokens()
    targets = tokens[:, 1:].clone()
    targets[:, :20] = IGNORED
    logits = logits_of(model, tokens)[:, 20:-1]
    losses = losses_of(model, tokens[:, :-1], targets)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 21:].flatten())
    torch.testing.assert_close(losses.main, expected, rtol=0, atol=1e-4)
    # The MTP module reads the tokens behind ignored targets: only the mean's terms are fewer.
    whole = losses_of(model, tokens[:, :-1], tokens[:, 1:])
    only_first = tokens[:, 1:].clone()
    only_first[:, 20:] = IGNORED
    first = losses_of(model, tokens[:, :-1], only_first)
    terms = torch.tensor([19, 19])  # positions 1 … 19, and 20 … 38
    joined = (terms[0] * first.mtp + terms[1] * losses.mtp) / terms.sum()
    torch.testing.assert_close(joined, whole.mtp, rtol=0, atol=1e-4)


def test_no_target_costs_nothing():
    model, tokens = build(), random_tokens()
    losses = losses_of(model, tokens, torch.full_like(tokens, IGNORED))
    losses.total(0.3, 0.0).backward()
    assert losses.main == 0
    assert (losses.mtp == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_sequence_too_short_for_mtp_is_refused():
    model = build(replace(SMALL, num_nextn_predict_layers=3))
    losses_of(model, random_tokens(length=4), random_tokens(length=4))
    with pytest.raises(ConfigError, match="3 tokens are too few for 3 MTP modules"):
        model(random_tokens(length=3), random_tokens(length=3))
    assert logits_of(model, random_tokens(length=1)).shape == (2, 1, SMALL.vocab_size)


# What may reach what.


@each_variant
def test_no_logit_depends_on_a_later_token(config: ModelConfig):
    model, tokens = build(config), random_tokens()
    before = logits_of(model, tokens)
    for place in (1, 17, LENGTH - 1):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + 1) % config.vocab_size
        after = logits_of(model, changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-5)
        assert ((after - before)[:, place].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("place", [5, 20])
def test_mtp_reads_as_far_as_it_may_and_no_further(depth: int, place: int):
    """The prediction of token `place` + 1 uses the tokens up to `place`, at every depth."""
    model = build(replace(SMALL, num_nextn_predict_layers=depth))
    tokens = random_tokens(batch=1)
    targets = torch.full_like(tokens[:, 1:], IGNORED)
    targets[:, place] = tokens[:, place + 1]
    later, last = tokens[:, :-1].clone(), tokens[:, :-1].clone()
    later[:, place + 1 :] = 0
    last[:, place] = (last[:, place] + 1) % SMALL.vocab_size
    judged = losses_of(model, tokens[:, :-1], targets)
    torch.testing.assert_close(losses_of(model, later, targets)[:2], judged[:2], rtol=0, atol=1e-4)
    assert ((losses_of(model, last, targets).mtp - judged.mtp).abs() > 1e-3).all()


def test_targets_are_judged_by_and_never_read():
    model, tokens = build(), random_tokens()
    a = losses_of(model, tokens, torch.full_like(tokens, 1))
    b = losses_of(model, tokens, torch.full_like(tokens, 2))
    assert torch.equal(a.expert_load, b.expert_load)
    assert torch.equal(a.balance, b.balance)
    assert a.main != b.main


# Reading in pieces.


@cache
def one_pass() -> tuple[MiniDeepSeek, Tensor, Tensor]:
    model, tokens = build(), random_tokens()
    return model, tokens, logits_of(model, tokens)


@given(cuts=st.sets(st.integers(1, LENGTH - 1)))
@settings(max_examples=40, deadline=None)
def test_any_split_into_cached_pieces_gives_the_logits_of_one_pass(cuts: set[int]):
    model, tokens, expected = one_pass()
    latents = LatentCache()
    edges = [0, *sorted(cuts), LENGTH]
    pieces = []
    for start, end in pairwise(edges):
        pieces.append(logits_of(model, tokens[:, start:end], latents))
        assert latents.length == end
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-4)


@cache
def exact_model(form: str) -> MiniDeepSeek:
    """In float64, so that routing can't tip and a wrong mask or position can't hide."""
    changes = {"with query latent, YaRN": {}, "direct queries, plain RoPE": PLAIN}[form]
    return build(replace(SMALL, **changes)).double()


PLAIN = {"q_lora_rank": None, "rope_scaling": None}
A_PIECE = st.integers(1, 12)


@given(
    lengths=st.lists(A_PIECE, min_size=1, max_size=4),
    sizes=st.lists(A_PIECE, max_size=3),
    back=st.integers(0, 12),
    form=st.sampled_from(["with query latent, YaRN", "direct queries, plain RoPE"]),
)
@settings(max_examples=40, deadline=None)
def test_padded_rows_read_in_pieces_give_the_logits_of_each_row_alone(lengths, sizes, back, form):
    """Also after a detour: the cache reads `back` tokens too many, and is set back."""
    model, longest = exact_model(form), max(lengths)
    total = longest + sum(sizes)
    tokens = random_tokens(len(lengths), total)
    padding = torch.tensor([longest - length for length in lengths])
    tokens = tokens.masked_fill(torch.arange(total) < padding[:, None], 0)
    latents, pieces = LatentCache(padding), []
    for piece in tokens.split([longest, *sizes], dim=1):
        pieces.append(logits_of(model, piece, latents))
        logits_of(model, random_tokens(len(lengths), back, seed=1), latents)
        latents.length -= back
    assert latents.length == total
    for row, text, start in zip(torch.cat(pieces, 1), tokens, padding.tolist(), strict=True):
        alone = logits_of(model, text[None, start:])[0]
        # Angles are float32: a text that begins elsewhere turns by others, equal to six digits.
        torch.testing.assert_close(row[start:], alone, rtol=0, atol=1e-3 if start else 1e-5)


def test_two_generations_do_not_share_a_cache():
    model, tokens, expected = one_pass()
    caches = [LatentCache() for _ in range(2)]
    for part in range(0, LENGTH, 10):
        for row, latents in enumerate(caches):
            out = logits_of(model, tokens[row : row + 1, part : part + 10], latents)
            torch.testing.assert_close(
                out, expected[row : row + 1, part : part + 10], rtol=0, atol=1e-4
            )


def test_too_long_a_text_is_refused_with_and_without_a_cache():
    model = build()
    longest = SMALL.max_position_embeddings
    logits_of(model, random_tokens(length=longest))
    with pytest.raises(ConfigError, match=f"65 tokens exceed max_position_embeddings={longest}"):
        logits_of(model, random_tokens(length=longest + 1))
    latents = LatentCache()
    logits_of(model, random_tokens(length=longest), latents)
    with pytest.raises(ConfigError, match="65 tokens"):
        logits_of(model, random_tokens(length=1), latents)


# Where learning goes.


@each_variant
def test_a_gradient_reaches_every_parameter_and_only_the_chosen_experts(config: ModelConfig):
    model, tokens = build(config), random_tokens(batch=1, length=7)
    losses = losses_of(model, tokens[:, :-1], tokens[:, 1:])
    losses.total(0.3, 0.01).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    for mixture, load in zip(mixtures, losses.expert_load, strict=True):
        for stacked in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
            assert torch.equal(stacked.grad.abs().sum((1, 2)) > 0, load > 0)


def test_embedding_and_head_learn_from_mtp_as_well():
    tokens = random_tokens()
    grads = []
    for weight in (0.0, 1.0):
        model = build()
        losses_of(model, tokens[:, :-1], tokens[:, 1:]).total(weight, 0.0).backward()
        grads.append((model.embed_tokens.weight.grad, model.lm_head.weight.grad))
    for without, with_mtp in zip(*grads, strict=True):
        assert (without - with_mtp).abs().max() > 1e-4


def test_the_bias_moves_against_the_load_and_only_when_told():
    model, tokens = build(), random_tokens()
    before = [gate.e_score_correction_bias.clone() for gate in model.gates()]
    losses = losses_of(model.train(), tokens[:, :-1], tokens[:, 1:])
    for gate, old in zip(model.gates(), before, strict=True):
        assert torch.equal(gate.e_score_correction_bias, old)
    model.update_balance_bias(losses.expert_load, speed=0.01)
    for gate, old, load in zip(model.gates(), before, losses.expert_load, strict=True):
        mean = load.sum() / len(load)
        expected = torch.where(load < mean, 0.01, torch.where(load > mean, -0.01, 0.0))
        torch.testing.assert_close(gate.e_score_correction_bias - old, expected)


def test_a_load_of_the_wrong_depth_is_refused():
    with pytest.raises(ValueError, match="zip"):
        build().update_balance_bias(torch.ones(1, 8), speed=0.01)


def test_it_learns_by_heart():
    model = build(hard=False).train()
    tokens = random_tokens(batch=4, length=25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        losses = losses_of(model, tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        losses.total(0.3, 0.0001).backward()
        optimizer.step()
        model.update_balance_bias(losses.expert_load, speed=0.001)
    assert losses.main < 0.5
    assert losses.mtp.mean() < 1.0
