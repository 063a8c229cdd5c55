"""Planted faults of users: each lets one person add more than the clip in a step.

They are no entries of the registry, whose runs protect records.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.faults.base import all_replaced, replaced


def ungrouped() -> AbstractContextManager[None]:
    """Every record of a user is clipped by itself, so that a user exceeds the bound."""
    begin = "opusim.training.networks.record_gradients.tape:RecordTape.begin"
    leave_out = "opusim.training.networks.contributions.sums:Contributions.leave_out"

    def alone(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, records, group=1: before(self, records * group)

    return all_replaced({begin: alone, leave_out: lambda _: lambda self, padding: None})


def split() -> AbstractContextManager[None]:
    """Every second record of a user is another user's: the loader reads two IDs where there is one."""
    number = itertools.count()

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, name: f"{before(value, name)}, {next(number) % 2}"

    return replaced("opusim.training.data.users:_key", make)


def k_in_each_part() -> AbstractContextManager[None]:
    """The loader gives a user a second group of k rows, so that k holds in each part of a batch and not in the step."""

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, step: before(self, step).repeat_interleave(2)

    return replaced("opusim.training.data.samplers:Sampler.indices", make)


FAULTS = {"above the bound": ungrouped, "two ids": split, "k in each part": k_in_each_part}
