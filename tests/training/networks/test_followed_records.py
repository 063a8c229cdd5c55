"""Records are followed operator by operator: what is refused, and that what is accepted has right gradients."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opusim.training.networks.record_gradients.calls import Layout
from opusim.training.networks.record_gradients.followed import rules, tracking
from opusim.training.networks.record_gradients.followed.placement import (
    Held,
    Mixed,
    Refused,
    codes,
    decoded,
    seed_pass,
)
from opusim.training.networks.record_gradients.followed.rules import Operation
from opusim.training.networks.record_gradients.followed.tracking import RowTracker
from opusim.training.networks.record_gradients.tape import RecordTape
from tests.support.private_loops import private_loop
from tests.support.record_models import Runs, backward, draw, ids

pytestmark = pytest.mark.usefixtures("one_thread")


def loss(output: Any) -> Tensor:
    """A sum over records with a gradient at every output."""
    parts = output if isinstance(output, tuple) else (output,)
    flat = torch.cat([part.flatten(1) for part in parts], dim=1)
    return (flat * torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype) * 0.3).tanh().sum()


def worst(build: Callable[[], nn.Module], *args: Tensor) -> float:
    """The largest relative error of a record's gradient, against passes on single records in float64."""
    torch.manual_seed(0)
    model = build()
    tape = RecordTape(model, *(each[:3] for each in args))
    with tape.recording(len(args[0])):
        loss(model(*args)).backward()
    found, errors = tape.record_gradients(), []
    exact = copy.deepcopy(model).double()
    for i in range(len(args[0])):
        exact.zero_grad()
        single = (each[i : i + 1].double() if each.is_floating_point() else each[i : i + 1] for each in args)
        loss(exact(*single)).backward()
        wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in exact.named_parameters()}
        distance = torch.cat([(found[n][i].double() - g).flatten() for n, g in wanted.items()]).norm()
        errors.append(float(distance / torch.cat([g.flatten() for g in wanted.values()]).norm()))
    return max(errors)


# What is accepted


def filled(model: Any, x: Tensor) -> Tensor:
    """Writes positions one by one into a tensor of its own."""
    found = x.new_zeros(len(x), 5, 3)
    for t in range(5):
        found[:, t] = model.f(x[:, t])
    return found


def steps(model: Any, x: Tensor) -> Tensor:
    state = None
    for t in range(x.shape[1]):
        state = model.cell(x[:, t], state)
    return torch.cat(state, dim=1)


def windows(model: Any, x: Tensor) -> Tensor:
    """Two by two windows of an image of four by four, as rows."""
    rows = x.view(len(x), 2, 2, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 3)
    return model.f(rows).view(len(x), -1)


def masked_mean(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    return torch.where(mask[..., None], model.f(x), 0.0).sum(dim=1) / lengths.clamp(min=1)[:, None]


ACCEPTED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "lstm cell, both states": (lambda: Runs(steps, cell=nn.LSTMCell(4, 3)), (draw(4, 3, 4),)),
    "two outputs, one computed from the other": (
        lambda: Runs(lambda m, x: torch.var_mean(x * m.p, dim=1, keepdim=True), p=nn.Parameter(draw(4))),
        (draw(4, 4),),
    ),
    "filled by position": (lambda: Runs(filled), (draw(4, 5, 4),)),
    "masked mean": (lambda: Runs(masked_mean), (draw(4, 5, 4), ids(4))),
    "last token": (lambda: Runs(lambda m, x, i: m.f(x)[torch.arange(len(x)), i]), (draw(4, 5, 4), ids(4))),
    "own rows by index": (
        lambda: Runs(lambda m, x, i: m.f(x).gather(1, i[..., None].expand(-1, -1, 3))), (draw(4, 5, 4), ids(4, 2)),
    ),
    "rows twice": (lambda: Runs(lambda m, x: m.f(torch.cat([x, 2 * x])).chunk(2)), (draw(4, 4),)),
    "rows repeated": (lambda: Runs(lambda m, x: m.f(x.repeat_interleave(3, dim=0)).view(len(x), -1)), (draw(4, 4),)),
    "positions first, merged": (
        lambda: Runs(lambda m, x: m.f(x.transpose(0, 1).reshape(-1, 4)).view(5, len(x), 3).transpose(0, 1)),
        (draw(4, 5, 4),),
    ),
    "windows": (lambda: Runs(windows, f=nn.Linear(3, 2)), (draw(4, 4, 4, 3),)),
    "quantiles within a record": (
        lambda: Runs(lambda m, x: m.f(x) - x.quantile(0.4, dim=1, keepdim=True)), (draw(4, 4),),
    ),
    "distances within a record": (lambda: Runs(lambda m, x: torch.cdist(m.f(x), m.f(x[:, :2]))), (draw(4, 5, 4),)),
    "an image sampled where it says": (
        lambda: Runs(
            lambda m, x: functional.grid_sample(
                x,
                functional.affine_grid(m.f(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False),
                align_corners=False,
            ),
            f=nn.Linear(16, 6),
        ),
        (draw(4, 1, 4, 4),),
    ),
    "one hot": (
        lambda: Runs(lambda m, i: m.f(functional.one_hot(i, 5).to(m.f.weight.dtype)), f=nn.Linear(5, 2)), (ids(4, 3),),
    ),
    "bags of one size": (lambda: nn.EmbeddingBag(5, 3), (ids(4, 6),)),
    "sorted and scanned within a record": (
        lambda: Runs(lambda m, x: m.f(x).sort(dim=1).values.cumsum(dim=1)), (draw(4, 4),),
    ),
    "frozen batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False).eval()), (draw(4, 4),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_has_the_gradients_of_a_loop_over_records(name: str) -> None:
    build, args = ACCEPTED[name]
    assert worst(build, *args) < 2e-5


def test_numbers_of_all_records_that_reach_no_parameter_are_no_harm() -> None:
    assert worst(lambda: Runs(lambda m, x: (m.f(x), x.mean())[0]), draw(4, 4)) < 2e-5


def test_a_sum_of_losses_besides_that_of_the_outputs_is_accepted() -> None:
    RecordTape(Runs(with_loss(functional.mse_loss, reduction="sum")), draw(6, 4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_models_of_transformers_apply_masks_without_reading_them(kind: str) -> None:
    """They leave a mask out if no record of the batch is padded, which one record would decide for all others."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "bert":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(**sizes, **off, intermediate_size=8, max_position_embeddings=8)
        model = transformers.BertForSequenceClassification(config)
    else:
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, n_positions=8))
    before = transformers.masking_utils.is_tracing
    masked = Runs(lambda m, x, mask: m.inner(input_ids=x, attention_mask=mask).logits, inner=model)
    assert worst(lambda: masked, ids(4, 5), torch.ones(4, 5, dtype=torch.int64).tril(2)) < 2e-5
    assert transformers.masking_utils.is_tracing is before


# What is refused


def by_length(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Sorts records by length, as old code for recurrent networks does, and puts them back."""
    order = lengths.argsort(stable=True)
    return model.f(x[order])[order.argsort()]


def unpadded(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    (places,) = torch.where((torch.arange(x.shape[1]) < lengths[:, None]).flatten())
    rows = model.f(x.flatten(0, 1)[places])
    return x.new_zeros(len(x) * x.shape[1], 3).index_copy(0, places, rows).view(len(x), -1, 3)


def in_a_thread(model: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x.detach().sort(dim=0).values))
    thread.start()
    thread.join()
    return model.f(found[0])


def put(place: Callable[[Tensor], Any], values: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(model: Any, x: Tensor) -> Tensor:
        copied = x.clone()
        copied[place(x)] = values(x)
        return model.f(copied)

    return forward


def in_other_order(model: Any, x: Tensor) -> Tensor:
    """Views of the same memory that give rows to other records."""
    memory = x.new_zeros(4 * len(x))
    other = memory.view(4, len(x))
    memory.view(len(x), 4).copy_(x)
    return model.f(other.t())


def hidden_order(x: Tensor) -> Tensor:
    """0, 1, ..., unless a record holds a number that no invented one does."""
    return torch.arange(len(x)) + (x[:, 0] > 1e9).long()


Sorted = backward("Sorted", lambda gradient: gradient.sort(dim=0).values)
Read = backward("Read", lambda gradient: gradient * (1.0 + float(gradient.abs().numpy().max() > 1e9)))
Shared = backward("Shared", lambda gradient: gradient.sum(dim=0, keepdim=True).expand_as(gradient))
Numbered = backward("Numbered", lambda gradient: gradient / len(gradient))


def hooked(before: bool) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    if before:
        model[2].register_full_backward_pre_hook(lambda m, out: (out[0] - out[0].mean(dim=0),))
    else:
        model[1].register_full_backward_hook(lambda m, into, out: (into[0] - into[0].mean(dim=0),))
    return model


def seeded(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(4)
    return model.f(x) * torch.randn(len(x), 1)


def exchanged(model: Any, x: Tensor) -> Tensor:
    """Puts the sum of the gradients in the place of a frozen parameter."""
    outputs = model.f(x)
    if outputs.requires_grad:
        outputs.register_hook(lambda gradient: setattr(model.p, "data", gradient.sum(dim=0)))
    return outputs


class Keeps(nn.Module):
    """Adds the mean of the batch before, of an attribute or a buffer, or writes that of this one into a buffer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.f, self.way, self.last = nn.Linear(4, 3), way, torch.zeros(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, before = x.detach().mean(dim=0), torch.zeros(4)
        if self.way == "attribute":
            before, self.last = self.last, 0.1 * self.last + mean
        if self.way == "exchanged buffer":
            before, self.mean = self.mean, mean
        if self.way == "buffer":
            self.mean.data.copy_(mean)
        return self.f(x + before)


class WithLoss(torch.autograd.Function):
    """A tensor as it is, and the gradient of a loss besides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, torch.ones(())


def with_loss(of: Callable[..., Tensor], **options: Any) -> Callable[[Any, Tensor], Tensor]:
    def forward(model: Any, x: Tensor) -> Tensor:
        outputs = model.f(x)
        return WithLoss.apply(outputs, of(outputs, torch.zeros_like(outputs), **options))

    return forward


def running(model: Any, x: Tensor) -> Tensor:
    """Subtracts the mean of the batch, which a batch norm writes into a tensor."""
    mean = torch.zeros(4)
    functional.batch_norm(x.detach(), mean, torch.ones(4), training=True, momentum=1.0)
    return model.f(x - mean)


def over_the_first(model: Any, x: Tensor) -> Tensor:
    copied = x.clone()
    torch.zeros(4, out=copied[0])
    return model.f(copied)


def places(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():  # where torch does not take torch.where apart
        (found,) = torch.where(x[:, 0] < 1e9)
    return model.f(x + torch.linspace(0, 1, 50)[found.clone()][:, None])


def signs(x: Tensor) -> Tensor:
    """Whole numbers, two of each record."""
    return (x[:, :2] > 0).long()


def bags(ids: Callable[[Tensor], Tensor], begin: Callable[[int], Tensor], **weights: Any) -> Any:
    """A model that adds bags of a table's rows, which begin where offsets say, to its inputs."""

    def forward(model: Any, x: Tensor) -> Tensor:
        own = {name: make(x) for name, make in weights.items()}
        found = functional.embedding_bag(ids(x), draw(5, 4), begin(len(x)), mode="sum", **own)
        return model.f(x + found)

    return forward


def normalised(model: Any, x: Tensor) -> Tensor:
    """Channels of single records, with weights in another order."""
    rows = x.t().reshape(1, -1, 1) * torch.arange(5.0)
    found = functional.batch_norm(rows, None, None, weight=x.reshape(-1), training=True)
    return model.f(found[0, :, 0].view(4, len(x)).t())


def of_two(model: Any, x: Tensor) -> Tensor:
    """Places in a table, by the rows of two records."""
    found = draw(5, 4)[signs(x).reshape(-1), signs(x).t().reshape(-1)]
    return model.f(x + found.view(len(x), 2).sum(dim=1, keepdim=True))


def put_in_other_order(model: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, 2).clone()
    rows[:, [0]] = x[:, :2].t().reshape(-1, 1)
    return model.f(rows.view(len(x), 4))


def sampled(model: Any, x: Tensor) -> Tensor:
    """Samples every record, a channel, where every other one says."""
    found = functional.grid_sample(x[None, :, :, None], x[None, :, None, :2], align_corners=False)
    return model.f(x + found[0, :, :4, 0])


def directional(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return model.f(forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x))).tangent)


def folded_back(x: Tensor) -> Tensor:
    """Sums windows of neighbouring records."""
    pairs = x[:, :, None].expand(-1, -1, 2).contiguous()
    return torch.ops.aten.unfold_backward(pairs, list(x.shape), 0, 2, 1)


def summed_weight(gradient: Tensor) -> Tensor:
    """Adds the gradient of a weight that all records share."""
    rows, options = gradient[:, None], ([0], [1], [0], [1], False, [0], 1, [False, True, False])
    _, shared, _ = torch.ops.aten.convolution_backward(rows, rows, torch.ones(1, 1, 1), *options)
    return gradient + shared.flatten()


SharedWeight = backward("SharedWeight", summed_weight)


def assigned(model: Any, x: Tensor) -> Tensor:
    h = model.f(x)
    h[:, 0] = model.p[0]
    return h


class Cubed(torch.autograd.Function):
    """A function that no interceptor sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient * weight**3, (gradient * x * 3 * weight**2).sum(dim=0)


def by_two(n: int) -> Tensor:
    return torch.arange(0, 2 * n, 2)


def fed(of: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.f(of(x))


def outlier(x: Tensor) -> Tensor:
    """1 if a record holds a number that no invented one does, else 0."""
    return (x.detach() > 1e9).any().float()


LENGTHS, FIRST = (draw(6, 5, 4), ids(6)), torch.zeros(1, 4, dtype=torch.int64)
PLACE, SIZE = "in Runs takes rows by their place", "in Runs makes numbers that depend on"
FED: dict[str, tuple[Any, ...]] = {  # what a linear layer takes, the batch if not the usual one, the message
    "repeated by content": (lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0), "repeat_interleave in"),
    "neighbour": (lambda x: x.roll(1, dims=0), "roll in Runs works along the records"),
    "another order of merged rows": (lambda x: x.reshape(4, len(x)).t(), "view in Runs moves"),
    "largest of the batch": (lambda x: torch.where(x == x.max(dim=0).values, x, 0.0), "max in Runs"),
    "sorted behind autograd": (lambda x: x.data.sort(dim=0).values, "sort in Runs works along"),
    "numpy": (lambda x: torch.from_numpy(np.sort(x.detach().numpy(), axis=0)), "numpy in Runs"),
    "a list": (lambda x: torch.tensor(sorted(x.tolist())), "tolist in Runs hands numbers"),
    "the batch's size": (lambda x: x / len(x), "div in Runs takes the number of records"),
    "places in the batch": (lambda x: x * torch.arange(len(x))[:, None], "mixes the records"),
    "counted from the end": (lambda x: x[torch.arange(0, -len(x), -1)], "takes rows by their place"),
    "gathered along the records": (lambda x: x.gather(0, (x * 0).long()), "gather in Runs takes"),
    "gathered from the first record": (lambda x: x + x.gather(1, FIRST), "gather in Runs takes rows by their"),
    "selected by number": (lambda x: x + x.index_select(0, FIRST[0, :1]), "index_select in Runs takes rows by"),
    "added to the first record": (
        lambda x: x.index_add(0, FIRST[0, :1], torch.ones(1, 4)), "index_add in Runs puts rows where",
    ),
    "rows that records name": (lambda x: x[(x[:, 0] > 0).long()], "index in Runs takes rows of other"),
    "attention over the batch": (lambda x: (x @ x.t()).softmax(dim=1) @ x, "mm in Runs multiplies rows"),
    "bits of numbers": (lambda x: x.view(torch.int32).float(), "reads the bits of numbers as another"),
    "order with an exception": (lambda x: x[hidden_order(x)], "takes rows by their place"),
    "what follows a fixed record": (lambda x: x + x[50:].sum(dim=0), "slice in Runs cuts"),
    "table of the batch": (lambda x: functional.embedding(signs(x)[:, 0], x), "embedding in Runs takes numbers of"),
    "row of the batch": (lambda x: x + functional.embedding(FIRST[0, :1], x), "embedding in Runs takes numbers"),
    "bags of the batch": (lambda x: functional.embedding_bag(signs(x), x), "_embedding_bag.* in Runs takes numbers of"),
    "table that grows with the batch": (
        lambda x: x + torch.linspace(0, 1, len(x))[signs(x)[:, :1]], "index in Runs takes rows of numbers that",
    ),
    "positions by the place of a record": (
        lambda x: x[:, :4] + x.t()[torch.arange(len(x)), FIRST[0, :1]][:, None], (draw(6, 50),), f"index {PLACE}",
    ),
    "rows by the place of a record": (lambda x: x + x.reshape(-1)[torch.arange(len(x))][:, None], f"index {PLACE}"),
    "constants by the place of a record": (
        lambda x: x + draw(50, 2)[torch.arange(len(x)), signs(x)[:, 0]][:, None], f"index {PLACE}",
    ),
    "records selected by records": (lambda x: x.index_select(0, signs(x)[:, 0]), f"index_select {PLACE}"),
    "a first row of its own": (
        lambda x: x + torch.cat([torch.ones(1, 4), *[torch.zeros(1, 4)] * (len(x) - 1)]), f"cat {SIZE}",
    ),
    "gaps of a view": (lambda x: x + x[:, :2].as_strided((2,), (1,), 2).repeat(2), "as_strided in Runs views memory"),
    "number of outliers": (lambda x: x * (1 + len(x[x[:, 0] > 1e9])), "index in Runs chooses rows by"),
    "other operator in small batches": (lambda x: x.neg() if len(x) > 20 else x.flip(0), "neg in Runs does not run in"),
    "the batch's size as a tensor": (lambda x: x / torch.tensor(float(len(x))), f"lift_fresh {SIZE}"),
    "the batch's size as a filled tensor": (lambda x: x / torch.full((4,), len(x)), f"full {SIZE}"),
    "windows folded back": (folded_back, "unfold_backward in Runs works along the records"),
    "patches of the batch": (
        lambda x: x + functional.unfold(x[None, None, :, :1], (3, 1), padding=(1, 0))[0, :1].t(),
        "im2col in Runs sees the records in another dimension",
    ),
    "triangle behind batches of 50": (lambda x: x.triu(-50), "triu in Runs works along the records"),
    "a list of tensors": (lambda x: x + torch.tensor([outlier(x)]), "torch.tensor of a list of tensors in"),
    "a list of whole numbers": (lambda x: x + x.new_tensor([outlier(x).long()]), "torch.tensor of a list of tensors"),
    "a capsule": (lambda x: x * (1 + str(torch.to_dlpack(x)).count("?")), "to_dlpack in Runs hands numbers"),
    "called fresh": (lambda x: x + torch.ops.aten.lift_fresh(outlier(x)), "lift_fresh in Runs has no known"),
    "a mean written out": (lambda x: x + torch.mean(x, 0, out=torch.zeros(4)), "mean in Runs takes a second tensor"),
    "text of the numbers": (lambda x: x if "inf" in str(x) else 2 * x, "__repr__ in Runs"),
    "turned at a fixed record": (lambda x: x + torch.cat([x[-50:], x[:-50]]), "slice in Runs"),
    "draws of its own": (lambda x: x * torch.rand(len(x), 1, generator=torch.Generator()), "rand in Runs"),
    "draws of its own for records": (lambda x: x.clone().normal_(generator=torch.Generator()), "normal in Runs"),
    "dropped dimension": (lambda x: x[:, None].squeeze(), "batch of one.*x.squeeze"),
}  # fmt: skip
REFUSED: dict[str, tuple[Any, ...]] = {  # a function, its arguments if any but one batch, the message
    **{name: (fed(of), *rest) for name, (of, *rest) in FED.items()},
    "sorted by length": (by_length, LENGTHS, f"index {PLACE}"),
    "unpadded": (unpadded, LENGTHS, "nonzero in Runs has no known rule.*mask them with torch.where"),
    "rows by a mask": (lambda m, x: m.f(x)[x[:, 0] > -99], "index in Runs chooses rows by a mask"),
    "written one row down": (put(lambda x: slice(1, None), lambda x: x[:-1]), "slice in Runs moves the rows"),
    "other views of the memory": (in_other_order, "memory that holds them in another order"),
    "statistics": (lambda m, x: functional.batch_norm(m.f(x), None, None, training=True), "native_batch_norm in Runs"),
    "a thread": (in_a_thread, "tensor that torch did not compute in this pass"),
    "a condition": (lambda m, x: m.f(x) if bool((x > 0).any()) else m.f(2 * x), r"item \(or a condition"),
    "a weight of the batch": (
        lambda m, x: functional.layer_norm(m.f(x), (3,), x.mean(dim=0)[:3]), "numbers of the batch for its weight",
    ),
    "parts of fixed size": (lambda m, x: torch.cat([m.f(part) for part in x.split(50)]), "split in Runs"),
    "bags in outer order": (bags(lambda x: signs(x).t().reshape(-1), by_two), "bags that begin where offsets"),
    "bags of one, and a rest": (bags(lambda x: signs(x).reshape(-1), torch.arange), "bags that begin where offsets"),
    "bags weighted in outer order": (
        bags(lambda x: signs(x).reshape(-1), by_two, per_sample_weights=lambda x: x[:, :2].t().reshape(-1)),
        "_embedding_bag.* in Runs combines rows of different records",
    ),
    "channels weighted in another order": (normalised, "native_batch_norm in Runs combines rows of different records"),
    "table by places of two records": (of_two, "index in Runs takes rows of other"),
    "images sampled where others say": (sampled, "grid_sampler_2d in Runs returns shape .* for 37 records"),
    "places put by the place": (
        put(lambda x: (torch.arange(len(x)), signs(x)[:, 0]), lambda x: torch.linspace(0, 1, len(x))),
        f"linspace {SIZE}",
    ),
    "put over the first record": (put(lambda x: FIRST[0, :1], lambda x: 1.0), "index_put in Runs moves the rows"),
    "put by a mask and a place": (
        put(lambda x: (x[:, 0] > -1e9, torch.arange(len(x)) % 4), lambda x: 1.0), "index_put in Runs chooses rows by",
    ),
    "put in another order": (put_in_other_order, "index_put in Runs combines rows of different records"),
    "gradient of a shared weight": (lambda m, x: SharedWeight.apply(m.f(x)), "sums gradients over the records"),
    "running statistics": (running, "native_batch_norm in Runs overwrites a tensor by what records share"),
    "zeros over a record": (over_the_first, "zeros in Runs has no known rule"),
    "places of a condition": (places, "nonzero in Runs has no known rule"),
    "seeded draws": (Runs(lambda m, x: m.g(seeded(m, x)), f=nn.Linear(4, 3), g=nn.Linear(3, 2)), "randn in Runs"),
    "backward pass": (lambda m, x: Sorted.apply(m.f(x)), "the gradient at linear.*sort"),
    "backward pass through a constant convolution": (
        lambda m, x: Shared.apply(functional.conv1d(m.f(x)[:, None], torch.ones(1, 1, 3))),
        "the gradient at linear.*sum in .*SharedBackward reduces over the records",
    ),
    "number of records in the backward pass": (lambda m, x: Numbered.apply(m.f(x)), "div in .*the number of"),
    "backward hook": (hooked(False), "mean in .*BackwardHookFunctionBackward reduces over the records"),
    "hook before a backward pass": (hooked(True), "mean in .*BackwardHookFunctionBackward reduces over"),
    "numbers in the backward pass": (lambda m, x: Read.apply(m.f(x)), "backward pass of ReadBackward"),
    "mean of squares besides": (with_loss(functional.mse_loss), "mse_loss_backward in .* divides by the number"),
    "mean of Huber losses besides": (with_loss(functional.huber_loss), "huber_loss_backward in .* divides by"),
    "mean of smooth losses besides": (with_loss(functional.smooth_l1_loss), "smooth_l1_loss_backward in .* divides by"),
    "exchanged buffer": (Keeps("exchanged buffer"), "Keeps takes a tensor that torch did not compute in this pass"),
    "earlier batches": (Keeps("attribute"), "tensor that torch did not compute in this pass"),
    "buffer": (Keeps("buffer"), "changes buffer 'mean'"),
    "frozen parameter exchanged in the backward pass": (
        Runs(exchanged, f=nn.Linear(4, 3), p=nn.Parameter(draw(3), requires_grad=False)), "changes parameter 'p'",
    ),
    "gradient inside": (
        lambda m, x: m.f(torch.autograd.grad(m.f(z := x.clone().requires_grad_()).sum(), z)[0]),
        "Runs computes gradients in its forward pass",
    ),
    "torch.func inside": (lambda m, x: torch.vmap(m.f)(x), "within torch.vmap or torch.func"),
    "directional derivatives inside": (directional, "Runs computes directional derivatives in its forward pass"),
    "a submodule": (
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(Runs(lambda m, x: m.f(x.flip(0))))),
        r"linear\('1.0.f.weight', '1.0.f.bias'\).*flip in Runs '1.0'",
    ),
    # models without gradients of single records
    "bags by offsets": (nn.EmbeddingBag(9, 3), (ids(40), torch.arange(40)), "bags that begin where offsets say"),
    "sparse embedding": (nn.Embedding(9, 3, sparse=True), (ids(6, 2),), "sparse gradients.*sparse=False"),
    "sparse bags": (nn.EmbeddingBag(9, 3, sparse=True), (ids(6, 2),), "sparse gradients.*sparse=False"),
    "shortened embeddings": (nn.Embedding(11, 3, max_norm=0.1), (torch.arange(4),), "max_norm"),
    "assignment": (Runs(assigned, f=nn.Linear(4, 3), p=nn.Parameter(torch.ones(3))), "in place"),
    "random numbers in a function of parameters": (
        Runs(
            lambda m, x: functional.scaled_dot_product_attention(x[:, None], m.keys, m.keys, dropout_p=0.5),
            keys=nn.Parameter(torch.ones(1, 2, 4)),
        ),
        "draws random numbers",
    ),
    "frozen model": (nn.Linear(4, 3).requires_grad_(False), "no parameter to train"),
    "half precision": (nn.Linear(4, 3).half(), "float16"),
    "own function of a parameter": (
        Runs(lambda m, x: Cubed.apply(m.f(x), m.p), f=nn.Linear(4, 3), p=nn.Parameter(torch.ones(3))),
        "'p' is used where single records cannot be told apart",
    ),
    "recomputed activations": (  # by a second forward pass inside the backward pass, where no use is caught
        Runs(
            lambda m, x: torch.utils.checkpoint.checkpoint(m.f, x, use_reentrant=False),
            f=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        ),
        "recomputes activations in the backward pass",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_records_is_refused_by_operator_and_submodule(name: str) -> None:
    function, *given, message = REFUSED[name]
    model = function if isinstance(function, nn.Module) else Runs(function)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        RecordTape(model, *(given[0] if given else (draw(6, 4),)))
    assert "\n" not in str(caught.value)
    assert "numpy" not in vars(Tensor)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_may_run_on_no_record() -> None:
    model = Runs(lambda m, x: m.cell(m.f(x))[0], f=nn.Linear(4, 3), cell=nn.LSTM(3, 2, batch_first=True))
    tape = RecordTape(model, draw(3, 5, 4))
    with tape.recording(0):
        model(draw(0, 5, 4)).sum().backward()
    assert tape.clip(1.0) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# Other shapes, and whole loops


def mixes_short(model: Any, x: Tensor) -> Tensor:
    return model.f(x - x.mean(dim=0) if x.shape[1] < 4 else x)


def test_records_of_another_shape_are_followed_before_they_are_trained_on() -> None:
    model = Runs(mixes_short)
    tape = RecordTape(model, draw(3, 5, 4))
    tape.follow((draw(8, 6, 4),), {})
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    tape.follow((draw(9, 6, 4),), {})
    assert not calls  # another number of records is no other shape
    with pytest.raises(ValueError, match="mean in Runs reduces over the records"):
        tape.follow((draw(8, 3, 4),), {})


def private(model: nn.Module, data: TensorDataset, folder: Path, **options: Any) -> Any:
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=len(data))
    given = (model, optimizer, lambda output, *_: output.sum(), loader)
    return private_loop(folder, given, noise_multiplier=1e-6, **options)


def test_a_private_loop_begins_with_invented_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds out of the module, or refuses, depends on no record of the loader."""
    shown: list[Tensor] = []
    before = RecordTape.__init__

    def noted(tape: RecordTape, model: nn.Module, *args: Tensor, **kwargs: Tensor) -> None:
        shown.extend(args)
        before(tape, model, *args, **kwargs)

    monkeypatch.setattr(RecordTape, "__init__", noted)
    data = TensorDataset(torch.full((8, 4), 777.0), torch.full((8, 2), 777))
    private(nn.Linear(4, 3), data, tmp_path).close()
    (x,) = shown
    assert x.shape[1:] == (4,)
    assert float(x.abs().max()) < 10


# Where records stand


@pytest.mark.parametrize("layout", [Layout(0), Layout(1, 1, 3), Layout(0, 2, 1), Layout(1, 2, 2)])
def test_layouts_are_found_from_the_numbers_of_records(layout: Layout) -> None:
    size = layout.rows * 5
    shape = (size, 4) if layout.dim == 0 else (4, size)
    assert decoded(codes(torch.zeros(shape), layout, 5), 5) == Held(layout)


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.roll(1, 0),
        lambda x: x[:4],
        lambda x: x.flip(0),
        lambda x: torch.cat([x[1:], torch.zeros(1, 4)]),
        lambda x: x.tril(),
        lambda x: x.reshape(4, 5),
        lambda x: torch.cat([x, x.flip(0)]),
        lambda x: torch.cat([x, x.roll(1, 0).minimum(x)], dim=1),
    ],
)
def test_rows_that_moved_have_no_layout(moved: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Refused):
        decoded(moved(codes(torch.zeros(5, 4), Layout(0), 5)), 5)


SHAPE = (2, 3, 4, 6)
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(dim=(0, 2)),
    "mean, kept": lambda x: x.mean(dim=1, keepdim=True),
    "scan": lambda x: x.cumsum(dim=2),
    "softmax": lambda x: x.softmax(dim=1),
    "turned": lambda x: x.flip(2),
    "times a matrix": lambda x: x @ torch.ones(x.shape[-1], 2),
    "a matrix times": lambda x: torch.ones(2, x.shape[-2]) @ x,
    "bilinear": lambda x: functional.bilinear(x, x, torch.ones(2, x.shape[-1], x.shape[-1])),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[2:]),
    "group norm": lambda x: functional.group_norm(x, 1),
    "instance norm": lambda x: functional.instance_norm(x),
    "convolution": lambda x: functional.conv2d(x, torch.ones(2, x.shape[1], 3, 3), padding=1),
    "pooling": lambda x: functional.max_pool2d(x, 3, 1, 1),
    "pooling a line": lambda x: functional.avg_pool1d(x.flatten(0, 1), 3, 1, 1),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
}


def state_of(function: Callable[[Tensor], Tensor], dim: int) -> tuple[Any, Tensor]:
    """Return where a function of a tensor with records in a dimension puts them, and the tensor."""
    survey, tracker, x = None, None, torch.empty(0)
    for records in (5, 7):
        tracker = RowTracker(nn.Module(), records, survey)
        x = draw(*SHAPE[:dim], records, *SHAPE[dim + 1 :])
        tracker.note(Held(Layout(dim)), x)
        seed_pass()
        with tracker:
            result = function(x)
        survey = tracker.survey
    return tracker.states(result)[0], x


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_puts_records_where_its_rule_says(name: str) -> None:
    """Another record changes other numbers only, whichever dimension the records stand in."""
    function, accepted = OPERATORS[name], 0
    for dim in range(len(SHAPE)):
        try:
            state, x = state_of(function, dim)
        except ValueError:
            continue
        if not isinstance(state, Held):
            continue
        accepted += 1
        layout, before = state.layout, function(x)
        for record in range(7):
            other = x.clone()
            other.select(dim, record).mul_(-3.0)
            differs = (function(other) != before).movedim(layout.dim, 0).flatten(1).any(dim=1)
            assert differs[layout.owners(7) != record].sum() == 0
            assert differs[layout.owners(7) == record].any()
    assert accepted


def operation(name: str, records: int, states: list[Any], **arguments: Tensor) -> Operation:
    """A call of an operator that this machine may not run."""
    return Operation(
        func=None, name=name, where=lambda: name, arguments=arguments, numbers=(), tensors=list(arguments.values()),
        written=[], states=dict(zip(map(id, arguments.values()), states, strict=True)), records=records,
    )  # fmt: skip


def test_a_gradient_of_keys_that_all_heads_share_sums_over_records_in_the_heads() -> None:
    queries, keys = torch.zeros(1, 7, 2, 3), torch.zeros(1, 1, 2, 3)
    held = Held(Layout(1))
    op = operation("_scaled_dot_product_flash_attention_backward", 7, [held, None], query=queries, key=keys)
    first, second = rules.attention(op, [queries, keys])
    assert first == held
    assert isinstance(second, Mixed)


def test_the_memory_of_a_recurrent_layer_is_of_all_records() -> None:
    inputs, reserve = torch.zeros(5, 7, 3), torch.zeros(11)
    op = operation("_cudnn_rnn", 7, [Held(Layout(1))], input=inputs)
    *held, last = rules.recurrent(op, [inputs, inputs[:1], inputs[:1], reserve])
    assert held == [Held(Layout(1))] * 3
    assert isinstance(last, Mixed)


def test_planted_fault_indices_taken_for_constants_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rules of order and look-ups, a sorted batch would be accepted, its gradients given to other records."""
    monkeypatch.setitem(tracking.RULES, "sort", lambda op, outputs: op.state(op["self"]))
    monkeypatch.setitem(tracking.RULES, "index", lambda op, outputs: op.state(op["self"]))
    monkeypatch.setitem(tracking.RULES, "index_put", lambda op, outputs: op.state(op["values"]))
    assert worst(lambda: Runs(by_length), draw(6, 5, 4), torch.arange(6).flip(0)) > 0.1
