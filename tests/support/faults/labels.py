"""Faults of labels that are read once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.support.faults.base import FEEDBACKS, Fault, replaced

_PROTECTIONS = "opusim.training.protections"


def _weaker(respond: Callable[..., Any]) -> Callable[..., Any]:
    return lambda labels, *, epsilon, **others: respond(labels, epsilon=1.2 * epsilon, **others)


def _constant(randomize: Callable[..., Any]) -> Callable[..., Any]:
    def answered(labels: Any, mechanism: Any, generator: Any, *, pay: Any) -> Any:
        return randomize(labels, mechanism, np.random.default_rng(0), pay=pay)

    return answered


def _brighter(taken: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, labels, light: taken(self, labels, 1.5 * light)


def _kept(read: Callable[..., Any]) -> Callable[..., Any]:
    def scores(readout: Any, labels: Any, source: Any, *, pay: Any) -> Any:
        answers = read(readout, labels, source, pay=pay)
        sums = readout.frames.taken(labels, readout.light)[:, readout.groups].sum(axis=2)
        return answers + 1e-3 * torch.from_numpy(sums).float()

    return scores


class _Unpermuted:
    """Sorted numbers for a permutation, and random ones for ties: every second call is a permutation's."""

    def __init__(self, source: Any) -> None:
        self._source, self._calls = source, 0

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        self._calls += 1
        found: np.ndarray = self._source.random(size)
        return np.sort(found, axis=1) if self._calls % 2 else found


def _unpermuted(answers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, labels, source: answers(self, labels, _Unpermuted(source))


def of_a_camera(name: str, breaks: str, noise: str, checks: tuple[str, ...], target: str, make: Any) -> Fault:
    return Fault(
        name=name, breaks=breaks, trainers=("pdfa",), protections=("label-readout",),
        settings=(f"protection.noise={noise}",), checks=checks,
        plant=lambda: replaced(f"{_PROTECTIONS}.{target}", make),
    )  # fmt: skip


_BRIGHT = "Labels are shown to the camera with 1.5 times the accounted light."
_TAKEN = "argmax_labels:LabelFrames.taken"
_SHARE = "response: share of labels kept"
FAULTS = (
    Fault(
        name="labels_kept_too_often",
        breaks="Randomized response answers at 1.2 times the accounted epsilon.", trainers=FEEDBACKS,
        protections=("label-randomized-response",), checks=(_SHARE,),
        plant=lambda: replaced(f"{_PROTECTIONS}.noisy_labels:respond", _weaker),
    ),
    Fault(
        name="labels_same_in_every_run",
        breaks="Randomized response draws from a constant seed, so that anybody can undo it.",
        trainers=FEEDBACKS, protections=("label-randomized-response",),
        checks=("response: equal in two runs",),
        plant=lambda: replaced(f"{_PROTECTIONS}.noisy_labels:randomize", _constant),
    ),
    of_a_camera(
        "counts_not_discarded", "The sums of each group of pixels are kept with the answer.", "argmax",
        ("argmax: values kept of the labels",), "counted_labels:read_argmax", _kept,
    ),
    of_a_camera(
        "labels_not_permuted", "Labels are shown as they are, without a secret permutation.", "argmax",
        ("response: classes moved to", _SHARE), "argmax_labels:ArgmaxReadout.answers", _unpermuted,
    ),
    of_a_camera("answers_too_bright", _BRIGHT, "argmax", (_SHARE,), _TAKEN, _brighter),
    of_a_camera(
        "counts_too_bright", _BRIGHT, "counts", ("counts: mean losses", "counts: spread of losses"), _TAKEN,
        _brighter,
    ),
)  # fmt: skip
