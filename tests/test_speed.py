"""The instruments measure what is known, the rivals do equal work, and the table tells it all."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mdsd.cli import main
from mdsd.config import ConfigError, ModelConfig
from mdsd.counting import count_parameters
from mdsd.model.generate import Sampling, generate_rows
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training import benchmark, rivals
from mdsd.training.benchmark import (
    ALONE,
    SECTIONS,
    BenchConfig,
    Report,
    Row,
    run_bench,
    table,
    write_report,
)
from mdsd.training.rivals import (
    BenchError,
    equal_gpt,
    expert_forms,
    fastest_setting,
    gpt_flops,
    head_losses,
    reference_model,
    reference_step,
    step_of,
)
from mdsd.training.speed import (
    CASES,
    OPERATION_KINDS,
    PYTHON,
    Spread,
    Workload,
    expected_bytes,
    growth,
    kept_numbers,
    our_step,
    peak_memory,
    spread,
    take_turns,
    time_by_kind,
    timed,
    times_faster,
    utilization,
    varied,
)

TOY = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=64,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=512,
    initializer_range=0.1,
)
WORK = Workload(TOY, batch_size=2, seq_len=16)
TOYS = dict.fromkeys(CASES, WORK)


# The clock.


def nap(seconds: float) -> Any:
    return timed(lambda: time.sleep(seconds))


def test_a_sleep_three_times_as_long_is_three_times_slower():
    ratio = times_faster(take_turns({"a": nap(0.02), "b": nap(0.06)}, 3), "a", "b")
    assert 2.4 < ratio.median < 3.6
    assert ratio.low <= ratio.median <= ratio.high


def test_a_disturbance_that_lasts_moves_seconds_but_not_the_ratio():
    calm = {"a": [1.0] * 9, "b": [2.0] * 9}
    slowed = {name: times[:4] + [3 * t for t in times[4:]] for name, times in calm.items()}
    assert times_faster(slowed, "a", "b") == times_faster(calm, "a", "b") == Spread(2, 2, 2)
    assert spread(slowed["a"]).median == 3


@given(st.lists(st.floats(0.001, 1000), min_size=1))
def test_a_spread_is_median_least_and_greatest(values: list[float]):
    found = spread(values)
    assert (found.low, found.high) == (min(values), max(values))
    assert sum(v <= found.median for v in values) * 2 >= len(values)
    assert sum(v >= found.median for v in values) * 2 >= len(values)


def test_each_has_one_turn_a_round_in_changing_order_and_warm_up_does_not_count():
    order: list[str] = []

    def work(name: str) -> Any:
        return lambda: order.append(name) or float(len(order))

    ticks: list[int] = []
    seconds = take_turns({n: work(n) for n in "abc"}, 2, lambda: ticks.append(1))
    assert "".join(order) == "cba" + "abc" + "cba"
    assert seconds == {"a": [4, 9], "b": [5, 8], "c": [6, 7]}
    assert len(ticks) == 9


# The scale for memory.


def test_memory_is_the_most_that_lives_at_once():
    def work() -> None:
        a = torch.empty(1_000_000)
        b = torch.empty(500_000)
        del a
        torch.empty(250_000)
        del b

    assert peak_memory(work) == 6_000_000


def test_memory_counts_the_inside_of_operations_but_not_what_was_there():
    x = torch.randn(1_000_000)
    assert peak_memory(lambda: x.median()) == 4_000_004  # it sorts a copy
    assert peak_memory(lambda: x.neg_()) == 0
    assert peak_memory(lambda: x.view(1000, 1000).T) == 0


def test_memory_from_before_makes_no_room():
    held = [torch.empty(1_000_000)]

    def swap() -> None:
        held.clear()
        held.append(torch.empty(500_000))

    assert peak_memory(swap) == 2_000_000


def test_memory_of_a_backward_pass_is_counted():
    w = torch.randn(1000, 1000, requires_grad=True)
    x = torch.randn(10, 1000)
    size = peak_memory(lambda: torch.autograd.grad((x @ w).sum(), w))
    assert 4_000_000 <= size < 4_200_000


# The steps.


def test_a_step_trains():
    step = our_step(WORK)
    first = float(step().losses.main)  # type: ignore[attr-defined]
    for _ in range(10):
        last = float(step().losses.main)  # type: ignore[attr-defined]
    assert last < first


def test_time_by_kind_adds_up_and_knows_a_product_and_a_pause():
    million = torch.randn(1000, 1000)
    shares = time_by_kind(lambda: million @ million)
    assert sum(shares.values()) == pytest.approx(1, abs=0.02)
    assert shares["matrix products"] > 0.5
    assert time_by_kind(lambda: time.sleep(0.05))[PYTHON] > 0.9
    assert set(OPERATION_KINDS) < set(shares)


def test_utilization_is_one_at_the_peak_and_half_at_half_speed():
    large = 2 * 1536**3
    assert utilization(large, [1.0, 2.0], [1.0, 2.0]) == Spread(1, 1, 1)
    assert utilization(large, [2.0], [1.0]).median == 0.5


def test_flops_of_a_workload_are_those_of_the_counting_chapter():
    # Six a weight and token; looks: 2 layers, 2 heads, widths 16 + 8, on average 8 tokens, × 6.
    weights = count_parameters(TOY).active - 128 * 32
    assert WORK.flops == 32 * (6 * weights + 6 * 2 * 2 * 24 * 8)


def test_varied_changes_one_setting_and_keeps_proportions():
    assert varied(WORK, "width", 64).model.moe_intermediate_size == 32
    assert varied(WORK, "depth", 5).model == replace(TOY, num_hidden_layers=5)
    assert varied(WORK, "experts", 8).model == replace(TOY, n_routed_experts=8)
    assert varied(WORK, "context", 8) == replace(WORK, seq_len=8)
    assert varied(WORK, "batch", 8) == replace(WORK, batch_size=8)
    with pytest.raises(ValueError, match="no setting is called 'depht'"):
        varied(WORK, "depht", 5)


def test_experts_cost_no_arithmetic_and_the_gradients_floor_holds():
    more = varied(WORK, "experts", 64)
    gates = 60 * 32  # the one layer of experts has 60 more rows in its gate
    assert more.flops - WORK.flops == 32 * 6 * gates
    assert kept_numbers(more.model) - kept_numbers(TOY) == 60
    total = count_parameters(more.model).total
    assert expected_bytes(more, 0.0) == 4 * total


def test_growth_follows_its_prediction_at_the_base_itself():
    cost = growth(WORK, {"batch": [2, 4]}, rounds=1)["batch"]
    assert cost[0].expected_bytes == pytest.approx(cost[0].bytes, rel=0.1)
    assert cost[1].expected_seconds == pytest.approx(2 * cost[0].expected_seconds)


def test_memory_of_a_step_grows_in_proportion_to_tokens():
    work = replace(WORK, batch_size=16, seq_len=64)
    near, far = (c.bytes for c in growth(work, {"batch": [16, 32]}, rounds=1)["batch"])
    assert 1.7 < far / near < 2.1


# The rivals do equal work.


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_the_reference_has_our_loss_in_every_setting(transformers, attention, experts):
    theirs = reference_model(TOY, attention, experts)
    torch.manual_seed(0)
    ours, (x, y) = MiniDeepSeek(TOY), WORK.batch()
    loss = theirs(input_ids=x, labels=y, shift_labels=y).loss
    torch.testing.assert_close(loss, ours(x, y).main, atol=1e-5, rtol=1e-5)


def test_a_reference_step_leaves_the_weights_that_our_step_leaves(transformers, monkeypatch):
    """Same clipping, same AdamW, same batch; only the balance loss, which is ours, is left out."""
    kept: dict[str, Any] = {}

    def remember(config: ModelConfig, attention: str, experts: str) -> Any:
        kept["theirs"] = reference_model(config, attention, experts)
        return kept["theirs"]

    monkeypatch.setattr(rivals, "reference_model", remember)
    reference_step(WORK, "eager", "eager")()
    torch.manual_seed(0)
    ours = MiniDeepSeek(TOY)
    step_of(ours, lambda x, y: ours(x, y).main, WORK)()
    theirs = kept["theirs"].state_dict()
    for name, weight in ours.state_dict().items():
        other = theirs[name if name.startswith("lm_head") else f"model.{name}"]
        torch.testing.assert_close(weight, other, atol=2e-5, rtol=1e-4)


def test_the_plain_recipe_is_that_of_our_step():
    """`step_of` with our whole loss gives what `train_step` gives."""
    step = our_step(WORK)
    report = step()
    torch.manual_seed(0)
    model = MiniDeepSeek(TOY)
    losses: list[Tensor] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        losses.append(model(x, y).total(0.3, 1e-4))
        return losses[-1]

    again = step_of(model, loss, WORK)
    again()
    again()
    second = float(step().losses.main)  # type: ignore[attr-defined]
    assert float(report.losses.main) == pytest.approx(losses[0].item(), abs=1e-3)  # type: ignore[attr-defined]
    assert second == pytest.approx(losses[1].item(), abs=1e-3)


def test_greedy_tokens_and_their_number_agree(transformers, monkeypatch):
    prompts = torch.randint(TOY.vocab_size, (2, 40), generator=torch.Generator().manual_seed(3))
    told: list[Tensor] = []

    class Ear(rivals.Stopwatch):
        def put(self, tokens: Tensor) -> None:
            super().put(tokens)
            told.append(tokens)

    monkeypatch.setattr(rivals, "Stopwatch", Ear)
    make = rivals.reference_decoding(TOY, prompts)
    torch.manual_seed(0)
    rows = generate_rows(
        MiniDeepSeek(TOY).eval(), prompts.tolist(), rivals.NEW_TOKENS, Sampling(temperature=0)
    )
    ours = torch.stack(list(rows), dim=1)
    for _ in range(2):  # the second run begins again where the prompt ends
        told.clear()
        assert make("sdpa", "batched_mm")() > 0
        assert torch.equal(told[0].view(2, -1), prompts)
        assert torch.equal(torch.stack(told[1:], dim=1), ours)


def test_the_trial_finds_the_fastest():
    times = {"grouped_mm": 0.02, "eager": 0.001, "batched_mm": 0.01}

    def make(attention: str, experts: str) -> Any:
        return lambda: times[experts] + (0.005 if attention == "sdpa" else 0.0)

    forms, tried = list(times), []
    assert fastest_setting(make, forms, lambda: tried.append(1)) == ("eager", "eager")
    assert len(tried) == 4


def test_batched_experts_are_tried_where_their_copies_fit():
    assert "batched_mm" in expert_forms(CASES["small"].model, 8, 1)
    assert "batched_mm" not in expert_forms(CASES["medium"].model, 2048, 7)


@pytest.mark.parametrize("case", CASES)
def test_the_dense_gpt_has_as_many_parameters_as_work_on_a_token(case: str):
    model = CASES[case].model
    active = count_parameters(model).active - 2 * model.vocab_size * model.hidden_size
    dense = sum(p.numel() for p in equal_gpt(model).blocks.parameters())
    assert dense == pytest.approx(active, rel=0.01)


def test_the_dense_gpt_is_causal_and_learns_and_its_operations_are_counted():
    gpt, (x, y) = equal_gpt(TOY), WORK.batch()
    other = x.clone()
    other[:, -1] = (other[:, -1] + 1) % 128
    hidden = torch.cat([y[:, :-1], torch.full((2, 1), -100)], dim=1)
    assert torch.equal(gpt.loss(x, hidden), gpt.loss(other, hidden))
    before = gpt.loss(x, y).item()
    step = step_of(gpt, gpt.loss, WORK)
    for _ in range(10):
        step()
    assert gpt.loss(x, y).item() < before
    weights = sum(m.weight.numel() for m in gpt.modules() if isinstance(m, torch.nn.Linear))
    assert gpt_flops(gpt, WORK) == 32 * (6 * weights + 6 * 2 * 2 * 32 * 8)


def test_all_ways_to_the_loss_agree_in_value_and_gradients():
    torch.manual_seed(0)
    h, w = torch.randn(2, 20, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    y = torch.randint(50, (2, 20))
    expected = F.cross_entropy((h @ w.T).flatten(0, 1), y.flatten())
    gradients = torch.autograd.grad(expected, [h, w])
    for name, way in head_losses().items():
        loss = way(h, w, y)
        torch.testing.assert_close(loss, expected, msg=name)
        torch.testing.assert_close(torch.autograd.grad(loss, [h, w]), gradients, msg=name)


# Table and file.


def test_rows_tell_whether_they_reach_their_mark():
    assert Row("a", "b", spread([1.3]), 1.3).reached()
    assert not Row("a", "b", spread([1.29]), 1.3).reached()
    assert Row("a", "b", spread([0.125]), 0.125, True).reached()
    assert not Row("a", "b", spread([0.13]), 0.125, True).reached()
    assert Row("a", "b", spread([9])).reached() is None
    assert str(Row("a", "b", spread([1.2, 1.4, 1.31]), 1.3)).split() == (
        "a b 1.31 1.20 to 1.40 at least 1.3 yes".split()
    )


def test_the_table_is_narrow_whatever_the_names():
    report = Report({"processor": "x" * 60, "threads": 2, "torch": "2.13.0"})
    report.rows += [Row("w" * 60, "a" * 60, spread([12345.678, 0.00001]), 0.125, True)]
    report.seconds["s" * 20] = {f"name {i}": [0.1 * i] for i in range(1, 12)}
    assert max(map(len, table(report).splitlines())) <= 100


def test_the_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch):
    path = tmp_path / "bench.json"
    path.write_text("before", encoding="utf-8")
    report = Report({}, [Row("a", "b", spread([1.0, 2.0, 4.0]), 1.5)], {"case": {"ours": [1, 2]}})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_report(report, path)
    assert path.read_text(encoding="utf-8") == "before"
    write_report(report, path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["seconds"] == {"case": {"ours": [1, 2]}}
    row = saved["rows"][0]
    assert row["ratio"] == {"median": 2, "low": 1, "high": 4}
    assert (row["reach"], row["reached"]) == (1.5, True)


def test_a_whole_run_in_miniature(transformers, tmp_path: Path, capsys):
    out = tmp_path / "new folder" / "bench.json"
    report = run_bench(BenchConfig(rounds=2, out=out), TOYS)
    text = table(report)
    for words in ("itself", "dense GPT", "matrix product", "all logits", "1 × 256", "data loading"):
        assert words in text, words
    assert set(report.seconds) >= set(SECTIONS) - {"dense", "decode"}
    assert all(len(t) == 2 for times in report.seconds.values() for t in times.values())
    assert json.loads(out.read_text(encoding="utf-8"))["machine"]["torch"] == torch.__version__
    assert "turns" in capsys.readouterr().err  # the progress bar


def test_without_transformers_the_error_says_what_to_install_and_what_goes(
    monkeypatch, tmp_path: Path, capsys
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BenchError, match="pip install"):
        run_bench(BenchConfig(only=("data", "small"), rounds=1, out=tmp_path / "no.json"), TOYS)
    assert not (tmp_path / "no.json").exists()
    assert main(["bench", "--only", "small"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mdsd: transformers")
    assert f"--only {' '.join(ALONE)}" in said
    report = run_bench(BenchConfig(only=ALONE, rounds=1, out=tmp_path / "yes.json"), TOYS)
    assert report.machine["transformers"] == "not installed"
    assert len(report.rows) > 3


def test_what_was_measured_before_an_interruption_is_kept(monkeypatch, tmp_path: Path):
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "bench.json"
    monkeypatch.setitem(SECTIONS, "memory", stop)
    with pytest.raises(KeyboardInterrupt):
        run_bench(BenchConfig(only=("data", "memory"), rounds=1, out=out), TOYS)
    assert list(json.loads(out.read_text(encoding="utf-8"))["seconds"]) == ["data"]


def test_wrong_options_are_named(capsys):
    for changes, words in (
        ({"only": ("smal",)}, "decode"),
        ({"rounds": 0}, "rounds is 0"),
        ({"threads": -1}, "threads is -1"),
    ):
        with pytest.raises(ConfigError, match=words):
            BenchConfig(**changes)
    assert main(["bench", "--only", "foo"]) == 1
    assert "there are small," in capsys.readouterr().err


def test_the_command_line_prints_the_table(monkeypatch, tmp_path: Path, capsys):
    threads, out = torch.get_num_threads(), tmp_path / "b.json"
    monkeypatch.setattr(benchmark, "CASES", TOYS)
    monkeypatch.setattr(benchmark.run_bench, "__defaults__", (TOYS,))
    try:
        options = ["--only", "data", "memory", "--rounds", "1", "--threads", "1"]
        assert main(["bench", *options, "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr()
    assert "data loading" in printed.out
    assert "threads 1" in printed.out
    assert str(out) in printed.err
    assert list(json.loads(out.read_text(encoding="utf-8"))["seconds"]) == ["data", "memory"]
