"""One optimizer step: learning rate, parameter groups, devices, losses, clipping, balance."""

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mdsd.config import ConfigError, preset
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.step import (
    StepReport,
    TrainConfig,
    TrainingError,
    backward,
    choose_device,
    choose_dtype,
    decay_groups,
    evaluate,
    initial_state,
    learning_rate,
    mtp_weight,
    train_step,
    update,
)

SMALL = preset("tiny", vocab_size=64, hidden_size=32, num_hidden_layers=2, q_lora_rank=16)


def settings(**changes) -> TrainConfig:
    small = {"data": Path("data"), "out": Path("run"), "batch_size": 4, "seq_len": 16}
    return TrainConfig(**(small | {"warmup_steps": 0, "device": "cpu"} | changes))


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_size", -1),
        ("keep", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("grad_clip", math.inf),
        ("warmup_steps", -1),
        ("mtp_weight", -0.1),
        ("mtp_late_weight", math.nan),
        ("mtp_late_from", 1.5),
        ("mtp_late_from", math.nan),
        ("seed", -1),
    ],
)
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("steps", 10.0, "a whole number"),
        ("steps", "10", "a whole number"),
        ("batch_size", True, "a whole number"),
        ("learning_rate", "fast", "a number"),
        ("grad_clip", None, "a number"),
        ("mtp_weight", False, "a number"),
        ("resume", 1, "True or False"),
        ("tensorboard", "yes", "True or False"),
        ("device", 0, "a text"),
        ("data", "data", "a Path"),
        ("dtype", "float8", "one of auto, float32, bfloat16, float16"),
    ],
)
def test_values_of_another_type_are_refused_by_name(name, value, kind):
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; it must be {kind}$"):
        settings(**{name: value})


def test_every_setting_has_a_type_that_is_checked():
    """Also those that a later chapter adds: no type is unknown, and none lets anything pass."""
    for name in (field.name for field in fields(TrainConfig)):
        with pytest.raises(ConfigError, match=f"^{name} is "):
            settings(**{name: ["nothing", "like", "it"]})
    assert settings(learning_rate=1).learning_rate == 1  # a whole number is a number


def test_learning_rate_rises_then_falls_to_a_tenth():
    config = settings(steps=1000, warmup_steps=100, learning_rate=1.0)
    rates = np.array([learning_rate(step, config) for step in range(1001)])
    assert rates[0] == 0.01
    assert rates[99] == rates[100] == 1.0
    assert rates[550] == pytest.approx(0.55)  # half way down the cosine
    assert rates[1000] == pytest.approx(0.1)
    assert (np.diff(rates[:100]) > 0).all()
    assert (np.diff(rates[100:]) < 0).all()


def test_a_warm_up_longer_than_the_run_never_ends():
    config = settings(steps=10, warmup_steps=100, learning_rate=1.0)
    assert learning_rate(9, config) == pytest.approx(0.1)


def test_the_weight_of_mtp_falls_where_v3_let_it_fall():
    """0.3 for the first 10 of 14.8 trillion tokens, 0.1 for the remaining 4.8 [V3] section 4.2."""
    config = settings(steps=1480)
    weights = [mtp_weight(step, config) for step in range(1480)]
    assert weights == [0.3] * 1000 + [0.1] * 480


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, [0.2] * 4), (0.25, [0.5, 0.2, 0.2, 0.2]), (0.9, [0.5] * 4), (1.0, [0.5] * 4)],
)
def test_the_weight_of_mtp_switches_once_at_a_share_of_the_run(share, expected):
    config = settings(steps=4, mtp_weight=0.5, mtp_late_weight=0.2, mtp_late_from=share)
    assert [mtp_weight(step, config) for step in range(4)] == expected


@pytest.mark.parametrize("step", [0, 6, 7, 9])
def test_a_step_weighs_mtp_by_its_place_in_the_run(step: int):
    """A state at step 7 of 10, resumed or not, is weighed with the late weight."""
    config = settings(steps=10, mtp_weight=3.0, mtp_late_weight=0.5, balance_weight=0.0)
    state = initial_state(config, SMALL)
    state.step = step
    losses = state.model(*sample())
    expected = losses.main + (3.0 if step < 7 else 0.5) * losses.mtp.mean()
    expected = torch.autograd.grad(expected, list(state.model.parameters()))
    backward(state, config, *sample())
    for parameter, gradient in zip(state.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("depths", [0, 1, 3])
def test_every_depth_is_reported_in_training_and_evaluation(depths: int):
    tokens = np.random.default_rng(0).integers(64, size=500).astype("<u2")
    state = initial_state(settings(), replace(SMALL, num_nextn_predict_layers=depths))
    for losses in (
        train_step(state, settings(), *sample()).losses,
        evaluate(state, settings(eval_batches=2), tokens),
    ):
        assert losses.mtp.shape == (depths,)
        assert losses.mtp.isfinite().all()


def test_matrices_decay_and_gains_do_not():
    model = MiniDeepSeek(SMALL)
    decayed, kept = decay_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("norm" in names[id(p)] for p in kept["params"])
    assert not any("norm" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_one_step_is_adamw_as_published():
    config = settings(grad_clip=1e9, learning_rate=1e-2, weight_decay=0.1)
    state = initial_state(config, SMALL)
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    twin = MiniDeepSeek(SMALL)
    twin.load_state_dict(state.model.state_dict())
    twin(*sample()).total(config.mtp_weight, config.balance_weight).backward()
    train_step(state, config, *sample())
    for (name, parameter), other in zip(
        state.model.named_parameters(), twin.parameters(), strict=True
    ):
        grad = other.grad
        decay = config.weight_decay if parameter.dim() > 1 else 0.0
        # After one step both bias-corrected moments are the gradient and its square.
        expected = before[name] * (1 - 1e-2 * decay) - 1e-2 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, atol=2e-6, rtol=1e-5)
    assert state.optimizer.defaults["betas"] == (0.9, 0.95)


def test_first_loss_is_that_of_guessing():
    losses = initial_state(settings(), SMALL).model(*sample())
    # Random logits have the variance D·std², which adds half of it to ln V (chapter 7).
    expected = math.log(64) + SMALL.hidden_size * SMALL.initializer_range**2 / 2
    assert abs(losses.main.item() - expected) < 0.2
    assert (losses.mtp - expected).abs().max() < 0.2


def test_one_batch_is_learned_by_heart():
    config = settings(learning_rate=1e-2)
    state = initial_state(config, SMALL)
    losses = [train_step(state, config, *sample()).losses.main.item() for _ in range(120)]
    assert losses[-1] < 0.1


def test_a_long_gradient_is_shortened():
    config = settings(grad_clip=0.5)
    state = initial_state(config, SMALL)
    seen = []
    state.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            torch.linalg.vector_norm(
                torch.cat([p.grad.flatten() for p in state.model.parameters()])
            )
        )
    )
    report = train_step(state, config, *sample())
    assert report.grad_norm > 0.5
    torch.testing.assert_close(seen[0], torch.tensor(0.5), atol=1e-4, rtol=0)


def test_the_balance_bias_moves_once_a_step():
    config = settings(bias_speed=0.25)
    state = initial_state(config, SMALL)
    load = train_step(state, config, *sample()).losses.expert_load
    assert load[0].sum() == 4 * 16 * SMALL.num_experts_per_tok
    for gate, counts in zip(state.model.gates(), load.float(), strict=True):
        expected = 0.25 * (counts.mean() - counts).sign()
        torch.testing.assert_close(gate.e_score_correction_bias, expected)


def test_update_leaves_no_gradient():
    config = settings()
    state = initial_state(config, SMALL)
    losses = state.model(*sample())
    losses.main.backward()
    update(state, config, losses)
    assert all(p.grad is None for p in state.model.parameters())


def everything(state) -> dict[str, torch.Tensor]:
    """A copy of all that a step may move: weights, biases, the optimizer's means and counters."""
    found = {name: value.clone() for name, value in state.model.state_dict().items()}
    for index, moments in state.optimizer.state_dict()["state"].items():
        found |= {f"{index} {name}": value.clone() for name, value in moments.items()}
    return found


def lost_gradient(state, config, x, y):
    state.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    return train_step(state, config, x, y)


def lost_loss(part):
    def step(state, config, x, y):
        losses = backward(state, config, x, y)
        losses = losses._replace(**{part: getattr(losses, part) * math.nan})
        return StepReport(losses, update(state, config, losses))

    return step


@pytest.mark.parametrize(
    "step", [lost_gradient, lost_loss("main"), lost_loss("mtp"), lost_loss("balance")]
)
def test_a_step_that_is_not_finite_moves_nothing_and_is_counted(step):
    config = settings(bias_speed=0.25)
    state = initial_state(config, SMALL)
    train_step(state, config, *sample())
    before = everything(state)
    for number in (1, 2):
        step(state, config, *sample(number))
        assert (state.skipped, state.skipped_in_a_row) == (number, number)
    after = everything(state)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in state.model.parameters())
    state.model.norm.weight._backward_hooks = None
    train_step(state, config, *sample())
    assert (state.skipped, state.skipped_in_a_row) == (2, 0)
    assert not torch.equal(state.model.norm.weight, before["norm.weight"])


def test_float16_skips_while_its_scale_is_too_high():
    config = settings(dtype="float16")
    state = initial_state(config, SMALL)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = everything(state)
    report = train_step(state, config, *sample())
    assert not report.grad_norm.isfinite()
    assert all(torch.equal(value, before[name]) for name, value in everything(state).items())
    assert (state.skipped, state.scaler.get_scale()) == (1, 2.0**39)
    while state.skipped_in_a_row:
        train_step(state, config, *sample())
    assert 1 < state.skipped < 40
    assert not torch.equal(state.model.lm_head.weight, before["lm_head.weight"])


def test_evaluation_changes_nothing_and_ignores_the_seed():
    tokens = np.random.default_rng(0).integers(64, size=1000).astype("<u2")
    config = settings(eval_batches=3)
    state = initial_state(config, SMALL)
    before = {name: t.clone() for name, t in state.model.state_dict().items()}
    torch_state = torch.get_rng_state()
    first = evaluate(state, config, tokens)
    second = evaluate(state, replace(config, seed=9), tokens)
    assert first.main == second.main
    assert state.model.training
    assert torch.equal(torch_state, torch.get_rng_state())
    assert all(torch.equal(t, before[name]) for name, t in state.model.state_dict().items())


def test_evaluation_weighs_a_small_last_batch_by_its_rows():
    tokens = np.random.default_rng(0).integers(64, size=16 * 5 + 1).astype("<u2")  # 5 windows
    state = initial_state(settings(), SMALL)
    whole = evaluate(state, settings(batch_size=5, eval_batches=9), tokens)
    parts = evaluate(state, settings(batch_size=4, eval_batches=9), tokens)
    torch.testing.assert_close(whole.main, parts.main)
    assert torch.equal(whole.expert_load, parts.expert_load)


def test_the_same_seed_gives_the_same_model():
    first, second, other = (
        initial_state(settings(seed=s), SMALL).model.lm_head.weight for s in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_learns_too_and_keeps_float32_weights(dtype):
    config = settings(dtype=dtype, learning_rate=1e-2)
    state = initial_state(config, SMALL)
    losses = [train_step(state, config, *sample()).losses.main.item() for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5
    assert all(p.dtype == torch.float32 for p in state.model.parameters())
    assert state.scaler.is_enabled() == (dtype == "float16")


def test_devices_and_formats():
    assert choose_device("cpu").type == "cpu"
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    with pytest.raises(TrainingError, match="this machine has cpu"):
        choose_device("cuda:99")
    with pytest.raises(TrainingError, match="'typo' is not here"):
        choose_device("typo")
    with pytest.raises(TrainingError, match="float8"):
        choose_dtype("float8", torch.device("cpu"))


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_cuda_takes_bfloat16_where_the_hardware_has_it(monkeypatch, native, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert choose_dtype("auto", torch.device("cuda")) == expected
