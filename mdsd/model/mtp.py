"""Multi-token prediction: each position also predicts the tokens after the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mdsd.config import ModelConfig
from mdsd.model.moe import RouterStats

IGNORED = -100  # a target without a loss, as in torch's cross-entropy


def shift_targets(targets: Tensor, by: int) -> Tensor:
    """Targets (B, T) moved `by` places to the left; the places without a token are ignored."""
    if by == 0:
        return targets
    shifted = torch.full_like(targets, IGNORED)
    shifted[:, :-by] = targets[:, by:]
    return shifted


class MTPModule(nn.Module):
    """One depth of multi-token prediction [V3] (21)–(23).

    The embedding and the output head are the main model's; `block` is a Transformer block.
    """

    def __init__(self, config: ModelConfig, block: nn.Module) -> None:
        super().__init__()
        width = config.hidden_size
        self.enorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)  # M_k
        self.block = block
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)

    def forward(
        self, h: Tensor, embedded: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, RouterStats | None]:
        """The normed states h (B, T, D) of the depth before and the embeddings (B, T, D) of the
        tokens k places ahead, to the normed states (B, T, D) that the head reads."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(h)], dim=-1)
        out, stats = self.block(self.eh_proj(joined), cos_sin)
        return self.norm(out), stats
