"""The loss in pieces equals the plain one, in value and gradients, and holds few logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mdsd.model import loss
from mdsd.model.loss import ROWS, cross_entropy, linear_cross_entropy
from mdsd.model.mtp import IGNORED


def drawn(
    rows: int, vocabulary: int, width: int = 6, spread: float = 1.0, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """States (1, rows, width), head (vocabulary, width), targets (1, rows)."""
    generator = torch.Generator().manual_seed(rows * vocabulary)
    h = spread * torch.randn(1, rows, width, generator=generator, dtype=dtype)
    weight = spread * torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    targets = torch.randint(vocabulary, (1, rows), generator=generator)
    return h.requires_grad_(), weight.requires_grad_(), targets


def gradients(value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs)


def test_the_plain_version_agrees_with_torch():
    logits, targets = torch.randn(2, 7, 11), torch.randint(11, (2, 7))
    targets[0, 2:5] = IGNORED
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(cross_entropy(logits, targets), expected)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(1, 30),
    piece=st.integers(1, 50),
    ignored=st.floats(0, 1),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    factor=st.sampled_from([1.0, 0.3, -2.0]),
)
def test_value_and_gradients_are_the_plain_ones(rows, vocabulary, piece, ignored, spread, factor):
    h, weight, targets = drawn(rows, vocabulary, spread=spread, dtype=torch.float64)
    targets[torch.rand(1, rows) < ignored] = IGNORED
    expected = factor * cross_entropy64(h, weight, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "ROWS", piece)
        found = factor * linear_cross_entropy(h, weight, targets)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, h, weight), gradients(expected, h, weight), strict=True):
        torch.testing.assert_close(one, other)


def cross_entropy64(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The definition, in float64: −log softmax at the targets that count, and their mean."""
    log_probabilities = (h @ weight.T).log_softmax(-1)
    counts = targets != IGNORED
    each = -log_probabilities.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (each * counts).sum() / counts.sum().clamp(min=1)


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
def test_pieces_of_the_real_size_leave_no_seam(rows):
    h, weight, targets = drawn(rows, 50)
    expected = cross_entropy(h @ weight.T, targets)
    found = linear_cross_entropy(h, weight, targets)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, h, weight), gradients(expected, h, weight), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-4)


class Largest(TorchDispatchMode):
    """Remember the most numbers that any tensor made inside has."""

    most = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("learning", [True, False])
def test_no_tensor_holds_all_logits(learning):
    h, weight, targets = drawn(8 * ROWS, 3000)
    with Largest() as seen, torch.set_grad_enabled(learning):
        value = linear_cross_entropy(h, weight, targets)
        if learning:
            gradients(value, h, weight)
    assert seen.most == ROWS * 3000
    with Largest() as seen:
        cross_entropy(h @ weight.T, targets)
    assert seen.most == 8 * ROWS * 3000


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_half_precision_stays_close_and_returns_what_came(dtype, close):
    h, weight, targets = drawn(2 * ROWS + 9, 300, width=16)
    expected = gradients(cross_entropy(h @ weight.T, targets), h, weight)
    with torch.autocast("cpu", dtype):
        value = linear_cross_entropy(h, weight, targets)
        assert value.dtype == torch.float32
        found = gradients(value, h, weight)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < close * other.norm()


def test_a_model_wholly_in_bfloat16():
    h, weight, targets = drawn(ROWS + 9, 300, width=16)
    half = [value.detach().bfloat16().requires_grad_() for value in (h, weight)]
    value = linear_cross_entropy(*half, targets)
    assert value.dtype == torch.float32
    found = gradients(value, *half)
    assert [grad.dtype for grad in found] == [torch.bfloat16] * 2
    for one, other in zip(
        found, gradients(cross_entropy(h @ weight.T, targets), h, weight), strict=True
    ):
        assert (one - other).norm() < 0.02 * other.norm()


def test_a_scaled_loss_does_not_lose_small_gradients_in_float16():
    """The scale comes in at the backward pass, when the gradients are in float32 already."""
    h, weight, targets = drawn(ROWS, 300, width=16)
    with torch.autocast("cpu", torch.float16):
        value = linear_cross_entropy(h, weight, targets)
    once = gradients(value * 2.0**16, h, weight)
    with torch.autocast("cpu", torch.float16):
        value = linear_cross_entropy(h, weight, targets)
    for one, other in zip(gradients(value, h, weight), once, strict=True):
        torch.testing.assert_close(one * 2.0**16, other)


def test_far_logits_do_not_overflow():
    h = torch.tensor([[[1000.0]]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    for target, expected in ((0, 0.0), (1, 2000.0)):
        assert linear_cross_entropy(h, weight, torch.tensor([[target]])) == expected


def test_the_gradient_can_be_asked_for_twice_but_not_differentiated():
    h, weight, targets = drawn(5, 9)
    value = linear_cross_entropy(h, weight, targets)
    first = torch.autograd.grad(value, (h, weight), retain_graph=True)
    second = torch.autograd.grad(value, (h, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    value = linear_cross_entropy(h, weight, targets)
    (grad,) = torch.autograd.grad(value * value, h, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_target_outside_the_vocabulary_is_refused():
    h, weight, targets = drawn(5, 9)
    targets[0, 2] = 9
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(h, weight, targets)


def test_a_loss_that_is_not_finite_stays_not_finite():
    h, weight, targets = drawn(5, 9)
    spoiled = h.detach().clone()
    spoiled[0, 3, 0] = torch.nan
    assert linear_cross_entropy(spoiled, weight, targets).isnan()
