"""The torch device of a run: its name on this machine, where records lie, and the error if its memory does not suffice.

Records go to the card once if they take at most half of the memory that is free there. Otherwise they stay on the host,
and batches are copied from pinned memory while the card computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from opusim.errors import ConfigError
from opusim.tables import data_size
from opusim.training.data.dataset import Dataset, HostSplit, Split, with_parts
from opusim.training.errors import CardMemoryError

AUTO = "auto"
"""The name that takes a card if there is one."""
_SHARE_OF_RECORDS = 0.5
"""Share of a card's free memory that records may take; the rest is for the model, its gradients and activations."""
_SHARE_OF_STEP = 0.9
"""Share of the remaining memory that a smaller batch may take by the estimate; the allocator loses some to gaps."""


def named_here(name: str) -> str:
    """Return a configuration's torch device here, or raise ConfigError: "auto" is the card, or else the processor."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == AUTO:
        return "cuda" if cuda else "cpu"
    try:
        place = torch.device(name)
    except RuntimeError as error:
        reason = f"{name!r} is no torch device; use 'auto', 'cpu' or 'cuda'"
        raise ConfigError("configuration", "torch_device", reason) from error
    mps = int(torch.backends.mps.is_available())
    available = {"cpu": 1, "cuda": cuda, "mps": mps}
    if (place.index or 0) >= available.get(place.type, 0):
        usable = ", ".join(repr(kind) for kind, count in available.items() if count)
        raise ConfigError(
            "configuration", "torch_device", f"{name!r} is not available here; use one of {usable}"
        )
    return name


def place_text(name: str) -> str | None:
    """Return a line that says on which card a run computes, or that "auto" found none; None for the processor."""
    here, how = named_here(name), ", as torch_device = 'auto' chose" if name == AUTO else ""
    place = torch.device(here)
    if place.type == "cuda":
        facts = torch.cuda.get_device_properties(place)
        return f"trains on {here} ({facts.name}, {data_size(facts.total_memory)}){how}"
    if place.type == "mps":
        return f"trains on {here}, Apple's GPU, on which opusim was never tried"
    return f"trains on the processor, since torch finds no card{how}" if name == AUTO else None


def to_device(dataset: Dataset, name: str, *, resident: bool = False) -> Dataset:
    """Return the data set for training on a torch device; `resident` moves all records, whatever their size."""
    if name == "cpu":
        return dataset
    place, parts = torch.device(name), (dataset.train, dataset.validation, dataset.test)
    free = _free_memory(place)
    moves = resident or free is None or _size(parts) <= _SHARE_OF_RECORDS * free

    def placed(split: Split) -> Split:
        if moves:
            return Split(split.x.to(place), split.y.to(place))
        return HostSplit(split.x, split.y, on_disk=split.on_disk, torch_device=name)

    return with_parts(dataset, placed)


def _size(parts: Iterable[Split | None]) -> int:
    return sum(tensor.nbytes for part in parts if part is not None for tensor in (part.x, part.y))


def _free_memory(place: torch.device) -> int | None:
    """Return the bytes that are free on a card, or None if torch does not report them."""
    return torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of a card: all, allocated before the first step (model and records), and the most allocated since then."""

    total: int
    before: int
    peak: int

    @classmethod
    def allocated(cls, place: torch.device) -> int | None:
        """Return what is allocated now, and count the peak from here; None unless on CUDA."""
        if place.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(place)
        return torch.cuda.memory_allocated(place)

    @classmethod
    def since(cls, before: int | None, place: torch.device) -> StepMemory | None:
        """Return the figures since `allocated` returned `before`."""
        if before is None:
            return None
        total = torch.cuda.get_device_properties(place).total_memory
        return cls(total=total, before=before, peak=torch.cuda.max_memory_allocated(place))

    def fitting(self, batch: int) -> int:
        """Return the largest of batch / 2, batch / 4, ... whose step fits by an estimate from the failed one.

        A smaller batch is assumed to use its share of `peak` - `before`. That includes gradients and the optimizer's
        state, and lacks what the failed step had not allocated yet.
        """
        room = _SHARE_OF_STEP * (self.total - self.before)
        smaller = max(batch // 2, 1)
        while smaller > 1 and (self.peak - self.before) * smaller / batch > room:
            smaller //= 2
        return smaller


def exhausted(step: int, batch: int, place: torch.device, found: StepMemory | None) -> CardMemoryError:
    """Return the error of a step for which a card's memory did not suffice, with the allocator's figures if public."""
    smaller = max(batch // 2, 1) if found is None else found.fitting(batch)
    how = "half of it"
    if found is not None:
        how = (
            f"estimated from the allocator's peak, {data_size(found.peak)} of {data_size(found.total)}, with "
            f"{data_size(found.before)} before the first step"
        )
    remedy = f"set sampler.batch_size={smaller} ({how})" if batch > 1 else "take a smaller model"
    return CardMemoryError(
        f"step {step}: a batch of {batch} records does not fit into the memory of {place}; {remedy}; the last "
        "checkpoint is kept"
    )
