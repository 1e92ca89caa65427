"""The mixture of experts against slow references, over many shapes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mdsd.config import ModelConfig, preset
from mdsd.model import moe as module
from mdsd.model.moe import (
    Experts,
    Gate,
    MixtureOfExperts,
    Routing,
    SwiGLU,
    balance_loss,
    bias_step,
    close_groups,
    expert_load,
    grouped_experts,
    grouped_wins,
    looped_experts,
    max_violation,
)
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.step import TrainConfig, evaluate, initial_state, train_step

few = settings(max_examples=40, deadline=None)


@st.composite
def routings(draw: st.DrawFn, **changes: object) -> ModelConfig:
    """A configuration whose experts, groups and choices per token fit together."""
    groups, size = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    return preset(
        "tiny",
        hidden_size=6,
        moe_intermediate_size=5,
        n_routed_experts=groups * size,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=draw(st.integers(1, kept * size)),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        **changes,
    )


def randomize(module: nn.Module, seed: int, std: float = 0.5) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, std)


def random_gate(config: ModelConfig, seed: int, bias: float = 0.0, spread: float = 0.3) -> Gate:
    gate = Gate(config)
    randomize(gate, seed)
    gate.e_score_correction_bias.normal_(bias, spread)
    return gate


def slow_experts(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Token by token and expert by expert, as equation (12) is written."""
    rows = []
    for n, token in enumerate(x):
        row = torch.zeros_like(token)
        for i, weight in zip(routing.experts[n].tolist(), routing.weights[n], strict=True):
            gate, up = experts.gate_up_proj[i].chunk(2)
            row = row + weight * (experts.down_proj[i] @ (F.silu(gate @ token) * (up @ token)))
        rows.append(row)
    return torch.stack(rows)


def test_swiglu_is_its_formula():
    ffn = SwiGLU(4, 6).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    g, u = x @ ffn.gate_proj.weight.T, x @ ffn.up_proj.weight.T
    expected = (g / (1 + (-g).exp()) * u) @ ffn.down_proj.weight.T
    torch.testing.assert_close(ffn(x), expected, rtol=1e-12, atol=1e-12)


@few
@given(routings(), st.integers(1, 12), st.integers(0, 99))
def test_sorted_experts_equal_the_slow_ones(config: ModelConfig, count: int, seed: int):
    experts = Experts(config).double()
    randomize(experts, seed)
    x = torch.randn(count, 6, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(count, config.n_routed_experts).topk(config.num_experts_per_tok).indices
    weights = torch.rand(chosen.shape, dtype=torch.float64, requires_grad=True)
    routing = Routing(chosen, weights, torch.empty(0))
    fast, slow = experts(x, routing), slow_experts(x, routing, experts)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    leaves, direction = (x, weights, *experts.parameters()), torch.randn_like(fast)
    grads = [torch.autograd.grad(out, leaves, direction) for out in (fast, slow)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_idle_expert_has_a_zero_gradient():
    config = preset("tiny", hidden_size=6, moe_intermediate_size=5)
    experts = Experts(config)
    randomize(experts, 0)
    chosen = torch.tensor([[0, 1], [2, 1]])
    experts(torch.randn(2, 6), Routing(chosen, torch.ones(2, 2), torch.empty(0))).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        busy = parameter.grad.flatten(1).abs().sum(1) > 0
        assert busy.tolist() == [True] * 3 + [False] * 5


BRANCHES: dict[str, Callable[..., Tensor]] = {
    "looped": looped_experts,
    "grouped": grouped_experts,
}


def force(patch: pytest.MonkeyPatch, branch: str) -> None:
    """Let `Experts` take the named branch and no other."""
    patch.setattr(module, "grouped_wins", lambda *_: branch == "grouped")
    for name in set(BRANCHES) - {branch}:
        patch.delattr(module, f"{name}_experts")


def value_and_gradients(
    run: Callable[..., Tensor], x: Tensor, routing: Routing, experts: Experts
) -> list[Tensor]:
    """The output of run(x, routing, experts), and its gradients by all that it depends on."""
    x, weights = x.detach().requires_grad_(), routing.weights.detach().requires_grad_()
    out = run(x, routing._replace(weights=weights), experts)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, (x, weights, *experts.parameters()), direction)]


# What each token chooses of 6 experts: (N, K) from the number of tokens.
CHOICES = {
    "random": lambda n: torch.rand(n, 6).topk(2).indices,
    "all tokens to one expert": lambda n: torch.full((n, 1), 4),
    "the same two, the rest idle": lambda n: torch.tensor([[5, 2]]).repeat(n, 1),
    "every expert": lambda n: torch.rand(n, 6).argsort(1),
}


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("branch", BRANCHES)
def test_both_branches_equal_the_slow_experts(monkeypatch, branch, choice, tokens):
    torch.manual_seed(tokens)
    sizes = {"hidden_size": 12, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
    config = preset("tiny", **sizes, n_routed_experts=6)
    experts = Experts(config)
    randomize(experts, tokens)
    chosen = CHOICES[choice](tokens)
    routing = Routing(chosen, torch.rand(chosen.shape), torch.empty(0))
    x = torch.randn(tokens, 12)
    slow = value_and_gradients(slow_experts, x, routing, experts)
    force(monkeypatch, branch)
    fast = value_and_gradients(lambda x, r, e: e(x, r), x, routing, experts)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("branch", BRANCHES)
def test_one_expert_is_a_plain_ffn(monkeypatch, branch):
    sizes = {"hidden_size": 12, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
    one = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 0}
    config = preset("tiny", **sizes, **one)
    moe, ffn = MixtureOfExperts(config), SwiGLU(12, 8)
    randomize(moe, 0)
    with torch.no_grad():
        ffn.gate_proj.weight.copy_(moe.experts.gate_up_proj[0, :8])
        ffn.up_proj.weight.copy_(moe.experts.gate_up_proj[0, 8:])
        ffn.down_proj.weight.copy_(moe.experts.down_proj[0])
    force(monkeypatch, branch)
    x = torch.randn(2, 5, 12)
    out, stats = moe(x)
    torch.testing.assert_close(out, ffn(x))  # the only gate value is s/s = 1
    assert stats.load.tolist() == [10]
    assert max_violation(stats.load) == 0


def test_no_token_gives_no_answer_and_gradients_of_zero():
    experts = Experts(preset("tiny", hidden_size=16, moe_intermediate_size=8))
    randomize(experts, 0)
    nobody = Routing(torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2), torch.empty(0, 8))
    out = experts(torch.empty(0, 16), nobody)
    assert out.shape == (0, 16)
    out.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.count_nonzero() == 0


@pytest.mark.parametrize("way", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_both_branches_compute_in_the_dtype_they_should(monkeypatch, branch, way):
    config = preset("tiny", hidden_size=32, moe_intermediate_size=16)
    experts, x = Experts(config), torch.randn(64, 32)
    randomize(experts, 0, 0.2)
    routing = random_gate(config, 0)(x)
    exact = value_and_gradients(slow_experts, x, routing, experts)
    if way == "bfloat16":
        experts, x = experts.bfloat16(), x.bfloat16()
    force(monkeypatch, branch)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        found = value_and_gradients(lambda x, r, e: e(x, r), x, routing, experts)
    assert found[0].dtype == x.dtype
    rough = [(a.float() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
    # float32 would be exact to 1e-6: half precision has to show, and may not show too much.
    low, high = (0.0, 1e-5) if way == "float32" else (5e-4, 2e-2)
    assert all(low <= error < high for error in rough), rough


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_step_of_gradients_reaches_the_gate_in_both_branches(monkeypatch, branch):
    moe = MixtureOfExperts(preset("tiny", hidden_size=16, moe_intermediate_size=8))
    randomize(moe, 0)
    force(monkeypatch, branch)
    moe(torch.randn(2, 8, 16))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in moe.parameters())


@pytest.mark.parametrize(
    ("width", "inner", "dtype", "rows", "expected"),
    [
        (32, 16, torch.float32, 64, True),
        (32, 16, torch.bfloat16, 64, True),
        (32, 16, torch.float16, 64, True),
        (4, 4, torch.float32, 64, True),  # 16 bytes a row are enough
        (4, 8, torch.bfloat16, 64, False),  # 8 bytes are not
        (33, 20, torch.float32, 64, False),
        (32, 18, torch.float32, 64, False),
        (32, 16, torch.float64, 64, False),  # grouped products know no float64
        (32, 16, torch.float32, 0, False),
        (32, 16, torch.float32, 2, False),  # a quarter of a row an expert: few experts have work
        (32, 16, torch.float32, 3, True),
        (32, 16, torch.float32, 8 * 512, True),
        (32, 16, torch.float32, 8 * 512 + 1, False),
    ],
)
def test_the_choice_between_the_branches(width, inner, dtype, rows, expected):
    down = torch.empty(8, width, inner, dtype=dtype)
    assert grouped_wins(torch.empty(rows, width, dtype=dtype), down) == expected


def test_the_choice_looks_through_autocast():
    rows, down = torch.empty(64, 4), torch.empty(8, 4, 4)
    assert grouped_wins(rows, down)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not grouped_wins(rows, down)  # rows of 8 bytes
        assert not grouped_wins(rows.double(), down.double())


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "rows", "expected"),
    [
        ("cpu", None, torch.float32, 64, True),
        ("mps", None, torch.float32, 64, False),
        ("cuda", (9, 0), torch.bfloat16, 64, True),
        ("cuda", (9, 0), torch.bfloat16, 1, True),  # counting the busy experts would wait for it
        ("cuda", (9, 0), torch.bfloat16, 0, False),
        ("cuda", (9, 0), torch.float32, 64, False),
        ("cuda", (7, 5), torch.bfloat16, 64, False),
    ],
)
def test_each_device_takes_what_it_has(monkeypatch, device, capability, dtype, rows, expected):
    class Elsewhere(torch.Tensor):
        """A tensor that claims to lie on a device that this machine may lack."""

        @property
        def device(self):
            return torch.device(device)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    down = torch.empty(8, 32, 16, dtype=dtype)
    assert grouped_wins(torch.empty(rows, 32, dtype=dtype).as_subclass(Elsewhere), down) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("width", "inner"), [(33, 20), (32, 18), (12, 6), (1, 1), (32, 16)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_any_width_and_dtype_works(dtype, width, inner, tokens):
    config = preset("tiny", hidden_size=width, moe_intermediate_size=inner)
    experts = Experts(config)
    randomize(experts, 0)
    x = torch.randn(tokens, width)
    routing = random_gate(config, 0)(x)
    wanted = slow_experts(x, routing, experts) if tokens else torch.empty(0, width)
    experts, x = experts.to(dtype), x.to(dtype).requires_grad_()
    out = experts(x, routing)
    assert out.dtype == dtype
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    assert (out.float() - wanted).norm() <= tolerance * wanted.norm()
    out.sum().backward()
    assert experts.down_proj.grad.isfinite().all()


def test_generating_visits_only_the_experts_with_work(monkeypatch):
    config = preset("tiny", hidden_size=16, moe_intermediate_size=8, n_routed_experts=256)
    experts, products = Experts(config), []
    randomize(experts, 0)
    linear = F.linear
    monkeypatch.setattr(module.F, "linear", lambda *a: products.append(a) or linear(*a))
    x, chosen = torch.randn(1, 16), torch.tensor([[7, 200]])
    with torch.inference_mode():
        experts(x, Routing(chosen, torch.ones(1, 2), torch.empty(0)))
    assert len(products) == 4  # two experts with two products each


@pytest.mark.parametrize("branch", BRANCHES)
def test_no_token_is_dropped_however_crowded_an_expert_is(monkeypatch, branch):
    config = preset("tiny", hidden_size=16, moe_intermediate_size=8, n_group=1, topk_group=1)
    moe = MixtureOfExperts(config)
    randomize(moe, 0)
    moe.gate.e_score_correction_bias[2:4] = 10.0  # everybody wants these two
    force(monkeypatch, branch)
    x = torch.randn(4, 32, 16)
    out, stats = moe(x)
    assert stats.load.tolist() == [0, 0, 128, 128, 0, 0, 0, 0]
    alone = torch.stack([moe(token[None, None])[0][0, 0] for token in x.flatten(0, 1)])
    torch.testing.assert_close(out.flatten(0, 1), alone, rtol=1e-4, atol=1e-4)


@few
@given(routings(), st.integers(0, 99), st.sampled_from([-3.0, -0.5, 0.0, 0.5]))
def test_a_token_has_k_distinct_experts_in_few_groups(config: ModelConfig, seed: int, bias: float):
    x = torch.randn(32, 6)
    routing = random_gate(config, seed, bias)(x)
    size = config.n_routed_experts // config.n_group
    for row in routing.experts:
        assert len(set(row.tolist())) == config.num_experts_per_tok
        assert len(set((row // size).tolist())) <= config.topk_group


@few
@given(routings(), st.integers(0, 99), st.sampled_from([-3.0, -0.5, 0.5]))
def test_the_choice_is_the_slow_one(config: ModelConfig, seed: int, bias: float):
    gate, x = random_gate(config, seed, bias), torch.randn(16, 6)
    routing, size = gate(x), config.n_routed_experts // config.n_group
    for token, chosen in zip(x, routing.experts, strict=True):
        score = ((gate.weight @ token).sigmoid() + gate.e_score_correction_bias).tolist()
        groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_group)]
        best_two = [sum(sorted((score[i] for i in group), reverse=True)[:2]) for group in groups]
        ranked = sorted(range(config.n_group), key=lambda g: -best_two[g])
        reachable = [i for g in ranked[: config.topk_group] for i in groups[g]]
        best = sorted(reachable, key=lambda i: -score[i])[: config.num_experts_per_tok]
        assert set(chosen.tolist()) == set(best)


def test_closed_groups_lose_even_to_negative_scores():
    scores = torch.tensor([[0.6, -0.1, 0.2, 0.1]])
    closed = close_groups(scores, groups=2, kept=1)
    assert closed.tolist() == [[*scores[0, :2].tolist(), -torch.inf, -torch.inf]]


def test_a_group_is_scored_by_its_best_two():
    # The sum over all three, or the best alone, would choose the other group.
    scores = torch.tensor([[0.5, 0.5, -0.9, 0.6, 0.2, 0.2]])
    assert close_groups(scores, groups=2, kept=1).isfinite().tolist() == [[True] * 3 + [False] * 3]


@few
@given(routings(), st.integers(0, 99))
def test_the_bias_moves_the_choice_and_not_the_weights(config: ModelConfig, seed: int):
    gate, x = random_gate(config, seed, spread=0.5), torch.randn(32, 6)
    routing = gate(x)
    raw = (x @ gate.weight.T).sigmoid().gather(1, routing.experts)
    expected = raw / raw.sum(-1, keepdim=True) * config.routed_scaling_factor
    torch.testing.assert_close(routing.weights, expected)


def test_the_bias_moves_the_choice():
    config = preset("tiny", hidden_size=6, n_group=1, topk_group=1)
    gate, x = random_gate(config, 0, spread=0.0), torch.randn(64, 6)
    gate.e_score_correction_bias[3] = 2.0
    assert (gate(x).experts == 3).any(-1).all()
    gate.e_score_correction_bias[3] = -2.0
    assert not (gate(x).experts == 3).any()


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_weights_are_normalized_and_scaled_as_asked(factor: float):
    sizes = {"hidden_size": 6, "routed_scaling_factor": factor}
    gate, x = random_gate(preset("tiny", **sizes), 0), torch.randn(32, 6)
    torch.testing.assert_close(gate(x).weights.sum(-1), torch.full((32,), factor))
    raw = random_gate(preset("tiny", **sizes, norm_topk_prob=False), 0)(x)
    torch.testing.assert_close(raw.weights, factor * raw.affinity.gather(1, raw.experts))


def test_the_gate_stays_in_float32_under_autocast():
    gate, x = random_gate(preset("tiny"), 0), torch.randn(256, 128)
    expected = gate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = gate(x)
    assert routing.affinity.dtype == routing.weights.dtype == torch.float32
    for a, b in zip(routing, expected, strict=True):
        assert torch.equal(a, b)


def test_a_bfloat16_layer_scores_in_float32():
    gate, x = random_gate(preset("tiny"), 0), torch.randn(64, 128).bfloat16()
    gate.bfloat16()
    expected = (x.float() @ gate.weight.float().T).sigmoid()
    torch.testing.assert_close(gate(x).affinity, expected)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_experts_are_close_to_float32_ones(autocast: bool):
    config = preset("tiny", hidden_size=32)
    experts, x = Experts(config), torch.randn(64, 32)
    randomize(experts, 0, 0.2)
    routing = random_gate(config, 0)(x)
    expected = experts(x, routing)
    if not autocast:
        experts, x = experts.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = experts(x, routing)
    assert out.dtype == x.dtype
    assert (out.float() - expected).norm() < 0.02 * expected.norm()


def slow_balance(routing: Routing, batch_size: int, config: ModelConfig) -> float:
    """Equations (17)–(20) with loops, for the mean over sequences."""
    experts, length, total = config.n_routed_experts, len(routing.experts) // batch_size, 0.0
    for b in range(batch_size):
        tokens = range(b * length, (b + 1) * length)
        for i in range(experts):
            hits = sum(i in routing.experts[t].tolist() for t in tokens)
            shares = [(routing.affinity[t, i] / routing.affinity[t].sum()).item() for t in tokens]
            frequency = experts / (config.num_experts_per_tok * length) * hits
            total += frequency * sum(shares) / length
    return total / batch_size


@few
@given(routings(), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99))
def test_balance_loss_is_its_formula(config: ModelConfig, batch: int, length: int, seed: int):
    x = torch.randn(batch * length, 6)
    routing = random_gate(config, seed)(x)
    expected = slow_balance(routing, batch, config)
    assert balance_loss(routing, batch, config).item() == pytest.approx(expected, rel=1e-5)


def test_balance_loss_is_1_when_balanced_and_e_over_k_when_crowded():
    config = preset("tiny", n_routed_experts=4, n_group=1, topk_group=1)
    even = torch.tensor([[0, 1], [2, 3]] * 3)
    routing = Routing(even, torch.ones(6, 2), torch.rand(6, 4))
    torch.testing.assert_close(balance_loss(routing, 1, config), torch.tensor(1.0))
    crowded = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 6)
    routing = Routing(even[:1].expand(6, 2), torch.ones(6, 2), crowded)
    torch.testing.assert_close(balance_loss(routing, 1, config), torch.tensor(2.0))


def test_balance_is_judged_sequence_by_sequence():
    config = preset("tiny", n_routed_experts=4, n_group=1, topk_group=1)
    # Each sequence crowds its two experts; the batch as a whole is balanced.
    chosen = torch.tensor([[0, 1]] * 3 + [[2, 3]] * 3)
    affinity = torch.zeros(6, 4).scatter(1, chosen, 1.0)
    routing = Routing(chosen, torch.ones(6, 2), affinity)
    torch.testing.assert_close(balance_loss(routing, 1, config), torch.tensor(1.0))
    torch.testing.assert_close(balance_loss(routing, 2, config), torch.tensor(2.0))


def test_balance_loss_has_the_right_gradient():
    config = preset("tiny", n_routed_experts=4, n_group=1, topk_group=1)
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 1]])
    affinity = torch.rand(4, 4, dtype=torch.float64).add(0.1).requires_grad_()

    def loss(s: Tensor) -> Tensor:
        return balance_loss(Routing(chosen, torch.ones(4, 2), s), 2, config)

    assert torch.autograd.gradcheck(loss, affinity)


def literal_balance(affinity: Tensor, experts: Tensor, batch_size: int) -> Tensor:
    """Equations (17)–(20) as they are written, for the mean over sequences, differentiable."""
    (count, n), k = affinity.shape, experts.shape[1]
    length, losses = count // batch_size, []
    for b in range(batch_size):
        tokens, loss = range(b * length, (b + 1) * length), affinity.new_zeros(())
        for i in range(n):
            hits = sum(1 for t in tokens if i in experts[t].tolist())
            f = n / (k * length) * hits  # (18)
            p = sum(affinity[t, i] / affinity[t].sum() for t in tokens) / length  # (19), (20)
            loss = loss + f * p  # (17)
        losses.append(loss)
    return torch.stack(losses).mean()


@few
@given(routings(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_balance_loss_has_the_gradient_of_its_equations(config, batch, length, seed):
    torch.manual_seed(seed)
    shape = (batch * length, config.n_routed_experts)
    affinity = torch.rand(shape, dtype=torch.float64).add(0.05).requires_grad_()
    experts = random_gate(config, seed).choose(affinity)
    routing = Routing(experts, torch.empty(0), affinity)
    pairs = [balance_loss(routing, batch, config), literal_balance(affinity, experts, batch)]
    torch.testing.assert_close(*pairs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, affinity)[0] for loss in pairs))


def test_balance_loss_sends_no_gradient_through_the_counts():
    config = preset("tiny", n_routed_experts=4, n_group=1, topk_group=1)
    affinity = torch.rand(6, 4, dtype=torch.float64).add(0.1).requires_grad_()
    chosen = affinity.detach().topk(2).indices
    (found,) = torch.autograd.grad(
        balance_loss(Routing(chosen, torch.empty(0), affinity), 1, config), affinity
    )
    f = F.one_hot(chosen, 4).sum(1).double().mean(0) * 4 / 2  # (E,), constants
    total = affinity.detach().sum(1, keepdim=True)
    share = affinity.detach() / total
    # d/ds of Σ f_i·P_i with f held fast: (f_i − Σ f_j·share_j) / (T·Σ s).
    torch.testing.assert_close(found, (f - (share * f).sum(1, keepdim=True)) / (6 * total))


def test_descending_the_balance_loss_empties_the_overloaded_experts():
    torch.manual_seed(0)
    config = preset("tiny", hidden_size=8, n_group=1, topk_group=1)
    gate, x = random_gate(config, 0, spread=0.0), torch.randn(256, 8) + 1.0
    optimizer, loads, losses = torch.optim.SGD(gate.parameters(), lr=0.5), [], []
    for _ in range(60):
        routing = gate(x)
        loads.append(expert_load(routing, 8))
        loss = balance_loss(routing, 4, config)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    crowded = loads[0].argmax()
    assert loads[-1][crowded] < loads[0][crowded]
    assert max_violation(loads[-1]) < 0.5 * max_violation(loads[0])
    assert losses[-1] < losses[0]


def test_balance_loss_does_not_reach_the_experts_or_the_input_of_the_choice():
    moe = MixtureOfExperts(preset("tiny", hidden_size=8))
    randomize(moe, 0)
    _, stats = moe(torch.randn(2, 8, 8))
    stats.balance.backward()
    assert moe.gate.weight.grad is not None
    assert all(p.grad is None for p in moe.experts.parameters())


def test_max_violation():
    loads = torch.tensor([[[4, 4, 4, 4]], [[8, 8, 0, 0]], [[7, 1, 4, 4]]])
    assert max_violation(loads).tolist() == [[0.0], [1.0], [0.75]]


def test_bias_step_works_against_the_excess():
    loads = torch.tensor([[9, 3, 6, 6], [0, 0, 0, 8]])
    expected = torch.tensor([[-0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.5, -0.5]])
    assert torch.equal(bias_step(loads, 0.5), expected)


def test_the_bias_rule_balances_a_skewed_gate():
    config = preset("tiny", hidden_size=8, n_group=1, topk_group=1)
    gate, loads = random_gate(config, 1, spread=0.0), []
    x = torch.randn(512, 8) + 1.0
    for _ in range(300):
        loads.append(expert_load(gate(x), 8))
        gate.e_score_correction_bias += bias_step(loads[-1], 0.005)
    assert max_violation(loads[0]) > 0.5
    assert max_violation(torch.stack(loads[-50:]).sum(0)) < 0.1


@few
@given(routings(), st.integers(0, 99))
def test_load_counts_every_copy(config: ModelConfig, seed: int):
    routing = random_gate(config, seed)(torch.randn(9, 6))
    load = expert_load(routing, config.n_routed_experts)
    assert load.dtype == torch.int64
    expected = [int((routing.experts == i).sum()) for i in range(config.n_routed_experts)]
    assert load.tolist() == expected


@few
@given(routings(), st.integers(0, 2), st.integers(0, 99))
def test_the_layer_is_shared_plus_routed(config: ModelConfig, shared: int, seed: int):
    config = ModelConfig(**{**vars(config), "n_shared_experts": shared})
    moe = MixtureOfExperts(config)
    randomize(moe, seed)
    x = torch.randn(2, 4, 6)
    out, stats = moe(x)
    flat = x.flatten(0, 1)
    routing = moe.gate(flat)
    expected = slow_experts(flat, routing, moe.experts).view_as(x)
    if shared:
        assert moe.shared_experts.gate_proj.weight.shape == (5 * shared, 6)
        expected = expected + moe.shared_experts(x)
    torch.testing.assert_close(out, expected)
    assert torch.equal(stats.load, expert_load(routing, config.n_routed_experts))
    torch.testing.assert_close(stats.balance, balance_loss(routing, 2, config))


def test_a_forward_pass_leaves_no_trace():
    moe = MixtureOfExperts(preset("tiny", hidden_size=8))
    randomize(moe, 0)
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    keys = set(vars(moe)) | set(vars(moe.gate)) | set(vars(moe.experts))
    for _ in range(2):
        moe(torch.randn(2, 8, 8))[0].sum().backward()
    assert keys == set(vars(moe)) | set(vars(moe.gate)) | set(vars(moe.experts))
    for name, value in moe.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_bias_is_a_buffer_that_is_saved():
    moe = MixtureOfExperts(preset("tiny"))
    assert "gate.e_score_correction_bias" in moe.state_dict()
    assert "gate.e_score_correction_bias" not in dict(moe.named_parameters())


SMALL = preset("tiny", vocab_size=64, hidden_size=32, num_hidden_layers=3, q_lora_rank=16)


def tokens(seed: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def run_settings(**changes: object) -> TrainConfig:
    fixed = {"data": Path("data"), "out": Path("run"), "batch_size": 8, "seq_len": 16}
    return TrainConfig(**(fixed | {"warmup_steps": 0, "device": "cpu"} | changes))


def biases(model: MiniDeepSeek) -> Tensor:
    return torch.stack([gate.e_score_correction_bias for gate in model.gates()]).clone()


def test_micro_batches_add_up_to_the_load_of_the_batch():
    torch.manual_seed(0)
    model = MiniDeepSeek(SMALL)
    x, y = tokens()
    whole = model(x, y).expert_load
    parts = [model(a, b).expert_load for a, b in zip(x.split(2), y.split(2), strict=True)]
    assert torch.equal(torch.stack(parts).sum(0), whole)
    assert (whole.sum(1)[:2] == 8 * 16 * SMALL.num_experts_per_tok).all()


def test_the_bias_moves_once_a_step_whatever_the_micro_batches():
    torch.manual_seed(0)
    model, (x, y) = MiniDeepSeek(SMALL), tokens()
    parts = [model(a, b).expert_load for a, b in zip(x.split(1), y.split(1), strict=True)]
    model.update_balance_bias(torch.stack(parts).sum(0), 0.01)
    once = biases(model)
    torch.manual_seed(0)
    model = MiniDeepSeek(SMALL)
    model.update_balance_bias(model(x, y).expert_load, 0.01)
    assert torch.equal(biases(model), once)
    assert once.abs().max() == torch.tensor(0.01)  # one step of γ, not one for each micro-batch


def test_the_bias_moves_once_an_optimizer_step(monkeypatch):
    state, calls = initial_state(run_settings(), SMALL), []
    move = MiniDeepSeek.update_balance_bias

    def spy(model: MiniDeepSeek, load: Tensor, speed: float) -> None:
        calls.append(load)
        move(model, load, speed)

    monkeypatch.setattr(MiniDeepSeek, "update_balance_bias", spy)
    for step in range(1, 4):
        before = biases(state.model)
        report = train_step(state, run_settings(bias_speed=0.01), *tokens(step))
        assert len(calls) == step
        expected = before + bias_step(report.losses.expert_load, 0.01)
        assert torch.equal(biases(state.model), expected)
        assert torch.equal(calls[-1], report.losses.expert_load)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_counts_nothing_twice(monkeypatch, reentrant):
    # The reentrant way loses the gradients of nested outputs, so it goes without the balance loss.
    config = run_settings(bias_speed=0.01, balance_weight=0.0 if reentrant else 0.01)
    plain, passes = initial_state(config, SMALL), []
    for step in range(3):
        expected = train_step(plain, config, *tokens(step)).losses.expert_load
    forward = MixtureOfExperts.forward

    def recomputed(moe: MixtureOfExperts, x: Tensor) -> tuple[Tensor, object]:
        def run(x: Tensor) -> tuple[Tensor, object]:
            passes.append(moe)
            return forward(moe, x)

        return checkpoint(run, x, use_reentrant=reentrant)

    monkeypatch.setattr(MixtureOfExperts, "forward", recomputed)
    state = initial_state(config, SMALL)
    for step in range(3):
        found = train_step(state, config, *tokens(step)).losses.expert_load
    assert len(passes) == 2 * 3 * len(state.model.gates())  # it did run everything twice
    assert torch.equal(found, expected)
    assert torch.equal(biases(state.model), biases(plain.model))


def test_evaluation_between_the_steps_changes_nothing():
    config = run_settings(bias_speed=0.01, eval_batches=2)
    data = np.random.default_rng(0).integers(64, size=500).astype("<u2")
    ends = []
    for evaluated in (False, True):
        state = initial_state(config, SMALL)
        for step in range(3):
            report = train_step(state, config, *tokens(step))
            if evaluated:
                assert evaluate(state, config, data).expert_load.sum() > 0
                state.model(tokens()[0])  # generating routes as well
        ends.append((biases(state.model), report.losses.expert_load))
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)
