"""Faults of the draw of batches."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.faults.base import FEEDBACKS, STEPWISE, Fault, replaced

Draw = Callable[..., np.ndarray]
BATCHES = "opusim.training.data.samplers:PoissonSampler._draw"


def fixed_size(self: Any, step: int) -> np.ndarray:
    """As many records as a Poisson batch has on average."""
    size = round(self.n_records * self.sampling_probability)
    return self._generator(step).choice(self.n_records, size, replace=False, shuffle=False)


def _without_seed(draw: Draw) -> Draw:
    return lambda self, step: fixed_size(self, step) if self.seed is None else draw(self, step)


def _pairs(draw: Draw) -> Draw:
    last: dict[int, np.ndarray] = {}

    def drawn(self: Any, step: int) -> np.ndarray:
        if step % 2 == 0 or id(self) not in last:
            last[id(self)] = draw(self, step)
        return last[id(self)]

    return drawn


def _by_epoch(draw: Draw) -> Draw:
    kept: dict[int, tuple[Any, dict[int, np.ndarray]]] = {}

    def drawn(self: Any, step: int) -> np.ndarray:
        if step == 0 or id(self) not in kept:
            kept[id(self)] = self, {}
        place, batches = step % self.steps_per_epoch, kept[id(self)][1]
        if place not in batches:
            batches[place] = draw(self, step)
        return batches[place]

    return drawn


def _more(one_batch: Draw) -> Draw:
    def drawn(self: Any, generator: np.random.Generator) -> np.ndarray:
        return np.flatnonzero(self._uniforms(generator) < 1.25 * self.sampling_probability)

    return drawn


def _from_all(draw: Draw) -> Draw:
    def drawn(self: Any, step: int) -> np.ndarray:
        return np.flatnonzero(self._uniforms(self._generator(step)) < self.sampling_probability)

    return drawn


def _opposed(uniforms: Draw) -> Draw:
    def drawn(self: Any, generator: Any) -> np.ndarray:
        found = uniforms(self, generator)
        odd = found[1::2]
        odd[:] = 1.0 - found[::2][: len(odd)]
        return found

    return drawn


FAULTS = (
    Fault(
        name="fixed_size_batches", breaks="Batches of fixed size are accounted for as Poisson batches.",
        trainers=STEPWISE, protections=("record", "label-amplified"), checks=("batch size: variance",),
        plant=lambda: replaced(BATCHES, lambda draw: fixed_size),
    ),
    Fault(
        name="fixed_size_batches_on_release",
        breaks="Only release mode takes batches of fixed size, accounted for as Poisson batches.",
        trainers=STEPWISE, protections=("record", "label-amplified"), modes=("release",),
        checks=("batch size: variance",), plant=lambda: replaced(BATCHES, _without_seed),
    ),
    Fault(
        name="batches_reused",
        breaks="Every second step repeats the batch of the previous step, so that batches are not independent.",
        trainers=STEPWISE, protections=("record", "label-amplified"), checks=("batch size: any two steps",),
        plant=lambda: replaced(BATCHES, _pairs),
    ),
    Fault(
        name="batches_repeat_every_epoch",
        breaks="Batches are drawn in the first epoch, and every later epoch takes them again.",
        trainers=STEPWISE, protections=("record", "label-amplified"), checks=("batch size: any two steps",),
        plant=lambda: replaced(BATCHES, _by_epoch),
    ),
    Fault(
        name="sampled_too_often", breaks="Records enter batches with 1.25 times the accounted probability.",
        trainers=STEPWISE, protections=("record", "label-amplified"), checks=("sum: mean, in records",),
        plant=lambda: replaced("opusim.training.data.samplers:PoissonSampler._one_batch", _more),
    ),
    Fault(
        name="all_subsets_sampled",
        breaks="Under correlated noise every step draws from all records, so that one record's steps overlap.",
        trainers=(*FEEDBACKS, "ulr"), checks=("batch size: variance", "batch size: any two steps"),
        plant=lambda: replaced("opusim.training.protections.record:CyclicPoissonSampler._draw", _from_all),
        settings=("protection.bands=10",),
    ),
    Fault(
        name="coins_paired",
        breaks="One coin decides for two records, never in a batch together; sizes of batches show little of it.",
        trainers=STEPWISE, checks=("records: coins of two",),
        plant=lambda: replaced("opusim.training.data.samplers:PoissonSampler._uniforms", _opposed),
        small_batches=True,
    ),
)  # fmt: skip
