"""The log: what a kill leaves, lost numbers, speed, acceptance, TensorBoard."""

import builtins
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mdsd.config import preset
from mdsd.counting import count_by, parameter_shapes, shares
from mdsd.model.transformer import Losses
from mdsd.training.logs import (
    LogError,
    RunLog,
    Speed,
    acceptance,
    board_writer,
    broken_tensor,
    find_origin,
    flat,
    flops_per_token,
    is_finite,
    loss_record,
    matmul_peak,
    plain,
    progress_text,
    read_log,
)
from mdsd.training.step import TrainConfig, initial_state, train_step

SMALL = preset("tiny", vocab_size=64, hidden_size=32, num_hidden_layers=2, q_lora_rank=16)
CONFIG = TrainConfig(
    data=Path("data"), out=Path("run"), batch_size=4, seq_len=16, eval_batches=2, device="cpu"
)
WORDS = np.random.default_rng(0).integers(64, size=400).astype("<u2")


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(WORDS[:68].astype(np.int64)).view(4, 17)
    return tokens[:, :-1], tokens[:, 1:]


# --- reading and writing ------------------------------------------------------------------------


@pytest.mark.parametrize("end", ['{"step": 3, "ma', "\0\0\0\0", "5\n", '{"main": 1.0}\n', "\n\n"])
def test_what_a_kill_leaves_at_the_end_is_dropped(tmp_path, end):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + end, encoding="utf-8")
    assert read_log(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("damage", ['{"step": 2, "ma', "{}", "[1]", "\0", ""])
def test_damage_before_whole_lines_is_named(tmp_path, damage):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n', encoding="utf-8")
    with pytest.raises(LogError, match=r"log\.jsonl is damaged in line 2"):
        read_log(path)


def test_bytes_that_are_no_text_are_damage_too(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n')
    assert read_log(path) == [{"step": 1}]
    assert read_log(tmp_path / "none.jsonl") == []


def test_a_log_is_opened_at_a_step(tmp_path):
    with RunLog(tmp_path, step=0) as log:
        for step in range(1, 5):
            log.write({"split": "train", "step": step})
    with RunLog(tmp_path, step=2) as log:
        log.write({"split": "train", "step": 3, "again": True})
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]
    assert read_log(tmp_path / "log.jsonl")[-1]["again"]


def test_each_line_is_on_the_disk_at_once(tmp_path):
    with RunLog(tmp_path, step=0) as log:
        for step in (1, 2):
            log.write({"split": "train", "step": step})
            assert len(read_log(tmp_path / "log.jsonl")) == step


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    values = {"main": math.nan, "mtp": [math.inf, 1.5], "grad_norm": -math.inf, "skipped": 3}
    with RunLog(tmp_path, step=0) as log:
        log.write({"split": "train", "step": 1} | values)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    line = json.loads(text, parse_constant=refuse)
    assert line == {
        "split": "train", "step": 1, "main": None, "mtp": [None, 1.5], "grad_norm": None,
        "skipped": 3,
    }  # fmt: skip
    assert plain(math.pi) == math.pi


# --- what is logged -----------------------------------------------------------------------------


@pytest.mark.parametrize("depths", [0, 1, 3])
def test_the_record_has_each_part_exactly(depths):
    mtp = torch.rand(depths)
    losses = Losses(torch.tensor(1.1), mtp, torch.tensor(0.7), torch.tensor([[6, 2], [3, 5]]))
    record = loss_record(losses)
    assert record["main"] == losses.main.item()
    assert record["mtp"] == mtp.tolist()
    assert record["balance"] == losses.balance.item()
    assert record["max_violation"] == pytest.approx((0.5 + 0.25) / 2)


def test_a_model_without_experts_has_no_violation():
    losses = Losses(torch.ones(()), torch.ones(1), torch.zeros(()), torch.zeros(0, 8).long())
    assert loss_record(losses)["max_violation"] == 0.0


def test_the_progress_bar_says_what_was_skipped_and_bears_a_lost_loss():
    line = {"main": math.nan, "mtp": [2.5], "tokens_per_second": 1234, "mfu": 0.256, "skipped": 0}
    assert progress_text(line) == "loss nan, MTP 2.500, 1,234 tokens/s, MFU 26%"
    assert progress_text(line | {"skipped": 2, "mtp": []}).endswith("MFU 26%, 2 skipped")


def test_speed_is_of_the_last_steps():
    speed = Speed(flops_a_token=1e6, peak=1e10, steps=3)
    assert speed.record(100, 1.0) == {"tokens_per_second": 100, "mfu": 0.01}
    for _ in range(3):
        last = speed.record(100, 0.1)
    assert last == {"tokens_per_second": 1000, "mfu": 0.1}


@pytest.mark.parametrize("depths", [0, 1, 2])
def test_operations_of_every_matrix_that_works(depths):
    """3 · 2 a weight that multiplies, the head once a depth, and the causal half of the scores."""
    config = preset("tiny", num_nextn_predict_layers=depths)
    shapes = parameter_shapes(config)
    active = sum(active for _, active in count_by("place", shares(config)).values())
    embedding = math.prod(shapes["embed_tokens.weight"])
    scores = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * 128 / 2
    layers = config.num_hidden_layers + depths
    expected = 6 * (active - embedding + depths * embedding) + 6 * layers * scores
    assert flops_per_token(config, 128) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_above_what_a_small_product_reaches(dtype):
    before = torch.get_rng_state()
    peak = matmul_peak(torch.device("cpu"), dtype, seconds=0.05)
    assert torch.equal(before, torch.get_rng_state())
    assert 1e8 < peak < 1e15


# --- acceptance ---------------------------------------------------------------------------------


class Scripted:
    """A stand-in for a model: its depths predict what functions of the tokens say."""

    def __init__(self, *depths):
        self.script, self.mtp = depths, [None] * (len(depths) - 1)
        self.lm_head = lambda h: torch.nn.functional.one_hot(h, 64)

    def depths(self, x):
        for k, predict in enumerate(self.script):
            yield predict(x)[:, : x.shape[1] - k], None

    def eval(self):
        return self

    train = eval


def test_acceptance_compares_predictions_of_the_same_token():
    """Depth k at place i and the main model at place i + k speak of one token."""
    state = initial_state(CONFIG, SMALL)

    def main(x):
        return x

    def one_on(x):
        return x.roll(-1, dims=1)

    def two_on(x):
        return x.roll(-2, dims=1)

    state.model = Scripted(main, one_on, two_on)
    assert acceptance(state, CONFIG, WORDS) == [1.0, 1.0]
    state.model = Scripted(main, two_on, one_on)
    assert max(acceptance(state, CONFIG, WORDS)) < 0.2
    state.model = Scripted(main)
    assert acceptance(state, CONFIG, WORDS) == []


def test_acceptance_is_that_of_the_models_own_logits_and_changes_nothing():
    config = replace(SMALL, num_nextn_predict_layers=2)
    state = initial_state(CONFIG, config)
    before = torch.get_rng_state()
    shares = acceptance(state, replace(CONFIG, eval_batches=1), WORDS)
    assert torch.equal(before, torch.get_rng_state())
    assert state.model.training
    x = torch.from_numpy(WORDS[:64].astype(np.int64)).view(4, 16)
    with torch.no_grad():
        best = [state.model.lm_head(h).argmax(-1) for h, _ in state.model.depths(x)]
    for k in (1, 2):
        same = best[k] == best[0][:, k:]
        assert shares[k - 1] == pytest.approx(same.float().mean().item())


# --- TensorBoard --------------------------------------------------------------------------------


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, step=0, tensorboard=True) as log:
        for step in (1, 2, 3):
            log.write({"split": "train", "step": step, "main": 1 / step, "mtp": [2.0, math.nan]})
    with RunLog(tmp_path, step=2, tensorboard=True) as log:
        log.write({"split": "train", "step": 3, "main": 7.0})
        log.write({"split": "val", "step": 3, "main": 8.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"main/train", "main/val", "mtp_1/train"}
    found = [(event.step, event.value) for event in events.Scalars("main/train")]
    assert found == [(1, 1.0), (2, 0.5), (3, 7.0)]
    assert len(read_log(tmp_path / "log.jsonl")) == 4


def test_without_tensorboard_a_line_says_what_to_install(monkeypatch):
    usual = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LogError, match="pip install tensorboard"):
        board_writer()


def test_nobody_pays_for_tensorboard_who_did_not_ask(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with RunLog(tmp_path, step=0) as log:
        log.write({"split": "train", "step": 1, "main": 1.0})
    assert "torch.utils.tensorboard" not in sys.modules
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_names_for_tensorboard():
    line = {"split": "val", "step": 4, "main": 1.5, "acceptance": [0.5, 0.25], "ema": None}
    assert flat(line) == {"main/val": 1.5, "acceptance_1/val": 0.5, "acceptance_2/val": 0.25}


# --- where a number was lost --------------------------------------------------------------------


def origin_with(fault, model=SMALL, step=train_step) -> str:
    state = initial_state(CONFIG, model)
    fault(state.model)

    def hooks() -> list[int]:
        return [len(module._forward_hooks) for module in state.model.modules()]

    before = hooks()
    origin = find_origin(state, CONFIG, step, *sample())
    assert hooks() == before
    return origin


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name, _ in parameter_shapes(SMALL).items()])
def test_one_broken_weight_is_found_wherever_it_is(name, value):
    def fault(model):
        model.get_parameter(name).data.flatten()[: 1 if "embed" not in name else None] = value

    assert f": the weight {name}" in origin_with(fault)


def test_a_broken_expert_is_named_by_its_number():
    def fault(model):
        model.layers[1].mlp.experts.gate_up_proj.data[5] = math.nan

    assert "layers.1.mlp.experts.gate_up_proj[5] is not finite" in origin_with(fault)


@pytest.mark.parametrize("name", ["lm_head.weight", "layers.0.self_attn.o_proj.weight"])
def test_a_gradient_alone_is_found(name):
    def fault(model):
        model.get_parameter(name).register_hook(lambda gradient: gradient * math.nan)

    assert origin_with(fault) == f"the gradient of {name}"


def test_an_output_that_breaks_on_sound_weights_is_found():
    def fault(model):
        model.layers[1].mlp.register_forward_hook(lambda *a: (a[2][0] * math.inf, a[2][1]))

    assert origin_with(fault) == "the output of layers.1.mlp"


def test_a_gradient_that_breaks_inside_names_the_layer_it_left():
    """The gradient of the first block's output is lost: the block's last matrix has it first."""

    def fault(model):
        def lose(module, inputs, output):
            output[0].register_hook(lambda gradient: gradient * math.nan)

        model.layers[0].register_forward_hook(lose)

    assert origin_with(fault) == "the gradient of layers.0.mlp.down_proj.weight"


def test_a_step_that_reports_nonsense_is_told_apart():
    assert origin_with(lambda model: None).startswith("no layer: ")


def test_finiteness_of_nested_values_and_buffers():
    assert is_finite((torch.ones(2), [None, torch.arange(3)], "text"))
    assert not is_finite((torch.ones(2), [torch.tensor([1.0, math.inf])]))
    model = initial_state(CONFIG, SMALL).model
    assert broken_tensor(model) == ""
    model.gates()[0].e_score_correction_bias[2] = math.nan
    assert broken_tensor(model).endswith("gate.e_score_correction_bias")


def test_damage_before_the_last_line_is_never_passed_over(tmp_path):
    path = tmp_path / "log.jsonl"
    for text in ("nonsense\n{cut", '{"step": 1}\nnonsense\nnonsense\n', 'x\n{"step": 2}\n'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(LogError, match="damaged in line"):
            read_log(path)
    path.write_text('{"step": 1}\n{"st', encoding="utf-8")
    assert read_log(path) == [{"step": 1}]
