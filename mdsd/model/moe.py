"""Mixture of experts: a sigmoid gate, experts in groups, and balance without an auxiliary loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdsd.config import ModelConfig


class SwiGLU(nn.Module):
    """The FFN of every block and expert: down(silu(gate(x)) · up(x)) [SwiGLU]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, D) to (…, D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Routing(NamedTuple):
    """Which experts work on each token, and how much each counts."""

    experts: Tensor  # (N, K) int64
    weights: Tensor  # (N, K) float32
    affinity: Tensor  # (N, E) float32, the sigmoid scores of all experts


class Gate(nn.Module):
    """Choose K of E experts for each token [V3] (12)–(16)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        # The balance bias b_i: moved by a rule, not by a gradient, so a buffer.
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def reachable(self, scores: Tensor) -> Tensor:
        """`scores` (N, E) with −inf outside each token's best `topk_group` groups."""
        config = self.config
        grouped = scores.unflatten(-1, (config.n_group, -1))  # (N, G, E/G)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)  # (N, G)
        chosen = group_score.topk(config.topk_group, dim=-1).indices
        closed = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, chosen, False)
        # −inf, not 0: with a negative bias every score may be below 0.
        return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens x (N, D); float32 throughout, whatever the model's dtype."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            affinity = F.linear(x.float(), self.weight.float()).sigmoid()
        scores = affinity.detach() + self.e_score_correction_bias
        if config.n_group > 1:
            scores = self.reachable(scores)
        experts = scores.topk(config.num_experts_per_tok, dim=-1).indices
        weights = affinity.gather(-1, experts)  # the bias chooses; it does not weigh
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * config.routed_scaling_factor, affinity)


class Experts(nn.Module):
    """The routed experts, E SwiGLU FFNs stacked in two tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, inner, width = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Weighted sum (N, D) of each token's experts; no token is ever dropped."""
        chosen = routing.experts.flatten()  # (N·K,)
        order = chosen.argsort(stable=True)  # copies of tokens, expert by expert
        token = order // routing.experts.shape[1]
        counts = chosen.bincount(minlength=len(self.gate_up_proj)).tolist()
        outputs = [
            F.linear(swiglu(F.linear(part, gate_up)), down)
            for part, gate_up, down in zip(
                x[token].split(counts),
                self.gate_up_proj.unbind(),
                self.down_proj.unbind(),
                strict=True,
            )
        ]
        weight = routing.weights.flatten()[order, None]
        result = torch.cat(outputs) * weight
        return torch.zeros_like(x).index_add(0, token, result.type_as(x))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of the stacked pair (…, 2F) → (…, F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def expert_load(routing: Routing, experts: int) -> Tensor:
    """How many of the routed copies each expert receives, (E,) int64."""
    return routing.experts.flatten().bincount(minlength=experts)


def max_violation(load: Tensor) -> Tensor:
    """MaxVio of loads (…, E): (largest − mean)/mean; 0 is perfect balance [ALF] (4)."""
    mean = load.float().mean(-1)
    return (load.float().amax(-1) - mean) / mean


def balance_loss(routing: Routing, batch_size: int, config: ModelConfig) -> Tensor:
    """Sequence-wise balance loss [V3] (17)–(20), without its factor α; 1 when balanced."""
    experts, per_token = config.n_routed_experts, config.num_experts_per_tok
    share = routing.affinity / routing.affinity.sum(-1, keepdim=True)
    probability = share.unflatten(0, (batch_size, -1)).mean(1)  # P_i (B, E)
    chosen = F.one_hot(routing.experts, experts).sum(1).float()  # (N, E)
    frequency = chosen.unflatten(0, (batch_size, -1)).mean(1) * experts / per_token  # f_i (B, E)
    return (frequency * probability).sum(-1).mean()


class RouterStats(NamedTuple):
    """What one MoE layer reports of one forward pass."""

    balance: Tensor  # () the sequence-wise balance loss
    load: Tensor  # (E,) int64


class MixtureOfExperts(nn.Module):
    """Shared experts for every token and the K routed ones that its gate chooses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config)
        self.experts = Experts(config)
        self.shared_experts = (
            SwiGLU(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)
            if config.n_shared_experts
            else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, RouterStats]:
        """Map x (B, T, D) to (B, T, D) and report the balance of this pass."""
        flat = x.flatten(0, 1)  # (N, D)
        routing = self.gate(flat)
        out = self.experts(flat, routing).view_as(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        load = expert_load(routing, self.config.n_routed_experts)
        return out, RouterStats(balance_loss(routing, x.shape[0], self.config), load)
