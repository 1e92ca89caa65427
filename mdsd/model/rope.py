"""Rotary position embedding, and YaRN to stretch it beyond the trained length."""

import math

import torch
from torch import Tensor

from mdsd.config import ModelConfig, YarnConfig


def frequencies(width: int, theta: float) -> Tensor:
    """Angles (R/2,) in radians by which pair i turns a position: theta^(-2i/R) [RoPE] (15)."""
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)


def yarn_frequencies(width: int, theta: float, yarn: YarnConfig) -> Tensor:
    """Frequencies (R/2,) stretched by parts: fast pairs kept, slow pairs divided by the factor.

    [YaRN] section 3.2; between the two, a linear ramp over the pair's index.
    """
    plain = frequencies(width, theta)

    def pair_with(turns: float) -> float:
        """The (fractional) pair that turns `turns` times over the original length."""
        period = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(period) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), width - 1)
    slowed = ((torch.arange(width // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / yarn.factor * slowed + plain * (1 - slowed)


def yarn_mscale(factor: float, weight: float) -> float:
    """[YaRN] (22): how much longer contexts sharpen attention; 1 for no stretching."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """Factor on attention scores: 1/sqrt(d_h + d_R), times mscale² under YaRN [V3] (10)."""
    scale = config.qk_head_dim**-0.5
    if config.rope_scaling is not None:
        yarn = config.rope_scaling
        scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def rotation(config: ModelConfig, start: int, length: int) -> Tensor:
    """Cosines and sines (2, T, R/2) of the angles at positions start … start+length−1."""
    width, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    if yarn is None:
        turns, magnitude = frequencies(width, theta), 1.0
    else:
        turns = yarn_frequencies(width, theta, yarn)
        magnitude = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(
            yarn.factor, yarn.mscale_all_dim
        )
    angles = torch.outer(torch.arange(start, start + length, dtype=torch.float32), turns)
    return torch.stack([angles.cos(), angles.sin()]) * magnitude


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn each pair (x0, x1), (x2, x3), … of x (…, T, R) by its angle [RoPE] (34)."""
    cos, sin = cos_sin
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).type_as(x)
