"""Refuse modules and losses that let one record change another's contribution to a training step.

`RecordTape` bounds what a record adds to a sum if no other record changes it. Which rows belong to a record follows
from the operators that run (`opusim.training.networks.record_gradients.followed`). Faults that operators do not show
are sought with invented records, so that no refusal depends on private ones:

- parameters or buffers that a forward pass changes: a checkpoint would hold them without noise;
- a module that remembers earlier batches, or draws random numbers of its own;
- a loss of one record that depends on another, or on the number of records;
- hooks on parameters, which would not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opusim.errors import DeviceError
from opusim.training.networks.base import preserved_modes
from opusim.training.networks.record_gradients.calls import Rows, real_tensors
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.record_independence import (
    MIXES_REMEDY,
    batch_statistics,
    first_half,
    perturbed,
    preserved_buffers,
    preserved_generators,
    require_fixed_tensors,
    require_forgetful,
    runs_torch_only,
    same,
    seed_generators,
    seeded_output,
)

Loss = Callable[[Any, Tensor], Tensor]
"""Losses of the records, shape (batch,), from outputs and targets."""
_BATCH = 5
"""Records of a backward pass; a prime."""
_WITNESS = 1
"""The record whose loss and gradient are compared."""
_TOLERANCE = 1e-4
"""Largest relative difference that counts as rounding."""


def require_separate_steps(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, seek: Callable[[], None] = lambda: None
) -> None:
    """Refuse (ValueError) a module or a loss that lets a record change what others add; see the top of this file.

    The model, with its feedback points, gets at least 5 invented records, and the loss of each is taken; `seek`, called
    before each pass, makes feedback repeat its draws. Parameters, buffers, modes and torch's generators are restored,
    except for what the module's first training pass sets, such as initial values that depend on its batch: no private
    batch may set them.
    """
    if found := batch_statistics(model):
        raise ValueError(f"model: {found} mixes the records of a batch: {MIXES_REMEDY}")
    require_no_hooks(model)
    try:
        with preserved_modes(model), preserved_generators(x.device):
            # what this pass sets comes from these records and stays
            seeded_output(model.train(), first_half(x))
        with preserved_modes(model), preserved_generators(x.device), preserved_buffers(model):
            first = require_fixed_tensors(model.train(), x)
            seeded_output(model, x.flip(0)[:_BATCH])
            if not same(first, seeded_output(model, x)):
                raise ValueError(
                    "model: its output depends on earlier batches, or on random numbers that torch's generator does "
                    "not draw; use a module that keeps no state between batches"
                )
            with torch.no_grad():
                outputs = model.eval()(x)
            _require_separate_losses(loss, outputs, y)
            tape, given = RecordTape(model.train(), x), Rows.of(((x[:_BATCH],), {}))
            with perturbed(model):
                _require_steady(tape, loss, seek, given, y[:_BATCH])
    except DeviceError:
        raise
    except (RuntimeError, TypeError, IndexError, ArithmeticError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        if reason.startswith("model: "):
            raise ValueError(reason) from error
        raise ValueError(
            f"model: a probe with invented records of shape {tuple(x.shape[1:])} ends in {type(error).__name__}: "
            f"{reason}; a protected run must not stop because of what its records hold, so let the model accept all "
            "numbers of this shape (tokens: data.inputs = 'tokens')"
        ) from error


def require_steady_gradients(
    tape: RecordTape, args: Any, kwargs: Any, *, seek: Callable[[], None] = lambda: None
) -> None:
    """Refuse (ValueError) a module whose gradients depend on earlier batches.

    `args` and `kwargs` are invented, of at least one record, as `RecordTape` takes them; `seek`, called before each
    pass, makes feedback repeat its draws. The loss of a record is a fixed function of its outputs. Parameters, buffers
    and torch's generators are restored; the gradients of parameters are removed.
    """
    if runs_torch_only(tape.model):
        return
    (records,) = Rows.of((args, kwargs)).repeated(_BATCH)
    place = records.tensors[0].device
    targets = torch.arange(_BATCH, device=place)
    with (
        preserved_generators(place),
        preserved_buffers(tape.model),
        perturbed(tape.model),
        torch.enable_grad(),
    ):
        _require_steady(tape, _invented_losses, seek, records, targets)


def _invented_losses(outputs: Any, targets: Tensor) -> Tensor:
    """Return sum_k c_k (z_k + tanh z_k) of each record's outputs z, whose numbers c in [-1, 1] vary by target."""
    losses = torch.zeros(len(targets), device=targets.device)
    for number, output in enumerate(real_tensors(outputs)):
        if output.requires_grad and output.shape[:1] == targets.shape:
            z = output.reshape(len(targets), -1).float()
            entries = torch.arange(z.shape[1], device=z.device)
            c = ((entries + 3 * number) * (targets[:, None] + 2) + targets[:, None]) % 101 / 50 - 1
            losses = losses + (c * (z + z.tanh())).sum(dim=1)
    return losses


def require_no_hooks(model: nn.Module) -> None:
    """Refuse (ValueError) hooks on the gradients of parameters."""
    for name, parameter in model.named_parameters():
        later = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or later:
            raise ValueError(
                f"model: parameter {name!r} has a gradient hook, which does not run where the gradients of single "
                "records are clipped; remove the hook"
            )


def _require_separate_losses(loss: Loss, outputs: Tensor, y: Tensor) -> None:
    """Refuse a loss in which a record's value or gradient depends on others, or that changes from call to call."""
    z = (outputs + torch.randn_like(outputs)).requires_grad_()
    losses = loss(z, y)
    size = losses.detach().abs().max()
    wanted = losses[_WITNESS].detach()
    separate = True
    for number in (0, _WITNESS, len(z) - 1):
        (gradient,) = torch.autograd.grad(losses[number], z, retain_graph=True)
        only, others = loss(z[number : number + 1], y[number : number + 1])[0], gradient.clone()
        others[number] = 0
        separate &= not bool(others.count_nonzero()) and _near(losses[number], only, size)
    for other in (0, len(z) - 1):
        for value in (1.0 - 3.0 * z[other].detach(), torch.full_like(z[other], torch.nan)):
            changed, targets = z.detach().clone(), y.clone()
            changed[other], targets[other] = value, y[(other + 1) % len(y)]
            separate &= _near(wanted, loss(changed, targets)[_WITNESS], size)
    if not separate or not torch.equal(losses.detach(), loss(z, y).detach()):
        raise ValueError(
            "loss: the loss of one record depends on other records or on earlier batches, so that no clip bounds what "
            "a record changes; compute each record's loss from its own output and target"
        )


def _require_steady(
    tape: RecordTape, loss: Loss, seek: Callable[[], None], records: Rows, targets: Tensor
) -> None:
    """Refuse (ValueError) gradients that another pass on the same records does not repeat, or memory of batches."""
    parameters = [parameter for layer in tape.layers for parameter in layer]

    def gradient(index: Tensor, factor: float) -> Tensor:
        """Return the gradient of record `_WITNESS` of a batch as a step computes it, real inputs times a factor."""
        rows = records.take(index).mapped(lambda leaf: leaf * factor if leaf.is_floating_point() else leaf)
        args, kwargs = rows.values
        for parameter in parameters:
            parameter.grad = None
        seed_generators()
        seek()
        recorder = tape.begin(rows.records)
        with recorder:
            loss(tape.model(*args, **kwargs), targets[index.to(targets.device)]).sum().backward()
        tape.end(recorder)
        factors = torch.zeros_like(tape.squared_norms())
        factors[:, _WITNESS] = 1.0
        tape.set_gradients(factors)
        found = torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        return found

    wanted, again = (gradient(torch.arange(records.records), 1.0) for _ in range(2))
    if not _near(wanted.nan_to_num(), again.nan_to_num(), wanted.nan_to_num().norm()):
        raise ValueError(
            "model: its gradients depend on earlier batches, or on random numbers that no global generator draws; "
            "use modules that keep nothing between batches, and draw from torch's generator"
        )
    require_forgetful(tape.model, gradient)


def _near(first: Tensor, second: Tensor, size: Tensor) -> bool:
    """Return whether two tensors differ by no more than rounding, in units of a size; NaN differs from everything."""
    gap = (first.detach().double() - second.detach().double()).norm()
    return bool(gap <= _TOLERANCE * size.detach().double())
