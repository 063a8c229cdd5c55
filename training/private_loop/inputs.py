"""Refuse what a private loop cannot take, and find out what it must know of a module before the first batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from training.networks.record_independence import preserved_generators
from training.private_loop.loader import examples

_DISTRIBUTED = ("torch.nn.parallel.", "torch.distributed.")
"""Where torch's classes are defined that share a module between processes, devices or threads."""


def require_own_parameters(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that moves other parameters than the module's.

    Raises:
        ValueError: It does.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in own for parameter in group["params"]):
            raise ValueError(
                f"optimizer: group {number} has parameters that are not the module's, whose gradients would not be "
                "private; give it parameters of module only"
            )


def require_recordable(module: nn.Module) -> None:
    """Refuse modules whose gradients of single records cannot be taken here.

    Raises:
        ValueError: The module is in evaluation mode, compiled, distributed or sparse; the tape refuses others.
    """
    if not module.training:
        raise ValueError("module is in evaluation mode; call module.train() before make_private")
    for name, inner in module.named_modules():
        if any(kind.__module__.startswith(_DISTRIBUTED) for kind in type(inner).__mro__):
            raise ValueError(
                f"module {name or type(inner).__name__!r} is a {type(inner).__name__}, which would average or shard "
                "gradients before they are private; give the plain module, whose clipped gradients make_private adds "
                "over all processes"
            )
        if inner._compiled_call_impl is not None or isinstance(inner, torch._dynamo.OptimizedModule):
            raise ValueError(
                f"module {name or type(inner).__name__!r} is compiled, or in a private loop already; give the plain "
                "one, which close() of the other private loop gives back"
            )
        if getattr(inner, "sparse", False):
            raise ValueError(f"module {name!r} has sparse gradients; build it with sparse=False")


def require_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the module does not take by its signature.

    Raises:
        ValueError: It does not.
    """
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"module does not take what the loader's batches begin with ({error}); give example_inputs, the "
            "arguments that the loop gives the module, for a few records"
        ) from error


def example_of(
    loader: DataLoader[Any], given: Sequence[Any] | Mapping[str, Any] | None, place: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of the module for a few records."""
    if given is None:
        batch = examples(loader)
        given = batch
        if isinstance(batch, Mapping):
            given = {
                key: value for key, value in batch.items() if key not in ("label", "labels", "label_ids")
            }
        elif isinstance(batch, Sequence):
            given = batch[:1]
    if isinstance(given, Tensor):
        given = (given,)
    moved = tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, given)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return tuple(moved), {}


def template_of(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the module's outputs for the probe, and refuse buffers that keep numbers of records.

    Raises:
        ValueError: A training pass writes what depends on records into a buffer, or no output has a row per record.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    kept: list[dict[str, Tensor]] = []
    with preserved_generators(next(module.parameters()).device), torch.no_grad():
        for change in (lambda t: t, _other_records):
            torch.manual_seed(0)
            changed = tree_map(lambda t, c=change: c(t) if isinstance(t, Tensor) else t, (args, dict(kwargs)))
            output = module._call_impl(*changed[0], **changed[1])
            kept.append({name: buffer.clone() for name, buffer in module.named_buffers()})
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
    for name in before:
        if not torch.equal(kept[0][name], kept[1][name]):
            raise ValueError(
                f"module: a training pass writes numbers of the records into buffer {name!r}, which no noise protects; "
                "switch that off, such as track_running_stats=False, or use modules without statistics"
            )
    rows = rows_of(args, kwargs)
    if not any(isinstance(leaf, Tensor) and leaf.shape[:1] == (rows,) for leaf in tree_leaves(output)):
        raise ValueError("module returns no tensor with a row for each record; return outputs, not a loss")
    return output


def rows_of(args: Any, kwargs: Any) -> int | None:
    """Return the first size of the first tensor among arguments, or None if there is none."""
    leaves = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim]
    return len(leaves[0]) if leaves else None


def _other_records(values: Tensor) -> Tensor:
    """Return records with other numbers of the same kind."""
    if values.is_floating_point():
        return values * 0.5 + 0.25
    return values.flip(0).flip(-1) if values.ndim else values
