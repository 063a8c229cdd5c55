"""Hand out secret Poisson batches of a user's data loader, each paid for before it is handed out.

The user's loader gives the data set, the collate function, the expected batch size and the workers. Its order is
replaced: in each step, each record enters the batch with probability q, independently of all others
(opusim.training.data.samplers.PoissonSampler). Of several processes, each hands out its part of the batch.

With fixed physical batches every batch has the same number of rows: copies of its first row fill it, of weight zero, so
that shapes do not tell how many were drawn. The collate function gets only the records, so that it may sort or change
them. Without fixed batches, a batch without records has tensors without rows and is a step like any other.

Where users are drawn, each drawn user has k rows, filled up by copies of its first record. The collate function is
called on the records of one user at a time, so that each row belongs to its user whatever that function does; torch's
own, which stacks rows, is called once.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from opusim.accounting.guarantee import BudgetExceeded
from opusim.accounting.mechanisms.records import RecordCentral
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import derive_seed, rounds_exactly
from opusim.training.data.samplers import PhysicalBatches, PoissonSampler
from opusim.training.data.users import Users
from opusim.training.engine.steps import PaidSteps
from opusim.training.networks.record_independence import (
    preserved_generators,
    same,
    system_generators,
)
from opusim.training.private_loop.folder import PrivacySettings
from opusim.training.private_loop.inputs import first_records
from opusim.training.private_loop.module import ModuleInLoop

_COLLATED = 4
"""Seeds under which a collate function is tried, since it may mix records at random."""
_OFFERS = 3
"""How often a batch that was left without a backward pass is handed out again."""
_FILL = -1
"""Index of a row that holds a copy of a record."""
_SEEDED = "accelerate.data_loader.SeedableRandomSampler"
"""The sampler of a loader that Accelerate or the Hugging Face Trainer has prepared."""
_DRIFT = 1e-3
"""Largest relative difference of a parameter's norm between processes when an epoch starts; rounding is far below."""


_Handed = tuple[int, int | list[int] | None, Any]
"""Number of rows of a batch, number of records (None if all rows are; a list by user if users are drawn), the batch."""


class PrivateLoader:
    """Stands for the user's loader in a private loop; iterating takes the rest of an epoch.

    An epoch has the nearest whole number to 1 / q steps. After a break or a resumed save, iterating finishes the epoch
    that was begun. A batch that was left without a backward pass, by a break or an error, is handed out again first:
    the choice to skip it could depend on its records.

    Attributes:
        dataset: The records.
        batch_size: Expected number of records in a batch.
        sampler: Draws the batches.
        users: The users to draw from, or None if records are drawn.

    Args:
        loader: The user's loader.
        settings: How batches are drawn, and what a step releases.
        physical: The rows of a batch, or its users.
        module: Trains on each batch that is handed out.
        steps: Pays for each batch, and holds the processes that share it.
        users: The users to draw from, or None if records are drawn.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        settings: PrivacySettings,
        module: ModuleInLoop,
        steps: PaidSteps,
        *,
        physical: PhysicalBatches,
        users: Users | None = None,
    ) -> None:
        self.dataset = loader.dataset
        self.batch_size = settings.batch_size
        self._source, self._settings, self._module, self._steps = loader, settings, module, steps
        self._physical, self._paid = physical, settings.mechanism
        self._last: _Handed = (0, None, None)
        self._iterations = self._offers = 0
        count, drawn, seed = len(self.dataset), len(users or self.dataset), settings.seed  # type: ignore[arg-type]
        seed = None if seed is None else derive_seed(seed, "private-loop", "batches")
        self.sampler = PoissonSampler(drawn, settings.sample_rate, seed=seed)
        self.users = None if users is None else replace(users, seed=seed)
        if users is None or loader.collate_fn is default_collate:
            require_separate_rows(loader)
        empty: Any = None
        if physical.count is None:
            one, two = (
                loader.collate_fn([self.dataset[index] for index in indices])
                for indices in ([0], [count - 1, count // 2])
            )
            empty = empty_batch(one, two)
        self._collate: Callable[[list[Any]], _Handed] = partial(
            _counted, collate=loader.collate_fn, empty=empty
        )
        if physical.count is not None or users is not None:
            with preserved_generators(torch.device("cpu")):
                single, pair = (loader.collate_fn([self.dataset[0] for _ in range(n)]) for n in (1, 2))
            each = None if users is None else users.most
            self._collate = _CollateFilled(loader.collate_fn, single, pair, empty, each)

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    @property
    def workers(self) -> int:
        """Other processes that read the records."""
        return self._source.num_workers

    @property
    def batch_sampler(self) -> BatchSampler:
        """Raise AttributeError: Opacus's BatchMemoryManager reads it, and the message says what takes its place."""
        raise AttributeError(
            "a private loader has no batch_sampler, because its batches are drawn in secret; instead of a "
            "BatchMemoryManager, give max_physical_batch_size to make_private and iterate over the loader itself"
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches left in the epoch, as the user's collate function builds them.

        Raises BudgetExceeded if the budget was spent before (the first time, iterating ends with a warning), and
        RuntimeError if a batch was not trained on when the next one was asked for, or another iteration began.
        """
        self._iterations += 1
        number, again = self._iterations, not self._module.trained
        self._begin_iteration()
        first = self._steps.step
        last = ((first - again) // len(self) + 1) * len(self)
        handing_errors = self._steps.ranks.handing_errors
        if again:
            with handing_errors():
                self._offers += 1
                if self._offers > _OFFERS:  # as a loop would that skips the batch
                    raise RuntimeError(
                        f"step {first - 1}: its batch was left without a backward pass, by a break or an error, "
                        f"{self._offers} times; which batches are left out may tell of their records, so the loop ends "
                        "here: mend the error, or resume from the last save with a smaller max_physical_batch_size if "
                        "memory ran out"
                    )
                self._module.begin(first - 1, *self._last)
            yield self._last[2]
            self._end_step(number)
        batches = iter(self._loader(first, last))
        for _ in range(first, last):
            with handing_errors():
                release = self._settings.mode == "release"
                # The records' transforms draw, too.
                with system_generators(torch.device("cpu")) if release else nullcontext():
                    self._last = next(batches)
                if not self._hand_out(until=last):
                    return
            yield self._last[2]
            self._end_step(number)

    def _begin_iteration(self) -> None:
        """Refuse to hand out batches if the budget is spent, or if the processes differ in call, group or parameters.

        Raises BudgetExceeded or RuntimeError.
        """
        self._steps.require_open()
        if self._steps.stopped is not None:
            raise BudgetExceeded(self._steps.stopped)
        ranks = self._steps.ranks
        with ranks.handing_errors():
            if Ranks().world != ranks.world:
                raise RuntimeError(
                    f"{Ranks().world} processes train together, and make_private was called in a group of "
                    f"{ranks.world}; call init_process_group before make_private, and keep the group"
                )
            if ranks.world > 1:
                self._steps.agree("iterates over the loader")
                # Parameters may differ from those of the first process by rounding only.
                named = list(self._module.module.named_parameters())
                norms = [float(p.detach().norm()) for _, p in named]
                for (name, _), ours, theirs in zip(named, norms, ranks.broadcast(norms), strict=True):
                    if abs(ours - theirs) > _DRIFT * abs(theirs):
                        raise RuntimeError(
                            f"parameter {name!r} has norm {ours:g} on process {ranks.rank} and {theirs:g} on process "
                            "0; change parameters and learning rates on every process alike"
                        )
                ranks.meet()
        if self._module.trained:
            self._module.drop()

    def _hand_out(self, *, until: int) -> bool:
        """Pay, in the epoch up to a step, for the next batch and take it; returns False if the budget is spent."""
        self._module.paid_on = place = self._module.place
        try:
            # A zeroth-order step's few sums are rounded on the processor, wherever the module is.
            if isinstance(self._paid, RecordCentral):
                mode = self._settings.mode
                exact, counts = rounds_exactly(place, mode), place == "cpu" and mode == "release"
                if (self._paid.exactly_rounded, self._paid.counts_sums) != (exact, counts):
                    self._paid = replace(self._paid, exactly_rounded=exact, counts_sums=counts)
            self._steps.pay(self._paid, until=until)
        except BudgetExceeded as error:
            self._steps.stopped = f"{error}; the loop ended after step {self._steps.step}{self._steps.lost}"
            warnings.warn(self._steps.stopped, stacklevel=3)
            return False
        self._module.begin(self._steps.step, *self._last)
        self._steps.step += 1
        return True

    def _end_step(self, iteration: int) -> None:
        """Refuse (RuntimeError) to continue before the batch at hand was trained on, or after another iteration."""
        with self._steps.ranks.handing_errors():
            if iteration != self._iterations:
                raise RuntimeError(
                    "data_loader: another iteration over it began meanwhile, which hands out the batches now; take "
                    "them from one iterator at a time"
                )
            self._steps.require_own()
            if not self._module.trained:
                raise RuntimeError(
                    f"step {self._steps.step - 1}: its batch was left without a backward pass, and which batches are "
                    "left out may tell of their records; call backward on the loss of every batch, also of an empty "
                    "one, before the next is drawn (a framework that accumulates gradients may draw ahead: give "
                    "max_physical_batch_size instead)"
                )
        self._last, self._offers = (0, None, None), 0

    def _loader(self, first: int, last: int) -> DataLoader[Any]:
        source, seed, rank = self._source, self._settings.seed, self._steps.ranks.rank
        if seed is None:
            own = int.from_bytes(os.urandom(7), "little")
        else:  # what workers draw differs from epoch to epoch, and from process to process
            keys = ((last - 1) // len(self), *((rank,) if rank else ()))
            own = derive_seed(seed, "private-loop", "workers", *keys) >> 1
        return DataLoader(
            _Indexed(source.dataset),
            batch_sampler=_Drawn(self.sampler, first, last, self._steps, self._physical, self.users),
            collate_fn=self._collate,
            generator=torch.Generator().manual_seed(own),
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
        )


class _Drawn(BatchSampler):
    """The indices of this process in some steps, and `_FILL` for rows to fill; each step is drawn once."""

    def __init__(
        self,
        sampler: PoissonSampler,
        first: int,
        last: int,
        steps: PaidSteps,
        physical: PhysicalBatches,
        users: Users | None,
    ) -> None:
        self._poisson, self._first, self._last, self._steps = sampler, first, last, steps
        self._physical, self._users = physical, users

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._first, self._last):
            own, most = self._steps.part(step, self._poisson.indices)
            rows = len(own) if self._physical.count is None else self._physical.rows(most)
            if self._users is not None:
                each = self._users.most
                chosen = [self._users.chosen(user, step) for user in own]
                own = list(
                    itertools.chain.from_iterable(found + [_FILL] * (each - len(found)) for found in chosen)
                )
                rows *= each
            yield own + [_FILL] * (rows - len(own))

    def __len__(self) -> int:
        return self._last - self._first


class _Row:
    """Stands for a record in a row that is to be filled."""


class _Indexed(torch.utils.data.Dataset[Any]):
    """A data set that returns any number of records, also none, and a `_Row` for each row to fill."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        filled = _FILL in indices
        drawn = [index for index in indices if index != _FILL] if filled else indices
        if drawn and callable(getattr(self._dataset, "__getitems__", None)):
            records = list(self._dataset.__getitems__(drawn))
        else:
            records = [self._dataset[index] for index in drawn]
        if not filled:
            return records
        found = iter(records)
        return [_Row() if index == _FILL else next(found) for index in indices]


def _counted(records: list[Any], *, collate: Callable[[list[Any]], Any], empty: Any) -> _Handed:
    """Collate as the user does, with the number of records; a batch without records is the same one each time."""
    return len(records), None, collate(records) if records else empty


class _CollateFilled:
    """The user's collate function, with copies of rows that fill the batch, and the numbers of rows and records.

    Copies of the first row follow the rows of all records. If users are drawn, each of them is collated separately, and
    copies of its own first row follow its rows; users that only fill the batch come last.

    Args:
        collate: The user's collate function.
        one: A batch of one record, whose row fills batches without records.
        two: A batch of that record twice; it differs from `one` in the dimensions of rows.
        empty: The batch without rows, if there may be one.
        each: Rows of a user, or None if records are drawn.

    Raises:
        ValueError: The batches hold something whose rows cannot be told apart.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], one: Any, two: Any, empty: Any, each: int | None
    ) -> None:
        self._collate, self._one, self._two, self._empty, self._each = collate, one, two, empty, each
        _joined([one], one, two, [[0]])

    def __call__(self, rows: list[Any]) -> _Handed:
        if not rows:
            return 0, 0 if self._each is None else [], self._empty
        each = self._each or len(rows)
        found = [rows[n : n + each] for n in range(0, len(rows), each)]
        if _Row in set(map(type, rows)):
            found = [[row for row in own if type(row) is not _Row] for own in found]
            found = [records for records in found if records]
        drawn = [len(records) for records in found]
        if found and self._collate is default_collate:
            whole = list(
                itertools.chain.from_iterable(
                    records + records[:1] * (each - len(records)) for records in found
                )
            )
            whole += whole[:1] * (len(rows) - len(whole))
            # Tuples with tensors, or numbers, of one kind at each place can be stacked at once.
            plain = set(map(type, whole)) == {tuple} and len(set(map(len, whole))) == 1
            kinds = [set(map(type, column)) for column in zip(*whole, strict=True)] if plain else []
            if plain and all(len(kind) == 1 and kind <= {Tensor, int, float} for kind in kinds):
                return len(rows), sum(drawn) if self._each is None else drawn, self._collate(whole)
        batches = [self._collate(records) for records in found] or [self._one]
        kept = [[*range(n), *[0] * (each - n)] for n in drawn] or [[0] * each]
        if left := len(rows) - each * len(kept):
            batches.append(batches[0])
            kept.append([0] * left)
        whole = _joined(batches, self._one, self._two, kept)
        return len(rows), sum(drawn) if self._each is None else drawn, whole


def _joined(batches: Sequence[Any], one: Any, two: Any, kept: Sequence[Sequence[int]]) -> Any:
    """Return the rows with these numbers of each batch, one after the other.

    Rows stand in the dimensions in which `one` and `two` differ. Raises ValueError if they cannot be told apart, or
    have other shapes in one batch than in another.
    """

    def constant(values: Sequence[Any], one: Any, where: str) -> Any:
        """Return a value without rows; it reaches all records of a step, so that no record may determine it."""
        if any(not _is_same(value, one) for value in values):
            raise ValueError(
                f"data_loader: its collate function puts a value without rows into batches (batch{where}), and it "
                "differs from one batch to the next; give each record a row of its own"
            )
        return one

    def leaf(values: Sequence[Any], one: Any, two: Any, where: str) -> Any:
        if _has_entries(one) and all(type(value) is type(one) for value in values):
            sizes = zip(one.shape, two.shape, strict=True)
            place = next((n for n, pair in enumerate(sizes) if pair == (1, 2)), None)
            if place is None:
                return constant(values, one, where)
            shapes = {(*each.shape[:place], *each.shape[place + 1 :]) for each in values}
            if len(shapes) > 1:
                raise ValueError(
                    f"data_loader: its collate function, called on the records of one user at a time, gives rows of "
                    f"several shapes (batch{where}); pad all records to one length"
                )
            counts = [each.shape[place] for each in values]
            numbers = _numbers(counts, kept, where)
            if isinstance(one, Tensor):
                whole = values[0] if len(values) == 1 else torch.cat(list(values), dim=place)
                if numbers is None:
                    return whole
                return whole.index_select(place, torch.tensor(numbers, device=whole.device))
            joined = np.concatenate(values, axis=place)
            return joined if numbers is None else joined.take(numbers, axis=place)
        if one is None or isinstance(one, str | bytes | bool | int | float):
            return constant(values, one, where)
        raise ValueError(
            f"data_loader: its collate function puts a {type(one).__name__} into batches (batch{where}), whose rows "
            "cannot be filled; return tensors with a row for each record, or lists, tuples and mappings of these, or "
            "give fixed_batches=False"
        )

    return _rebuilt(batches, one, two, kept, leaf, "")


def _numbers(counts: Sequence[int], kept: Sequence[Sequence[int]], where: str) -> list[int] | None:
    """Return the numbers of kept rows in joined batches, None for all; raise ValueError if a batch has too few."""
    if any(count <= max(own) for count, own in zip(counts, kept, strict=True)):
        raise ValueError(
            f"data_loader: its collate function gives fewer rows than records (batch{where}); return a row for each"
        )
    if all(own == list(range(count)) for count, own in zip(counts, kept, strict=True)):
        return None
    starts = itertools.accumulate(counts[:-1], initial=0)
    return [start + row for start, own in zip(starts, kept, strict=True) for row in own]


def empty_batch(one: Any, two: Any) -> Any:
    """Return a batch without records in the form of two batches, of one record and of two others.

    Tensors and arrays lose all rows, and all entries of dimensions that vary. A list or tuple that grows with the batch
    becomes empty; in others, and in mappings, each entry is emptied. None stays, and so does a truth value that both
    batches have. Nothing else can be kept (ValueError), since it may reveal the records that the batches were built
    from.
    """

    def leaf(values: Sequence[Any], one: Any, two: Any, where: str) -> Any:
        if _has_entries(one) and _has_entries(two) and one.ndim and one.ndim == two.ndim:
            varies = [n == 0 or a != b for n, (a, b) in enumerate(zip(one.shape, two.shape, strict=True))]
            return one[tuple(slice(0 if each else None) for each in varies)]
        if one is None or (isinstance(one, bool) and one is two):
            return one
        raise ValueError(
            f"data_loader: its collate function puts a {type(one).__name__} into batches (batch{where}), of which no "
            "batch without records can be made; return tensors with a row for each record, or lists, tuples and "
            "mappings of these, and build constants into the module or the criterion"
        )

    return _rebuilt([one], one, two, [], leaf, "")


_Leaf = Callable[[Sequence[Any], Any, Any, str], Any]
"""Takes the values of batches, of batches of one and of two records, and their place; returns some rows of them."""


def _rebuilt(
    batches: Sequence[Any], one: Any, two: Any, kept: Sequence[Sequence[int]], leaf: _Leaf, where: str
) -> Any:
    """Return some rows of each batch: containers entry by entry, lists that grow with the batch row by row."""
    kind: Any = type(one)
    if isinstance(batches[0], Mapping) and isinstance(one, Mapping) and isinstance(two, Mapping):
        if list(one) == list(two):
            if any(set(each) != set(one) for each in batches):
                raise ValueError(
                    f"data_loader: its collate function gives other keys from one batch to the next (batch{where}); "
                    "give all of them the same keys"
                )
            entries = {
                key: _rebuilt([b[key] for b in batches], one[key], two[key], kept, leaf, f"{where}[{key!r}]")
                for key in one
            }
            return _like(batches[0], entries)
    elif isinstance(one, list | tuple) and set(map(type, (*batches, two))) == {kind}:
        if len(one) == 1 and len(two) == 2:
            rows = list(itertools.chain.from_iterable(batches))
            numbers = _numbers([len(each) for each in batches], kept, where) if kept else []
            return kind([copy.copy(rows[n]) for n in (range(len(rows)) if numbers is None else numbers)])
        if set(map(len, (*batches, two))) == {len(one)}:
            parts = enumerate(zip(zip(*batches, strict=True), one, two, strict=True))
            found = [_rebuilt(*part, kept, leaf, f"{where}[{n}]") for n, part in parts]
            return kind(*found) if hasattr(one, "_fields") else kind(found)
    return leaf(batches, one, two, where)


def _is_same(value: Any, one: Any) -> bool:
    """Return whether two values without rows are equal, entry by entry where they have entries."""
    if isinstance(one, Tensor):
        return isinstance(value, Tensor) and torch.equal(value, one)
    if isinstance(one, np.ndarray):
        return isinstance(value, np.ndarray) and np.array_equal(value, one)
    return type(value) is type(one) and bool(value == one)


def _has_entries(value: Any) -> bool:
    """Return whether a value is a tensor or an array whose entries have places."""
    return isinstance(value, Tensor | np.ndarray) and not getattr(value, "is_nested", False)


def _like(given: Mapping[Any, Any], found: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return entries in a mapping of a given one's kind, or in a dict if its constructor does not take them."""
    kind: Any = type(given)
    with suppress(Exception):  # the constructor of a user's own class may raise anything
        made: Mapping[Any, Any] = kind(found)
        if list(made) == list(found) and all(made[key] is found[key] for key in found):
            return made
    return found


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Return the batch size of a loader whose batches Poisson sampling can replace.

    Raises TypeError if it is no torch DataLoader, and ValueError if it has no batches, a stream of records, or an own
    way to draw.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"data_loader = {type(loader).__name__}: must be a torch.utils.data.DataLoader; build one over the data set"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "data_loader reads a stream of records, of which no secret subset can be drawn; give a data set with "
            "__getitem__ and __len__"
        )
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise ValueError(
            "data_loader draws its batches in a way of its own, which no guarantee covers; give batch_size and "
            "shuffle=True instead of a batch_sampler"
        )
    sampler, count = batches.sampler, len(loader.dataset)  # type: ignore[arg-type]
    kind = f"{type(sampler).__module__}.{type(sampler).__name__}"
    plain = type(sampler) is SequentialSampler or (
        isinstance(sampler, RandomSampler)
        and (type(sampler) is RandomSampler or kind == _SEEDED)
        and not sampler.replacement
        and sampler.num_samples == count
    )
    if not plain:
        raise ValueError(
            f"data_loader has a {type(sampler).__name__} of its own, which Poisson sampling would replace; leave it "
            "out, and choose records by torch.utils.data.Subset"
        )
    if not count:
        raise ValueError("data_loader: the data set has no records; give at least one")
    return batches.batch_size


def require_separate_rows(loader: DataLoader[Any]) -> None:
    """Refuse (ValueError) a collate function that mixes records, as mixup does.

    Two batches of the first records differ in the first or the last one. Their rows are compared if the collate
    function drew equally many numbers for both, under the same seed, and their tensors have one shape, which padding
    may change.
    """
    with preserved_generators(torch.device("cpu")):
        records = first_records(loader)
        count = len(records)
        changed: list[tuple[int, list[Any]]] = []
        for place, donor in itertools.product((0, count - 1) if count > 1 else (), range(2)):
            others = [record for number, record in enumerate(records) if number != place]
            changed.append((place, [*records[:place], others[-donor], *records[place + 1 :]]))
        for seed in range(_COLLATED):
            wanted, *batches = _seeded_batches(loader, [records, *(each for _, each in changed)], seed)
            for (place, _), found in zip(changed, batches, strict=False):
                if not found or not wanted or found[1] != wanted[1]:
                    continue
                kept = torch.arange(count) != place
                pairs = zip(wanted[0], found[0], strict=False)
                rows = [(a, b) for a, b in pairs if a.ndim and len(a) == count and a.shape == b.shape]
                rows = [(a.cpu()[kept], b.cpu()[kept]) for a, b in rows]
                if not all(torch.equal(a, b) or same(a, b) for a, b in rows):
                    raise ValueError(
                        "data_loader: its collate function mixes records (one record changed the row of another, as "
                        "mixup does), so that no clip bounds what a record adds; leave that out"
                    )


def _seeded_batches(
    loader: DataLoader[Any], batches: Sequence[Sequence[Any]], seed: int
) -> list[tuple[list[Tensor], list[float]] | None]:
    """Return the tensors of batches, each put together under a seed from copies, and the next random numbers.

    None if the function refuses the records, such as one that occurs twice, or they cannot be copied; nothing follows
    the first batch if it is refused.
    """
    found: list[tuple[list[Tensor], list[float]] | None] = []
    for records in batches:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            leaves = tree_leaves(loader.collate_fn(copy.deepcopy(list(records))))
            tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
        except Exception:  # whatever a user's function raises
            found.append(None)
            if len(found) == 1:
                break
            continue
        drawn = [float(torch.rand(())), float(np.random.random()), random.random()]  # noqa: NPY002
        found.append((tensors, drawn))
    return found
