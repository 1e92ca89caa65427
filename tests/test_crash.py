"""The crash campaign: a training killed again and again ends like one that nobody disturbed.

Real signals, real processes and, where the machine lets us, a real full disk. The processes come
from a server that has the package loaded and forks, so that a life begins within milliseconds.
"""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mdsd.config import ModelConfig, preset
from mdsd.training import loop
from mdsd.training.checkpoint import CheckpointError, checkpoints, load_run
from mdsd.training.data import PrepareConfig, TokenData, prepare
from mdsd.training.files import check_sums, read_seal
from mdsd.training.logs import read_log
from mdsd.training.step import TrainConfig, initial_state, train_step

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGKILL and forks are POSIX")

KILLS = 30
WAIT = 60.0  # seconds, far beyond what any life needs
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "q_lora_rank": 16, "kv_lora_rank": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "easy"
    prepare(PrepareConfig(out=out, stories=300, val_fraction=0.2, workers=1))
    return out


@pytest.fixture(scope="module")
def model(data) -> ModelConfig:
    return preset("tiny", vocab_size=TokenData(data).meta["vocab_size"], **SIZES)


@pytest.fixture
def config(data, tmp_path) -> TrainConfig:
    return TrainConfig(
        data=data,
        out=tmp_path / "run",
        steps=110,
        batch_size=2,
        seq_len=16,
        warmup_steps=20,
        eval_every=15,
        eval_batches=1,
        save_every=2,
        device="cpu",
    )


@pytest.fixture(scope="module")
def server():
    """Processes forked from one that has imported all they need (AdamW: torch._dynamo, late)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mdsd.training.loop", "torch._dynamo", "pytest"])
    return context


class Average:
    """A running average of the weights; part of what has to survive."""

    def __init__(self, model):
        self.weights = {name: w.detach().clone() for name, w in model.named_parameters()}

    def state_dict(self):
        return self.weights

    def load_state_dict(self, averages):
        self.weights = averages

    @contextmanager
    def applied(self, model) -> Iterator[None]:
        own = {name: w.detach().clone() for name, w in model.named_parameters()}
        model.load_state_dict(self.weights, strict=False)
        yield
        model.load_state_dict(own, strict=False)


def averaging_state(config, model_config):
    state = initial_state(config, model_config)
    state.ema = Average(state.model)
    return state


def noisy_step(state, config, x, y):
    """A step that draws from every random generator and moves the average."""
    report = train_step(state, config, x, y)
    noise = random.gauss() + torch.rand(()).item() + np.random.randn()  # noqa: NPY002
    with torch.no_grad():
        state.model.lm_head.weight += 1e-3 * noise
        for name, weight in state.model.named_parameters():
            state.ema.weights[name].lerp_(weight, 0.1)
    return report


def slow_step(*arguments):
    time.sleep(0.03)  # so that a quick machine does not finish before it is killed
    return noisy_step(*arguments)


def live(config, model, step=noisy_step) -> None:
    """One life: begin, or go on from what the last one left."""
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    loop.plot_log = lambda *_: None  # no pictures, and no measuring of the machine
    loop.matmul_peak = lambda *_: 1e12
    loop.tqdm.set_lock(threading.RLock())  # its usual one is a semaphore, which a kill leaks
    if step is noisy_step:
        os.fsync = lambda _: None  # this life is not killed: no need to wait for the disk
    resume = (config.out / "config.json").exists()
    loop.train(replace(config, resume=resume), model, step, averaging_state)


def wait_until(met, process) -> bool:
    """Look a thousand times a second; False if the process ended first."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        if met():
            return True
        if process.exitcode is not None:
            return False
        time.sleep(0.001)
    raise AssertionError("nothing happened")


def is_writing(run: Path) -> bool:
    """Whether a checkpoint is half written, or half removed."""
    return any(run.glob("checkpoints/*.partial"))


def lines(run: Path) -> int:
    path = run / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def moment(kind: str, run: Path, chance: random.Random, process) -> bool:
    """Wait for a random moment of a kind."""
    if kind == "anywhere":
        time.sleep(chance.uniform(0, 0.4))
        return process.exitcode is None
    if kind == "between steps":
        # Opening a log rewrites it once; new lines beyond the first prove that steps are done.
        wanted = lines(run) + chance.randrange(1, 6)
        alive = wait_until(lambda: lines(run) >= wanted, process)
        time.sleep(chance.uniform(0, 0.01))
        return alive
    alive = wait_until(lambda: not is_writing(run) and lines(run) > 0, process)
    alive = alive and wait_until(lambda: is_writing(run), process)
    time.sleep(chance.choice([0, 0, 0.001, 0.003]))
    return alive


def kill_in(kind: str, process, run: Path, chance: random.Random) -> bool:
    """Start the process and kill it at such a moment; whether it left a half checkpoint."""
    process.start()
    try:
        alive = moment(kind, run, chance, process)
    finally:
        process.kill()  # SIGKILL
        process.join(WAIT)
    assert alive, "the training ended before it was killed"
    assert process.exitcode == -signal.SIGKILL
    return is_writing(run)


def finish(process) -> None:
    process.start()
    process.join(4 * WAIT)
    assert process.exitcode == 0


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def ending(run: Path) -> dict:
    """All that a run has come to, without what depends on the clock."""
    last = checkpoints(run)[-1].path
    check_sums(last)
    training = torch.load(last / "training.pt", weights_only=True)
    clock = {"tokens_per_second", "mfu"}
    return {
        "weights": tensors(last / "model.safetensors"),
        "average": tensors(last / "ema.safetensors"),
        "training": training,
        "state": read_seal(last)[0],
        "kept": [(c.step, c.validation_loss) for c in checkpoints(run)],
        "log": [
            {k: v for k, v in line.items() if k not in clock}
            for line in read_log(run / "log.jsonl")
        ],
    }


def assert_equal(a, b, where: str = "") -> None:
    """Compare nested values, tensors bit for bit, and name the first that differs."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_equal(one, other, f"{where}/{place}")
    else:
        assert a == b, where


@pytest.mark.slow
def test_thirty_kills_change_nothing(config, model, server):
    chance = random.Random(2026)
    whole = replace(config, out=config.out.with_name("whole"))
    finish(server.Process(target=live, args=(whole, model)))
    kinds = ["anywhere", "between steps", "inside a checkpoint"] * (KILLS // 3)
    torn = Counter()
    for kind in kinds:
        process = server.Process(target=live, args=(config, model, slow_step))
        torn[kind] += kill_in(kind, process, config.out, chance)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill never leaves a damaged checkpoint
            for checkpoint in checkpoints(config.out):
                check_sums(checkpoint.path)
    assert torn["inside a checkpoint"] >= 3, torn
    assert checkpoints(config.out)[-1].step < config.steps, "nothing was left to do at the end"
    finish(server.Process(target=live, args=(config, model)))
    assert_equal(ending(config.out), ending(whole.out))
    assert not is_writing(config.out)


# A disk that is really full.


def limit_file_size(state, config, x, y):
    """After the first checkpoint, let the kernel refuse files as large as the optimizer's."""
    if state.step == config.save_every:
        import resource

        size = (checkpoints(config.out)[-1].path / "training.pt").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * size // 4, resource.RLIM_INFINITY))
    return noisy_step(state, config, x, y)


def fill_the_disk(state, config, x, y):
    """After the first checkpoint, fill the disk up to a rest that takes the log alone."""
    if state.step == config.save_every:
        free = shutil.disk_usage(config.out).free
        (config.out.parent / "filler").write_bytes(bytes(free - 100_000))
    return noisy_step(state, config, x, y)


def report(config, model, step, connection) -> None:
    """Live, and send what was raised."""
    try:
        live(config, model, step)
        connection.send(("", ""))
    except Exception as error:
        connection.send((type(error).__name__, str(error)))


def outcome(server, config, model, step) -> tuple[str, str]:
    """The type and the text of what a life raised."""
    ours, theirs = server.Pipe()
    process = server.Process(target=report, args=(config, model, step, theirs))
    process.start()
    assert ours.poll(WAIT)
    process.join(WAIT)
    return ours.recv()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 40 MB in memory, for whom the machine lets mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs to mount a file system")
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def assert_stopped_at_the_second(config, name: str, message: str) -> None:
    assert name == "CheckpointError"
    assert "\n" not in message
    assert f"step-{2 * config.save_every:08d}" in message
    (first,) = checkpoints(config.out)
    assert first.step == config.save_every
    check_sums(first.path)
    assert not is_writing(config.out)


def test_a_file_that_cannot_grow_leaves_the_checkpoint_before(config, model, server):
    config = replace(config, steps=8, eval_every=100)
    name, message = outcome(server, config, model, limit_file_size)
    assert_stopped_at_the_second(config, name, message)
    finish(server.Process(target=live, args=(config, model)))
    assert checkpoints(config.out)[-1].step == 8


def test_a_full_disk_is_said_and_leaves_the_checkpoint_before(config, model, server, small_disk):
    config = replace(config, out=small_disk / "run", steps=8, eval_every=100)
    name, message = outcome(server, config, model, fill_the_disk)
    assert_stopped_at_the_second(config, name, message)
    assert "the disk is full, free some space" in message
    (small_disk / "filler").unlink()
    finish(server.Process(target=live, args=(config, model)))
    assert checkpoints(config.out)[-1].step == 8


def test_a_disk_without_room_is_refused_before_the_first_step(config, model, server, small_disk):
    config = replace(config, out=small_disk / "run", keep=100)
    name, message = outcome(server, config, model, noisy_step)
    assert name == "CheckpointError"
    assert "the disk has" in message
    assert not list(small_disk.iterdir())


def test_a_read_only_disk_is_one_clear_line(config, model, server, small_disk):
    config = replace(config, out=small_disk / "run", steps=4, eval_every=100)
    finish(server.Process(target=live, args=(config, model)))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for out in (config.out, small_disk / "new"):
        name, message = outcome(server, replace(config, out=out, steps=8), model, noisy_step)
        assert name == "CheckpointError"
        assert "Read-only file system" in message
        assert "\n" not in message
    load_run(config.out)  # reading needs no writing


@pytest.mark.skipif(hasattr(os, "geteuid") and not os.geteuid(), reason="root may write anywhere")
def test_a_folder_without_permission_is_one_clear_line(config, model):
    config.out.parent.joinpath("locked").mkdir(mode=0o500)
    locked = replace(config, out=config.out.parent / "locked" / "run")
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        loop.train(locked, model)
    assert "\n" not in str(caught.value)
