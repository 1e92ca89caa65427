"""Telling a story: samplers, the latent cache, and text that streams."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdsd.config import ConfigError
from mdsd.model.mla import LatentCache
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens that together reach this probability."""
    seed: int = 0
    """The same seed tells the same story."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; use 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; keep at least 1 token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; use a probability above 0, up to 1")


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits (B, V) with −inf for all but the k largest of each row."""
    if k >= logits.shape[-1]:
        return logits
    kept = logits.topk(k, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits (B, V) with −inf outside each row's nucleus of probability p [nucleus]."""
    ordered, indices = logits.sort(dim=-1, descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # what the likelier tokens already reach
    ordered = ordered.masked_fill(before >= p, -torch.inf)
    return torch.empty_like(logits).scatter(-1, indices, ordered)


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Draw one token (B,) from each row of logits (B, V)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    # Drawing on the CPU gives the same story on every device.
    return logits.softmax(-1).cpu().multinomial(1, generator=generator)[:, 0].to(logits.device)


@torch.inference_mode()
def generate_rows(
    model: MiniDeepSeek,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_id: int | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yield the next token (B,) of each row of `prompt` (B, T), again and again.

    Ends after `max_new_tokens`, at the model's longest sequence, or when every row has produced
    `stop_id`; a row that has, goes on producing it. Without a cache the whole text is read anew
    for every token: slow, and the reference for the cached way.

    Raises:
        ConfigError: the prompt is empty, or longer than the model's longest sequence.
    """
    limit = model.config.max_position_embeddings
    if prompt.shape[1] == 0:
        raise ConfigError("the prompt is empty; begin with the end-of-text token")
    if prompt.shape[1] > limit:
        raise ConfigError(f"the prompt has {prompt.shape[1]} tokens; the model reads {limit}")
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = LatentCache(model.config, len(prompt)) if use_cache else None
    done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    text = unread = prompt
    for _ in range(min(max_new_tokens, limit - prompt.shape[1] + 1)):
        logits = model(unread, cache=cache) if use_cache else model(text)
        token = next_token(logits[:, -1], sampling, generator)
        if stop_id is not None:
            token = token.masked_fill(done, stop_id)
            done |= token == stop_id
        yield token
        if stop_id is not None and bool(done.all()):
            return
        unread = token[:, None]
        text = torch.cat([text, unread], dim=1)


def generate(
    model: MiniDeepSeek,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_id: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield the tokens that continue one `prompt`, up to and without `stop_id`."""
    start = torch.tensor([list(prompt)], device=model.embed_tokens.weight.device)
    for token in generate_rows(
        model, start, max_new_tokens, sampling, stop_id=stop_id, use_cache=use_cache
    ):
        if int(token) == stop_id:
            return
        yield int(token)


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of `ids` piece by piece, each piece as soon as its bytes form whole characters."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        if piece := decoder.decode(tokenizer.decode_bytes([token])):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a story's beginning: the one that ended the story before, then `text`."""
    return [tokenizer.eot_id, *tokenizer.encode(text)]


def tell_story(
    model: MiniDeepSeek,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[str]:
    """Tell one story that begins with `prompt`, piece by piece, until it ends."""
    start, stop = prompt_ids(tokenizer, prompt), tokenizer.eot_id
    yield prompt
    yield from stream_text(
        tokenizer, generate(model, start, max_new_tokens, sampling, stop_id=stop)
    )


def sample_stories(
    model: MiniDeepSeek,
    tokenizer: Tokenizer,
    count: int,
    sampling: Sampling,
    *,
    prompt: str = "",
    max_new_tokens: int = 256,
) -> list[str]:
    """Tell `count` stories side by side; one that does not end in time is cut off."""
    device, stop = model.embed_tokens.weight.device, tokenizer.eot_id
    start = torch.tensor([prompt_ids(tokenizer, prompt)], device=device).repeat(count, 1)
    columns = list(generate_rows(model, start, max_new_tokens, sampling, stop_id=stop))
    rows = torch.stack(columns, dim=1).tolist()
    return [
        prompt + tokenizer.decode(row[: row.index(stop)] if stop in row else row) for row in rows
    ]
