"""Mechanisms as events of dp_accounting, for its own accountants: a second opinion on every number."""

from functools import singledispatch
from typing import Any

import dp_accounting as dp

from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelAmplified, LabelBudget, LabelReadout, LabelRelease
from opusim.accounting.mechanisms.records import ClippedRecords, PoissonGaussian
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace


@singledispatch
def event(mechanism: Mechanism) -> dp.DpEvent:
    """The event of all steps."""
    raise NotImplementedError(type(mechanism).__name__)


def sampled(mechanism: Any, one: dp.DpEvent) -> dp.DpEvent:
    batch = dp.PoissonSampledDpEvent(mechanism.sampling_probability, one)
    return dp.SelfComposedDpEvent(batch, mechanism.steps)


@event.register(PoissonGaussian)
@event.register(ClippedRecords)
@event.register(LabelAmplified)
def _(mechanism: PoissonGaussian | ClippedRecords | LabelAmplified) -> dp.DpEvent:
    """z over C, which dp_accounting's PLD takes for every relation."""
    noise = dp.GaussianDpEvent(mechanism.noise_multiplier)
    return sampled(mechanism, noise)


@event.register(LabelBudget)
@event.register(LabelReadout)
@event.register(LabelRelease)
def _(mechanism: LabelBudget | LabelReadout | LabelRelease) -> dp.DpEvent:
    """N(0, 1) against N(mu, 1): the Gaussian event of multiplier 1 / mu under add_or_remove_one."""
    return dp.SelfComposedDpEvent(dp.GaussianDpEvent(mechanism.noise), mechanism.steps)


@event.register(ZoGaussian)
def _(mechanism: ZoGaussian) -> dp.DpEvent:
    moved = 1.0 if mechanism.joint_clip else mechanism.directions**0.5
    one = dp.GaussianDpEvent(mechanism.noise_multiplier / moved)
    return sampled(mechanism, one)


@event.register(ZoLaplace)
def _(mechanism: ZoLaplace) -> dp.DpEvent:
    """The directions composed within the sample."""
    one: dp.DpEvent = dp.LaplaceDpEvent(mechanism.scale)
    if mechanism.directions > 1:
        one = dp.SelfComposedDpEvent(one, mechanism.directions)
    return sampled(mechanism, one)
