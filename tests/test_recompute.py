"""Recomputation: gradients bit for bit, forgotten tensors gone, products and routing done once."""

import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from mdsd.config import preset
from mdsd.model.fp8 import convert_to_fp8
from mdsd.model.norm import RMSNorm
from mdsd.model.transformer import MiniDeepSeek
from mdsd.training.recompute import RECOMPUTED, recomputed, saved_bytes

SMALL = preset("tiny", vocab_size=64, hidden_size=32, num_hidden_layers=2, q_lora_rank=16)
SHAPES = {
    "small": SMALL,
    "no query latent": replace(SMALL, q_lora_rank=None),
    "dense only": replace(SMALL, first_k_dense_replace=9, num_nextn_predict_layers=0),
    "two depths": replace(SMALL, num_nextn_predict_layers=2, n_shared_experts=2),
    "no shared experts": replace(SMALL, n_shared_experts=0, n_group=1, topk_group=1),
    "odd widths": replace(SMALL, moe_intermediate_size=37, v_head_dim=30, hidden_size=36),
}


def build(config=SMALL, seed: int = 0) -> MiniDeepSeek:
    torch.manual_seed(seed)
    return MiniDeepSeek(config)


def sample(rows: int = 3, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(64, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def run(model, context, x, y, dtype=torch.float32) -> list[torch.Tensor]:
    """The losses and all gradients, the forward pass inside `context`."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), context:
        losses = model(x, y)
        total = losses.total(0.3, 1e-2)
    total.backward()
    grads = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*(part.detach() for part in losses), *grads]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_equal_bit_for_bit(name, dtype):
    model, (x, y) = build(SHAPES[name]), sample()
    plain = run(model, nullcontext(), x, y, dtype)
    assert same(run(model, recomputed(model), x, y, dtype), plain)


@pytest.mark.parametrize("part", RECOMPUTED)
def test_each_part_alone_gives_the_same_and_saves_something(part):
    model, (x, y) = build(), sample()
    plain = run(model, nullcontext(), x, y)
    assert same(run(model, recomputed(model, (part,)), x, y), plain)
    assert saved_bytes(model, x, y, (part,)) < saved_bytes(model, x, y, ())


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 4), length=st.integers(2, 17), seed=st.integers(0, 9))
def test_any_batch_gives_the_same(rows, length, seed):
    model, (x, y) = build(seed=seed), sample(rows, length)
    y = y.masked_fill(torch.rand(y.shape) < 0.2, -100)
    assert same(run(model, recomputed(model), x, y), run(model, nullcontext(), x, y))


def test_float64_and_fp8_models_give_the_same():
    x, y = sample()
    for model in (build().double(), convert_to_fp8(build())):
        assert same(run(model, recomputed(model), x, y), run(model, nullcontext(), x, y))


def test_all_parts_together_more_than_halve_what_a_block_saves():
    model, (x, y) = MiniDeepSeek(preset("tiny", vocab_size=64)), sample(8, 64)
    parts = [saved_bytes(model, x, y, (part,)) for part in RECOMPUTED]
    nothing, together = saved_bytes(model, x, y, ()), saved_bytes(model, x, y)
    assert together < 0.5 * nothing
    assert together < min(parts)


def test_without_parts_the_count_is_autograds_own():
    model, (x, y), found = build(), sample(), {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model(x, y)
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    assert losses.main.isfinite()
    assert saved_bytes(model, x, y, ()) == sum(found.values())


def test_the_allocator_holds_as_much_less_as_was_counted():
    model, (x, y) = MiniDeepSeek(preset("tiny", vocab_size=64)), sample(8, 64)

    def allocated(context) -> int:
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(profile_memory=True, activities=[cpu]) as profile, context:
            losses = model(x, y)
        events = profile.events()
        freed = [event.cpu_memory_usage for event in events if event.name == "[memory]"]
        rest = [event.self_cpu_memory_usage for event in events if event.name != "[memory]"]
        assert losses.main.isfinite()
        return sum(freed) + sum(rest)

    less = allocated(nullcontext()) - allocated(recomputed(model))
    counted = saved_bytes(model, x, y, ()) - saved_bytes(model, x, y)
    assert abs(less - counted) < 0.02 * counted


class Operations(TorchDispatchMode):
    """Count the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, _, args=(), kwargs=None):
        self.count[operation.name()] += 1
        return operation(*args, **(kwargs or {}))


def test_products_attention_and_routing_are_not_done_again():
    model, (x, y) = build(), sample()

    def backward_operations(context) -> Counter[str]:
        with context:
            total = model(x, y).total(0.3, 1e-2)
        with Operations() as operations:
            total.backward()
        return operations.count

    plain = backward_operations(nullcontext())
    ours = backward_operations(recomputed(model))
    blocks = SMALL.num_hidden_layers + SMALL.num_nextn_predict_layers
    assert ours["aten::mm"] == plain["aten::mm"] + 2 * blocks  # kv_b_proj and q_b_proj, once each
    for again in ("aten::topk", "aten::sigmoid", "aten::_grouped_mm", "aten::sort.stable"):
        assert ours[again] == plain[again]
    assert not any("flash_attention_for_cpu" in name and "backward" not in name for name in ours)
    assert ours["aten::silu"] > plain["aten::silu"]


def test_nothing_is_left_in_the_model_even_after_an_error():
    model, (x, y) = build(), sample()
    names = list(model.state_dict())
    with pytest.raises(IndexError), recomputed(model):
        model(x + 1000, y)
    assert list(model.state_dict()) == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert same(run(model, recomputed(model), x, y), run(model, nullcontext(), x, y))


def test_the_graph_is_freed_without_the_collector():
    model, (x, y), seen = build(), sample(), []
    see = model.layers[0].mlp.register_forward_hook(
        lambda _, __, out: seen.append(weakref.ref(out.untyped_storage()))
    )
    keep = model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda _, args: seen.append(weakref.ref(args[0].untyped_storage()))
    )
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            with recomputed(model, ("norms",)):
                total = model(x, y).total(0.3, 1e-2)
            assert any(storage() is not None for storage in seen)
            if backward:
                total.backward()
            del total
            assert all(storage() is None for storage in seen)
    finally:
        gc.enable()
        see.remove()
        keep.remove()


def test_what_is_forgotten_is_freed_after_the_forward_pass():
    model, (x, y), seen = build(), sample(), []

    def see(_, args):
        seen.append(weakref.ref(args[0].untyped_storage()))

    handles = [model.layers[0].mlp.down_proj.register_forward_pre_hook(see)]  # SwiGLU's output
    handles += [block.self_attn.register_forward_pre_hook(see) for block in model.layers]  # norms'
    alive = []
    for context in (nullcontext(), recomputed(model)):
        seen.clear()
        with context:
            total = model(x, y).total(0.3, 1e-2)
        alive.append(sum(storage() is not None for storage in seen))
        assert total.isfinite()
    for handle in handles:
        handle.remove()
    assert alive == [3, 0]


@pytest.mark.parametrize("convert", [nn.Module.train, convert_to_fp8])
def test_the_backward_pass_may_run_twice_and_inside_autocast(convert):
    model, (x, y), grads = convert(build()), sample(), []
    for context in (nullcontext(), recomputed(model)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with context:
                total = model(x, y).total(0.3, 1e-2)
            total.backward(retain_graph=True)
        total.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert same(*grads)


def test_a_weight_that_changed_in_between_is_noticed():
    model, (x, y) = build(), sample()
    with recomputed(model):
        total = model(x, y).total(0.3, 1e-2)
    with torch.no_grad():
        model.layers[0].self_attn.kv_b_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        total.backward()


class Noisy(RMSNorm):
    """A norm with dropout inside: what is random must not be drawn again."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


def test_random_numbers_are_drawn_once():
    model, (x, y) = build(), sample()
    for module in model.modules():
        if type(module) is RMSNorm:
            module.__class__ = Noisy
    results, states = [], []
    for context in (nullcontext(), recomputed(model)):
        torch.manual_seed(3)
        results.append(run(model, context, x, y))
        states.append(torch.get_rng_state())
    assert same(*results)
    assert torch.equal(*states)


class Written(RMSNorm):
    """A norm that writes into its results, as a whole and in part."""

    def forward(self, x):
        out = x * 2
        before = out * 3
        out.add_(1)
        part = x * 3
        part[..., :4].mul_(0.5)
        return out * before * part


def test_writing_into_a_forgotten_tensor_is_repeated_on_a_copy():
    model = nn.Sequential(Written(8), nn.Linear(8, 8))
    x = torch.randn(5, 8, requires_grad=True)
    grads = []
    for context in (nullcontext(), recomputed(model)):
        model.zero_grad()
        with context:
            total = model(x).square().sum()
        total.backward()
        grads.append([model[1].weight.grad.clone(), x.grad.clone()])
        x.grad = None
    assert same(*grads)


def test_evaluation_inside_changes_nothing():
    model, (x, y) = build(), sample()
    with torch.no_grad(), recomputed(model):
        inside = model(x, y)
    with torch.no_grad():
        assert same(inside, model(x, y))
