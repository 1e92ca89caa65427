"""Checkpoints: exact resume for every option, damage found, folders whole, settings kept."""

import errno
import json
import os
import pkgutil
import random
import shutil
import stat
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mdsd.config import MdsdError, preset
from mdsd.model.fp8 import fp8_train_step
from mdsd.training import files
from mdsd.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWarning,
    best_checkpoint,
    check_room,
    checkpoint_bytes,
    checkpoints,
    latest_whole,
    load_run,
    open_run,
    prune,
    restore,
    save_checkpoint,
    write_text,
)
from mdsd.training.data import PrepareConfig, TokenData, batch, prepare
from mdsd.training.files import (
    check_sums,
    random_states,
    read_seal,
    remove,
    seal,
    set_random_states,
    whole_folder,
)
from mdsd.training.logs import read_log
from mdsd.training.loop import train
from mdsd.training.memory import MemoryConfig, memory_state, memory_step
from mdsd.training.step import TrainConfig, initial_state, train_step

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
SETTINGS = dict(
    steps=10, batch_size=2, seq_len=16, warmup_steps=2, eval_every=5, eval_batches=2, save_every=5
)
SETTINGS |= {"device": "cpu"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "easy"
    prepare(PrepareConfig(out=out, stories=300, val_fraction=0.2, workers=1))
    return out


@pytest.fixture(scope="module")
def model(data):
    return preset("tiny", vocab_size=TokenData(data).meta["vocab_size"], **SIZES)


@pytest.fixture
def config(data, tmp_path) -> TrainConfig:
    return TrainConfig(data=data, out=tmp_path / "run", **SETTINGS)


@pytest.fixture(autouse=True, scope="module")
def quick():
    """No pictures and no measuring of the machine: the runs here are many and short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mdsd.training.loop.plot_log", lambda *_: None)
        patch.setattr("mdsd.training.loop.matmul_peak", lambda *_: 1e12)
        yield


@pytest.fixture(scope="module")
def finished(data, model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    train(TrainConfig(data=data, out=out, **SETTINGS), model)
    return out


@pytest.fixture
def run(config, finished) -> Path:
    """A run of its own with checkpoints at steps 5 and 10."""
    return shutil.copytree(finished, config.out)


class Average:
    """A running average of the weights, the plain way."""

    def __init__(self, model):
        self.weights = {name: w.detach().clone().float() for name, w in model.named_parameters()}

    def move(self, model):
        for name, w in model.named_parameters():
            self.weights[name].lerp_(w.detach(), 0.1)

    def state_dict(self):
        return self.weights

    def load_state_dict(self, averages):
        self.weights = averages

    @contextmanager
    def applied(self, model):
        own = {name: w.detach().clone() for name, w in model.named_parameters()}
        model.load_state_dict(self.weights, strict=False)
        yield
        model.load_state_dict(own, strict=False)


def averaging_state(config, model_config):
    state = initial_state(config, model_config)
    state.ema = Average(state.model)
    return state


def noisy_step(state, config, x, y):
    """A step that draws from every random generator, as dropout would; it keeps an average."""
    report = train_step(state, config, x, y)
    noise = random.random() + random.gauss() + torch.rand(()).item()
    noise += np.random.rand() + np.random.randn()  # noqa: NPY002
    with torch.no_grad():
        state.model.lm_head.weight += 1e-3 * noise
    if state.ema is not None:
        state.ema.move(state.model)
    return report


class Stopped(BaseException):
    """Ends a training at once, as a kill would, without a last checkpoint."""


def stopping(step, last):
    """`step`, until `last` steps are done and saved."""

    def stepping(state, config, x, y):
        if state.step == last:
            raise Stopped
        return step(state, config, x, y)

    return stepping


def logged(run: Path) -> list[dict]:
    """The log without what depends on the clock."""
    clock = {"tokens_per_second", "mfu"}
    log = read_log(run / "log.jsonl")
    return [{k: v for k, v in line.items() if k not in clock} for line in log]


def equal(a, b) -> bool:
    """Whether nested values are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, copied: a mapped file that a test then cuts short is a bus error."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def content(run: Path) -> dict:
    """All that the last checkpoint of a run holds."""
    path = checkpoints(run)[-1].path
    found = {file.name: tensors(file) for file in path.glob("*.safetensors")}
    found["training"] = torch.load(path / "training.pt", weights_only=True)
    found["state"] = read_seal(path)[0]
    return found


OPTIONS = {
    "as it is": ({}, {}, noisy_step),
    "no MTP": ({"num_nextn_predict_layers": 0}, {}, noisy_step),
    "three depths": ({"num_nextn_predict_layers": 3}, {}, noisy_step),
    "queries not compressed": ({"q_lora_rank": None}, {}, noisy_step),
    "groups of experts": ({"n_group": 4, "topk_group": 2}, {}, noisy_step),
    "no shared expert": ({"n_shared_experts": 0}, {}, noisy_step),
    "all layers dense": ({"first_k_dense_replace": 2}, {}, noisy_step),
    "bfloat16": ({}, {"dtype": "bfloat16"}, noisy_step),
    "float16": ({}, {"dtype": "float16"}, noisy_step),
    "another seed": ({}, {"seed": 2**40 + 7}, noisy_step),
    "long warm-up, no clipping": ({}, {"warmup_steps": 50, "grad_clip": 1e9}, noisy_step),
    "no decay, late weight": ({}, {"weight_decay": 0.0, "mtp_late_from": 0.55}, noisy_step),
    "strong balance": ({}, {"balance_weight": 0.1, "bias_speed": 0.1}, noisy_step),
    "fp8": ({}, {}, fp8_train_step),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_five_and_five_steps_equal_ten(name, config, model):
    changes, recipe, step = OPTIONS[name]
    model, config = replace(model, **changes), replace(config, **recipe)
    whole = replace(config, out=config.out.with_name("whole"))
    state = initial_state if step is fp8_train_step else averaging_state
    train(whole, model, step, state)
    with pytest.raises(Stopped):
        train(config, model, stopping(step, 5), state)
    assert checkpoints(config.out)[-1].step == 5
    random.seed(99)  # another process would have other states
    np.random.seed(99)  # noqa: NPY002
    torch.manual_seed(99)
    train(replace(config, resume=True), model, step, state)
    assert equal(content(whole.out), content(config.out))
    assert logged(whole.out) == logged(config.out)


def two_steps(state, config) -> list:
    tokens = TokenData(config.data).split("train")
    for _ in range(2):
        noisy_step(state, config, *batch(tokens, 2, 16, config.seed, state.step))
        state.step += 1
    return [state.model.state_dict(), state.ema.state_dict()]


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 2},
        {"recompute": True},
        {"ema_decay": 0.9},
        {"micro_batches": 2, "recompute": True, "ema_decay": 0.9, "dtype": "bfloat16"},
    ],
    ids=" ".join,
)
def test_five_and_five_steps_equal_ten_with_each_saving_of_memory(options, config, model):
    config = MemoryConfig(**vars(config) | options)
    whole = replace(config, out=config.out.with_name("whole"))
    train(whole, model, memory_step, memory_state)
    with pytest.raises(Stopped):
        train(config, model, stopping(memory_step, 5), memory_state)
    train(replace(config, resume=True), model, memory_step, memory_state)
    assert equal(content(whole.out), content(config.out))
    assert logged(whole.out) == logged(config.out)
    assert ("ema.safetensors" in content(config.out)) == ("ema_decay" in options)


@pytest.mark.parametrize("part", [None, "model", "optimizer", "random", "step", "average"])
def test_a_forgotten_part_would_be_seen(config, model, run, part):
    """The test above must be able to fail: no part of the state can be left as it was."""
    reference = averaging_state(config, model)
    restore(reference, checkpoints(run)[0])
    expected = two_steps(reference, config)
    other = averaging_state(replace(config, seed=6), model).ema
    state = averaging_state(replace(config, seed=5), model)
    noise, optimizer = random_states(), state.optimizer.state_dict()
    weights = {name: w.clone() for name, w in state.model.state_dict().items()}
    restore(state, checkpoints(run)[0])
    if part == "model":
        state.model.load_state_dict(weights)
    elif part == "optimizer":
        state.optimizer.load_state_dict(optimizer)
    elif part == "random":
        set_random_states(noise)
    elif part == "step":
        state.step = 0
    elif part == "average":
        state.ema = other
    assert equal(two_steps(state, config), expected) == (part is None)


def test_counters_are_restored(config, model):
    state = initial_state(config, model)
    state.step, state.best_loss, state.skipped, state.skipped_in_a_row = 7, 1.5, 4, 2
    save_checkpoint(state, config.out, 2.5)
    other = initial_state(config, model)
    restore(other, checkpoints(config.out)[0])
    assert (other.step, other.best_loss) == (7, 1.5)
    assert (other.skipped, other.skipped_in_a_row) == (4, 2)
    assert checkpoints(config.out)[0].validation_loss == 2.5


def test_the_scale_of_float16_is_restored_and_left_out_elsewhere(config, model):
    half = initial_state(replace(config, dtype="float16"), model)
    half.scaler.load_state_dict(half.scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 3})
    save_checkpoint(half, config.out, None)
    (saved,) = checkpoints(config.out)
    again = initial_state(replace(config, dtype="float16"), model)
    restore(again, saved)
    assert again.scaler.state_dict() == half.scaler.state_dict()
    plain = initial_state(config, model)
    restore(plain, saved)  # a changed dtype
    plain.step = 1
    save_checkpoint(plain, config.out, None)
    restore(again, checkpoints(config.out)[-1])


@given(draws=st.lists(st.sampled_from("pgnNt"), max_size=8))
@settings(max_examples=40, deadline=None)
def test_generators_go_on_after_any_draws(draws):
    one = {
        "p": random.random,
        "g": random.gauss,
        "n": np.random.rand,
        "N": np.random.randn,
        "t": lambda: torch.randn(3).tolist(),
    }
    for name in draws:
        one[name]()
    states = random_states()
    first = [one[name]() for name in "pgnNtpgnNt"]
    set_random_states(states)
    assert first == [one[name]() for name in "pgnNtpgnNt"]


def test_states_of_absent_devices_are_passed_over():
    states = random_states() | {"cuda": [torch.zeros(16, dtype=torch.uint8)], "mps": torch.zeros(4)}
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        set_random_states(states)
    set_random_states({k: v for k, v in random_states().items() if k != "mps"})  # an older one


# Averages of the weights.


def test_the_average_is_kept_and_loaded(config, model):
    state = train(config, model, noisy_step, averaging_state)
    path = checkpoints(config.out)[-1].path
    assert equal(tensors(path / "ema.safetensors"), state.ema.state_dict())
    best = best_checkpoint(checkpoints(config.out))
    plain, averaged = load_run(config.out)[0], load_run(config.out, ema=True)[0]
    assert equal(dict(plain.state_dict()), tensors(best.path / "model.safetensors"))
    parameters = {name: w.detach() for name, w in averaged.named_parameters()}
    assert equal(parameters, tensors(best.path / "ema.safetensors"))
    assert not torch.equal(plain.lm_head.weight, averaged.lm_head.weight)
    for ours, theirs in zip(averaged.gates(), plain.gates(), strict=True):
        assert torch.equal(ours.e_score_correction_bias, theirs.e_score_correction_bias)


def test_a_run_without_an_average_says_so(run):
    with pytest.raises(CheckpointError, match="kept no average"):
        load_run(run, ema=True)


def test_an_average_that_is_asked_for_later_begins_with_the_weights(config, model, run):
    state = averaging_state(replace(config, seed=3), model)
    restore(state, checkpoints(run)[-1])
    weights = {name: w.detach() for name, w in state.model.named_parameters()}
    assert equal(state.ema.state_dict(), weights)
    noisy_step(state, config, *batch(TokenData(config.data).split("train"), 2, 16, 0, 10))
    assert not equal(state.ema.state_dict(), weights)  # a copy, not the weights themselves


# Damage.

FILES = ["model.safetensors", "training.pt", "state.json"]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "cut short":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    elif how == "one bit":
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "cut short", "empty", "one bit"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(config, model, run, name, how):
    whole = logged(run)
    weights = tensors(checkpoints(run)[-1].path / "model.safetensors")
    damage(checkpoints(run)[-1].path / name, how)
    with pytest.warns(CheckpointWarning, match="step-00000010") as caught:
        assert latest_whole(run).step == 5
    assert name in str(caught[0].message)
    with pytest.warns(CheckpointWarning, match="step-00000010"):
        state = train(replace(config, resume=True), model)
    assert state.step == 10
    assert equal(tensors(checkpoints(run)[-1].path / "model.safetensors"), weights)
    assert logged(run) == whole
    assert [c.step for c in checkpoints(run)] == [5, 10]
    assert (run / "checkpoints" / "step-00000010.damaged").is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_whole(run).step == 10


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_flipped_bit_is_found(tmp_path, data):
    path = tmp_path / "checkpoints" / "step-00000012"
    shutil.rmtree(path, ignore_errors=True)
    with whole_folder(path) as folder:
        save_file({"w": torch.arange(9.0)}, folder / "model.safetensors")
        seal(folder, {"step": 12, "validation_loss": None, "best_loss": 3.25})
    assert latest_whole(tmp_path).step == 12
    victim = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(victim.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    victim.write_bytes(content)
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError):
        latest_whole(tmp_path)


def test_load_run_passes_over_a_damaged_best(config, model, run):
    best = best_checkpoint(checkpoints(run))
    (other,) = [c for c in checkpoints(run) if c != best]
    damage(best.path / "model.safetensors", "one bit")
    with pytest.warns(CheckpointWarning, match=best.path.name):
        loaded, _ = load_run(run)
    assert equal(dict(loaded.state_dict()), tensors(other.path / "model.safetensors"))
    damage(other.path / "state.json", "cut short")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CheckpointError, match="holds no whole checkpoint"),
    ):
        load_run(run)


def test_a_run_without_a_whole_checkpoint_is_not_begun_again(config, model, run):
    for checkpoint in checkpoints(run):
        damage(checkpoint.path / "training.pt", "one bit")
    with (
        pytest.warns(CheckpointWarning) as caught,
        pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"),
    ):
        train(replace(config, resume=True), model)
    assert {"step-00000005", "step-00000010"} <= {
        word for w in caught for word in str(w.message).replace(os.sep, " ").split()
    }
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step-00000005",
        "step-00000010",
    ]


def test_weights_of_another_model_are_refused(config, model, run):
    state = initial_state(config, replace(model, moe_intermediate_size=48))
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        restore(state, checkpoints(run)[-1])


def test_nothing_is_unpickled(config, model, run):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(run / "owned"),))

    path = checkpoints(run)[-1].path
    values = read_seal(path)[0]
    torch.save(Evil(), path / "training.pt")
    (path / "state.json").unlink()
    seal(path, values)  # with a checksum that is right
    with pytest.raises(CheckpointError, match=r"training\.pt"):
        train(replace(config, resume=True, steps=20), model)
    assert not (run / "owned").exists()


def test_checkpoints_without_sums_are_still_read(config, model, run):
    path = checkpoints(run)[-1].path
    (path / "state.json").write_text(json.dumps(read_seal(path)[0]), encoding="utf-8")
    training = torch.load(path / "training.pt", weights_only=True)
    del training["skipped"], training["random"]["mps"]
    torch.save(training, path / "training.pt")
    assert train(replace(config, resume=True, steps=12), model).step == 12


# Folders: whole or absent, whatever fails.


class Fault:
    """Let the call with this number fail, over all of the operating system's that write."""

    NAMES = ("mkdir", "open", "fsync", "chmod", "rename", "replace")

    def __init__(self, monkeypatch, turn, error):
        self.calls, self.turn, self.error = 0, turn, error
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))
        for place in ("torch.save", "mdsd.training.resume.save_file", "mdsd.training.resume.seal"):
            monkeypatch.setattr(place, self.wrap(pkgutil.resolve_name(place)))

    def wrap(self, real):
        def call(*arguments, **options):
            self.calls += 1
            if self.calls == self.turn:
                raise self.error
            return real(*arguments, **options)

        return call


ERRORS = {
    "disk full": OSError(errno.ENOSPC, "No space left on device"),
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "read-only": OSError(errno.EROFS, "Read-only file system"),
    "no permission": PermissionError(errno.EACCES, "Permission denied"),
    "input/output": OSError(errno.EIO, "Input/output error"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_any_failing_write_leaves_the_older_checkpoints_whole(config, model, name):
    state, run = initial_state(config, model), config.out
    save_checkpoint(state, run, None)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    turn = failures = 0
    while True:
        turn += 1
        state.step = turn
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, turn, ERRORS[name])
            try:
                save_checkpoint(state, run, None)
            except CheckpointError as error:
                failures += 1
                message = str(error)
                assert "\n" not in message
                assert f"step-{turn:08d}" in message
                assert "before it is whole" in message
                expected = "the disk is full" if name in ("disk full", "quota") else "Errno"
                assert expected in message
        for path, content in before.items():
            assert path.read_bytes() == content
        for checkpoint in checkpoints(run):
            check_sums(checkpoint.path)
        if fault.calls < turn:
            break
    assert failures == turn - 1 > 10
    assert not list(run.rglob("*.partial"))
    state.step = 1000
    save_checkpoint(state, run, None)  # and the next attempt succeeds


@pytest.mark.parametrize("name", ERRORS)
def test_a_failing_write_while_training_is_one_clear_line(config, model, monkeypatch, name):
    saves = 0

    def failing(*arguments):
        nonlocal saves
        saves += 1
        if saves == 2:
            raise ERRORS[name]
        return torch_save(*arguments)

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(CheckpointError) as caught:
        train(config, model)
    assert "\n" not in str(caught.value)
    assert [c.step for c in checkpoints(config.out)] == [5]
    check_sums(checkpoints(config.out)[0].path)
    assert train(replace(config, resume=True), model).step == 10


def test_a_kill_at_any_operation_leaves_old_or_new(config, model):
    state, run = initial_state(config, model), config.out
    save_checkpoint(state, run, None)
    turn = 0
    while True:
        turn += 1
        state.step = turn
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, turn, Stopped())
            with suppress(Stopped):
                save_checkpoint(state, run, None)
        assert checkpoints(run)[0].step == 0
        for checkpoint in checkpoints(run):
            check_sums(checkpoint.path)
        if fault.calls < turn:
            break
    assert turn > 10


def test_a_folder_is_seen_only_when_it_is_whole(tmp_path):
    with whole_folder(tmp_path / "a") as inside:
        (inside / "x").write_text("1", encoding="utf-8")
        assert not (tmp_path / "a").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    (tmp_path / "b.partial").mkdir()  # left by a kill
    (tmp_path / "b.partial" / "old").write_text("half", encoding="utf-8")
    with whole_folder(tmp_path / "b") as inside:
        assert not list(inside.iterdir())
    assert [p.name for p in (tmp_path / "b").iterdir()] == []


def test_nothing_is_written_over_an_older_checkpoint(config, model):
    state = initial_state(config, model)
    path = save_checkpoint(state, config.out, None)
    before = (path / "state.json").read_bytes()
    with pytest.raises(CheckpointError, match="cannot write"):
        save_checkpoint(state, config.out, 1.0)
    assert (path / "state.json").read_bytes() == before


def test_everything_is_on_the_disk_before_the_name(config, model, monkeypatch):
    """Each file and the folder are waited for before the rename, the parent after it."""
    order = []
    real_sync, real_rename = files.sync, os.rename

    def sync(path):
        order.append(path.name)
        real_sync(path)

    def rename(source, target, **options):
        order.append("rename")
        real_rename(source, target, **options)

    monkeypatch.setattr(files, "sync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save_checkpoint(initial_state(config, model), config.out, None)
    at = order.index("rename")
    assert set(order[:at]) == {*FILES, "step-00000000.partial"}
    assert order[at - 1] == "step-00000000.partial"
    assert order[at + 1 :] == ["checkpoints"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_file_modes_follow_the_umask(config, model, mask):
    before = os.umask(mask)
    try:
        state = averaging_state(config, model)
        path = save_checkpoint(state, config.out, None)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert set(modes) == {*FILES, "ema.safetensors"}
    assert set(modes.values()) == {0o666 & ~mask}
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask


def test_a_removed_folder_loses_its_name_first(tmp_path, monkeypatch):
    (tmp_path / "step-00000001").mkdir()

    def killed(path, *_, **__):
        raise Stopped

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Stopped):
        remove(tmp_path / "step-00000001")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.partial"]


def test_text_is_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_text(path, "old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_, **__: (_ for _ in ()).throw(Stopped()))
            with pytest.raises(Stopped):
                write_text(path, "new")
        assert path.read_text(encoding="utf-8") == "old"
    write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


# Which ones stay, and room for them.


@given(
    losses=st.lists(st.none() | st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=12),
    keep=st.integers(1, 4),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_last_and_the_best_stay(tmp_path, losses, keep):
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    for step, loss in enumerate(losses):
        with whole_folder(run / "checkpoints" / f"step-{step:08d}") as folder:
            seal(folder, {"step": step, "validation_loss": loss, "best_loss": 1.0})
        prune(run, keep)
    evaluated = [(loss, -step) for step, loss in enumerate(losses) if loss is not None]
    best = {-min(evaluated)[1]} if evaluated else set()
    assert {c.step for c in checkpoints(run)} == set(range(len(losses))[-keep:]) | best
    assert not list(run.rglob("*.partial"))


def test_the_size_is_known_before(config, model):
    for state in (initial_state(config, model), averaging_state(config, model)):
        step = noisy_step(state, config, *batch(TokenData(config.data).split("train"), 2, 16, 0, 0))
        assert step
        path = save_checkpoint(state, config.out.with_name(str(state.ema)), None)
        size = sum(file.stat().st_size for file in path.iterdir())
        assert checkpoint_bytes(state) < size < checkpoint_bytes(state) + 200_000


def free_space(monkeypatch, free: int) -> None:
    usage = SimpleNamespace(total=2**50, used=0, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_no_room_is_said_before_anything_is_written(config, model, monkeypatch):
    state = initial_state(config, model)
    size = checkpoint_bytes(state)
    for written, keep, steps in ((4, 2, 100), (3, 1, 100), (3, 50, 5), (1, 2, 4)):
        asked = replace(config, keep=keep, steps=steps)
        free_space(monkeypatch, written * size)
        check_room(state, asked)
        free_space(monkeypatch, written * size - 1)
        with pytest.raises(CheckpointError, match="free some space, or lower keep"):
            check_room(state, asked)
    assert not config.out.exists()


def test_training_checks_the_room(config, model, monkeypatch):
    free_space(monkeypatch, 1000)
    with pytest.raises(CheckpointError, match="the disk has 0 MB"):
        train(config, model)
    assert not config.out.exists()


def test_what_is_there_already_counts_as_room(config, model, run, monkeypatch):
    state = initial_state(config, model)
    there = sum(p.stat().st_size for p in run.glob("checkpoints/*/*"))
    wanted = 4 * checkpoint_bytes(state)
    longer = replace(config, steps=100)
    free_space(monkeypatch, wanted - there)
    check_room(state, longer)
    free_space(monkeypatch, wanted - there - 1)
    with pytest.raises(CheckpointError, match="free some space"):
        check_room(state, longer)


# What may change on resuming.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 4),
        ("seq_len", 8),
        ("learning_rate", 1e-3),
        ("warmup_steps", 3),
        ("weight_decay", 0.0),
        ("grad_clip", 2.0),
        ("mtp_weight", 0.2),
        ("mtp_late_weight", 0.2),
        ("mtp_late_from", 0.5),
        ("balance_weight", 0.1),
        ("bias_speed", 0.1),
        ("seed", 1),
        ("dtype", "float32"),
    ],
)
def test_a_changed_setting_is_refused_unless_asked_for(config, model, run, name, value):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    changed = replace(config, resume=True, steps=12, **{name: value})
    with pytest.raises(CheckpointError, match=f"began with {name}="):
        train(changed, model)
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert train(replace(changed, change=True), model).step == 12
    # From now on these are the run's settings.
    assert train(replace(changed, steps=13), model).step == 13


def test_every_other_setting_may_change(config, model, run, tmp_path):
    shutil.copytree(config.data, tmp_path / "moved data")
    run.rename(tmp_path / "moved run")
    free = {"eval_every": 3, "eval_batches": 1, "save_every": 2, "keep": 5, "steps": 12}
    moved = {"data": tmp_path / "moved data", "out": tmp_path / "moved run", "device": "auto"}
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        del moved["device"]
    assert train(replace(config, resume=True, **free, **moved), model).step == 12


def test_settings_of_older_runs_count_as_defaults(config, model, run):
    path = run / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["training"]["change"], values["training"]["grad_clip"]
    del values["training"]["data_sha256"]
    path.write_text(json.dumps(values), encoding="utf-8")
    resumed = replace(config, resume=True)
    with pytest.raises(CheckpointError, match=r"began with grad_clip=1\.0, and 2\.0"):
        train(replace(resumed, grad_clip=2.0), model)
    train(resumed, model)


def test_a_setting_that_is_known_no_more_is_refused(config, model, run):
    path = run / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["training"]["momentum"] = 0.5
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"began with momentum=0\.5"):
        train(replace(config, resume=True), model)


def test_changed_weight_decay_takes_effect(config, model, run):
    state = initial_state(replace(config, weight_decay=0.03), model)
    restore(state, checkpoints(run)[-1])
    assert [g["weight_decay"] for g in state.optimizer.param_groups] == [0.03, 0.0]


def test_another_data_set_is_refused_unless_asked_for(config, model, tmp_path):
    """Two data sets of one vocabulary, GPT-2's whole one."""
    for seed in (0, 1):
        full = PrepareConfig(
            out=tmp_path / f"full{seed}", stories=60, seed=seed, vocabulary="full", workers=1
        )
        prepare(replace(full, val_fraction=0.2))
    model = replace(model, vocab_size=50_257)
    config = replace(config, data=tmp_path / "full0", steps=1)
    train(config, model)
    other = replace(config, data=tmp_path / "full1", resume=True, steps=2)
    with pytest.raises(CheckpointError, match="trained on other data"):
        train(other, model)
    assert train(replace(other, change=True), model).step == 2
    with pytest.raises(CheckpointError, match="trained on other data"):
        train(replace(config, resume=True, steps=3), model)


def test_change_does_not_reach_the_model_or_the_vocabulary(config, model, run, tmp_path):
    changed = replace(config, resume=True, change=True)
    with pytest.raises(CheckpointError, match="moe_intermediate_size=96"):
        train(changed, replace(model, moe_intermediate_size=48))
    other = PrepareConfig(out=tmp_path / "other", level="rich", stories=300, workers=1)
    prepare(other)
    large = replace(model, vocab_size=TokenData(other.out).meta["vocab_size"])
    with pytest.raises(CheckpointError, match="vocab"):
        train(replace(changed, data=other.out), large)


def test_imported_weights_are_no_training(config, model, run):
    path = run / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["training"]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(CheckpointError, match="no training to go on with"):
        train(replace(config, resume=True), model)


# Opening and loading.


def test_leftovers_are_swept_away(config, model, run):
    left = run / "checkpoints" / "step-00000099.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    train(replace(config, resume=True), model)
    assert not left.exists()


def test_a_run_killed_before_its_first_file_begins_again(config, model):
    open_run(config, model, TokenData(config.data))
    (config.out / "config.json").rename(config.out / "config.json.partial")
    assert train(config, model).step == 10


@pytest.mark.parametrize("name", ["config.json", "tokenizer_meta.json"])
@pytest.mark.parametrize("how", ["missing", "cut short", "empty"])
def test_damaged_descriptions_of_a_run_are_named(run, name, how):
    damage(run / name, how)
    with pytest.raises(CheckpointError, match=run.name):
        load_run(run)


def test_no_run_and_no_checkpoint(config, model, tmp_path):
    with pytest.raises(CheckpointError, match="no run folder"):
        load_run(tmp_path)
    open_run(config, model, TokenData(config.data))
    with pytest.raises(CheckpointError, match="no whole checkpoint: train it first"):
        load_run(config.out)
    assert latest_whole(config.out) is None


def test_an_exported_model_is_told_apart_from_a_run(run, tmp_path):
    from mdsd.model.hub import save_pretrained

    model, tokenizer = load_run(run)
    for words in (tokenizer, None):
        out = tmp_path / str(words is None)
        save_pretrained(model, out, words)
        with pytest.raises(CheckpointError, match=f"mdsd import --folder {out}"):
            load_run(out)


def test_reading_changes_nothing(run):
    damage(checkpoints(run)[-1].path / "model.safetensors", "one bit")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.warns(CheckpointWarning):
        load_run(run)
    with pytest.warns(CheckpointWarning):
        latest_whole(run)
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_a_read_only_folder_is_one_clear_line(config, model, monkeypatch):
    def refuse(*_, **__):
        raise ERRORS["read-only"]

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(CheckpointError, match=r"cannot write the run folder.*Read-only") as e:
            train(config, model)
    assert "\n" not in str(e.value)
    assert isinstance(e.value, MdsdError)


def test_a_checkpoint_is_its_own_description(run):
    for checkpoint in checkpoints(run):
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.path.name == f"step-{checkpoint.step:08d}"
        sums = read_seal(checkpoint.path)[1]
        assert set(sums) == {"model.safetensors", "training.pt"}
