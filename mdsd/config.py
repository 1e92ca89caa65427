"""The numbers that define a model, in the names of Hugging Face's `DeepseekV3Config`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any, NamedTuple


class MdsdError(Exception):
    """Base of every error that a user can cause: it says what was wrong and what to do."""


class ConfigError(MdsdError, ValueError):
    """A setting that no model can have, alone or together with the others."""


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Stretch RoPE to longer contexts ([YaRN]; V3 section 4.3 uses these values)."""

    factor: float = 40.0
    """How many times longer the new context is."""
    original_max_position_embeddings: int = 4096
    """The length the model was trained at, in tokens."""
    beta_fast: float = 32.0
    """Pairs that turn more often than this over the original length keep their frequency."""
    beta_slow: float = 1.0
    """Pairs that turn less often than this are slowed down by the whole factor."""
    mscale: float = 1.0
    """Weight of the length correction of cos and sin."""
    mscale_all_dim: float = 1.0
    """Weight of the length correction of the softmax scale."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every number that defines a mini-DeepSeek."""

    vocab_size: int
    """Rows of the embedding and of the output head."""
    hidden_size: int
    """Width D of the residual stream."""
    num_hidden_layers: int
    """Transformer blocks of the main model."""
    num_attention_heads: int
    """Attention heads H."""
    kv_lora_rank: int
    """Width of the latent that keys and values are read from (d_c)."""
    q_lora_rank: int | None = None
    """Width of the query latent (d_c'); None projects queries directly."""
    qk_nope_head_dim: int
    """Width of the part of a head's key that carries no position (d_h)."""
    qk_rope_head_dim: int
    """Width of the rotary key that all heads share (d_R)."""
    v_head_dim: int
    """Width of a head's value."""
    intermediate_size: int
    """Inner width of a dense FFN."""
    moe_intermediate_size: int
    """Inner width of one expert."""
    n_routed_experts: int
    """Experts E that tokens are routed to."""
    n_shared_experts: int = 1
    """Experts that see every token."""
    num_experts_per_tok: int
    """Routed experts K that work on one token."""
    n_group: int = 1
    """Groups the routed experts are divided into."""
    topk_group: int = 1
    """Groups a token may reach."""
    norm_topk_prob: bool = True
    """Divide the K gate values by their sum."""
    routed_scaling_factor: float = 1.0
    """Factor on the gate values."""
    first_k_dense_replace: int = 1
    """Leading layers that have a dense FFN in place of experts."""
    num_nextn_predict_layers: int = 0
    """Depth of multi-token prediction; 0 predicts the next token only."""
    max_position_embeddings: int = 4096
    """The longest sequence, in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: YarnConfig | None = None
    """YaRN's settings, or None for plain RoPE."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        check(self)

    def is_dense(self, layer: int) -> bool:
        """Whether `layer` has a dense FFN; the MTP blocks count on from the last layer."""
        return layer < self.first_k_dense_replace

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key: the part without and the part with position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers kept a token and layer while generating: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts "
    "num_experts_per_tok n_group topk_group max_position_embeddings rope_theta rms_norm_eps "
    "initializer_range routed_scaling_factor"
).split()
NOT_NEGATIVE = "n_shared_experts first_k_dense_replace num_nextn_predict_layers".split()


def check(config: ModelConfig) -> None:
    """Raise a `ConfigError` that names the setting if `config` describes no model."""
    for name in POSITIVE:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be greater than 0")
    for name in NOT_NEGATIVE:
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must not be negative")
    if config.q_lora_rank is not None and config.q_lora_rank <= 0:
        raise ConfigError(f"q_lora_rank is {config.q_lora_rank}; use None for direct queries")
    if config.qk_rope_head_dim % 2:
        raise ConfigError(
            f"qk_rope_head_dim is {config.qk_rope_head_dim}; RoPE turns pairs: make it even"
        )
    check_routing(config)


def check_routing(config: ModelConfig) -> None:
    """Raise a `ConfigError` if experts and groups do not divide into a routing."""
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups:
        raise ConfigError(f"n_routed_experts ({experts}) must be a multiple of n_group ({groups})")
    if config.topk_group > groups:
        raise ConfigError(f"topk_group ({config.topk_group}) exceeds n_group ({groups})")
    if groups > 1 and experts // groups < 2:
        raise ConfigError(
            f"{groups} groups of {experts} experts leave one a group; a group's score needs two"
        )
    reachable = experts // groups * config.topk_group
    if config.num_experts_per_tok > reachable:
        raise ConfigError(
            f"num_experts_per_tok is {config.num_experts_per_tok}, but topk_group="
            f"{config.topk_group} of n_group={groups} leaves only {reachable} experts to choose"
        )


PRESETS: dict[str, ModelConfig] = {
    # Trains on two CPU cores in minutes.
    "tiny": ModelConfig(
        vocab_size=50_257,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=96,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=1,
        max_position_embeddings=512,
    ),
    # Fits one consumer GPU.
    "mini": ModelConfig(
        vocab_size=50_257,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        kv_lora_rank=128,
        q_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=1536,
        moe_intermediate_size=256,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
        max_position_embeddings=1024,
    ),
    # Published sizes, for counting only: V2 routes by a softmax, which this book does not build.
    "deepseek-v2-lite": ModelConfig(
        vocab_size=102_400,
        hidden_size=2048,
        num_hidden_layers=27,
        num_attention_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=10_944,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        norm_topk_prob=False,
    ),
    "deepseek-v3": ModelConfig(
        vocab_size=129_280,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=18_432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
        max_position_embeddings=163_840,
        rope_scaling=YarnConfig(),
        initializer_range=0.006,
    ),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The named preset with `changes` made; a `ConfigError` lists the names there are."""
    if name not in PRESETS:
        raise ConfigError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    unknown = set(changes) - {field.name for field in fields(ModelConfig)}
    if unknown:
        raise ConfigError(f"ModelConfig has no field {', '.join(sorted(unknown))}")
    return replace(PRESETS[name], **changes)


def ffn_shapes(config: ModelConfig, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one SwiGLU FFN of inner width `width`."""
    yield "gate_proj.weight", (width, config.hidden_size)
    yield "up_proj.weight", (width, config.hidden_size)
    yield "down_proj.weight", (config.hidden_size, width)


def moe_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one mixture of experts; routed experts are stacked along E."""
    experts, inner, width = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    yield "gate.weight", (experts, width)
    yield "experts.gate_up_proj", (experts, 2 * inner, width)
    yield "experts.down_proj", (experts, width, inner)
    if config.n_shared_experts:
        for name, shape in ffn_shapes(config, inner * config.n_shared_experts):
            yield f"shared_experts.{name}", shape


def attention_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one multi-head latent attention."""
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    if config.q_lora_rank is None:
        yield "q_proj.weight", (heads * config.qk_head_dim, config.hidden_size)
    else:
        yield "q_a_proj.weight", (config.q_lora_rank, config.hidden_size)
        yield "q_a_layernorm.weight", (config.q_lora_rank,)
        yield "q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (config.cache_width, config.hidden_size)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
    yield "o_proj.weight", (config.hidden_size, heads * config.v_head_dim)


def block_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the Transformer block at `layer`."""
    yield "input_layernorm.weight", (config.hidden_size,)
    for name, shape in attention_shapes(config):
        yield f"self_attn.{name}", shape
    yield "post_attention_layernorm.weight", (config.hidden_size,)
    dense = config.is_dense(layer)
    for name, shape in ffn_shapes(config, config.intermediate_size) if dense else moe_shapes(config):
        yield f"mlp.{name}", shape


def mtp_shapes(config: ModelConfig, depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the MTP module at `depth` (0 first), without what it shares."""
    width = config.hidden_size
    yield "enorm.weight", (width,)
    yield "hnorm.weight", (width,)
    yield "eh_proj.weight", (width, 2 * width)
    for name, shape in block_shapes(config, config.num_hidden_layers + depth):
        yield f"block.{name}", shape
    yield "norm.weight", (width,)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, without building the model.

    Buffers (the balance biases) are not parameters: no gradient reaches them.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": vocabulary}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": s for name, s in block_shapes(config, layer)}
    shapes |= {"norm.weight": (config.hidden_size,), "lm_head.weight": vocabulary}
    for depth in range(config.num_nextn_predict_layers):
        shapes |= {f"mtp.{depth}.{name}": s for name, s in mtp_shapes(config, depth)}
    return shapes


class ParameterCount(NamedTuple):
    """Parameters of a model, as the papers count them."""

    total: int  # the main model: embedding, blocks, norm, head
    active: int  # of these, the ones that work on one token: K of E routed experts
    mtp: int  # the MTP modules, without the embedding and head they share


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count parameters from the shapes alone (V3: 671 B in all, 37 B active)."""
    total = active = mtp = 0
    for name, shape in parameter_shapes(config).items():
        size = prod(shape)
        if name.startswith("mtp."):
            mtp += size
            continue
        total += size
        routed = ".experts." in name
        active += size * config.num_experts_per_tok // config.n_routed_experts if routed else size
    return ParameterCount(total, active, mtp)


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """`config` as plain values, ready for a `config.json`."""
    return asdict(config)


def from_dict(values: dict[str, Any]) -> ModelConfig:
    """Read a `config.json`, ours or a published one; fields that shape no tensor are passed over."""
    known = {field.name for field in fields(ModelConfig)}
    chosen = {name: value for name, value in values.items() if name in known}
    scaling = chosen.get("rope_scaling")
    if scaling is not None:
        chosen["rope_scaling"] = yarn_from_dict(scaling)
    try:
        return ModelConfig(**chosen)
    except TypeError as error:
        raise ConfigError(f"this is no DeepSeek-V3 configuration: {error}") from error


def yarn_from_dict(values: dict[str, Any]) -> YarnConfig:
    """Read the `rope_scaling` entry of a `config.json`."""
    kind = values.get("type", values.get("rope_type", "yarn"))
    if kind != "yarn":
        raise ConfigError(f"rope_scaling is of type {kind!r}; only 'yarn' can be built")
    known = {field.name for field in fields(YarnConfig)}
    return YarnConfig(**{name: value for name, value in values.items() if name in known})
