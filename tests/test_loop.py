"""The training loop and the run folder it leaves: exact resume, signals, checkpoints, errors."""

import json
import random
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from mdsd.config import MdsdError, from_dict, preset
from mdsd.training.checkpoint import CheckpointError, checkpoints, load_run
from mdsd.training.data import PrepareConfig, TokenData, batch, prepare
from mdsd.training.logs import LogError, progress_text, read_log
from mdsd.training.loop import Interrupted, TrainingError, train
from mdsd.training.pictures import draw_losses
from mdsd.training.resume import restore, save_checkpoint
from mdsd.training.step import (
    StepReport,
    TrainConfig,
    backward,
    initial_state,
    learning_rate,
    train_step,
    update,
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
CLOCKS = ("tokens_per_second", "mfu")
LOSSES = ("main", "mtp", "balance", "max_violation", "grad_norm", "learning_rate")


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
    return TrainConfig(
        data=data,
        out=tmp_path / "run",
        steps=10,
        batch_size=2,
        seq_len=16,
        warmup_steps=2,
        eval_every=4,
        eval_batches=2,
        save_every=3,
        device="cpu",
    )


def noisy_step(state, config, x, y):
    """A step that draws from every random generator, as dropout would."""
    report = train_step(state, config, x, y)
    noise = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002
    with torch.no_grad():
        state.model.lm_head.weight += 1e-3 * noise
    return report


def stop_after(step: int):
    """A step function that presses Ctrl-C during the step of that number."""

    def stepping(state, config, x, y):
        if state.step + 1 == step:
            signal.raise_signal(signal.SIGINT)
        return noisy_step(state, config, x, y)

    return stepping


def log_losses(run: Path) -> list[dict]:
    """The log without what depends on the clock."""
    log = read_log(run / "log.jsonl")
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in log]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoints(run)[-1].path / "model.safetensors")


def assert_same_run(first: Path, second: Path) -> None:
    assert log_losses(first) == log_losses(second)
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    one, other = (
        torch.load(checkpoints(run)[-1].path / "training.pt", weights_only=True)
        for run in (first, second)
    )
    assert one["scaler"] == other["scaler"]
    for index, moments in one["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, other["optimizer"]["state"][index][name]), (index, name)


def test_a_run_leaves_what_it_promises(config, model, capsys):
    state = train(config, model)
    assert state.step == 10
    names = {path.name for path in config.out.iterdir()}
    assert names == {"config.json", "tokenizer_meta.json", "log.jsonl", "loss.png", "checkpoints"}
    assert (config.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((config.out / "config.json").read_text(encoding="utf-8"))
    assert from_dict(values) == model
    for name in ("learning_rate", "mtp_weight", "mtp_late_weight", "mtp_late_from"):
        assert values["training"][name] == getattr(config, name)
    log = read_log(config.out / "log.jsonl")
    assert [line["step"] for line in log if line["split"] == "train"] == list(range(1, 11))
    assert [line["step"] for line in log if line["split"] == "val"] == [4, 8, 10]
    assert all(len(line["mtp"]) == 1 for line in log)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loss" in captured.err
    assert "tokens/s" in captured.err


@pytest.mark.parametrize("depths", [0, 1, 3])
def test_every_depth_is_logged_drawn_and_shown(depths, config, model, capsys):
    train(config, replace(model, num_nextn_predict_layers=depths))
    log = read_log(config.out / "log.jsonl")
    assert {len(line["mtp"]) for line in log} == {depths}
    axes = Figure().subplots()
    draw_losses(axes, log)
    for depth in range(1 + depths):
        label = f"MTP depth {depth}" if depth else "main"
        for split in ("train", "val"):
            expected = [
                [line["main"], *line["mtp"]][depth] for line in log if line["split"] == split
            ]
            (curve,) = (c for c in axes.lines if c.get_label() == f"{label}, {split}")
            assert curve.get_ydata().tolist() == expected
    assert len(axes.lines) == 2 * (1 + depths)
    shown = progress_text(log[-2])
    assert shown.count(".") == 1 + depths
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("stop", [3, 5, 9])  # at a save, between two, beside an evaluation
def test_stopped_and_resumed_equals_uninterrupted(config, model, stop):
    whole = replace(config, out=config.out.with_name("whole"))
    train(whole, model, step=noisy_step)
    with pytest.raises(Interrupted, match=f"step {stop} of 10"):
        train(config, model, step=stop_after(stop))
    assert checkpoints(config.out)[-1].step == stop
    train(replace(config, resume=True), model, step=noisy_step)
    assert_same_run(whole.out, config.out)


def test_float16_resumes_with_its_loss_scale(config, model):
    config = replace(config, dtype="float16", steps=4)
    whole = replace(config, out=config.out.with_name("whole"))
    train(whole, model, step=noisy_step)
    with pytest.raises(Interrupted):
        train(config, model, step=stop_after(2))
    train(replace(config, resume=True), model, step=noisy_step)
    assert_same_run(whole.out, config.out)


def test_a_second_signal_leaves_at_once(config, model):
    def impatient(*arguments):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return train_step(*arguments)

    with pytest.raises(KeyboardInterrupt):
        train(config, model, step=impatient)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_last_and_the_best_checkpoint_stay(config, model):
    train(replace(config, steps=12, save_every=1, keep=2), model)
    found = checkpoints(config.out)
    assert [c.step for c in found][-2:] == [11, 12]
    vals = {
        line["step"]: line["main"]
        for line in read_log(config.out / "log.jsonl")
        if line["split"] == "val"
    }
    best = min(vals, key=vals.get)
    assert {c.step for c in found} == {11, 12, best}
    # A worse model later does not displace the best one.
    config = replace(config, out=config.out.with_name("worse"), steps=12, keep=1)

    def ever_worse(state, config, x, y):
        report = train_step(state, config, x, y)
        if state.step >= 4:
            with torch.no_grad():
                state.model.lm_head.weight.mul_(2)
        return report

    train(config, model, step=ever_worse)
    assert [c.step for c in checkpoints(config.out)] == [4, 12]
    loaded, _ = load_run(config.out)
    best = load_file(checkpoints(config.out)[0].path / "model.safetensors")
    assert torch.equal(loaded.lm_head.weight, best["lm_head.weight"])


def test_a_resumed_run_remembers_its_best_loss(config, model):
    with pytest.raises(Interrupted):
        train(config, model, step=stop_after(5))
    best = checkpoints(config.out)[-1].best_loss

    def ruined(state, config, x, y):
        report = train_step(state, config, x, y)
        with torch.no_grad():
            state.model.lm_head.weight.mul_(-3)
        return report

    train(replace(config, resume=True), model, step=ruined)
    assert checkpoints(config.out)[-1].validation_loss > best
    assert checkpoints(config.out)[-1].best_loss == best


def test_load_run_needs_no_data_set(config, model):
    state = train(config, model)
    tokenizer = TokenData(config.data).tokenizer
    loaded, loaded_tokenizer = load_run(config.out)
    assert not loaded.training
    assert loaded_tokenizer.encode("Tom has a ball.") == tokenizer.encode("Tom has a ball.")
    assert loaded.config == state.model.config


def test_each_step_gets_its_own_batch_at_its_own_rate(config, model):
    seen = []

    def recording(state, config, x, y):
        seen.append((x, y, state.optimizer.param_groups[0]["lr"]))
        return train_step(state, config, x, y)

    train(config, model, step=recording)
    tokens = TokenData(config.data).split("train")
    for step, (x, y, rate) in enumerate(seen):
        expected = batch(tokens, config.batch_size, config.seq_len, config.seed, step)
        assert torch.equal(x, expected[0])
        assert torch.equal(y, expected[1])
        assert rate == learning_rate(step, config)


def test_another_step_function_takes_the_middle(config, model):
    """Half a batch at a time: the loop does not know how a step is computed."""

    def halves(state, config, x, y):
        parts = [backward(state, config, a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        load = parts[0].expert_load + parts[1].expert_load
        losses = parts[0]._replace(expert_load=load)
        return StepReport(losses, update(state, config, losses))

    whole = replace(config, out=config.out.with_name("whole"), balance_weight=0.0)
    train(replace(config, balance_weight=0.0), model, step=halves)
    train(whole, model)
    for name, value in weights(whole.out).items():
        torch.testing.assert_close(weights(config.out)[name], value, atol=1e-3, rtol=1e-3)


def breaking(at: int, fault, mend: int | None = None):
    """A step function that breaks the model before the step of that number (1 first)."""

    def step(state, config, x, y):
        if state.step + 1 == at:
            fault(state.model)
        if state.step + 1 == mend:
            state.model.norm.weight._backward_hooks = None
        return train_step(state, config, x, y)

    return step


def spoil(name: str, row=...):
    def fault(model):
        model.get_parameter(name).data[row] = torch.nan

    return fault


def lose_gradient(model):
    model.norm.weight.register_hook(lambda gradient: gradient * torch.nan)


FAULTS = {
    "attention": (spoil("layers.1.self_attn.kv_b_proj.weight", 3), "layers.1.self_attn.kv_b_proj"),
    "gain": (spoil("layers.0.input_layernorm.weight", 3), "layers.0.input_layernorm"),
    "all experts": (spoil("layers.1.mlp.experts.down_proj"), "layers.1.mlp.experts.down_proj[0]"),
    "gate": (spoil("layers.1.mlp.gate.weight", 0), "layers.1.mlp.gate"),
    "MTP": (spoil("mtp.0.eh_proj.weight", 0), "mtp.0.eh_proj"),
    "embedding": (spoil("embed_tokens.weight"), "embed_tokens"),
    "head": (spoil("lm_head.weight", 0), "lm_head.weight"),
    "gradient": (lose_gradient, "began in the gradient of norm.weight."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_steps_end_with_the_layer_and_the_last_good_checkpoint(fault, config, model):
    break_it, place = FAULTS[fault]
    config = replace(config, steps=30, eval_every=50, save_every=5)
    with pytest.raises(TrainingError) as stop:
        train(config, model, step=breaking(6, break_it))
    message = str(stop.value)
    assert message.startswith("5 steps in a row, the last of them 10,")
    assert "\n" not in message
    assert place in message
    assert [c.step for c in checkpoints(config.out)] == [5]
    assert str(checkpoints(config.out)[-1].path) in message
    assert all(value.isfinite().all() for value in weights(config.out).values())


def test_five_broken_steps_in_a_row_end_a_run_that_never_saved(config, model):
    config = replace(config, steps=30, eval_every=50, save_every=50)
    with pytest.raises(
        TrainingError, match=r"5 steps in a row, the last of them 5,.*began in"
    ) as stop:
        train(config, model, step=breaking(1, spoil("embed_tokens.weight")))
    assert "No checkpoint was saved before" in str(stop.value)


def test_an_expert_that_few_tokens_visit_is_never_saved(config, model):
    """Too few tokens for five skipped steps in a row: the weights are looked at when saved."""
    fault = spoil("layers.1.mlp.experts.gate_up_proj", (2, 0))
    with pytest.raises(TrainingError, match=r"layers\.1\.mlp\.experts\.gate_up_proj\[2\]"):
        train(replace(config, batch_size=1, seq_len=2), model, step=breaking(2, fault))
    assert not checkpoints(config.out)


def test_a_few_lost_steps_are_skipped_logged_and_survived(config, model):
    state = train(config, model, step=breaking(3, lose_gradient, mend=6))
    assert (state.step, state.skipped, state.skipped_in_a_row) == (10, 3, 0)
    log = [line for line in read_log(config.out / "log.jsonl") if line["split"] == "train"]
    assert [line["skipped"] for line in log] == [0, 0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert [line["grad_norm"] is None for line in log] == [False] * 2 + [True] * 3 + [False] * 5


def test_float16_stops_when_its_scale_has_fallen_below_one(config, model):
    config = replace(config, steps=30, eval_every=50, save_every=50, dtype="float16")
    with pytest.raises(TrainingError, match="17 steps in a row"):  # 2^16, halved to 1/2
        train(config, model, step=breaking(1, lose_gradient))


def test_the_validation_line_has_acceptance_and_the_average(config, model):
    """The average, here: the weights with the head turned around, so that its loss is another."""

    class Average:
        def state_dict(self):
            return {}

        def load_state_dict(self, averages):
            pass

        @contextmanager
        def applied(self, model):
            model.lm_head.weight.data.neg_()
            yield
            model.lm_head.weight.data.neg_()

    def averaged(config, model_config):
        state = initial_state(config, model_config)
        state.ema = Average()
        return state

    train(config, model, state=averaged)
    plain = replace(config, out=config.out.with_name("plain"))
    train(plain, model)
    for line, other in zip(log_losses(config.out), log_losses(plain.out), strict=True):
        if line["split"] == "val":
            assert line.pop("ema") > line["main"]
            assert len(line["acceptance"]) == 1
        assert line == other


def test_the_log_of_a_run_has_all_its_entries(config, model):
    train(replace(config, tensorboard=True), model)
    for line in read_log(config.out / "log.jsonl"):
        more = {"acceptance"}
        if line["split"] == "train":
            more = {"grad_norm", "learning_rate", "skipped", "tokens_per_second", "mfu"}
        assert line.keys() == {"split", "step", "main", "mtp", "balance", "max_violation"} | more
        assert line["split"] == "val" or 0 < line["mfu"] < 1.5
    assert list((config.out / "tensorboard").glob("events*"))


def test_tensorboard_that_is_missing_is_said_before_anything_is_written(config, model, monkeypatch):
    def missing():
        raise LogError("TensorBoard is not installed: `pip install tensorboard`")

    monkeypatch.setattr("mdsd.training.loop.board_writer", missing)
    with pytest.raises(LogError, match="pip install tensorboard"):
        train(replace(config, tensorboard=True), model)
    assert not config.out.exists()


def test_a_second_signal_while_a_checkpoint_is_written(config, model, monkeypatch):
    """The first Ctrl-C asks for a checkpoint, and the second comes while it is half written."""
    import mdsd.training.resume as resume

    usual = resume.save_file

    def interrupted(tensors, path):
        usual(tensors, path)
        if "step-00000005" in str(path):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(resume, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config, model, step=stop_after(5))
    assert [c.step for c in checkpoints(config.out)] == [3, 4]
    monkeypatch.undo()
    train(replace(config, resume=True), model, step=noisy_step)
    whole = replace(config, out=config.out.with_name("whole"))
    train(whole, model, step=noisy_step)
    assert_same_run(whole.out, config.out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_interruption_says_which_signal_it_was(number, config, model):
    def ask(state, config, x, y):
        if state.step == 3:
            signal.raise_signal(number)
        return train_step(state, config, x, y)

    with pytest.raises(Interrupted, match="after step 4 of 10") as stop:
        train(config, model, step=ask)
    assert stop.value.signal == number
    assert checkpoints(config.out)[-1].step == 4


def test_a_folder_with_a_run_is_refused_and_left_alone(config, model):
    train(config, model)
    before = {p: p.read_bytes() for p in config.out.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="already holds a run"):
        train(config, model)
    assert before == {p: p.read_bytes() for p in config.out.rglob("*") if p.is_file()}


def test_what_cannot_be_resumed(config, model, data, tmp_path):
    with pytest.raises(CheckpointError, match="no run to resume"):
        train(replace(config, resume=True), model)
    assert not config.out.exists()
    train(config, model)
    other = replace(model, moe_intermediate_size=48)
    with pytest.raises(CheckpointError, match="moe_intermediate_size=96"):
        train(replace(config, resume=True), other)
    prepare(PrepareConfig(out=tmp_path / "full", stories=300, vocabulary="full", workers=1))
    large = replace(model, vocab_size=50_257)
    second = replace(config, out=tmp_path / "second", steps=1)
    train(second, large)
    with pytest.raises(CheckpointError, match="another vocabulary"):
        train(replace(second, data=tmp_path / "full", resume=True), large)


def test_a_finished_run_resumes_to_nothing_or_goes_on(config, model):
    train(config, model)
    resumed = replace(config, resume=True)
    before = log_losses(config.out)
    assert train(resumed, model).step == 10
    assert log_losses(config.out) == before
    assert train(replace(resumed, steps=12), model).step == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 100_000}, "max_position_embeddings"),
        ({"device": "cuda:7"}, "cuda:7"),
        ({"preset": "huge"}, "huge"),
    ],
)
def test_misfits_are_named_before_anything_is_written(config, changes, message):
    with pytest.raises(MdsdError, match=message):
        train(replace(config, **changes))
    assert not config.out.exists()


def test_too_little_data_and_too_small_a_vocabulary(config, model):
    with pytest.raises(TrainingError, match="vocab_size"):
        train(config, replace(model, vocab_size=100))
    long = replace(model, max_position_embeddings=10**6)
    with pytest.raises(TrainingError, match="split holds"):
        train(replace(config, seq_len=500_000), long)
    assert not config.out.exists()


def test_an_out_that_is_a_file(config, model):
    config.out.write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is a file"):
        train(config, model)
    assert config.out.read_text(encoding="utf-8") == "mine"


def test_an_out_that_holds_other_files(config, model):
    config.out.mkdir()
    (config.out / "log.jsonl").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"holds other files \(log.jsonl\)"):
        train(config, model)
    assert [path.name for path in config.out.iterdir()] == ["log.jsonl"]
    assert (config.out / "log.jsonl").read_text(encoding="utf-8") == "mine"


def test_a_run_that_has_gone_further_than_asked(config, model):
    train(replace(config, steps=3), model)
    before = (config.out / "config.json").read_text(encoding="utf-8")
    with pytest.raises(CheckpointError, match="at step 3 already"):
        train(replace(config, steps=2, resume=True), model)
    assert (config.out / "config.json").read_text(encoding="utf-8") == before
    assert train(replace(config, steps=3, resume=True), model).step == 3


def test_nothing_is_saved_on_schedule_while_steps_are_skipped(config, model):
    """Weights on their way to be lost must not push out the checkpoints that are good."""

    def broken(state, config, x, y):
        if state.step >= 3:
            x, y = x.clone(), y.clone()
            with torch.no_grad():
                state.model.lm_head.weight.fill_(1e30)  # finite, and no use
        return train_step(state, config, x, y)

    with pytest.raises(TrainingError, match="step-00000003"):
        train(replace(config, steps=20, save_every=1), model, step=broken)
    assert [c.step for c in checkpoints(config.out)][-1] == 3


def test_other_settings_are_another_try(config, model):
    with pytest.raises(Interrupted):
        train(config, model, step=stop_after(5))
    seen = []

    def step(state, config, x, y):
        seen.append(state.skipped_in_a_row)
        return train_step(state, config, x, y)

    path = checkpoints(config.out)[-1]
    state = initial_state(config, model)
    restore(state, path)
    state.skipped_in_a_row = 4
    shutil.rmtree(path.path)
    save_checkpoint(state, config.out, None)
    train(replace(config, resume=True, change=True, learning_rate=1e-4), model, step=step)
    assert seen[0] == 0


def test_a_step_larger_than_the_data_is_refused(config, model):
    with pytest.raises(TrainingError, match="lower batch_size"):
        train(replace(config, batch_size=10**6), model)
    assert not config.out.exists()
