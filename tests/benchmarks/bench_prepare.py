"""Measure how fast text becomes token files, against a plain loop over tiktoken.

    python tests/benchmarks/bench_prepare.py [FILE.txt] [--rounds 5]

Without a file it writes Little World's rich stories to one first. The rounds are interleaved,
so that whatever else the machine does falls on all ways alike.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mdsd.training.corpus import generate_stories
from mdsd.training.prepare import PrepareConfig, prepare
from mdsd.training.tokenizer import END_OF_TEXT, gpt2_encoding


def plain_loop(path: Path) -> int:
    """Encode story by story into one list, as one would at first; return the number of tokens."""
    encoding, tokens = gpt2_encoding(), []
    for story in path.read_text(encoding="utf-8").split(END_OF_TEXT):
        if story.strip():
            tokens += [*encoding.encode_ordinary(story.strip()), encoding.eot_token]
    return len(tokens)


def prepared(path: Path, out: Path, vocabulary: str) -> int:
    """Prepare the whole data set; return the number of tokens."""
    config = PrepareConfig(source=str(path), out=out, vocabulary=vocabulary, overwrite=True)
    return sum(split["tokens"] for split in prepare(config)["splits"].values())


def speed(work: Callable[[], int]) -> tuple[float, float, int]:
    """Return tokens per second of wall-clock time, per second of processor time, and tokens."""
    wall, processor = time.perf_counter(), time.process_time()
    tokens = work()
    return (
        tokens / (time.perf_counter() - wall),
        tokens / (time.process_time() - processor),
        tokens,
    )


def write_sample(path: Path) -> None:
    """Write 20,000 bundled stories."""
    stories = (story.text for story in generate_stories("rich", 0))
    text = "".join(f"{s}\n{END_OF_TEXT}\n" for s in itertools.islice(stories, 20_000))
    path.write_text(text, encoding="utf-8")


def show(name: str, speeds: list[tuple[float, float, int]]) -> None:
    """Print median and range of one way."""
    wall = sorted(s[0] / 1e6 for s in speeds)
    processor = statistics.median(s[1] / 1e6 for s in speeds)
    print(
        f"{name:<13} {statistics.median(wall):5.2f} M tokens/s ({wall[0]:.2f} to {wall[-1]:.2f}), "
        f"{processor:.2f} M a second of processor time"
    )


def main() -> None:
    """Run the rounds and print the medians and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder, "stories.txt")
        if not args.file:
            write_sample(path)
        ways = {
            "plain loop": lambda: plain_loop(path),
            "prepare full": lambda: prepared(path, Path(folder, "full"), "full"),
            "prepare cut": lambda: prepared(path, Path(folder, "cut"), "cut"),
        }
        speeds: dict[str, list] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, work in ways.items():
                speeds[name].append(speed(work))
    assert len({s[2] for ways in speeds.values() for s in ways}) == 1, "the ways should agree"
    tokens = speeds["plain loop"][0][2]
    print(f"{tokens:,} tokens, {args.rounds} interleaved rounds, {os.cpu_count()} processors")
    for name in ways:
        show(name, speeds[name])
    for name in ("prepare full", "prepare cut"):
        ratios = [a[0] / b[0] for a, b in zip(speeds[name], speeds["plain loop"], strict=True)]
        print(
            f"{name} / plain loop: {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
