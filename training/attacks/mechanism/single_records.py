"""Runs on records that differ, in batches so small that some are empty: each record is seen on its own.

Every record has a feature of its own, and so a direction of its own in the sum of a step. Least squares split a sum
into an amount for each record: 1 if the record is in the batch and is clipped as accounted, 0 if it is not, plus noise
of known deviation. That noise is so small that the amounts tell every batch. So these runs show what identical records
hide: whether two records share a coin, whether a batch of one record or of none gets its noise, and whether each record
is clipped on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

from accounting.ledger.ledger import read_ledger
from opusim.p_values import bonferroni, chi_squared_p_value, normal_p_value
from training.attacks.mechanism.contributions import (
    Gradient,
    Weights,
    clipped,
    convex_contribution,
    flattened,
    layers_of,
    record_gradients,
    require_beyond,
)
from training.attacks.mechanism.noise import least_likely_variance
from training.attacks.mechanism.readings import direction_entries, noisy_sums
from training.attacks.mechanism.report import Check
from training.attacks.mechanism.subjects import Subject
from training.config.reading import merged
from training.config.run import RunConfig
from training.data import Dataset
from training.runs.folder import RunFolder
from training.zeroth_order.step_log import LOG_FILE, LogContent

BATCH, STEPS = 3, 80
"""Expected batch size, and steps of a run: among both runs some 6 batches are empty, and 20 have one record."""
_NOISE_MULTIPLIER = 0.1
"""z: an amount of 0 passes for 1 with probability 3e-7."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What one run released of each record.

    Attributes:
        amounts: Contributions of each record to each sum, in units of what is accounted, shape (steps, records).
        std: Standard deviation of the accounted noise on each amount, of a shape that broadcasts with it.
        noise: Components that no record touches, divided by their accounted standard deviation, shape (steps,
            coordinates).
        probability: q, with which each record enters a batch.
    """

    amounts: np.ndarray
    std: np.ndarray
    noise: np.ndarray
    probability: float

    @property
    def inside(self) -> np.ndarray:
        """Which records are in each batch, shape (steps, records)."""
        return np.asarray(self.amounts > 0.5)

    @property
    def residuals(self) -> np.ndarray:
        """The noise on each amount, divided by its accounted standard deviation, shape (steps, records)."""
        return np.asarray((self.amounts - self.inside) / self.std)


def small_batches(values: Mapping[str, Any], *, single: bool) -> dict[str, Any]:
    """Return a configuration's keys with small batches, and for single records with little noise.

    Args:
        values: The keys.
        single: Whether the records differ.
    """
    protection = {key: value for key, value in values["protection"].items() if key != "epsilon" or not single}
    changes = {"sampler": {"batch_size": BATCH}}
    if single:
        protection["noise_multiplier"] = _NOISE_MULTIPLIER
    return merged({**values, "protection": protection}, changes)


def read_amounts(
    folder: RunFolder, config: RunConfig, subject: Subject, dataset: Dataset, states: Sequence[Weights]
) -> Amounts:
    """Read what a run released of each record.

    Args:
        folder: The folder of the finished run.
        config: Its resolved configuration.
        subject: The records and model that it was trained with.
        dataset: Its records.
        states: The parameters before the first step and after each step; unused for zo.

    Raises:
        ValueError: A record's gradient does not exceed the clip.
    """
    mechanism: Any = read_ledger(folder.ledger_file).mechanisms[0]
    clip, z = float(mechanism.clip_norm), float(mechanism.noise_multiplier)
    q = float(mechanism.sampling_probability)
    if config.trainer.kind == "zo":
        return _of_scalars(folder, config, mechanism, dataset)
    expected = list(_contributions(config, subject, dataset, states[0], clip))
    names = list(expected[0])
    each = np.stack([flattened(gradient, names) for gradient in expected])  # (records, parameters)
    sums = np.stack([flattened(total, names) for total in noisy_sums(states, config, mechanism)])
    used = np.any(each != 0, axis=0)
    inverse = np.linalg.pinv(each[:, used])
    return Amounts(
        amounts=sums[:, used] @ inverse,
        std=z * clip * np.linalg.norm(inverse, axis=0),
        noise=sums[:, ~used] / (z * clip),
        probability=q,
    )


def _contributions(
    config: RunConfig, subject: Subject, dataset: Dataset, state: Weights, clip: float
) -> Iterator[Gradient]:
    """Yield the clipped contribution of each record, at the first state; the others hardly differ from it."""
    rows = range(len(dataset.train))
    if config.trainer.kind == "convex":
        for row in rows:
            yield convex_contribution(config, dataset, clip, row=row)
        return
    by_layer = getattr(config.trainer, "clip", "joint") == "module"
    model = subject.single_model(clip)
    for gradient in record_gradients(config, model, dataset, [(state, row) for row in rows]):
        layers = layers_of(list(gradient)) if by_layer else [list(gradient)]
        require_beyond([float(np.linalg.norm(flattened(gradient, names))) for names in layers], clip)
        yield clipped(gradient, clip, by_layer=by_layer)


def _of_scalars(folder: RunFolder, config: RunConfig, mechanism: Any, dataset: Dataset) -> Amounts:
    """Read the scalars of zeroth-order training; a record's loss differs along a direction by its own entry."""
    z, n = float(mechanism.noise_multiplier), len(dataset.train)
    factor = 2 * float(getattr(config.trainer, "perturbation")) * float(mechanism.divisor)  # noqa: B009
    amounts, deviations, noise = [], [], []
    for entry in LogContent.read(folder.path / LOG_FILE).entries:
        scalars = np.array(entry.scalars, dtype=np.float64) * factor / float(mechanism.clip_norm)
        slopes = np.stack([direction_entries(seed, n) for seed in entry.seeds])  # (directions, records)
        shares = slopes / np.linalg.norm(slopes, axis=0) if mechanism.joint_clip else np.sign(slopes)
        inverse = np.linalg.pinv(shares)
        amounts.append(inverse @ scalars)
        deviations.append(z * np.linalg.norm(inverse, axis=1))
        noise.append(np.linalg.qr(shares, mode="complete").Q[:, n:].T @ scalars / z)
    return Amounts(
        amounts=np.array(amounts),
        std=np.array(deviations),
        noise=np.array(noise),
        probability=float(mechanism.sampling_probability),
    )


def single_record_checks(runs: Sequence[Amounts]) -> list[Check]:
    """Check contributions, coins and noise of single records, of at least two runs of equal length."""
    inside = np.stack([run.inside for run in runs])  # (runs, steps, records)
    residuals = np.stack([run.residuals for run in runs])
    noise = np.stack([run.noise for run in runs])
    sizes, q = inside.sum(axis=2), runs[0].probability
    return [
        _contribution(residuals, inside),
        _alone(residuals[sizes == 1], inside[sizes == 1]),
        least_likely_variance("records: noise along them", [residuals], "no noise along contributions"),
        _coins(inside, q),
        _of_two_records(inside, q),
        _of_two_steps(inside, q),
        _noise_of("empty batches: variance", noise[sizes == 0], "batches without records that get no noise"),
        _noise_of("batches of one: variance", noise[sizes == 1], "batches of one record that get less noise"),
    ]


def _contribution(residuals: np.ndarray, inside: np.ndarray) -> Check:
    """Check the record whose mean contribution is least likely."""
    counts = np.maximum(inside.sum(axis=(0, 1)), 1)
    deviations = np.sum(residuals * inside, axis=(0, 1)) / np.sqrt(counts)
    worst = int(np.argmax(np.abs(deviations)))
    return Check(
        name="records: contribution",
        observed=float(deviations[worst]),
        expected=0.0,
        standard_error=1.0,
        p_value=bonferroni(normal_p_value(float(deviations[worst])), len(counts)),
        finds="records that are clipped together, or one that is not clipped",
    )


def _alone(residuals: np.ndarray, inside: np.ndarray) -> Check:
    """Check contributions of records that are alone in a batch."""
    found = residuals[inside]
    deviation = float(found.sum() / math.sqrt(max(found.size, 1)))
    return Check(
        name="records: alone in a batch",
        observed=deviation,
        expected=0.0,
        standard_error=1.0,
        p_value=normal_p_value(deviation),
        finds="batches of one record that are not clipped",
    )


def _noise_of(name: str, noise: np.ndarray, finds: str) -> Check:
    """Check the noise of some steps, shape (steps, coordinates); nothing is found if there are none."""
    total, count = float(np.sum(np.square(noise))), noise.size
    return Check(
        name=name,
        observed=total / count if count else 1.0,
        expected=1.0,
        standard_error=math.sqrt(2 / count) if count else math.inf,
        p_value=chi_squared_p_value(total, count) if count else 1.0,
        finds=finds,
    )


def _coins(inside: np.ndarray, q: float) -> Check:
    """Check the record that is least likely to have been in so many batches."""
    tosses = inside.shape[0] * inside.shape[1]
    counts = inside.sum(axis=(0, 1)).tolist()
    found = [(int(count), tosses) for count in counts]
    return _least_likely_count("records: coins", found, q, "a record that is in too many batches")


def _of_two_records(inside: np.ndarray, q: float) -> Check:
    """Check how often two records are in a batch, over all pairs at one distance or mirrored."""
    n, found = inside.shape[2], []
    places = np.arange(n)
    for distance in range(1, n):
        for phase in (0, 1):  # alternate blocks, so that no two pairs share a record
            first = places[(places // distance % 2 == phase) & (places + distance < n)]
            if first.size:
                both = inside[..., first] & inside[..., first + distance]
                found.append((int(both.sum()), both.size))
    mirrored = inside[..., : n // 2] & inside[..., : -(n // 2) - 1 : -1]
    found.append((int(mirrored.sum()), mirrored.size))
    return _least_likely_count("records: coins of two", found, q * q, "one coin for two records")


def _of_two_steps(inside: np.ndarray, q: float) -> Check:
    """Check how often a record is in the batches of two steps at one distance, or of a step in two runs."""
    steps, found = np.arange(inside.shape[1]), []
    for distance in range(1, len(steps)):
        for phase in (0, 1):
            first = steps[(steps // distance % 2 == phase) & (steps + distance < len(steps))]
            if first.size:
                both = inside[:, first] & inside[:, first + distance]
                found.append((int(both.sum()), both.size))
    for one, other in ((i, j) for j in range(len(inside)) for i in range(j)):
        both = inside[one] & inside[other]
        found.append((int(both.sum()), both.size))
    return _least_likely_count("records: coins of two steps", found, q * q, "a coin used again")


def _least_likely_count(name: str, found: Sequence[tuple[int, int]], probability: float, finds: str) -> Check:
    """Check the least likely of several counts (how many, of how many) of binomial law."""
    counts, sizes = np.array(found).T
    law = scipy.stats.binom(sizes, probability)
    p_values = np.minimum(2 * np.minimum(law.cdf(counts), law.sf(counts - 1)), 1.0)
    worst = int(np.argmin(p_values))
    return Check(
        name=name,
        observed=float(counts[worst]),
        expected=float(law.mean()[worst]),
        standard_error=float(law.std()[worst]),
        p_value=bonferroni(float(p_values[worst]), len(found)),
        finds=finds,
    )
