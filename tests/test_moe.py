"""The mixture of experts against slow references, over many shapes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mdsd.config import ModelConfig, preset
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
    max_violation,
)

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
