"""Multi-head latent attention and the small cache that it makes possible."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdsd.config import ModelConfig
from mdsd.model.rope import rotate, softmax_scale


class LatentCache:
    """What one generation remembers: a latent and a rotary key a token and layer.

    The cache belongs to a generation, not to the model; the model fills it and reads it.
    """

    def __init__(self, config: ModelConfig, batch_size: int = 1) -> None:
        self.config = config
        self.layers: list[Tensor] = [
            torch.empty(batch_size, 0, config.cache_width)  # (B, capacity, C+R)
            for _ in range(config.num_hidden_layers)
        ]
        self.length = 0  # tokens that every layer holds

    def extend(self, layer: int, new: Tensor) -> Tensor:
        """Write `new` (B, T, C+R) behind the `length` tokens of `layer`; all of them (B, S, C+R)."""
        end = self.length + new.shape[1]
        stored = self.layers[layer]
        if end > stored.shape[1]:
            # Doubling keeps the cost of growing at one copy a token.
            grown = new.new_empty(new.shape[0], max(end, 2 * stored.shape[1]), new.shape[2])
            grown[:, : self.length] = stored[:, : self.length]
            self.layers[layer] = stored = grown
        stored[:, self.length : end] = new
        return stored[:, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as held, once every layer has them."""
        self.length += tokens


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True (T, S) where a query may look: the queries are the last T of the S positions."""
    position = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device) <= position[:, None]


class MultiHeadLatentAttention(nn.Module):
    """Attention whose keys and values are read from one narrow latent a token [V3] (1)–(11)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.num_attention_heads
        query_width = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)  # W_DQ
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=1e-6)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)  # W_UQ, W_QR
        self.kv_a_proj_with_mqa = nn.Linear(width, config.cache_width, bias=False)  # W_DKV, W_KR
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(  # W_UK, W_UV
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, width, bias=False)

    def queries(self, h: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """The parts without and with position, (B, H, T, d_h) and (B, H, T, R), of h (B, T, D)."""
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(h)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(h)))
        q = q.unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)  # (B, H, T, d_h+R)
        plain, rotary = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return plain, rotate(rotary, cos_sin)

    def latents(self, h: Tensor, cos_sin: Tensor) -> Tensor:
        """All that attention needs to know of h (B, T, D): latent and rotary key (B, T, C+R)."""
        config = self.config
        latent, rotary = self.kv_a_proj_with_mqa(h).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        return torch.cat([self.kv_a_layernorm(latent), rotate(rotary, cos_sin)], dim=-1)

    def keys_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, H, S, d_h+R) and values (B, H, S, d_v), expanded from latents (B, S, C+R)."""
        config, heads = self.config, self.config.num_attention_heads
        latent, rotary = latents.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        up = self.kv_b_proj(latent).unflatten(-1, (heads, -1)).transpose(1, 2)
        plain, values = up.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        shared = rotary[:, None].expand(-1, heads, -1, -1)  # one rotary key for all heads
        return torch.cat([plain, shared], dim=-1), values

    def forward(
        self, h: Tensor, cos_sin: Tensor, cache: LatentCache | None = None, layer: int = 0
    ) -> Tensor:
        """Attend from h (B, T, D) to itself and to what `cache` holds of `layer`; (B, T, D)."""
        query = torch.cat(self.queries(h, cos_sin), dim=-1)  # (B, H, T, d_h+R)
        latents = self.latents(h, cos_sin)
        if cache is not None:
            latents = cache.extend(layer, latents)
        keys, values = self.keys_values(latents)
        whole = keys.shape[2] == h.shape[1]
        out = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=None if whole else causal_mask(h.shape[1], keys.shape[2], h.device),
            is_causal=whole,
            scale=softmax_scale(self.config),
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))
