"""The model gives the numbers of another implementation, `transformers`' DeepseekV3ForCausalLM.

Weights are drawn much larger than for training. At the initial spread, logits hardly depend on
attention and routing, and a comparison passes whatever is wrong with them. Chosen configurations
come first, then random ones, then multi-token prediction. The last part of this file breaks the
model in eighteen ways and asserts that the comparison notices each of them.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mdsd.config import ModelConfig, YarnConfig
from mdsd.model.mla import LatentCache, LatentProjections, MultiHeadLatentAttention
from mdsd.model.moe import Gate, MixtureOfExperts, Routing
from mdsd.model.rope import rotation, softmax_scale
from mdsd.model.transformer import Block, Losses, MiniDeepSeek

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4  # absolute, in float32, on logits with a standard deviation near 1
GRADIENT_TOLERANCE = 1e-3  # relative to the largest entry of a parameter's gradient

BASE = ModelConfig(
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
    n_routed_experts=16,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    max_position_embeddings=64,
)
YARN = YarnConfig(factor=4.0, original_max_position_embeddings=16)

CONFIGS = {
    "base": BASE,
    "direct queries": replace(BASE, q_lora_rank=None),
    "yarn": replace(BASE, rope_scaling=YARN),
    "yarn, two mscales": replace(BASE, rope_scaling=replace(YARN, mscale=0.7, mscale_all_dim=0.4)),
    "one group": replace(BASE, n_group=1, topk_group=1),
    "every group": replace(BASE, topk_group=4),
    "two dense layers": replace(BASE, first_k_dense_replace=2),
    "no dense layer": replace(BASE, first_k_dense_replace=0),
    "gate values not normalized": replace(BASE, norm_topk_prob=False),
    "two shared experts": replace(BASE, n_shared_experts=2),
    "other base and eps": replace(BASE, rope_theta=500.0, rms_norm_eps=1e-3),
    "all at once": replace(
        BASE, q_lora_rank=None, rope_scaling=YARN, norm_topk_prob=False, n_shared_experts=2
    ),
}


def harden(model: MiniDeepSeek, sign: int) -> None:
    """Make matrices large, norms uneven, and the balance biases all of one sign and decisive."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.dim() > 1 else parameter.normal_(1, 0.3)
        model.lm_head.weight.mul_(1.25)
        for gate in model.gates():
            # Scores lie in (0, 1): with the negative sign, every biased score is below 0.
            gate.e_score_correction_bias.uniform_(1.0, 2.0).mul_(sign)


def build(config: ModelConfig, seed: int, sign: int) -> MiniDeepSeek:
    torch.manual_seed(seed)
    model = MiniDeepSeek(config).eval()
    harden(model, sign)
    return model


def reference_name(name: str) -> str:
    """Return the name in `transformers` of our parameter or buffer `name`."""
    return name if name.startswith("lm_head") else f"model.{name}"


def reference_config(config: ModelConfig) -> object:
    """Return the `DeepseekV3Config` of `config`."""
    values = asdict(config)
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    if yarn := values.pop("rope_scaling"):
        rope |= {"rope_type": "yarn", **yarn}
    return transformers.DeepseekV3Config(
        **values,
        num_key_value_heads=config.num_attention_heads,
        rope_parameters=rope,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def reference_of(model: MiniDeepSeek) -> nn.Module:
    """Return a `DeepseekV3ForCausalLM` with the weights of `model`."""
    reference = transformers.DeepseekV3ForCausalLM(reference_config(model.config)).eval()
    weights = {
        reference_name(name): tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("mtp.")
    }
    reference.load_state_dict(weights, strict=True)
    return reference


def random_tokens(seed: int, length: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(BASE.vocab_size, (2, length), generator=generator)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def chosen_experts(model: MiniDeepSeek, tokens: Tensor) -> Tensor:
    """Return which experts (L, N, E) each gate chooses, as booleans."""
    rows: list[Tensor] = []

    def remember(gate: nn.Module, _: object, routing: Routing) -> None:
        rows.append(F.one_hot(routing.experts, BASE.n_routed_experts).sum(1).bool())

    hooks = [gate.register_forward_hook(remember) for gate in model.gates()]
    logits_of(model, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(rows)


# Logits and gradients.


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_the_reference(config: ModelConfig, seed: int, sign: int):
    model, tokens = build(config, seed, sign), random_tokens(seed)
    ours, theirs = logits_of(model, tokens), logits_of(reference_of(model), tokens)
    assert 0.5 < theirs.std() < 2, "at this scale the comparison is blind"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_biases_of_these_tests_change_choices(sign: int):
    model, tokens = build(BASE, 0, sign), random_tokens(0)
    with_bias = chosen_experts(model, tokens)
    for gate in model.gates():
        gate.e_score_correction_bias.zero_()
    without = chosen_experts(model, tokens)
    differ = (with_bias != without).any(-1).float().mean()
    assert differ > 0.5


Gradients = dict[str, Tensor | None]


def gradients(model: MiniDeepSeek, tokens: Tensor) -> Gradients:
    """Return the gradients of the main loss under the reference's names."""
    losses = model(tokens[:, :-1], tokens[:, 1:])
    assert isinstance(losses, Losses)
    losses.main.backward()
    return {reference_name(name): p.grad for name, p in model.named_parameters()}


def reference_gradients(reference: nn.Module, tokens: Tensor) -> Gradients:
    logits = reference(tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in reference.named_parameters()}


def compare_gradients(ours: Gradients, theirs: Gradients, smallest: float) -> dict[str, float]:
    """Return each parameter's largest error, relative to its largest entry or to `smallest`."""
    assert ours.keys() == theirs.keys()
    errors = {}
    for name, other in theirs.items():
        own = ours[name]
        other = torch.zeros(()) if other is None else other
        own = torch.zeros_like(other) if own is None else own
        errors[name] = float((own - other).abs().max() / other.abs().max().clamp(min=smallest))
    return errors


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["base", "direct queries", "yarn", "all at once"])
def test_gradients_equal_the_reference(name: str, sign: int):
    model, tokens = build(CONFIGS[name], 0, sign), random_tokens(0)
    theirs = reference_gradients(reference_of(model), tokens)
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 1e-4, f"{name} is not tested: its gradient is too small"
    errors = compare_gradients(gradients(model, tokens), theirs, smallest=1e-4)
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors


@pytest.mark.parametrize("first", [1, 9, 39])
def test_decoding_token_by_token_equals_the_reference(first: int):
    """A prefill of `first` tokens and single ones, out of a cache of latents."""
    model, tokens = build(CONFIGS["yarn"], 0, 1), random_tokens(0)
    cache = LatentCache()
    with torch.no_grad():
        rows = [model(tokens[:, :first], cache=cache)]
        rows += [model(token[:, None], cache=cache) for token in tokens[:, first:].unbind(1)]
    theirs = logits_of(reference_of(model), tokens)
    torch.testing.assert_close(torch.cat(rows, dim=1), theirs, rtol=0, atol=TOLERANCE)


# Random configurations.


@st.composite
def yarns(draw: st.DrawFn) -> YarnConfig:
    return YarnConfig(
        factor=draw(st.sampled_from([1.0, 2.0, 4.0, 40.0])),
        original_max_position_embeddings=draw(st.sampled_from([8, 16, 64])),
        beta_fast=draw(st.sampled_from([4.0, 32.0])),
        beta_slow=draw(st.sampled_from([0.5, 1.0])),
        mscale=draw(st.sampled_from([0.7, 1.0])),
        mscale_all_dim=draw(st.sampled_from([0.4, 1.0])),
    )


@st.composite
def random_configs(draw: st.DrawFn) -> ModelConfig:
    groups, in_group = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 3, 5]))
    kept, layers = draw(st.integers(1, groups)), draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=97,
        hidden_size=draw(st.sampled_from([32, 48, 72])),
        num_hidden_layers=layers,
        num_attention_heads=draw(st.integers(1, 5)),
        kv_lora_rank=draw(st.sampled_from([8, 20, 48])),
        q_lora_rank=draw(st.sampled_from([None, 12, 40])),
        qk_nope_head_dim=draw(st.sampled_from([4, 12, 20])),
        qk_rope_head_dim=draw(st.sampled_from([4, 8, 16])),
        v_head_dim=draw(st.sampled_from([6, 16, 30])),
        intermediate_size=40,
        moe_intermediate_size=draw(st.sampled_from([12, 24])),
        n_routed_experts=groups * in_group,
        n_shared_experts=draw(st.integers(1, 2)),
        num_experts_per_tok=draw(st.integers(1, min(4, kept * in_group))),
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        first_k_dense_replace=draw(st.integers(0, layers)),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0])),
        rope_scaling=draw(st.none() | yarns()),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        max_position_embeddings=64,
    )


@torch.no_grad()
def build_to_scale(config: ModelConfig, seed: int, sign: int) -> MiniDeepSeek:
    """Return a model of any width whose logits have a standard deviation of 1."""
    torch.manual_seed(seed)
    model = MiniDeepSeek(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.normal_(1, 0.3)
    model.embed_tokens.weight.normal_()
    for gate in model.gates():
        gate.e_score_correction_bias.uniform_(1.0, 2.0).mul_(sign)
    model.lm_head.weight /= logits_of(model, random_tokens(seed)).std()
    return model


FEATURES: dict[str, Callable[[ModelConfig], bool]] = {
    "direct queries": lambda config: config.q_lora_rank is None,
    "plain RoPE": lambda config: config.rope_scaling is None,
    "groups": lambda config: config.n_group > 1,
    "closed groups": lambda config: config.topk_group < config.n_group,
    "one head": lambda config: config.num_attention_heads == 1,
    "one expert a token": lambda config: config.num_experts_per_tok == 1,
    "normalized gate values": lambda config: config.norm_topk_prob,
    "no dense layer": lambda config: config.first_k_dense_replace == 0,
    "values wider than keys": lambda config: config.v_head_dim > config.qk_head_dim,
}


def test_random_models_equal_the_reference_in_logits_and_gradients():
    tried: list[ModelConfig] = []

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(random_configs(), st.integers(0, 1000), st.sampled_from([-1, 1]))
    def compare(config: ModelConfig, seed: int, sign: int) -> None:
        tried.append(config)
        model, tokens = build_to_scale(config, seed, sign), random_tokens(seed)
        reference = reference_of(model)
        ours, theirs = logits_of(model, tokens), logits_of(reference, tokens)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
        errors = compare_gradients(
            gradients(model, tokens), reference_gradients(reference, tokens), smallest=1e-3
        )
        assert max(errors.values()) < GRADIENT_TOLERANCE, errors

    compare()
    assert len(set(tried)) >= 40
    for name, feature in FEATURES.items():
        share = sum(map(feature, tried)) / len(tried)
        assert 0.05 < share < 0.95, f"{name}: {share:.0%} of the models have it"


# Multi-token prediction: `transformers` has none, but its layers can be chained by (21) to (25).

OWN = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight"]  # beside a block's


class ReferenceChain(nn.Module):
    """The main model and its MTP modules, put together from the reference's layers."""

    def __init__(self, model: MiniDeepSeek) -> None:
        super().__init__()
        self.eps, self.first = model.config.rms_norm_eps, model.config.num_hidden_layers
        deep = replace(model.config, num_hidden_layers=self.first + len(model.mtp))
        self.whole = transformers.DeepseekV3ForCausalLM(reference_config(deep)).eval()
        state = model.state_dict()
        self.own = {
            name: nn.Parameter(tensor.clone())
            for name, tensor in state.items()
            if name.startswith("mtp.") and name.split(".", 2)[2] in OWN
        }
        rest = {self.name(name): tensor for name, tensor in state.items() if name not in self.own}
        self.whole.load_state_dict(rest, strict=True)

    def name(self, name: str) -> str:
        """Return the name in `self.whole` of our tensor `name`."""
        if not name.startswith("mtp."):
            return reference_name(name)
        _, depth, inner = name.split(".", 2)
        return f"model.layers.{self.first + int(depth)}.{inner.removeprefix('block.')}"

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of what is our parameter `name`."""
        own = self.own.get(name)
        return (self.whole.get_parameter(self.name(name)) if own is None else own).grad

    def forward(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the loss of each depth, the main model's first."""
        model, length = self.whole.model, tokens.shape[1]
        embedded = model.embed_tokens(tokens)
        rotary = model.rotary_emb(embedded, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        h, losses = embedded, []
        for layer in model.layers[: self.first]:
            h = layer(h, attention_mask=mask, position_embeddings=rotary)
        h = model.norm(h)
        losses.append(self.loss(h, targets))
        for k, layer in enumerate(model.layers[self.first :], start=1):
            left = length - k
            enorm, hnorm, projection, norm = (self.own[f"mtp.{k - 1}.{name}"] for name in OWN)
            ahead = F.rms_norm(embedded[:, k:], h.shape[-1:], enorm, self.eps)
            state = F.rms_norm(h[:, :left], h.shape[-1:], hnorm, self.eps)
            h = layer(
                torch.cat([ahead, state], dim=-1) @ projection.T,
                attention_mask=mask[..., :left, :left],
                position_embeddings=tuple(part[:, :left] for part in rotary),
            )
            h = F.rms_norm(h, h.shape[-1:], norm, self.eps)
            losses.append(self.loss(h, targets[:, k:]))
        return losses

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.whole.lm_head(h).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_mtp_equals_a_chain_of_reference_layers(depth: int, sign: int):
    model = build(replace(CONFIGS["yarn"], num_nextn_predict_layers=depth), 0, sign)
    tokens, chain = random_tokens(0), ReferenceChain(model)
    losses = model(tokens[:, :-1], tokens[:, 1:])
    assert isinstance(losses, Losses)
    theirs = torch.stack(chain(tokens[:, :-1], tokens[:, 1:]))
    torch.testing.assert_close(
        torch.cat([losses.main[None], losses.mtp]), theirs, rtol=0, atol=TOLERANCE
    )

    losses.total(mtp_weight=0.3, balance_weight=0.0).backward()
    (theirs[0] + 0.3 * theirs[1:].mean()).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    others = {name: chain.gradient(name) for name in ours}
    errors = compare_gradients(ours, others, smallest=1e-4)
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors


# Would it notice? Each mistake below is one that implementations have made.

Mistake = Callable[[MiniDeepSeek, pytest.MonkeyPatch], None]


def mistaken_gate(
    weigh_with_bias: bool = False,
    best_of_group: int = 2,
    closed: float = -torch.inf,
    normalize: bool = True,
    scale: bool = True,
) -> Callable[[Gate, Tensor], Routing]:
    """Return a gate's forward that makes the mistakes it is asked for, by default none."""

    def forward(self: Gate, x: Tensor) -> Routing:
        config = self.config
        affinity = (x @ self.weight.T).sigmoid()
        scores = affinity + self.e_score_correction_bias
        groups = scores.unflatten(-1, (config.n_group, -1))
        best = groups.topk(best_of_group, -1).values.sum(-1).topk(config.topk_group, -1).indices
        opened = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(-1, best, True)
        reachable = groups.masked_fill(~opened[..., None], closed).flatten(-2)
        experts = reachable.topk(config.num_experts_per_tok, -1).indices
        weights = (scores if weigh_with_bias else affinity).gather(-1, experts)
        if normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if scale:
            weights = weights * config.routed_scaling_factor
        return Routing(experts, weights, affinity)

    return forward


def half_split(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+R/2}), the other layout."""
    (cos, sin), (a, b) = cos_sin, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def post_norm(self: Block, h: Tensor, cos_sin: Tensor, cache: None = None) -> tuple[Tensor, None]:
    """Norm each branch's result in place of its input."""
    h = h + self.input_layernorm(self.self_attn(h, cos_sin, cache, self.layer))
    out = self.mlp(h)
    return h + self.post_attention_layernorm(out if isinstance(out, Tensor) else out[0]), None


def swap_gate_and_up(model: MiniDeepSeek) -> None:
    """Give the second half of the stacked experts to silu in place of the first."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            stacked = module.experts.gate_up_proj.data
            module.experts.gate_up_proj.data = stacked.roll(stacked.shape[1] // 2, dims=1)


def drop(kind: type[nn.Module], name: str, replacement: nn.Module | None) -> Mistake:
    """Return the mistake of a `kind` whose part `name` is missing."""

    def mistake(model: MiniDeepSeek, _: pytest.MonkeyPatch) -> None:
        for module in model.modules():
            if isinstance(module, kind):
                setattr(module, name, replacement)

    return mistake


def gate(**mistakes: bool | int | float) -> Mistake:
    """Return the mistake of a gate that goes wrong in the named ways."""
    return lambda _, patch: patch.setattr(Gate, "forward", mistaken_gate(**mistakes))


def function(name: str, other: Callable[..., object]) -> Mistake:
    """Return the mistake of another function in the place of `name`, or of a class's method."""
    return lambda _, patch: patch.setattr(name, other)


def plain_rotation(config: ModelConfig, start: int, length: int) -> Tensor:
    return rotation(replace(config, rope_scaling=None), start, length)


MISTAKES: dict[str, Mistake] = {
    "rotary pairs in the other layout": function("mdsd.model.mla.rotate", half_split),
    "scale without the rotary width": function(
        "mdsd.model.mla.softmax_scale",
        lambda config: (
            softmax_scale(config) * (config.qk_head_dim / config.qk_nope_head_dim) ** 0.5
        ),
    ),
    "scale without YaRN's mscale": function(
        "mdsd.model.mla.softmax_scale", lambda config: config.qk_head_dim**-0.5
    ),
    "YaRN without its frequencies": function("mdsd.model.transformer.rotation", plain_rotation),
    "bias in the weights": gate(weigh_with_bias=True),
    "group score of the best one": gate(best_of_group=1),
    "closed groups at 0": gate(closed=0.0),
    "weights not normalized": gate(normalize=False),
    "weights not scaled": gate(scale=False),
    "shared expert missing": drop(MixtureOfExperts, "shared_experts", None),
    "gate and up swapped": lambda model, _: swap_gate_and_up(model),
    "norm behind the branch": function("mdsd.model.transformer.Block.forward", post_norm),
    "latent not normed": drop(MultiHeadLatentAttention, "kv_a_layernorm", nn.Identity()),
    "query latent not normed": drop(MultiHeadLatentAttention, "q_a_layernorm", nn.Identity()),
    "last norm missing": drop(MiniDeepSeek, "norm", nn.Identity()),
}


def error_with(mistake: Mistake, sign: int) -> float:
    """Return the largest difference of logits that `mistake` makes under biases of this sign."""
    model, tokens = build(CONFIGS["yarn"], 0, sign), random_tokens(0)
    theirs = logits_of(reference_of(model), tokens)
    with pytest.MonkeyPatch.context() as patch:
        mistake(model, patch)
        return float((logits_of(model, tokens) - theirs).abs().max())


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_the_comparison_notices(mistake: Mistake):
    assert max(error_with(mistake, sign) for sign in (-1, 1)) > 100 * TOLERANCE


def constant_weights(self: Gate, x: Tensor) -> Routing:
    """Weigh by gate values that no gradient reaches."""
    routing = mistaken_gate()(self, x)
    return routing._replace(weights=routing.weights.detach())


def constant_sum(self: Gate, x: Tensor) -> Routing:
    """Divide the gate values by their sum as if it were a number."""
    experts, weights, affinity = mistaken_gate(normalize=False)(self, x)
    total = affinity.gather(-1, experts).sum(-1, keepdim=True).detach()
    return Routing(experts, weights / total, affinity)


def cut_rotary_key(self: MultiHeadLatentAttention, h: Tensor, cos_sin: Tensor) -> Tensor:
    """Keep the gradient from the rotary key that all heads share."""
    latents = LatentProjections.latents(self, h, cos_sin)
    latent, rotary = latents.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1)
    return torch.cat([latent, rotary.detach()], dim=-1)


@pytest.mark.parametrize(
    ("place", "mistake"),
    [
        (Gate, constant_weights),
        (Gate, constant_sum),
        (MultiHeadLatentAttention, cut_rotary_key),
    ],
)
def test_only_gradients_show_these_mistakes(
    place: type[nn.Module], mistake: Callable[..., object], monkeypatch: pytest.MonkeyPatch
):
    model, tokens = build(BASE, 0, 1), random_tokens(0)
    reference = reference_of(model)
    monkeypatch.setattr(place, "forward" if place is Gate else "latents", mistake)
    ours, theirs = logits_of(model, tokens), logits_of(reference, tokens)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    errors = compare_gradients(
        gradients(model, tokens), reference_gradients(reference, tokens), smallest=1e-4
    )
    assert max(errors.values()) > 100 * GRADIENT_TOLERANCE


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_gate_without_a_mistake_passes(sign: int):
    assert error_with(gate(), sign) < TOLERANCE


def test_only_a_negative_bias_shows_closed_groups_at_0():
    """Why both signs are compared: with positive biases, this mistake changes nothing."""
    assert error_with(MISTAKES["closed groups at 0"], 1) < TOLERANCE
    assert error_with(MISTAKES["closed groups at 0"], -1) > 100 * TOLERANCE
