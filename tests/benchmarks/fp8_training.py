"""How far FP8 training strays from float32: one short run, or longer ones by options.

Over three seeds, the mean of the run and its standard deviation (some minutes a seed):

--steps 600 --seeds 0 1 2
    bundled stories, level easy, down to 0.44 nats: +0.27 % (0.46 %)
--source stories.txt --steps 200 --seeds 0 1 2
    11,946 stories of TinyStories, down to 4.20 nats: +0.02 % (0.01 %)
"""

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported

import numpy as np

from mdsd.config import preset
from mdsd.model.fp8 import fp8_train_step
from mdsd.training.data import TokenData
from mdsd.training.loop import read_log, train
from mdsd.training.prepare import PrepareConfig, prepare
from mdsd.training.step import TrainConfig, train_step

PARTS = 4  # of a run, reported one by one


def losses(folder: Path, name: str, seed: int, steps: int) -> tuple[np.ndarray, float]:
    """Training losses of all steps and the last validation loss of one run."""
    data = TokenData(folder / "data")
    # Two blocks, the second with experts; every matrix has several tiles.
    model = preset(
        "tiny",
        vocab_size=data.meta["vocab_size"],
        hidden_size=256,
        num_hidden_layers=2,
        moe_intermediate_size=128,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
        initializer_range=1 / 16,
    )
    config = TrainConfig(
        data=folder / "data",
        out=folder / f"{name}-{seed}",
        steps=steps,
        batch_size=8,
        seq_len=64,
        eval_every=steps,
        eval_batches=50,
        save_every=steps,
        seed=seed,
    )
    train(config, model, {"float32": train_step, "FP8": fp8_train_step}[name])
    log = read_log(config.out / "log.jsonl")
    curve = [line["main"] for line in log if line["split"] == "train"]
    return np.array(curve), log[-1]["main"]


def percent(values: Iterable[float]) -> str:
    return " ".join(f"{100 * v:+.2f} %" for v in values)


def compare(folder: Path, seed: int, steps: int) -> list[float]:
    """Relative differences of one seed: in each part of the run, over all of it, in validation."""
    exact, exact_val = losses(folder, "float32", seed, steps)
    ours, ours_val = losses(folder, "FP8", seed, steps)
    parts = [part.mean() for part in np.array_split(ours / exact - 1, PARTS)]
    result = [*parts, (ours / exact - 1).mean(), ours_val / exact_val - 1]
    print(f"seed {seed}, float32 ends at {exact_val:.3f} nats: {percent(result)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="bundled", help="stories, as `mdsd prepare` takes them")
    parser.add_argument("--level", default="easy", help="of the bundled stories: easy or rich")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    print(f"FP8 against float32 in each of {PARTS} parts of a run, over the run, in validation")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = {"source": options.source, "level": options.level}
        prepare(PrepareConfig(**chosen, out=folder / "data", workers=1))
        results = [compare(folder, seed, options.steps) for seed in options.seeds]
    print(f"mean of {len(results)} seeds: {percent(np.mean(results, axis=0))}")
    if len(results) > 1:
        print(f"standard deviation: {percent(np.std(results, axis=0, ddof=1))}")


if __name__ == "__main__":
    main()
