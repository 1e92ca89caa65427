"""The whole model on one page: blocks, the main model, and its multi-token prediction."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdsd.config import ConfigError, ModelConfig
from mdsd.model.mla import LatentCache, MultiHeadLatentAttention
from mdsd.model.moe import Gate, MixtureOfExperts, RouterStats, SwiGLU
from mdsd.model.mtp import IGNORED, MTPModule, shift_targets
from mdsd.model.rope import rotation


class Block(nn.Module):
    """Attention, then a dense FFN or a mixture of experts, each on a normed residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = MultiHeadLatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = (
            SwiGLU(config.hidden_size, config.intermediate_size)
            if config.is_dense(layer)
            else MixtureOfExperts(config)
        )

    def forward(
        self, h: Tensor, cos_sin: Tensor, cache: LatentCache | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """Map h (B, T, D) to (B, T, D); a mixture of experts also reports its balance."""
        h = h + self.self_attn(self.input_layernorm(h), cos_sin, cache, self.layer)
        normed = self.post_attention_layernorm(h)
        if isinstance(self.mlp, SwiGLU):
            return h + self.mlp(normed), None
        out, stats = self.mlp(normed)
        return h + out, stats


class Losses(NamedTuple):
    """What a training step is made of, each part in nats a token."""

    main: Tensor  # () cross-entropy of the next token
    mtp: Tensor  # (D,) cross-entropy of the token k+1 ahead, one a depth
    balance: Tensor  # () sequence-wise balance loss, mean over the MoE layers
    expert_load: Tensor  # (L, E) int64, one row a MoE layer, those of the MTP modules last

    def total(self, mtp_weight: float, balance_weight: float) -> Tensor:
        """main + λ·mean(mtp) + α·balance [V3] (17), (25)."""
        loss = self.main + balance_weight * self.balance
        return loss + mtp_weight * self.mtp.mean() if len(self.mtp) else loss


class MiniDeepSeek(nn.Module):
    """A small DeepSeek-V3: with targets it returns losses, without them logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        depths = range(config.num_nextn_predict_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = nn.ModuleList(
            MTPModule(config, Block(config, config.num_hidden_layers + k)) for k in depths
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every matrix from N(0, initializer_range²); norms start at 1, biases at 0."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: LatentCache | None = None
    ) -> Tensor | Losses:
        """Logits (B, T, V) of tokens (B, T), or the `Losses` against targets (B, T).

        `targets` are the tokens one place ahead; −100 marks those without a loss. A `cache`
        holds the tokens before these and is extended by these.
        """
        self.check_length(tokens, cache)
        start = cache.length if cache is not None else 0
        cos_sin = rotation(self.config, start, tokens.shape[1]).to(tokens.device)
        h, stats = self.embed_tokens(tokens), []
        for block in self.layers:
            h, report = block(h, cos_sin, cache)
            stats.append(report)
        if cache is not None:
            cache.advance(tokens.shape[1])
        h = self.norm(h)
        if targets is None:
            return self.lm_head(h).float()
        return self.losses(h, targets, cos_sin, stats)

    def losses(
        self, h: Tensor, targets: Tensor, cos_sin: Tensor, stats: list[RouterStats | None]
    ) -> Losses:
        """The parts of the loss from the normed states h (B, T, D) of the main model."""
        main, mtp = self.cross_entropy(h, targets), []
        for depth, module in enumerate(self.mtp):
            # The token k places ahead of position i is the target of position i + k − 1.
            ahead = shift_targets(targets, depth).clamp(min=0)
            h, report = module(h, self.embed_tokens(ahead), cos_sin)
            mtp.append(self.cross_entropy(h, shift_targets(targets, depth + 1)))
            stats.append(report)
        reports = [report for report in stats if report is not None]
        return Losses(
            main,
            torch.stack(mtp) if mtp else main.new_zeros(0),
            torch.stack([r.balance for r in reports]).mean() if reports else main.new_zeros(()),
            torch.stack([r.load for r in reports])
            if reports
            else targets.new_zeros(0, self.config.n_routed_experts),
        )

    def cross_entropy(self, h: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats () of the head's logits on h (B, T, D) against (B, T)."""
        logits = self.lm_head(h).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)

    def check_length(self, tokens: Tensor, cache: LatentCache | None) -> None:
        """Raise a `ConfigError` if the sequence outgrows what the model was made for."""
        length = tokens.shape[1] + (cache.length if cache is not None else 0)
        if length > self.config.max_position_embeddings:
            raise ConfigError(
                f"{length} tokens exceed max_position_embeddings="
                f"{self.config.max_position_embeddings}; shorten the text or raise it"
            )

    def gates(self) -> list[Gate]:
        """The gates of all MoE layers, in the order of `Losses.expert_load`'s rows."""
        return [module for module in self.modules() if isinstance(module, Gate)]

    @torch.no_grad()
    def update_balance_bias(self, expert_load: Tensor, speed: float) -> None:
        """b_i += γ·sign(mean load − load_i) from one optimizer step's load (L, E) [ALF] alg. 1."""
        for gate, load in zip(self.gates(), expert_load.float(), strict=True):
            gate.e_score_correction_bias += speed * (load.mean() - load).sign()
