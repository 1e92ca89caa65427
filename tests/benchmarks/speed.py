"""How fast this machine tells, encodes, learns and continues stories; run by `make bench`."""

import os
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from mdsd.config import preset
from mdsd.model.generate import Sampling, generate
from mdsd.training.corpus import generate_stories
from mdsd.training.data import TokenData, batch
from mdsd.training.prepare import PrepareConfig, prepare
from mdsd.training.step import TrainConfig, initial_state, train_step
from mdsd.training.tokenizer import gpt2_encoding

STORIES = 20_000
STEPS = 30
NEW_TOKENS = 200


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(what: str, amount: float, unit: str, time_taken: float) -> None:
    print(f"{what:<28}{amount / time_taken:>12,.0f} {unit} a second")


def measure_data(folder: Path) -> None:
    """Tell stories, then compare their preparation with a plain loop over the same texts."""
    for level in ("easy", "rich"):
        stories = islice(generate_stories(level, seed=0), 2000)
        report(f"tell {level} stories", 2000, "stories", seconds(lambda told=stories: list(told)))

    texts = [story.text for story in islice(generate_stories("rich", seed=0), STORIES)]
    source = folder / "stories.txt"
    source.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    encode = gpt2_encoding().encode
    start = time.perf_counter()
    tokens = sum(len(encode(text)) for text in texts)
    report("plain loop over tiktoken", tokens, "tokens", time.perf_counter() - start)
    config = PrepareConfig(source=str(source), out=folder / "data")
    report("mdsd prepare, text file", tokens, "tokens", seconds(lambda: prepare(config)))


def measure_model(folder: Path) -> None:
    """Train the tiny preset for some steps, then continue a story with and without the cache."""
    data = TokenData(folder / "data")
    config = TrainConfig(data=folder / "data", out=folder / "run")
    state = initial_state(config, preset("tiny", vocab_size=data.meta["vocab_size"]))
    sizes = (config.batch_size, config.seq_len, config.seed)
    batches = [batch(data.split("train"), *sizes, step) for step in range(STEPS + 1)]

    def train(some: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in some:
            train_step(state, config, x.to(state.device), y.to(state.device))

    train(batches[:1])  # the first step also allocates
    tokens = STEPS * config.batch_size * config.seq_len
    report("train tiny", tokens, "tokens", seconds(lambda: train(batches[1:])))

    model, prompt = state.model.eval(), batches[0][0][0, :8].tolist()
    for use_cache in (True, False):
        told = generate(model, prompt, NEW_TOKENS, Sampling(), use_cache=use_cache)
        name = "sample with the cache" if use_cache else "sample without it"
        report(name, NEW_TOKENS, "tokens", seconds(lambda told=told: list(told)))


def main() -> None:
    """Measure everything in a temporary folder."""
    threads = torch.get_num_threads()
    print(f"{os.cpu_count()} processors, torch {torch.__version__} with {threads} threads")
    with tempfile.TemporaryDirectory() as folder:
        measure_data(Path(folder))
        measure_model(Path(folder))


if __name__ == "__main__":  # the preparation may start processes that import this file
    main()
