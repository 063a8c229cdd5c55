from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.support.faults.base import Fault, replaced


def _kept(read: Callable[..., Any]) -> Callable[..., Any]:
    def scores(readout: Any, labels: Any, source: Any, *, pay: Any) -> Any:
        answers = read(readout, labels, source, pay=pay)
        sums = readout.frames.taken(labels, readout.light)[:, readout.groups].sum(axis=2)
        return answers + 1e-3 * torch.from_numpy(sums).float()

    return scores


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.counted_labels:read_argmax", _kept)


FAULT = Fault(
    name="counts_not_discarded",
    breaks="The sums of each group of pixels are kept with the answer.",
    trainers=("pdfa",),
    protections=("label-readout",),
    settings=("protection.noise=argmax",),
    checks=("argmax: values kept of the labels",),
    plant=plant,
)
