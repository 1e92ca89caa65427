"""The model gives the numbers of another implementation, `transformers`' DeepseekV3ForCausalLM.

Weights are drawn much larger than for training. At the initial spread, logits hardly depend on
attention and routing, and a comparison passes whatever is wrong with them. The last part of this
file breaks the model in fifteen ways and asserts that the comparison notices each of them.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdsd.config import ModelConfig, YarnConfig
from mdsd.model.mla import MultiHeadLatentAttention
from mdsd.model.moe import Gate, MixtureOfExperts, Routing
from mdsd.model.rope import rotation, softmax_scale
from mdsd.model.transformer import Block, Losses, MiniDeepSeek

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4  # absolute, in float32, on logits with a standard deviation near 1

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


def reference_of(model: MiniDeepSeek) -> nn.Module:
    """Return a `DeepseekV3ForCausalLM` with the weights of `model`."""
    values = asdict(model.config)
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    if yarn := values.pop("rope_scaling"):
        rope |= {"rope_type": "yarn", **yarn}
    config = transformers.DeepseekV3Config(
        **values,
        num_key_value_heads=model.config.num_attention_heads,
        rope_parameters=rope,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    reference = transformers.DeepseekV3ForCausalLM(config).eval()
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


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["base", "direct queries", "yarn", "all at once"])
def test_gradients_equal_the_reference(name: str, sign: int):
    model, tokens = build(CONFIGS[name], 0, sign), random_tokens(0)
    reference = reference_of(model)
    losses = model(tokens[:, :-1], tokens[:, 1:])
    assert isinstance(losses, Losses)
    losses.main.backward()
    logits = reference(tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        ours, other = parameter.grad, theirs.pop(reference_name(name)).grad
        assert ours is not None, name
        assert other.abs().max() > 1e-4, f"{name} is not tested: its gradient is too small"
        error = (ours - other).abs().max() / other.abs().max()
        assert error < 1e-3, name
    assert not theirs


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


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_gate_without_a_mistake_passes(sign: int):
    assert error_with(gate(), sign) < TOLERANCE


def test_only_a_negative_bias_shows_closed_groups_at_0():
    """Why both signs are compared: with positive biases, this mistake changes nothing."""
    assert error_with(MISTAKES["closed groups at 0"], 1) < TOLERANCE
    assert error_with(MISTAKES["closed groups at 0"], -1) > 100 * TOLERANCE
