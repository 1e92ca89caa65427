"""Multi-token prediction: which token enters where, what is judged, and what stays unseen."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mdsd.config import ConfigError, ModelConfig, preset
from mdsd.model import transformer
from mdsd.model.generate import Sampling, generate
from mdsd.model.mla import LatentCache
from mdsd.model.mtp import IGNORED, MTPModule
from mdsd.model.rope import rotation
from mdsd.model.transformer import Losses, MiniDeepSeek
from mdsd.training.data import batch as draw

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

    def forward(self, h: Tensor, cos_sin: Tensor, cache: object) -> tuple[Tensor, None]:
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


def test_the_block_gets_rotation_and_cache_and_its_report_comes_back():
    class Reporting(nn.Module):
        def forward(self, h: Tensor, cos_sin: Tensor, cache: object) -> tuple[Tensor, object]:
            return h, (cos_sin, cache)

    cos_sin, cache = torch.randn(2, 5, 8), LatentCache()
    module = MTPModule(small(1), Reporting())
    _, stats = module(*torch.randn(2, 1, 5, 32), cos_sin, cache)
    assert stats == (cos_sin, cache)


def test_a_module_that_reads_in_portions_with_a_cache_reads_the_same():
    module, cache = hard_model(1).mtp[0], LatentCache()
    (h, embedded), cos_sin = torch.randn(2, 2, 8, 32), rotation(small(1), 0, 8)
    whole, _ = module(h, embedded, cos_sin)
    for start, end in ((0, 3), (3, 4), (4, 8)):
        part = slice(start, end)
        out, _ = module(h[:, part], embedded[:, part], cos_sin[:, part], cache)
        cache.advance(end - start)
        torch.testing.assert_close(out, whole[:, part], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def slow_losses(model: MiniDeepSeek, sequence: Tensor, counts: Tensor) -> list[Tensor]:
    """Losses of all depths, place by place, the chain computed anew for each prefix.

    `counts` (B, T) tells which tokens t_1 … t_T are judged.
    """
    places, depths = sequence.shape[1] - 1, len(model.mtp)
    terms: list[list[Tensor]] = [[] for _ in range(1 + depths)]
    for i in range(places):
        # The states of positions 0 … i at each depth, from nothing behind t_{i+k}.
        cos_sin = rotation(model.config, 0, i + 1)
        h, _ = model.states(sequence[:, : i + 1], cos_sin)
        for k in range(min(depths, places - 1 - i) + 1):
            if k:
                entering = model.embed_tokens(sequence[:, k : i + k + 1])
                h, _ = model.mtp[k - 1](h, entering, cos_sin)
            logits = model.lm_head(h[:, -1])
            each = F.cross_entropy(logits, sequence[:, i + k + 1], reduction="none")
            terms[k].extend(each[counts[:, i + k]])
    assert len(terms[-1]) == counts[:, depths:].sum()
    return [torch.stack(judged).mean() if judged else torch.zeros(()) for judged in terms]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_losses_equal_a_slow_reference(data: st.DataObject, depths: int, batch: int, seed: int):
    """Any depth, length and padding, and tokens that are ignored anywhere."""
    places = data.draw(st.integers(depths + 1, 8))
    model = hard_model(depths)
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.randint(31, (batch, places + 1), generator=generator)
    ignored = data.draw(st.sampled_from(["nothing", "the ends of rows", "anything"]))
    if ignored == "the ends of rows":
        lengths = [data.draw(st.integers(1, places)) for _ in range(batch)]
        counts = torch.arange(places) < torch.tensor(lengths)[:, None]
    else:
        counts = torch.rand(batch, places, generator=generator) < (0.7 if ignored[0] == "a" else 2)
    tokens, targets = split(sequence)
    losses = model(tokens, targets.masked_fill(~counts, IGNORED))
    expected = torch.stack(slow_losses(model, sequence, counts))
    found = torch.stack([losses.main, *losses.mtp])
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


END = 30  # the token between two stories


@pytest.mark.parametrize("seed", range(5))
def test_each_place_is_given_and_judged_by_the_rule_also_at_borders(seed: int, monkeypatch):
    """Depth k at place i: t_{i+k} enters and t_{i+k+1} is judged, in windows of a packed stream."""
    stream = np.concatenate([[*range(1, n), END] for n in (5, 2, 9, 1, 1, 7, 12, 3, 30)])
    tokens, targets = draw(stream, batch_size=3, seq_len=10, seed=seed, step=0)
    window = torch.cat([tokens, targets[:, -1:]], dim=1)
    entered, wanted = [], []
    model = hard_model(3)
    model.embed_tokens.register_forward_hook(lambda _, args, __: entered.append(args[0]))

    def judge(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        assert h.shape[:2] == targets.shape
        assert weight is model.lm_head.weight
        wanted.append(targets)
        return h.sum()

    monkeypatch.setattr(transformer, "linear_cross_entropy", judge)
    model(tokens, targets)
    for k in range(4):
        for i in range(10 - k):
            assert torch.equal(entered[k][:, i], window[:, i + k])
            assert torch.equal(wanted[k][:, i], window[:, i + k + 1])
        assert entered[k].shape == wanted[k].shape == (3, 10 - k)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_end_of_a_story_hides_nothing_from_the_next(depth: int):
    """As in V3, documents are packed without a mask between them: all that came before is read."""
    model = hard_model(2)
    for border in range(1, LENGTH - 1):
        sequence = sequences(1, seed=border) % END
        sequence[0, border] = END
        for place in range(max(0, border - depth), LENGTH - 1 - depth):
            other = sequence.clone()
            other[0, 0] = (other[0, 0] + 7) % END
            moved = judged(model, other, depth, place) - judged(model, sequence, depth, place)
            assert moved.abs() > 1e-5, (border, place)


def padded_rows(filler: int) -> tuple[Tensor, Tensor]:
    """Three rows of 9, 6 and 2 tokens, filled up at the end with `filler`; tokens and targets."""
    sequence = sequences(3) % 29
    targets = sequence[:, 1:].clone()
    for row, length in enumerate((9, 6, 2)):
        sequence[row, length:] = filler
        targets[row, length - 1 :] = IGNORED
    return sequence[:, :-1], targets


def test_padding_tells_nothing_and_learns_nothing():
    model, found = hard_model(3).double(), []  # float32 would add in another order
    for filler in (29, 30):
        losses = model(*padded_rows(filler))
        (losses.main + losses.mtp.sum()).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert (model.embed_tokens.weight.grad[29:] == 0).all()
        found.append([losses.main, *losses.mtp, *grads])
        model.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_a_padded_row_counts_as_many_tokens_as_it_has():
    model = hard_model(2)
    tokens, targets = padded_rows(30)
    together = model(tokens, targets)
    for k, found in enumerate([together.main, *together.mtp]):
        total = torch.zeros(())
        for row, length in enumerate((9, 6, 2)):
            if length > 1 + k:
                alone = model(tokens[row : row + 1], targets[row : row + 1])
                total += (length - 1 - k) * [alone.main, *alone.mtp][k]
        count = sum(max(length - 1 - k, 0) for length in (9, 6, 2))
        torch.testing.assert_close(found, total / count, rtol=1e-4, atol=1e-4)


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


class Recorder:
    """Stands in for a shared layer: a copy of its weight for each use, all with one storage."""

    def __init__(self, weight: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.weight, self.use, self.copies, self.read = weight, use, [], []

    def __call__(self, x: Tensor) -> Tensor:
        self.read.append(self.weight.data_ptr())
        self.copies.append(self.weight.detach().clone().requires_grad_())
        return self.use(x, self.copies[-1])


def test_the_gradient_of_a_shared_tensor_is_the_sum_over_its_uses(monkeypatch):
    model, (tokens, targets) = hard_model(2), split(sequences())
    model(tokens, targets).total(0.3, 0.0).backward()
    embedding = Recorder(model.embed_tokens.weight, F.embedding)
    # The loss takes the head's weight: the recorder multiplies; the head behind it is the identity.
    one = torch.eye(len(model.lm_head.weight))
    head = Recorder(model.lm_head.weight, F.linear)
    loss = transformer.linear_cross_entropy
    with monkeypatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", lambda _, x: embedding(x))
        patch.setattr(
            transformer, "linear_cross_entropy", lambda h, _, targets: loss(head(h), one, targets)
        )
        losses = model(tokens, targets)
    losses.total(0.3, 0.0).backward()
    for recorder in (embedding, head):
        assert len(recorder.copies) == 3
        assert len(set(recorder.read)) == 1
        gradients = [copy.grad for copy in recorder.copies]
        torch.testing.assert_close(sum(gradients), recorder.weight.grad, rtol=1e-4, atol=1e-5)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_one_training_step_keeps_one_tensor():
    model = hard_model(2)
    before = model.embed_tokens.weight.data_ptr(), model.lm_head.weight.data_ptr()
    model(*split(sequences())).total(0.3, 0.0).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert before == (model.embed_tokens.weight.data_ptr(), model.lm_head.weight.data_ptr())
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(list(model.parameters()))  # no second copy hides anywhere


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


def test_logits_and_generation_do_not_call_the_modules():
    def refuse(*_: object) -> None:
        raise AssertionError("an MTP module was called")

    model = hard_model(2).eval()
    for module in model.mtp.modules():
        module.register_forward_pre_hook(refuse)
    model(sequences())
    assert len(list(generate(model, [1, 2, 3], 5, Sampling()))) == 5
    with pytest.raises(AssertionError, match="was called"):
        model(*split(sequences()))


@pytest.mark.parametrize("depths", [1, 2])
def test_a_checkpoint_without_modules_loads_where_they_are_not_asked_for(depths: int):
    full = hard_model(depths)
    state = {n: t for n, t in full.state_dict().items() if not n.startswith("mtp.")}
    torch.manual_seed(5)
    bare = MiniDeepSeek(small(0))
    bare.load_state_dict(state)
    assert torch.equal(bare(sequences()), full(sequences()))
    assert torch.equal(bare(*split(sequences())).main, full(*split(sequences())).main)
    with pytest.raises(RuntimeError, match=r"mtp\.0"):  # where they are, nothing is made up
        MiniDeepSeek(small(depths)).load_state_dict(state)


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_a_sequence_without_a_token_for_every_depth_is_refused(depths: int):
    model, tokens = hard_model(depths), sequences()
    assert model(tokens[:, : depths + 1], tokens[:, : depths + 1]).mtp.isfinite().all()
    with pytest.raises(ConfigError, match="too few"):
        model(tokens[:, :depths], tokens[:, :depths])


def test_ignored_is_the_value_that_torch_ignores():
    assert nn.CrossEntropyLoss().ignore_index == IGNORED
