"""What single records add to a step's sum: as accounted, and as small batches of records that differ show it.

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
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn

from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms import Mechanism
from opusim.description.section import merged
from opusim.medium.transmission import Direction
from opusim.p_values import bonferroni
from opusim.training.attacks.base import Records
from opusim.training.attacks.mechanism.checks import Check
from opusim.training.attacks.mechanism.subjects import Subject
from opusim.training.attacks.replay import NoiselessStep, plain_descent
from opusim.training.config.run import RunConfig
from opusim.training.convex.config import ConvexConfig
from opusim.training.data import Dataset
from opusim.training.engine.plan import RunPlan
from opusim.training.networks.functions import LOSSES
from opusim.training.protections.config import NoProtectionConfig
from opusim.training.runs.folder import RunFolder
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent

_MIN_EXCESS = 1.5
"""Smallest ratio of a record's gradient norm to the clip in every layer."""

Weights = Mapping[str, Tensor]
Gradient = dict[str, np.ndarray]
"""By parameter, float64."""


def record_gradients(
    config: RunConfig, model: nn.Module, dataset: Dataset, at: Sequence[tuple[Weights, int]]
) -> list[Gradient]:
    """Return gradients of single records without clip or noise.

    Args:
        config: The resolved configuration of the run.
        model: A new model of the run; it is changed.
        dataset: The records.
        at: For each gradient the parameters, and the number of the record.
    """
    x, y = dataset.train.x, dataset.train.y
    if config.trainer.kind == "ulr":  # by torch; names follow the order of the layers
        by_torch = []
        for state, row in at:
            named = dict(zip(state, model.parameters(), strict=True))
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(state[name])
            loss = LOSSES[config.loss](model(x[row : row + 1]), y[row : row + 1]).per_record.sum()
            parts = torch.autograd.grad(loss, list(named.values()))
            by_torch.append({n: part.double().numpy() for n, part in zip(named, parts, strict=True)})
        return by_torch
    unprotected = config.unchecked(
        protection=NoProtectionConfig(), mode="experiment", optimizer={"name": "sgd"}
    )
    plan = plain_descent(RunPlan.checked(unprotected, dataset, model=model)).with_silent_device()
    with plan.opened_device() as device:
        noiseless = NoiselessStep(plan.network, plan.algorithm.trainer(device))
        found = [
            noiseless.gradients(state, Records(x=x[row : row + 1], y=y[row : row + 1]), step=0)
            for state, row in at
        ]
    return [{name: tensor.numpy() for name, tensor in gradient.items()} for gradient in found]


def convex_contribution(config: RunConfig, dataset: Dataset, clip: float, *, row: int = 0) -> Gradient:
    """x~ residual^T at weights of 0, for a record with open gates only: x~ = x / (|x| sqrt(P)) on every gate."""
    options, k = config.trainer_as(ConvexConfig), dataset.n_classes
    x, label = dataset.train.x[row].double().numpy(), int(dataset.train.y[row])
    target = np.eye(k)[label]
    residual = {
        "squared": -target,
        "margin": -target,
        "one-against-rest": 0.5 - target,
        "softmax": 1 / k - target,
    }[options.objective]
    norm = float(np.linalg.norm(residual))
    if options.residual_clip is None or norm < _MIN_EXCESS * clip:
        raise ValueError(
            f"trainer.clip = {options.clip}: must be given and below {norm / _MIN_EXCESS:.2g}, so that the self-test's "
            f"records exceed it (objective {options.objective!r}); lower it"
        )
    if options.objective == "one-against-rest":
        residual = np.sign(residual)
        norm = math.sqrt(k)
    gates = np.ones(options.hyperplanes) / math.sqrt(options.hyperplanes)
    features = np.einsum("d,p,k->dpk", x / np.linalg.norm(x), gates, residual * clip / norm)
    return {"weight": features}


def clipped(gradient: Gradient, clip: float, *, by_layer: bool) -> Gradient:
    """Clip a gradient as docs/privacy-records.md states: one factor for all layers, or C / sqrt(L) for each."""
    layers = layers_of(list(gradient))
    if not by_layer:
        factor = clip / float(np.linalg.norm(flattened(gradient, list(gradient))))
        return {name: factor * part for name, part in gradient.items()}
    bound = clip / math.sqrt(len(layers))
    return {
        name: gradient[name] * (bound / float(np.linalg.norm(flattened(gradient, names))))
        for names in layers
        for name in names
    }


def require_beyond(norms: Sequence[float], clip: float) -> None:
    """Refuse a clip that the records' norms do not exceed in every layer."""
    least = min(norms)
    if least < _MIN_EXCESS * clip:
        raise ValueError(
            f"protection.clip_norm = {clip:g}: must be at most {least / _MIN_EXCESS:.2g}, so that the records of the "
            "self-test exceed it in every layer; lower it"
        )


def layers_of(names: Sequence[str]) -> list[list[str]]:
    """Return the names of each layer's parameters."""
    layers = dict.fromkeys(name.partition(".")[0] for name in names)
    return [[name for name in names if name.partition(".")[0] == layer] for layer in layers]


def flattened(gradient: Gradient, names: Sequence[str]) -> np.ndarray:
    """Return some parameters of a gradient in one row."""
    return np.concatenate([gradient[name].ravel() for name in names])


def noisy_sums(
    states: Sequence[Weights], config: RunConfig, mechanism: Mechanism
) -> list[Gradient]:  # by step
    """Return the noisy sum G of each step."""
    divisor = getattr(mechanism, "divisor", None) or config.divisor
    if config.protection.protects == "labels" and not config.protection.poisson:  # public batch sizes divide
        divisor = config.sampler.batch_size
    factor = divisor / config.optimizer.lr
    return [
        {name: (before[name].double() - after[name].double()).numpy() * factor for name in before}
        for before, after in pairwise(states)
    ]


def direction_entries(seed: int, count: int) -> np.ndarray:
    """Return the first entries of a zeroth-order direction, float64, shape (count,)."""
    entries = torch.zeros(count)
    Direction(seed).add_to(entries, 0, 1.0)
    return entries.double().numpy()


# Small batches

BATCH, STEPS = 2, 80
"""Expected batch size, and steps of a run: among both runs some 18 batches are empty, and 45 have one record."""
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
    # the clipped contribution of each record at the first state, which the others are close to
    rows = range(len(dataset.train))
    if config.trainer.kind == "convex":
        expected = [convex_contribution(config, dataset, clip, row=row) for row in rows]
    else:
        by_layer, expected = getattr(config.trainer, "clip", "joint") == "module", []
        model = subject.new_model(clip, single=True)
        for gradient in record_gradients(config, model, dataset, [(states[0], row) for row in rows]):
            layers = layers_of(list(gradient)) if by_layer else [list(gradient)]
            require_beyond([float(np.linalg.norm(flattened(gradient, names))) for names in layers], clip)
            expected.append(clipped(gradient, clip, by_layer=by_layer))
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
    sizes, q, (count, steps, n) = inside.sum(axis=2), runs[0].probability, inside.shape
    # the record whose mean contribution is least likely, and those that are alone in a batch
    times = np.maximum(inside.sum(axis=(0, 1)), 1)
    deviations = np.sum(residuals * inside, axis=(0, 1)) / np.sqrt(times)
    worst = float(deviations[np.argmax(np.abs(deviations))])
    single = residuals[sizes == 1][inside[sizes == 1]]
    alone = float(single.sum() / math.sqrt(max(single.size, 1)))
    # how often two records are in a batch: all pairs at one distance, of records that no two pairs share, or mirrored
    of_two = [
        inside[..., first] & inside[..., first + distance] for distance, first in _blocks(n) if first.size
    ]
    of_two.append(inside[..., : n // 2] & inside[..., : -(n // 2) - 1 : -1])
    # how often a record is in the batches of two steps at one distance, or of a step in two runs
    again = [inside[:, first] & inside[:, first + gap] for gap, first in _blocks(steps) if first.size]
    again += [inside[i] & inside[j] for j in range(count) for i in range(j)]
    return [
        Check.normal(
            "records: contribution",
            worst,
            0.0,
            1.0,
            "records that are clipped together, or one that is not clipped",
            comparisons=n,
        ),
        Check.normal(
            "records: alone in a batch", alone, 0.0, 1.0, "batches of one record that are not clipped"
        ),
        Check.variance("records: noise along them", [residuals], "no noise along contributions"),
        _coins("records: coins", list(inside.T), q, "a record that is in too many batches"),
        _coins("records: coins of two", of_two, q * q, "one coin for two records"),
        _coins("records: coins of two steps", again, q * q, "a coin used again"),
        Check.variance(
            "empty batches: variance", [noise[sizes == 0]], "batches without records that get no noise"
        ),
        Check.variance(
            "batches of one: variance", [noise[sizes == 1]], "batches of one record that get less noise"
        ),
    ]


def _blocks(count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each distance below a count with the first places of pairs in alternate blocks: none is in two pairs."""
    places = np.arange(count)
    for distance in range(1, count):
        for phase in (0, 1):
            yield distance, places[(places // distance % 2 == phase) & (places + distance < count)]


def _coins(name: str, coins: Sequence[np.ndarray], probability: float, finds: str) -> Check:
    """Check the least likely of several counts of coins, each of binomial law."""
    counts, sizes = np.array([(int(each.sum()), each.size) for each in coins]).T
    law = scipy.stats.binom(sizes, probability)
    p_values = np.minimum(2 * np.minimum(law.cdf(counts), law.sf(counts - 1)), 1.0)
    worst = int(np.argmin(p_values))
    return Check(
        name=name,
        observed=float(counts[worst]),
        expected=float(law.mean()[worst]),
        standard_error=float(law.std()[worst]),
        p_value=bonferroni(float(p_values[worst]), len(coins)),
        finds=finds,
    )
