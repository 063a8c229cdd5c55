"""Make a user's own training loop private, with the argument names of Opacus: `make_private`."""

from __future__ import annotations

import hashlib
import random
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opusim import checks
from opusim.accounting.explanation import large_delta, large_epsilon
from opusim.accounting.guarantee import Adjacency
from opusim.processes.ranks import Ranks, init_process_group
from opusim.randomness.streams import noise_stream
from opusim.training.data.samplers import PhysicalBatches, never_filled
from opusim.training.data.users import OwnIds, Users, id_warnings, require_users
from opusim.training.engine.steps import PaidSteps
from opusim.training.feedback.hooks import points_in
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.networks.base import require_fresh_noise
from opusim.training.networks.clipping import CountedSums
from opusim.training.networks.record_independence import preserved_generators
from opusim.training.private_loop.folder import PrivacySettings
from opusim.training.private_loop.inputs import (
    arguments_for,
    require_no_hidden_points,
    require_own_parameters,
    require_own_readings,
    require_plain_parts,
    warn_of_parameters_left_out,
)
from opusim.training.private_loop.loader import batch_size_of
from opusim.training.private_loop.module import MeasuredModule, PrivateModule
from opusim.training.private_loop.session import NamedAccountant, PrivateTraining
from opusim.training.protections.clipping import FLAT, Clipping
from opusim.training.protections.record import RecordGradients, require_counted_sums
from opusim.training.runs.storage import only_writer
from opusim.training.zeroth_order.optimizer import ZerothOrder
from opusim.training.zeroth_order.trainer import ScalarRelease

_PROBES = 16
"""Records by which data sets are compared, at places that depend on their number only."""
_WHOLE = 2**28
"""Bytes up to which all tensors of a TensorDataset are compared."""


def make_private(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Tensor],
    data_loader: DataLoader[Any],
    max_grad_norm: float | Sequence[float],
    target_delta: float,
    folder: str | Path,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    epochs: int | None = None,
    mode: Literal["experiment", "release"] = "experiment",
    seed: int | None = None,
    relation: str = "zero_out",
    sample_rate: float | None = None,
    max_physical_batch_size: int | None = None,
    fixed_batches: bool | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    accountant: str | None = None,
    user_ids: OwnIds | None = None,
    records_per_user: int | None = None,
    clipping: Clipping | str = "flat",
    resume: bool = False,
) -> PrivateTraining:
    """Make a training loop private: DP-SGD on whole records, with a ledger that every step is paid in first.

    With b the loader's batch size and n the number of its records, each step draws a secret Poisson batch with
    q = b / n, clips each record's gradient to C, and releases (sum + N(0, (z C)^2)) / b as the gradient of the
    parameters. Module and optimizer stay the objects that they are; the loop itself need not change::

        private = opusim.make_private(module=model, optimizer=optimizer, criterion=criterion, ...)
        model, optimizer, criterion, loader = private
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    An optimizer `opusim.training.ZerothOrder` takes no gradients. Its step then clips the vector of each record's K
    loss differences along K directions to C, and releases (sum + N(0, (z C)^2)) / b; there is no backward pass::

        for x, y in loader:
            optimizer.step(lambda x, y: criterion(model(x), y), x, y)

    The criterion is called on one record at a time, so that the loss of a record depends on no other, and receives the
    module's outputs exactly as they are. A batch may be empty; its backward pass and its step are taken like any other.

    With `user_ids` users are protected: each step draws each user with probability q = b / n, where b and n count
    users, and clips the mean gradient of at most `records_per_user` of its records, once. A record without an ID is a
    user of its own. The loader then hands out `records_per_user` rows for each drawn user, filled up by copies of
    weight zero.

    Under torchrun, or in an initialised process group, every process makes the same call and runs the same loop. The
    first process pays, draws each batch over the whole data set and adds the noise once to the sum of all.

    Args:
        module: In training mode, on its device, not in a DistributedDataParallel, with parameters in float32. Every
            record is processed independently.
        optimizer: Over parameters of the module, or a `ZerothOrder` of it.
        criterion: Maps outputs and targets to a loss, with any reduction.
        data_loader: A loader with batch_size over a data set with a length; its order is replaced. Several processes
            share each batch, so that batch_size is that of all together.
        max_grad_norm: C, above 0. Under clipping = "per_layer" also a norm for each layer (a weight with its bias) in
            the order of the module; C is then the root of the sum of their squares. With `ZerothOrder`, the bound on
            the norm of a record's loss differences: 2 phi sqrt(K) times the norm of a gradient that it keeps whole.
        target_delta: Delta of every statement, in [0, 1); warns above 0.1 / n.
        folder: Where saves stand, and the ledger, which also names what ran: versions, script and the files that
            define module, criterion and data set, each with its digest, classes of module and optimizer. New, or of
            this loop with `resume`; that of the first process counts.
        noise_multiplier: z, above 0; None for the least noise that keeps `epochs` within `target_epsilon`.
        target_epsilon: Budget; the step that would exceed it is not taken, and the iteration ends with a warning. None
            for no budget. Warns above 10.
        epochs: Planned epochs of round(1 / q) steps.
        mode: "experiment" stores a seed from which its noise can be rebuilt; "release" draws noise and batches from the
            operating system.
        seed: Seed of experiment mode, in [0, 2^64); None draws one.
        relation: "zero_out", under which n is public, or "add_or_remove_one", under which nothing may come from n.
        sample_rate: q, for add_or_remove_one a constant of your choice; None takes b / n.
        max_physical_batch_size: Records in memory at once; larger batches run in parts, whose forward passes run twice.
        fixed_batches: Whether every batch has a fixed number of rows, filled up by copies of a record of weight zero,
            so that neither the loop nor the time of a pass shows how many records were drawn. More rows run with a
            chance of 1e-9 a step, or if n q exceeds batch_size. None takes true on a graphics card, and from 1,024
            expected records. `physical_batches` of the private loop says how many rows run.
        example_inputs: Arguments of the module for a few records, a sequence or a mapping by name, public or invented:
            refusals may depend on them. None takes the shapes of the first entry of the loader's batches, or of all but
            the labels of a mapping, and invents the numbers.
        accountant: Name of another accountant, which an installed package brings by the entry-point group
            "opusim.accountants"; the statement gives its epsilon as well, as claimed. Budget and `epsilon` are those of
            opusim.
        user_ids: The ID of each record's user, a whole number or a text, in the order of the data set; None or a blank
            text for none. The collate function is called on the records of one user at a time.
        records_per_user: k, at least 1. A step draws which k records of a user with more it takes.
        clipping: How a record's gradient g is brought within C: "flat", by one factor; "per_layer", by one for each
            layer; "automatic", as C g / (|g| + 0.01); "adaptive", by a bound that begins at C and follows the median
            of the norms, as noisy counts show it, which the noise multiplier pays for. An `opusim.training.Clipping`
            also sets the constants.
        resume: Resume from the last `save` in `folder`, with the same arguments.

    Returns:
        The private loop; unpack it, and ask it for `epsilon`, `statement()` and `save()`.

    Raises:
        TypeError, ValueError: An argument is wrong, or the module mixes records; the message says what to do.
        NoGuarantee: No noise reaches `target_epsilon`.
        RunFolderError: The folder is in use, or holds other work.
    """
    init_process_group()
    ranks = Ranks()
    steps = PaidSteps(ranks, "the private loop")
    given = {
        "max_grad_norm": tuple(max_grad_norm) if isinstance(max_grad_norm, list | tuple) else max_grad_norm,
        "clipping": Clipping(kind=clipping) if isinstance(clipping, str) else clipping,  # type: ignore[arg-type]
        "target_delta": target_delta,
        "noise_multiplier": noise_multiplier,
        "target_epsilon": target_epsilon,
        "epochs": epochs,
        "mode": mode,
        "seed": seed,
        "relation": str(relation),
        "sample_rate": sample_rate,
        "records_per_user": records_per_user,
    }
    with ExitStack() as stack, ranks.handing_errors():
        checks.instance(nn.Module, module=module)
        checks.instance((str, Clipping), clipping=clipping)
        require_plain_parts(module, optimizer, data_loader)
        if isinstance(optimizer, list | tuple | dict):
            raise TypeError(
                f"optimizer: must be one torch.optim.Optimizer, got a {type(optimizer).__name__} of {len(optimizer)}; "
                "give one optimizer with a group for each of them, such as torch.optim.SGD([{'params': ..., 'lr': ...}"
                ", ...])"
            )
        checks.instance(torch.optim.Optimizer, optimizer=optimizer)
        if isinstance(optimizer, ZerothOrder):
            _require_measurable(optimizer, module, clipping=clipping, user_ids=user_ids)
            given["directions"] = optimizer.directions
        if max_physical_batch_size is not None:
            checks.integer(minimum=1, max_physical_batch_size=max_physical_batch_size)
        require_users(user_ids, records_per_user)
        group = records_per_user or 1
        if max_physical_batch_size is not None and max_physical_batch_size < group:
            raise ValueError(
                f"max_physical_batch_size = {max_physical_batch_size}: must hold the {group} records of a user, whose "
                "gradient is clipped once; raise it, or lower records_per_user"
            )
        other = None if accountant is None else NamedAccountant.load(accountant)
        batch_size = batch_size_of(data_loader)
        require_own_parameters(optimizer, module)
        warn_of_parameters_left_out(optimizer, module)
        data = digest_of_data(data_loader) if mode == "experiment" or ranks.world > 1 else None
        if ranks.world > 1:
            call: dict[str, Any] = {**given, **_facts(module, optimizer, data_loader, data)}
            call |= {"data_loader.batch_size": batch_size, "resume": resume, "accountant": accountant}
            call |= {"user_ids": None if user_ids is None else _digest([str(each) for each in user_ids])}
            call |= {"fixed_batches": fixed_batches, "max_physical_batch_size": max_physical_batch_size}
            ranks.require_same(call)
        points = points_in(module)
        require_no_hidden_points(module, points)
        require_own_readings(points, ranks.world)
        for each in points:
            each.private_loops += 1
            stack.callback(lambda own: setattr(own, "private_loops", own.private_loops - 1), each)
        if mode == "release":
            require_fresh_noise(module)
            for each in points:
                each.draw_from(ranks.on_first(lambda: secrets.randbits(64)))
        place = Path(folder)
        users, count = None, len(data_loader.dataset)  # type: ignore[arg-type]
        if user_ids is not None:
            users = Users.of(user_ids, count=count, most=group, name="user_ids")
            for each in id_warnings(user_ids, count=count, name="user_ids"):
                warnings.warn(each, stacklevel=2)
            count = len(users)
        given["users"] = users.digest if users is not None and mode == "experiment" else None
        given["data"] = data if mode == "experiment" else None
        given["device"] = _takes_device(module, optimizer, points)
        settings = ranks.on_first(
            lambda: _settings(count, place, stack, resume=resume, batch_size=batch_size, **given)
        )
        drawn = _drawn(settings, count, ranks)
        physical = PhysicalBatches.of_steps(
            **drawn,
            on_card=any(parameter.device.type != "cpu" for parameter in module.parameters()),
            fixed=fixed_batches,
            size=None if max_physical_batch_size is None else max_physical_batch_size // group,
        )
        example = arguments_for(module, data_loader, example_inputs)
        place_of_loop: dict[str, Any] = {
            "users": users,
            "settings": settings,
            "folder": place,
            "physical": physical,
            "steps": steps,
            "stack": stack,
            "accountant": other,
            "resume": resume,
        }
        noise = noise_stream(settings.mode, settings.seed, "private-loop")
        if isinstance(optimizer, ZerothOrder):
            measured = MeasuredModule(
                module,
                example,
                optimizer=optimizer,
                release=ScalarRelease(
                    clip=settings.max_grad_norm,
                    divisor=float(settings.batch_size),
                    scale=settings.noise_multiplier * settings.max_grad_norm,
                    noise=noise,
                    joint=optimizer.directions > 1,
                ),
                steps=steps,
                points=points,
                most_rows=physical.size,
            )
            stack.callback(measured.close)
            return PrivateTraining(measured, optimizer, criterion, data_loader, **place_of_loop)
        gradients = RecordGradients(
            clip_norm=settings.max_grad_norm,
            noise_multiplier=settings.noise_multiplier,
            divisor=float(settings.batch_size),
            noise=noise,
            clipping=settings.clipping,
            ranks=ranks,
            counted=CountedSums.of(physical.most(**drawn), processes=ranks.world)
            if mode == "release"
            else None,
        )
        private = PrivateModule(
            module,
            example,
            gradients=gradients,
            steps=steps,
            points=points,
            most_rows=None if physical.size is None else physical.size * group,
            group=group,
            release=mode == "release",
        )
        stack.callback(private.close)
        require_counted_sums(
            private.tape, batch_size * group, processes=ranks.world, name="data_loader.batch_size"
        )
        settings.clipping.require_layers(private.tape.depth, private.tape.names)
        return PrivateTraining(private, optimizer, criterion, data_loader, **place_of_loop)


def _require_measurable(
    optimizer: ZerothOrder, module: nn.Module, *, clipping: Clipping | str, user_ids: OwnIds | None
) -> None:
    """Refuse (ValueError) what zeroth-order steps do not protect: other modules, users, clips, several processes."""
    if Ranks().world > 1:
        raise ValueError(
            "optimizer: ZerothOrder trains in one process, and this one is in a group; use opusim train zo, which "
            "shares its batches among processes"
        )
    if optimizer.module is not module:
        raise ValueError("optimizer: is a ZerothOrder of another module; build it with the module given here")
    if user_ids is not None:
        raise ValueError(
            "user_ids: ZerothOrder protects single records; leave user_ids out, or take an optimizer of gradients"
        )
    if clipping not in ("flat", FLAT):
        raise ValueError(
            f"clipping = {clipping!r}: ZerothOrder clips a record's loss differences jointly; leave clipping out"
        )


def _takes_device(
    module: nn.Module, optimizer: torch.optim.Optimizer, points: Sequence[FeedbackAlignment]
) -> bool | None:
    """Return whether a device computes feedback; None if a part of opusim, or a measured loss, may use one."""
    if any(each.noisy_device is not None for each in points):
        return True
    own = any(type(part).__module__.startswith("opusim") for part in module.modules())
    return None if points or own or isinstance(optimizer, ZerothOrder) else False


def _drawn(settings: PrivacySettings, records: int, ranks: Ranks) -> dict[str, Any]:
    """Return the public numbers of a step's records, or users, for `PhysicalBatches`.

    Under add_or_remove_one the number of records is private, and the number of rows follows from other constants.
    """
    is_public = settings.relation is Adjacency.ZERO_OUT
    return {
        "expected": settings.sample_rate * records if is_public else settings.batch_size,
        "records": records if is_public else None,
        "processes": ranks.world,
    }


def _settings(records: int, folder: Path, stack: ExitStack, *, resume: bool, **given: Any) -> PrivacySettings:
    """Return the settings of a private loop of n records or users, and hold its folder as its only writer.

    With `resume` the folder supplies arguments that were not given; see `PrivacySettings.resolve`.
    """
    settings = PrivacySettings.resolve(records=records, **given)
    stack.enter_context(only_writer(folder, "folder", private=settings.mode == "release"))
    warning = large_delta(settings.target_delta, [settings.mechanism])
    if not resume:
        loose, thin = large_epsilon("target_epsilon", settings.target_epsilon), None
        if settings.relation is Adjacency.ZERO_OUT:
            names = {"rate": "sample_rate", "constant": "the loader's batch_size"}
            thin = never_filled(settings.sample_rate * records, settings.batch_size, **names)
        for each in filter(None, (warning, loose, thin)):
            warnings.warn(each, stacklevel=5)
        return settings
    found = [name for name in ("seed", "noise_multiplier") if given[name] is None]
    counted = records if given["sample_rate"] is None else None
    return settings.require_same(folder, found=found, records=counted)


def _facts(
    module: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], data: str | None
) -> dict[str, tuple[Any, ...]]:
    """Return facts about the arguments that must be equal in all processes."""
    parameters = [
        (name, tuple(p.shape), str(p.dtype), p.device.type, p.requires_grad)
        for name, p in module.named_parameters()
    ]
    groups = [
        (len(group["params"]), *((name, repr(value)) for name, value in group.items() if name != "params"))
        for group in optimizer.param_groups
    ]
    count = len(loader.dataset)  # type: ignore[arg-type]
    records = count, loader.num_workers, loader.prefetch_factor, data
    return {
        "module": (type(module).__qualname__, *parameters, *(name for name, _ in module.named_buffers())),
        "optimizer": (type(optimizer).__qualname__, *groups),
        "data_loader": records,
    }


def digest_of_data(loader: DataLoader[Any]) -> str | None:
    """Return a digest of a data set's records in their order, or None if it draws numbers of its own or cannot be read.

    All of a TensorDataset counts up to `_WHOLE` bytes, and of every data set the records at some places, as the collate
    function gives them under one state of the global generators.
    """
    dataset: Any = loader.dataset
    tensors = dataset.tensors if type(dataset) is TensorDataset else ()
    dense = tensors and all(each.layout is torch.strided for each in tensors)
    whole = _digest(tensors) if dense and sum(each.nbytes for each in tensors) <= _WHOLE else None
    if whole is not None and loader.collate_fn is default_collate:
        return whole
    places = sorted({place * (len(dataset) - 1) // (_PROBES - 1) for place in range(_PROBES)})
    found = []
    for _ in range(2):
        # a user's function may raise anything
        with preserved_generators(torch.device("cpu")), suppress(Exception):
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
            random.seed(0)
            found.append(_digest([loader.collate_fn([dataset[n]]) for n in places]))
    sampled = found[0] if len(found) == 2 and found[0] == found[1] else None
    return sampled if whole is None else _digest([whole, sampled])


def _digest(records: Sequence[Any]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(records):
        if isinstance(leaf, Tensor):
            found.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            found.update(repr((leaf.dtype.str, leaf.shape)).encode())
            found.update(leaf.tobytes())
        elif isinstance(leaf, str | int | float):
            found.update(repr(leaf).encode())
    return found.hexdigest()
