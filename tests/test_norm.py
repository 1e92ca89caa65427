"""RMSNorm's own backward pass: PyTorch's numbers, in every dtype and shape."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsd.model import norm as module
from mdsd.model.norm import RMSNorm, ScaleByRMS


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    size=st.sampled_from([1e-6, 1e-3, 1.0, 1e6]),
    eps=st.sampled_from([1e-6, 1e-5]),
    seed=st.integers(0, 99),
)
def test_value_and_gradients_are_those_of_torch(shape, size, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(*shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    grad = torch.randn(*shape, generator=generator, dtype=torch.float64)
    x.requires_grad_(), weight.requires_grad_()
    expected = F.rms_norm(x, shape[-1:], weight, eps)
    found = ScaleByRMS.apply(x, weight, eps)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(y, (x, weight), grad) for y in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9 * grad.abs().max() / size, rtol=1e-6)


def test_the_gradient_agrees_with_differences():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: ScaleByRMS.apply(x, w, 1e-6), (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_stays_and_the_sum_is_taken_wider(dtype):
    x = torch.full((2, 5000), 3.0, dtype=dtype, requires_grad=True)
    norm = RMSNorm(5000)
    out = norm(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.ones_like(out))
    out.sum().backward()
    assert x.grad.dtype == dtype
    assert norm.weight.grad.dtype == torch.float32


def test_both_paths_of_the_module_agree(monkeypatch):
    """What other devices compute, on this one."""
    norm, x = RMSNorm(16), torch.randn(2, 5, 16, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    ours = torch.autograd.grad(norm(x).square().sum(), (x, norm.weight))

    class Elsewhere(torch.autograd.Function):
        apply = staticmethod(lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps))

    monkeypatch.setattr(module, "ScaleByRMS", Elsewhere)
    theirs = torch.autograd.grad(norm(x).square().sum(), (x, norm.weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_strided_and_expanded_rows():
    base = torch.randn(4, 6, 10)
    for x in (base[:, ::2, ::2], base.transpose(0, 1)[..., :5], base[:1, :, :5].expand(3, 6, 5)):
        x = x.detach().requires_grad_()
        weight = torch.randn(5, requires_grad=True)
        grad = torch.randn(x.shape).transpose(0, 1).contiguous().transpose(0, 1)
        pairs = [
            torch.autograd.grad(y, (x, weight), grad)
            for y in (ScaleByRMS.apply(x, weight, 1e-6), F.rms_norm(x, (5,), weight, 1e-6))
        ]
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_row_that_is_no_number_spoils_no_other():
    x = torch.randn(3, 4)
    x[1, 2] = torch.nan
    out = RMSNorm(4)(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
