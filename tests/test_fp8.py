"""FP8 against literal loops over tiles, float64 and bounds; and what the swap leaves alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mdsd.config import preset
from mdsd.model import fp8
from mdsd.model.fp8 import (
    E4M3_MAX,
    TILE,
    Fp8Experts,
    Fp8Linear,
    Quantized,
    convert_to_fp8,
    decode,
    fp8_linear,
    fp8_train_step,
    multiply,
    multiply_promoted,
    quantize_blocks,
    quantize_tiles,
    tile_scale,
    to_e4m3,
)
from mdsd.model.hub import dequantize_blocks
from mdsd.model.mla import LatentCache
from mdsd.model.moe import Experts, Gate, Routing
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.logs import read_log
from mdsd.training.loop import load_run, train
from mdsd.training.prepare import PrepareConfig, prepare
from mdsd.training.step import TrainConfig, train_step

few = settings(max_examples=30, deadline=None)
# Smaller than a tile, a tile, ragged, two and three tiles.
widths = st.sampled_from([1, 7, 127, 128, 129, 200, 256, 300])
seeds = st.integers(0, 2**31)

# The positive grid from the definition of the format, not from torch.
GRID = np.array(
    [2.0**-9 * m for m in range(8)]
    + [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)][:-1]
)


def draw(rows: int, columns: int, seed: int, decades: float = 0.0) -> Tensor:
    """Normal numbers whose size varies from row to row and column to column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    for shape in ((rows, 1), (1, columns)):
        x = x * 10 ** (decades * (torch.rand(shape, generator=generator) - 0.5))
    return x


def literal_round(x: np.ndarray) -> np.ndarray:
    """The nearest grid number, ties to the even one, by searching the grid."""
    size = np.minimum(np.abs(x), GRID[-1])
    above = np.searchsorted(GRID, size).clip(1)
    low, high = GRID[above - 1], GRID[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), x)


def literal_tile(x: np.ndarray, power_of_two: bool) -> np.ndarray:
    """One tile of any shape after quantization with one scale, in float64 but for the scale."""
    scale = np.float32(np.abs(x).max()) / np.float32(E4M3_MAX)
    if scale == 0:
        return np.zeros_like(x)
    if power_of_two:
        scale = np.float32(2.0 ** np.ceil(np.log2(scale)))
    return literal_round((x.astype(np.float32) / scale).astype(np.float64)) * np.float64(scale)


def literal_tiles(x: Tensor, rows: int, columns: int, power_of_two: bool = False) -> np.ndarray:
    """All of x in tiles of `rows` by `columns`, one after the other."""
    out = x.numpy().astype(np.float64)
    for i in range(0, out.shape[0], rows):
        for j in range(0, out.shape[1], columns):
            part = slice(i, i + rows), slice(j, j + columns)
            out[part] = literal_tile(out[part], power_of_two)
    return out


def bound(x: Tensor, scale: Tensor) -> Tensor:
    """How far rounding may move x: half a digit, or half a step near zero; and float32's rest."""
    return x.double().abs() * (1 / 16 + 1e-6) + scale.double() * 2.0**-10 * (1 + 1e-6)


def spread(q: Quantized) -> Tensor:
    """The scale of every single number."""
    return q.row_scales().repeat_interleave(TILE, 1)[:, : q.codes.shape[1]]


# The format


def test_the_grid_is_the_formats():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert decode(codes).tolist() == GRID.tolist()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(decode(every), every.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(to_e4m3(decode(every)).view(torch.uint8), every.view(torch.uint8))


@few
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=50))
def test_rounding_is_to_the_nearest(values: list[float]):
    x = torch.tensor(values)
    assert decode(to_e4m3(x)).tolist() == literal_round(x.double().numpy()).tolist()


def test_rounding_saturates_and_keeps_nan():
    x = torch.tensor([449.0, -1e30, torch.inf, -torch.inf, torch.nan])
    assert decode(to_e4m3(x))[:4].tolist() == [448, -448, 448, -448]
    assert decode(to_e4m3(x))[4].isnan()


def test_nothing_beyond_448_is_ever_cast(monkeypatch: pytest.MonkeyPatch):
    """What a cast does there differs between versions and devices, so the clamp must come first."""
    plain_to, seen = torch.Tensor.to, []

    def spy(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        if torch.float8_e4m3fn in args:
            seen.append(self.abs().max().item())
        return plain_to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    to_e4m3(torch.tensor([1e6, -torch.inf]))
    fp8_linear(torch.full((3, 200), 1e-42), torch.randn(5, 200))  # its scale is a bound, not exact
    assert seen
    assert max(seen) <= E4M3_MAX


# Tiles and blocks


@few
@given(widths, widths, seeds, st.floats(0, 12))
def test_tiles_are_quantized_one_by_one(rows: int, columns: int, seed: int, decades: float):
    x = draw(rows, columns, seed, decades)
    q = quantize_tiles(x)
    assert q.codes.dtype == torch.float8_e4m3fn
    assert q.scale.shape == (rows, -(-columns // TILE))
    np.testing.assert_allclose(q.dequantize().numpy(), literal_tiles(x, 1, TILE), rtol=1e-6)
    assert ((q.dequantize() - x).abs() <= bound(x, spread(q))).all()


@few
@given(widths, widths, seeds, st.floats(0, 12))
def test_blocks_are_quantized_one_by_one(rows: int, columns: int, seed: int, decades: float):
    x = draw(rows, columns, seed, decades)
    q = quantize_blocks(x)
    assert q.scale.shape == (-(-rows // TILE), -(-columns // TILE))
    np.testing.assert_allclose(q.dequantize().numpy(), literal_tiles(x, TILE, TILE), rtol=1e-6)
    assert ((q.dequantize() - x).abs() <= bound(x, spread(q))).all()


@few
@given(widths, widths, seeds)
def test_blocks_are_those_of_published_checkpoints(rows: int, columns: int, seed: int):
    x = draw(rows, columns, seed, 3)
    q = quantize_blocks(x)
    assert torch.equal(dequantize_blocks(q.codes, q.scale), q.dequantize())
    assert torch.equal(q.transpose().dequantize(), q.dequantize().T)


@few
@given(widths, widths, seeds, st.floats(0, 6), st.booleans())
def test_quantizing_twice_is_quantizing_once(
    rows: int, columns: int, seed: int, decades: float, power_of_two: bool
):
    once = quantize_tiles(draw(rows, columns, seed, decades), power_of_two)
    twice = quantize_tiles(once.dequantize(), power_of_two)
    torch.testing.assert_close(twice.dequantize(), once.dequantize(), rtol=2e-7, atol=0)
    blocks = quantize_blocks(once.dequantize())
    again = quantize_blocks(blocks.dequantize())
    torch.testing.assert_close(again.dequantize(), blocks.dequantize(), rtol=2e-7, atol=0)


@few
@given(st.lists(st.floats(2.0**-110, 2.0**120, width=32), min_size=1, max_size=50))
def test_scales_round_up_to_powers_of_two(values: list[float]):
    largest = torch.tensor(values)
    plain, rounded = tile_scale(largest), tile_scale(largest, power_of_two=True)
    assert (rounded.frexp().mantissa == 0.5).all()
    assert (rounded >= plain * (1 - 2e-7)).all()
    assert (rounded < 2 * plain * (1 + 2e-7)).all()


def test_turning_tiles_with_powers_of_two_rounds_once():
    x = draw(256, 256, 0)
    once = quantize_tiles(x, power_of_two=True).dequantize()
    turned = quantize_tiles(once.T, power_of_two=True).dequantize().T
    large = once.abs() > once.abs().amax(0) * 2.0**-13  # still of full precision in a new tile
    assert torch.equal(once[large], turned[large])
    assert not torch.equal(*(quantize_tiles(m).dequantize() for m in (x, x.T)))


@pytest.mark.parametrize("quantize", [quantize_tiles, quantize_blocks])
def test_zeros_and_the_tiniest_numbers(quantize):
    assert torch.equal(quantize(torch.zeros(3, 300)).dequantize(), torch.zeros(3, 300))
    x = draw(3, 300, 0) * 1e-30
    torch.testing.assert_close(quantize(x).dequantize(), x, rtol=1 / 16, atol=1e-33)
    denormal = torch.full((2, 130), 1e-42)  # below the scale's bound: lost, but not NaN
    assert (quantize(denormal).dequantize() - denormal).abs().max() <= 2e-38 * 2.0**-10
    huge = torch.full((2, 130), torch.finfo(torch.float32).max)
    torch.testing.assert_close(quantize(huge).dequantize(), huge)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_spoils_its_own_tile(value: float):
    x = draw(3, 300, 0)
    x[1, 150] = value
    finite = quantize_tiles(x).dequantize().isfinite()
    expected = torch.ones(3, 300, dtype=torch.bool)
    expected[1, 128:256] = False
    assert torch.equal(finite, expected)
    y = fp8_linear(x, draw(5, 300, 1))
    assert y.isfinite().all(1).tolist() == [True, False, True]


# Products


@few
@given(widths, widths, widths, seeds, st.floats(0, 4))
def test_the_products_agree_with_each_other(rows, others, columns, seed, decades):
    a, b = draw(rows, columns, seed, decades), draw(others, columns, seed + 1, decades)
    exact = literal_tiles(a, 1, TILE) @ literal_tiles(b, TILE, TILE).T
    size = np.abs(literal_tiles(a, 1, TILE)) @ np.abs(literal_tiles(b, TILE, TILE)).T
    qa, qb = quantize_tiles(a), quantize_blocks(b)
    for product in (multiply, multiply_promoted):
        wrong = np.abs(product(qa, qb).double().numpy() - exact)
        assert (wrong <= 1e-5 * size + 1e-37).all(), product.__name__
    both = quantize_tiles(b)
    torch.testing.assert_close(
        multiply_promoted(qa, both), multiply(qa, both), rtol=1e-4, atol=1e-5 * float(size.max())
    )


def literal_layer(x: Tensor, w: Tensor, dy: Tensor, power_of_two: bool) -> dict[str, np.ndarray]:
    """The three products of a linear layer, tile by tile, in float64 [V3] 3.3.1."""
    cached, weight = literal_tiles(x, 1, TILE, power_of_two), literal_tiles(w, TILE, TILE)
    turned = literal_tiles(torch.from_numpy(cached).float(), TILE, 1, power_of_two)
    return {
        "Fprop": cached @ weight.T,
        "Dgrad": literal_tiles(dy, 1, TILE) @ weight,
        "Wgrad": literal_tiles(dy, TILE, 1).T @ turned,
    }


def layer_products(
    x: Tensor, w: Tensor, dy: Tensor, power_of_two: bool = False
) -> dict[str, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_linear(x, w, power_of_two)
    y.backward(dy)
    return {"Fprop": y.detach(), "Dgrad": x.grad, "Wgrad": w.grad}


@few
@given(widths, widths, widths, seeds, st.floats(0, 2), st.booleans())
def test_the_three_products_are_the_literal_ones(
    tokens: int, inputs: int, outputs: int, seed: int, decades: float, power_of_two: bool
):
    x, w = draw(tokens, inputs, seed, decades), draw(outputs, inputs, seed + 1, decades)
    dy = draw(tokens, outputs, seed + 2, decades)
    literal = literal_layer(x, w, dy, power_of_two)
    for name, ours in layer_products(x, w, dy, power_of_two).items():
        # A number within float32's rounding of a tie may go the other way in the second rounding.
        wrong = np.linalg.norm(ours.double().numpy() - literal[name])
        assert wrong <= 2e-3 * np.linalg.norm(literal[name]) + 1e-30, name


@few
@given(widths, widths, widths, seeds, st.floats(0, 6))
def test_the_three_products_stay_within_the_bound(tokens, inputs, outputs, seed, decades):
    x, w = draw(tokens, inputs, seed, decades), draw(outputs, inputs, seed + 1, decades)
    dy = draw(tokens, outputs, seed + 2, decades)

    def error(matrix: Tensor, q: Quantized) -> Tensor:
        return bound(matrix, spread(q))

    e_x, e_w = error(x, quantize_tiles(x)), error(w, quantize_blocks(w))
    turned = quantize_tiles(x).dequantize().T
    # The cached input is rounded twice.
    e_turned = e_x.T + error(turned, quantize_tiles(turned))
    e_dy, e_dy_turned = error(dy, quantize_tiles(dy)), error(dy.T, quantize_tiles(dy.T))
    pairs = {
        "Fprop": ((x, e_x), (w, e_w)),
        "Dgrad": ((dy, e_dy), (w.T, e_w.T)),
        "Wgrad": ((dy.T, e_dy_turned), (x.T, e_turned)),
    }
    for name, ours in layer_products(x, w, dy).items():
        (a, e_a), (b, e_b) = pairs[name]
        a, b = a.double(), b.double()
        allowed = e_a @ b.abs().T + a.abs() @ e_b.T + e_a @ e_b.T + 1e-5 * a.abs() @ b.abs().T
        assert ((ours - a @ b.T).abs() <= allowed + 1e-37).all(), name


def test_the_error_is_that_of_the_format():
    """Both factors off by 2.6 % in the mean square: 3.7 % together, whatever the width."""
    for width in (128, 1024):
        x, w = draw(256, width, 0), draw(256, width, 1)
        exact = x @ w.T
        error = (fp8_linear(x, w) - exact).norm() / exact.norm()
        assert 0.033 < error < 0.041


def test_tiles_protect_from_outliers_that_a_tensor_does_not():
    x, w = draw(64, 1024, 0), draw(64, 1024, 1)
    x[::32, 7] = 1e6
    clean = torch.arange(64) % 32 != 0
    exact = x[clean] @ w.T

    def error(quantized: Tensor) -> float:
        return ((quantized[clean] @ w.T - exact).norm() / exact.norm()).item()

    one_scale = x.abs().max() / E4M3_MAX
    assert error(decode(to_e4m3(x / one_scale)) * one_scale) > 0.9
    assert error(quantize_tiles(x).dequantize()) < 0.03


def test_hardware_products_train_the_same(monkeypatch: pytest.MonkeyPatch):
    """The path of a graphics card, with the FP8 products that a CPU has."""
    x, w, dy = draw(130, 200, 0), draw(70, 200, 1), draw(130, 70, 2)
    emulated = layer_products(x, w, dy)
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    for name, ours in layer_products(x, w, dy).items():
        torch.testing.assert_close(ours, emulated[name], rtol=1e-4, atol=1e-4)


def test_only_what_is_asked_for_is_computed():
    for x_learns, w_learns in ((True, False), (False, True)):
        x, w = draw(5, 200, 0).requires_grad_(x_learns), draw(6, 200, 1).requires_grad_(w_learns)
        fp8_linear(x, w).sum().backward()
        assert (x.grad is not None, w.grad is not None) == (x_learns, w_learns)


def test_a_second_derivative_is_refused():
    x, w = draw(4, 8, 0).requires_grad_(), draw(4, 8, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(fp8_linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# Layers


def test_a_layer_maps_whatever_shape_a_plain_one_maps():
    plain = nn.Linear(200, 70)
    layer = Fp8Linear.from_linear(plain)
    for shape in ((200,), (0, 200), (1, 200), (2, 3, 200)):
        x = draw(int(np.prod(shape[:-1])), 200, 0).reshape(shape)
        assert layer(x).shape == plain(x).shape
        torch.testing.assert_close(layer(x), plain(x), rtol=0.5, atol=0.2)
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    assert not Fp8Linear.from_linear(nn.Linear(2, 3).eval()).training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_layer_answers_in_the_dtype_of_its_input(dtype: torch.dtype):
    layer = Fp8Linear.from_linear(nn.Linear(200, 70, bias=False))
    x = draw(5, 200, 0).to(dtype).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (dtype, dtype, torch.float32)
    torch.testing.assert_close(y, layer(x.float()).to(dtype))


def test_autocast_changes_the_output_and_no_product():
    layer = Fp8Linear.from_linear(nn.Linear(200, 70, bias=False))
    x = draw(50, 200, 0).requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    outside = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
        assert inside.dtype == torch.bfloat16
        torch.testing.assert_close(inside, y.bfloat16(), rtol=0, atol=0)
        inside.backward(torch.ones_like(inside))  # within autocast, where products are rounded
    assert torch.equal(x.grad, outside[0])
    assert torch.equal(layer.weight.grad, outside[1])


def test_what_is_kept_for_the_backward_pass_is_fp8():
    kept: list[Tensor] = []
    layer = Fp8Linear.from_linear(nn.Linear(256, 384, bias=False))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(draw(512, 256, 0).requires_grad_())
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept)
    assert bytes_kept == 512 * 256 + 256 * 384 + 4 * (512 * 2 + 2 * 3)


def test_recomputation_changes_nothing():
    layer = Fp8Linear.from_linear(nn.Linear(200, 70))
    x = draw(50, 200, 0).requires_grad_()
    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        run(x).square().sum().backward()
        gradients.append((x.grad, layer.weight.grad, layer.bias.grad))
        x.grad = layer.weight.grad = layer.bias.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# Experts


def random_experts(seed: int = 0, **changes: object) -> Experts:
    config = preset("tiny", hidden_size=160, moe_intermediate_size=136, **changes)
    torch.manual_seed(seed)
    experts = Experts(config)
    with torch.no_grad():
        experts.gate_up_proj.normal_(0, 0.1)
        experts.down_proj.normal_(0, 0.1)
    return experts


def random_routing(tokens: int, experts: int, chosen: int, used: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.rand(tokens, experts, generator=generator)
    choice[:, used:] = -1
    return Routing(
        choice.topk(chosen).indices, torch.rand(tokens, chosen, generator=generator), choice
    )


def slow_experts(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Expert by expert with three layers of its own, as equation (12) is written."""
    out = torch.zeros_like(x)
    for i, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        token, place = torch.where(routing.experts == i)
        if len(token):
            gate, up = fp8_linear(x[token], gate_up, power_of_two=True).chunk(2, dim=-1)
            inner = F.silu(gate) * up * routing.weights[token, place, None]
            out = out.index_add(0, token, fp8_linear(inner, down))
    return out


@few
@given(st.sampled_from([1, 5, 40, 300]), st.integers(2, 8), seeds)
def test_experts_are_a_slow_sum_of_fp8_layers(tokens: int, used: int, seed: int):
    experts = Fp8Experts.from_experts(random_experts(seed))
    routing = random_routing(tokens, 8, 2, used, seed)
    results = []
    for forward in (experts, lambda x, routing: slow_experts(x, routing, experts)):
        x = draw(tokens, 160, seed).requires_grad_()
        out = forward(x, routing)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, experts.gate_up_proj.grad, experts.down_proj.grad))
        experts.zero_grad()
    for ours, slow in zip(*results, strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-3, atol=1e-4 * float(slow.abs().max()))
    assert not results[0][2][used:].any()  # experts without a token have the gradient zero


def test_experts_without_a_token():
    experts = Fp8Experts.from_experts(random_experts())
    x = torch.zeros(0, 160, requires_grad=True)
    out = experts(x, random_routing(0, 8, 2, 8, 0))
    out.sum().backward()
    assert out.shape == (0, 160)
    assert not experts.down_proj.grad.any()


def test_experts_are_close_to_the_plain_ones():
    plain = random_experts()
    x, routing = draw(300, 160, 0), random_routing(300, 8, 2, 8, 0)
    exact = plain(x, routing)
    error = (Fp8Experts.from_experts(plain)(x, routing) - exact).norm() / exact.norm()
    assert 0.02 < error < 0.09


# The swap


@pytest.fixture
def model() -> MiniDeepSeek:
    torch.manual_seed(0)
    return MiniDeepSeek(preset("tiny", vocab_size=61))


def test_conversion_leaves_the_state_dict_alone(model: MiniDeepSeek):
    before = {
        name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()
    }
    parameters = dict(model.named_parameters())
    assert convert_to_fp8(model) is model
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor.data_ptr() == before[name][0], name
        assert torch.equal(tensor, before[name][1]), name
    assert all(p is parameters[name] for name, p in model.named_parameters())
    MiniDeepSeek(model.config).load_state_dict(after)


def test_conversion_takes_what_it_should_and_nothing_else(model: MiniDeepSeek):
    convert_to_fp8(model)
    convert_to_fp8(model)  # a second time changes nothing
    kinds: dict[type, set[str]] = {}
    for name, module in model.named_modules():
        kinds.setdefault(type(module), set()).add(name.split(".")[-1])
    assert kinds[nn.Linear] == {"lm_head", "eh_proj"}
    assert kinds[nn.Embedding] == {"embed_tokens"}
    assert kinds[Gate] == {"gate"}
    assert kinds[Fp8Experts] == {"experts"}
    assert Experts not in kinds
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert kinds[Fp8Linear] == attention | {"gate_proj", "up_proj", "down_proj"}
    rounded = {
        name.split(".")[-1]
        for name, module in model.named_modules()
        if isinstance(module, Fp8Linear) and module.power_of_two
    }
    assert rounded == {"o_proj"}


def test_an_optimizer_made_before_goes_on(model: MiniDeepSeek):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    convert_to_fp8(model)
    tokens = torch.randint(61, (2, 20))
    before = [p.clone() for p in model.parameters()]
    model(tokens, tokens).total(0.3, 1e-4).backward()
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert all(moved)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_converted_model_is_deterministic_and_close(model: MiniDeepSeek):
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    exact = model(tokens, tokens)
    convert_to_fp8(model)
    first, second = model(tokens, tokens), model(tokens, tokens)
    assert torch.equal(first.main, second.main)
    assert 0 < abs(first.main - exact.main) / exact.main < 0.05


def test_a_converted_model_decodes_with_a_cache(model: MiniDeepSeek):
    """Tiles of activations lie within a token, so chunks do not change them."""
    plain = {name: m for name, m in model.named_modules() if name.endswith("kv_b_proj")}
    convert_to_fp8(model).eval()
    for name, module in plain.items():  # absorbed decoding reads this weight in float32
        model.set_submodule(name, module)
    tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, cache = model(tokens), LatentCache()
        parts = torch.cat([model(part, cache=cache) for part in tokens.split(4, 1)], 1)
    assert (parts - whole).norm() < 0.02 * whole.norm()


# Training

# Widths of less than a tile and of one and a half.
SMALL = preset(
    "tiny",
    vocab_size=500,
    hidden_size=192,
    num_hidden_layers=2,
    moe_intermediate_size=48,
    num_nextn_predict_layers=0,
    initializer_range=0.07,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "stories"
    prepare(PrepareConfig(out=folder, stories=300, workers=1))
    return folder


def losses(run: Path) -> list[float]:
    return [line["main"] for line in read_log(run / "log.jsonl") if line["split"] == "train"]


def test_the_training_loop_trains_in_fp8_and_resumes_exactly(data: Path, tmp_path: Path):
    settings = dict(
        data=data, steps=6, batch_size=4, seq_len=32, warmup_steps=2, save_every=3, device="cpu"
    )
    whole = TrainConfig(out=tmp_path / "whole", **settings)
    state = train(whole, SMALL, step=fp8_train_step)
    assert any(isinstance(m, Fp8Linear) for m in state.model.modules())

    def stop_after_three(state, config, x, y):
        if state.step == 3:
            raise KeyboardInterrupt
        return fp8_train_step(state, config, x, y)

    split = TrainConfig(out=tmp_path / "split", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(split, SMALL, step=stop_after_three)
    resumed = TrainConfig(out=tmp_path / "split", resume=True, **settings)
    train(resumed, SMALL, step=fp8_train_step)
    assert losses(split.out) == losses(whole.out)
    plain, _ = load_run(whole.out)  # a checkpoint is that of any model
    assert not any(isinstance(m, Fp8Linear) for m in plain.modules())
    state.model.eval()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, state.model.state_dict()[name]), name


def test_fp8_follows_float32(data: Path, tmp_path: Path):
    curves = []
    for name, step in (("float32", train_step), ("fp8", fp8_train_step)):
        config = TrainConfig(
            data=data, out=tmp_path / name, steps=30, batch_size=4, seq_len=32, device="cpu"
        )
        train(config, SMALL, step)
        curves.append(np.array(losses(config.out)))
    assert curves[1][-1] < curves[1][0] - 1
    relative = curves[1] / curves[0] - 1
    assert 0 < abs(relative.mean()) < 0.01
