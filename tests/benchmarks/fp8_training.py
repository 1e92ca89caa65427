"""How far FP8 training strays from float32 over longer runs; about five minutes a seed.

python tests/benchmarks/fp8_training.py [steps] [seed ...]
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported

import numpy as np

from mdsd.config import preset
from mdsd.model.fp8 import fp8_train_step
from mdsd.training.data import TokenData
from mdsd.training.loop import read_log, train
from mdsd.training.prepare import PrepareConfig, prepare
from mdsd.training.step import TrainConfig, train_step

STEPS = 600
SEEDS = (0, 1, 2)
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


def percent(values: np.ndarray) -> str:
    return " ".join(f"{100 * v:+.2f} %" for v in values)


def main(steps: int, seeds: tuple[int, ...]) -> None:
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(PrepareConfig(out=folder / "data", workers=1))
        for seed in seeds:
            exact, exact_val = losses(folder, "float32", seed, steps)
            ours, ours_val = losses(folder, "FP8", seed, steps)
            parts = np.array([p.mean() for p in np.array_split(ours / exact - 1, PARTS)])
            runs.append([*parts, (ours / exact - 1).mean(), ours_val / exact_val - 1])
            print(f"seed {seed}, loss {exact_val:.4f}: {percent(runs[-1])}", flush=True)
    spread = np.std(runs, axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(runs[0]))
    print(f"FP8 against float32 by quarter, over the run, in validation; {len(runs)} seeds")
    print(f"mean   {percent(np.mean(runs, axis=0))}\nspread {percent(spread)}")


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:]]
    main(numbers[0] if numbers else STEPS, tuple(numbers[1:]) or SEEDS)
