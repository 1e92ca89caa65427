"""Multi-token prediction: which token enters where, what is judged, and what stays unseen."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdsd.config import ModelConfig, preset
from mdsd.model.mtp import IGNORED, MTPModule
from mdsd.model.rope import rotation
from mdsd.model.transformer import Losses, MiniDeepSeek

LENGTH = 9  # tokens of a sequence, its last target included


def small(depths: int, **changes: object) -> ModelConfig:
    return preset(
        "tiny",
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=2,
        num_nextn_predict_layers=depths,
        **changes,
    )


def hard_model(depths: int, seed: int = 0) -> MiniDeepSeek:
    """A model with weights large enough that every token it reads shows in its logits."""
    torch.manual_seed(seed)
    model = MiniDeepSeek(small(depths))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
            else:
                parameter.normal_(1, 0.3)
    return model


def split(sequence: Tensor) -> tuple[Tensor, Tensor]:
    return sequence[:, :-1], sequence[:, 1:]


def sequences(batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(31, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def judged(model: MiniDeepSeek, sequence: Tensor, depth: int, place: int) -> Tensor:
    """The loss at one place and depth: every other target is ignored."""
    tokens, targets = split(sequence)
    alone = torch.full_like(targets, IGNORED)
    alone[:, place + depth] = targets[:, place + depth]
    losses = model(tokens, alone)
    return losses.main if depth == 0 else losses.mtp[depth - 1]


class Identity(nn.Module):
    """A block that adds nothing, so that the module around it can be read off."""

    def forward(self, h: Tensor, cos_sin: Tensor) -> tuple[Tensor, None]:
        return h, None


def unit(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def test_the_module_is_its_formula():
    torch.manual_seed(0)
    module = MTPModule(small(1), Identity()).double()
    for norm, size in ((module.enorm, 2.0), (module.hnorm, 3.0), (module.norm, 0.5)):
        nn.init.constant_(norm.weight, size)
    h, embedded = torch.randn(2, 2, 5, 32, dtype=torch.float64)
    out, stats = module(h, embedded, torch.empty(0))
    # The published checkpoints' order: the embedding's columns of M_k come first.
    left, right = module.eh_proj.weight.chunk(2, dim=1)
    joined = 2 * unit(embedded) @ left.T + 3 * unit(h) @ right.T
    torch.testing.assert_close(out, 0.5 * unit(joined), rtol=1e-10, atol=1e-10)
    assert stats is None


def test_the_block_gets_the_rotation_and_its_report_comes_back():
    class Reporting(nn.Module):
        def forward(self, h: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
            return h, cos_sin

    cos_sin = torch.randn(2, 5, 8)
    _, stats = MTPModule(small(1), Reporting())(*torch.randn(2, 1, 5, 32), cos_sin)
    assert stats is cos_sin


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_losses_equal_a_slow_reference(depths: int):
    """Position by position, with the chain recomputed for each prefix."""
    model, sequence = hard_model(depths), sequences()
    losses = model(*split(sequence))
    tokens, terms = sequence[:, :-1], [[] for _ in range(1 + depths)]
    for i in range(LENGTH - 1):
        # The states of positions 0 … i at each depth, from nothing behind t_{i+k}.
        cos_sin = rotation(model.config, 0, i + 1)
        h, _ = model.states(tokens[:, : i + 1], cos_sin)
        for k in range(min(depths, LENGTH - 2 - i) + 1):
            if k:
                entering = model.embed_tokens(sequence[:, k : i + k + 1])
                h, _ = model.mtp[k - 1](h, entering, cos_sin)
            logits = model.lm_head(h[:, -1])
            terms[k].append(F.cross_entropy(logits, sequence[:, i + k + 1]))
    for k, found in enumerate([losses.main, *losses.mtp]):
        assert len(terms[k]) == LENGTH - 1 - k
        torch.testing.assert_close(found, torch.stack(terms[k]).mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_depth_reads_up_to_its_entering_token_and_no_further(depth: int):
    """Depth k at position i reads t_0 … t_{i+k}; t_{i+k+1} is the target and not changed here."""
    model, sequence = hard_model(2), sequences(1)
    for place in range(LENGTH - 1 - depth):
        target = place + depth + 1
        before = judged(model, sequence, depth, place)
        for changed in set(range(LENGTH)) - {target}:
            other = sequence.clone()
            other[0, changed] = (other[0, changed] + 7) % 31
            moved = (judged(model, other, depth, place) - before).abs() > 1e-5
            assert moved == (changed < target), (place, changed)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_depth_reads_its_target(depth: int):
    """The probabilities of all targets at one place add up to 1 only if none of them is seen."""
    model, sequence = hard_model(2), sequences(1)
    for place in range(LENGTH - 1 - depth):
        total = 0.0
        for token in range(31):
            sequence[0, place + depth + 1] = token
            total += (-judged(model, sequence, depth, place)).exp().item()
        assert total == pytest.approx(1, abs=1e-4), place


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_ignored_target_removes_its_loss_and_hides_no_token(depth: int):
    model, sequence = hard_model(2), sequences(1)
    tokens, targets = split(sequence)
    places = range(LENGTH - 1 - depth)
    each = torch.stack([judged(model, sequence, depth, place) for place in places])
    for ignored in range(depth, LENGTH - 1):
        partly = targets.clone()
        partly[0, ignored] = IGNORED
        losses = model(tokens, partly)
        found = [losses.main, *losses.mtp][depth]
        kept = [place for place in places if place + depth != ignored]
        torch.testing.assert_close(found, each[kept].mean(), rtol=1e-4, atol=1e-4)


def test_embedding_and_head_are_one_tensor_each():
    model = hard_model(2)
    large = [n for n, p in model.named_parameters(remove_duplicate=False) if 31 in p.shape]
    assert large == ["embed_tokens.weight", "lm_head.weight"]
    losses = model(*split(sequences()))
    for part in (losses.main, *losses.mtp):
        for shared in (model.embed_tokens.weight, model.lm_head.weight):
            (gradient,) = torch.autograd.grad(part, shared, retain_graph=True)
            assert gradient.abs().sum() > 0


def test_the_chain_passes_gradients_down():
    model = hard_model(2)
    last = model(*split(sequences())).mtp[1]
    below = [model.mtp[0].eh_proj.weight, model.mtp[0].norm.weight, model.norm.weight]
    for gradient in torch.autograd.grad(last, below):
        assert gradient.abs().sum() > 0


def test_the_first_link_takes_the_state_after_the_final_norm():
    model, sequence = hard_model(1), sequences()
    before = model(*split(sequence)).mtp[0]
    with torch.no_grad():
        model.norm.weight[:16] *= 3  # a common factor would vanish in hnorm
    assert (model(*split(sequence)).mtp[0] - before).abs() > 1e-3


def test_without_modules_there_is_no_part_for_them():
    model = hard_model(0)
    losses = model(*split(sequences()))
    assert losses.mtp.shape == (0,)
    expected = losses.main + 0.01 * losses.balance
    torch.testing.assert_close(losses.total(0.3, 0.01), expected)


def test_the_total_takes_the_mean_over_depths():
    parts = torch.tensor(2.0), torch.tensor([3.0, 5.0]), torch.tensor(1.5)
    losses = Losses(*parts, torch.zeros(0, 8, dtype=torch.long))
    assert losses.total(0.3, 0.1).item() == pytest.approx(2 + 0.3 * 4 + 0.1 * 1.5)


def test_dropping_the_modules_leaves_the_predictions():
    model, tokens = hard_model(2), sequences()
    before = model(tokens)
    model.mtp = nn.ModuleList()
    assert torch.equal(model(tokens), before)


def test_ignored_is_the_value_that_torch_ignores():
    assert nn.CrossEntropyLoss().ignore_index == IGNORED
