"""Micro-batches, the average of the weights, and trainings that use them."""

import json
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mdsd.cli import main
from mdsd.config import ConfigError, preset
from mdsd.model.transformer import Losses, MiniDeepSeek
from mdsd.training.checkpoint import CheckpointError, checkpoints, load_run
from mdsd.training.data import PrepareConfig, TokenData, prepare
from mdsd.training.logs import read_log
from mdsd.training.loop import Interrupted, train
from mdsd.training.memory import (
    AveragedWeights,
    Beside,
    MemoryConfig,
    accumulate,
    blend,
    memory_state,
    memory_step,
    weigh,
)
from mdsd.training.step import TrainConfig, train_step

SMALL = preset("tiny", vocab_size=64, hidden_size=32, num_hidden_layers=2, q_lora_rank=16)
DEEP = replace(SMALL, num_nextn_predict_layers=2)


def settings_for(**changes) -> MemoryConfig:
    small = {"data": Path("data"), "out": Path("run"), "batch_size": 7, "seq_len": 12}
    return MemoryConfig(**(small | {"warmup_steps": 0, "device": "cpu"} | changes))


def sample(seed: int = 0, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (rows, 13), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].clone()


def gradient(state) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in state.model.parameters()])


# --- micro-batches ------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    number=st.integers(1, 7),
    ignored=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 11)), max_size=60),
    emptied=st.sets(st.integers(0, 6), max_size=7),
    seed=st.integers(0, 5),
)
def test_gradients_are_those_of_the_whole_batch(number, ignored, emptied, seed):
    x, y = sample(seed)
    for row, place in ignored:
        y[row, place] = -100
    y[list(emptied)] = -100
    results = []
    for micro_batches in (1, number):
        config = settings_for(micro_batches=micro_batches, balance_weight=0.1)
        state = memory_state(config, DEEP)
        losses = accumulate(state, config, x, y)
        results.append((losses, gradient(state)))
    (one, exact), (many, ours) = results
    assert (ours - exact).norm() <= 1e-6 * exact.norm()
    for part, whole in zip(many, one, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-7)
    assert torch.equal(many.expert_load, one.expert_load)


@pytest.mark.parametrize("part", range(4))
def test_each_part_of_the_loss_by_itself_is_exact(part):
    torch.manual_seed(0)
    model, (x, y) = MiniDeepSeek(DEEP).double(), sample()
    y[0, 3:], y[4, :9] = -100, -100
    gradients = []
    for rows in (7, 2):
        model.zero_grad()
        for px, py in zip(x.split(rows), y.split(rows), strict=True):
            losses = weigh(model(px, py), py, y)
            [losses.main, *losses.mtp, losses.balance][part].backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads))
    exact, ours = gradients
    assert exact.norm() > 0
    assert (ours - exact).norm() <= 1e-7 * exact.norm()  # the gate computes in float32


def test_weighed_losses_add_up_by_hand():
    y = torch.tensor([[1, 2, -100], [3, -100, -100]])  # depth 0: 2 + 1 targets, depth 1: 1 + 0
    losses = Losses(torch.tensor(5.0), torch.tensor([7.0]), torch.tensor(4.0), torch.ones(1, 2))
    first, second = weigh(losses, y[:1], y), weigh(losses, y[1:], y)
    torch.testing.assert_close(first.main, torch.tensor(10 / 3))
    assert first.mtp.tolist() == [7.0]
    assert second.mtp.tolist() == [0.0]
    assert first.balance == second.balance == 2.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("changes", [{}, {"recompute": True}, {"ema_decay": 0.9}])
def test_one_micro_batch_is_the_plain_step_bit_for_bit(dtype, changes):
    config = settings_for(dtype=dtype, **changes)
    plain, ours = memory_state(config, SMALL), memory_state(config, SMALL)
    for plain.step in range(3):
        ours.step = plain.step
        expected = train_step(plain, config, *sample(plain.step))
        report = memory_step(ours, config, *sample(plain.step))
        assert torch.equal(report.grad_norm, expected.grad_norm)
    after = ours.model.state_dict()
    assert all(torch.equal(after[name], t) for name, t in plain.model.state_dict().items())


def test_the_bias_moves_once_by_the_load_of_all():
    x, y = sample()
    states = {}
    for number in (1, 5):
        config = settings_for(micro_batches=number)
        states[number] = memory_state(config, SMALL)
        report = memory_step(states[number], config, x, y)
        assert (report.losses.expert_load.sum(-1) <= x.numel() * SMALL.num_experts_per_tok).all()
    for one, many in zip(states[1].model.gates(), states[5].model.gates(), strict=True):
        assert torch.equal(one.e_score_correction_bias, many.e_score_correction_bias)
        assert set(one.e_score_correction_bias.abs().tolist()) <= {0.0, config_speed()}


def config_speed() -> float:
    return torch.tensor(settings_for().bias_speed).item()


def test_one_micro_batch_is_in_memory_at_a_time():
    config = settings_for(micro_batches=7)
    state, alive, held = memory_state(config, SMALL), [], []

    def before(*_):
        alive.append(sum(storage() is not None for storage in held))

    def after(_, __, out):
        held.append(weakref.ref(out.untyped_storage()))

    state.model.embed_tokens.register_forward_hook(after)
    state.model.register_forward_pre_hook(before)
    accumulate(state, config, *sample())
    assert len(held) == 14
    assert alive == [0] * 7


# --- the average --------------------------------------------------------------------------------


def formula(average: torch.Tensor, weight: torch.Tensor, decay: float) -> torch.Tensor:
    return decay * average + (1 - decay) * weight


@settings(max_examples=30, deadline=None)
@given(decay=st.floats(0, 0.9999), size=st.integers(1, 5000), seed=st.integers(0, 99))
def test_blending_is_the_formula_bit_for_bit(decay, size, seed):
    generator = torch.Generator().manual_seed(seed)
    average, weight = torch.randn(2, size, generator=generator)
    expected = formula(average, weight, decay)
    blend(average, weight, decay)
    assert torch.equal(average, expected)


def averaged(steps: int, config=None) -> tuple:
    config = config or settings_for(ema_decay=0.8)
    state = memory_state(config, SMALL)
    plain = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for state.step in range(steps):
        memory_step(state, config, *sample(state.step))
        for name, parameter in state.model.named_parameters():
            plain[name] = formula(plain[name], parameter.detach(), 0.8)
    return state, plain


def test_the_average_beside_the_steps_is_the_plain_one():
    state, plain = averaged(5)
    found = state.ema.state_dict()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


def test_a_slow_average_still_reads_the_weights_of_its_step(monkeypatch):
    work = AveragedWeights.blend_all

    def slow(self, weights, arrived):
        time.sleep(0.05)
        work(self, weights, arrived)

    monkeypatch.setattr(AveragedWeights, "blend_all", slow)
    test_the_average_beside_the_steps_is_the_plain_one()


def test_the_update_runs_beside_and_is_waited_for():
    gate, average = threading.Event(), AveragedWeights(torch.nn.Linear(4, 4), 0.5)
    work = average.blend_all
    average.blend_all = lambda *args: (gate.wait(10), work(*args))
    average.update(torch.nn.Linear(4, 4))
    assert average.thread.is_alive()  # update came back before the work was done
    gate.set()
    average.wait()
    assert average.thread is None


def test_a_skipped_step_is_not_averaged_in():
    config = settings_for(ema_decay=0.8)
    state = memory_state(config, SMALL)
    before = {name: tensor.clone() for name, tensor in state.ema.state_dict().items()}
    with torch.no_grad():
        state.model.embed_tokens.weight[0, 0] = torch.nan
    memory_step(state, config, *sample())
    assert state.skipped == 1
    assert all(torch.equal(before[name], t) for name, t in state.ema.state_dict().items())


def test_no_thread_is_left_behind():
    averaged(3)[0].ema.wait()
    assert [thread.name for thread in threading.enumerate()].count("beside training") == 0


def test_an_error_in_the_thread_surfaces_once():
    beside = Beside()
    beside.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        beside.wait()
    beside.wait()
    beside.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        beside.start(lambda: None)


def test_the_model_is_itself_again_after_applied_even_after_an_error():
    state, plain = averaged(2)
    own = {name: t.clone() for name, t in state.model.state_dict().items()}
    pointers = [p.data_ptr() for p in state.model.parameters()]
    x, y = sample()
    with torch.no_grad():
        outside = state.model(x, y).main
        with state.ema.applied(state.model):
            inside = state.model(x, y).main
            named = dict(state.model.named_parameters())
            assert all(torch.equal(named[name], plain[name]) for name in plain)
        with pytest.raises(IndexError), state.ema.applied(state.model):
            state.model(x + 1000)
        assert inside != outside == state.model(x, y).main
    assert all(torch.equal(own[name], t) for name, t in state.model.state_dict().items())
    assert pointers == [p.data_ptr() for p in state.model.parameters()]


def test_averages_go_on_where_they_were_saved():
    state, _ = averaged(2)
    other = AveragedWeights(state.model, 0.8)
    other.load_state_dict(state.ema.state_dict())
    for average in (state.ema, other):
        average.update(state.model)
    saved = other.state_dict()
    assert all(torch.equal(saved[name], t) for name, t in state.ema.state_dict().items())
    with pytest.raises(ValueError, match="other parameters"):
        other.load_state_dict({"norm.weight": torch.ones(3)})


def test_the_average_does_not_share_memory_with_the_weights():
    model = torch.nn.Linear(3, 3)
    average = AveragedWeights(model, 0.9)
    with torch.no_grad():
        model.weight.fill_(7)
    assert not (average.state_dict()["weight"] == 7).any()


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("micro_batches", 0), ("micro_batches", 8), ("ema_decay", -0.1), ("ema_decay", 1.0),
     ("ema_decay", float("nan")), ("steps", 0)],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        settings_for(**{name: value})


def test_other_settings_are_refused():
    config = TrainConfig(data=Path("data"), out=Path("run"))
    state = memory_state(config, SMALL)
    assert state.ema is None
    with pytest.raises(TypeError, match="MemoryConfig"):
        memory_step(state, config, *sample())


# --- trainings ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "easy"
    prepare(PrepareConfig(out=out, stories=300, val_fraction=0.2, workers=1))
    return out


OPTIONS = {"micro_batches": 3, "recompute": True, "ema_decay": 0.7}


def files(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    last = checkpoints(run)[-1].path
    return {path.name: load_file(path) for path in last.glob("*.safetensors")}


HALF = pytest.param(OPTIONS | {"dtype": "float16"}, marks=pytest.mark.slow)  # products in float16


@pytest.mark.parametrize("changes", [OPTIONS, HALF, {"recompute": True}])
def test_stopped_and_resumed_equals_uninterrupted(data, tmp_path, changes):
    model = replace(SMALL, vocab_size=TokenData(data).meta["vocab_size"])
    config = settings_for(
        data=data, out=tmp_path / "whole", batch_size=4, eval_batches=2, steps=6, **changes
    )
    halves = replace(config, out=tmp_path / "halves")

    def stopping(state, *arguments):
        if state.step == 2:
            signal.raise_signal(signal.SIGINT)
        return memory_step(state, *arguments)

    train(config, model, memory_step, memory_state)
    with pytest.raises(Interrupted):
        train(halves, model, stopping, memory_state)
    assert checkpoints(halves.out)[-1].step == 3
    train(replace(halves, resume=True), model, memory_step, memory_state)
    whole, resumed = files(config.out), files(halves.out)
    assert whole.keys() == resumed.keys()
    assert ("ema.safetensors" in whole) == ("ema_decay" in changes)
    for name, tensors in whole.items():
        assert all(torch.equal(resumed[name][key], tensor) for key, tensor in tensors.items())


def test_a_kept_average_is_logged_saved_and_loaded(data, tmp_path):
    model = replace(SMALL, vocab_size=TokenData(data).meta["vocab_size"])
    config = settings_for(
        data=data, out=tmp_path / "run", batch_size=4, eval_every=4, eval_batches=2, steps=8,
        keep=1, **OPTIONS,
    )  # fmt: skip
    state = train(config, model, memory_step, memory_state)
    line = read_log(config.out / "log.jsonl")[-1]
    assert line["split"] == "val"
    assert line["ema"] != line["main"]
    average = load_run(config.out, ema=True)[0]
    assert not torch.equal(average.norm.weight, load_run(config.out)[0].norm.weight)
    settings_kept = json.loads((config.out / "config.json").read_text("utf-8"))["training"]
    assert settings_kept["micro_batches"] == 3
    assert state.ema.state_dict().keys() == dict(average.named_parameters()).keys()


def test_the_command_line_trains_with_all_three_and_tells_with_the_average(data, tmp_path, capsys):
    run = tmp_path / "run"
    short = "--steps 4 --batch-size 3 --seq-len 16 --warmup-steps 0 --eval-every 4 --eval-batches 1"
    shapes = "--model.hidden-size 32 --model.num-hidden-layers 2 --model.q-lora-rank 16"
    memory = "--micro-batches 2 --recompute --ema-decay 0.5"
    arguments = f"train --data {data} --out {run} {short} {memory} {shapes}"
    assert main(arguments.split()) == 0
    sample_command = f"sample --run {run} --ema --max-new-tokens 3 --seed 1"
    assert main(sample_command.split()) == 0
    assert (
        main(f"train --data {data} --out {tmp_path / 'x'} {short} --micro-batches 9".split()) == 1
    )
    assert "micro_batches is 9" in capsys.readouterr().err


def test_telling_with_an_average_that_was_not_kept_is_refused(data, tmp_path):
    model = replace(SMALL, vocab_size=TokenData(data).meta["vocab_size"])
    config = settings_for(data=data, out=tmp_path / "run", batch_size=2, steps=1, eval_batches=1)
    train(config, model, memory_step, memory_state)
    with pytest.raises(CheckpointError, match="ema_decay"):
        load_run(config.out, ema=True)
