"""Read what a finished run of the self-test released, and split it into pure noise and what the records add.

Everything is read from the run's folder, as any recipient could: the parameters before and after each step, or the step
log, or the labels that were read once; and the accounted mechanism from the ledger. A step of plain gradient descent is
W' = W - (lr / divisor) G with the noisy sum G, so G = (W - W') divisor / lr.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import scipy.signal
import scipy.stats
import torch
from torch import Tensor

from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.convex import ConvexLastIterate, learning_rates
from opusim.description.section import merged
from opusim.medium.transmission import Direction
from opusim.p_values import bonferroni
from opusim.training.attacks.base import Records
from opusim.training.attacks.mechanism.checks import BatchLaw, Check, Released, Sums
from opusim.training.attacks.mechanism.subjects import Subject
from opusim.training.attacks.replay import NoiselessStep, plain_descent
from opusim.training.config.run import RunConfig
from opusim.training.convex.config import ConvexConfig
from opusim.training.data import Dataset
from opusim.training.engine.plan import RunPlan
from opusim.training.networks.functions import LOSSES
from opusim.training.protections.config import NoProtectionConfig
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array
from opusim.training.zeroth_order.config import ZoConfig
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent

_MIN_EXCESS = 1.5
"""Smallest ratio of a record's gradient norm to the clip in every layer."""

Weights = Mapping[str, Tensor]
Gradient = dict[str, np.ndarray]
"""By parameter, float64."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run of the self-test.

    Attributes:
        folder: Its folder.
        config: Its resolved configuration.
        subject: The records and model that it was trained with.
        dataset: Its records; of users one record each.
        states: The parameters before the first step and after each step; empty if labels are read once, unused for zo.
    """

    folder: RunFolder
    config: RunConfig
    subject: Subject
    dataset: Dataset
    states: Sequence[Weights]

    @property
    def mechanism(self) -> Any:
        """What its ledger accounts for in a step."""
        return read_ledger(self.folder.ledger_file).mechanisms[0]

    @property
    def scores(self) -> np.ndarray:
        """The log-likelihood of every class that is kept for each record, shape (n, k)."""
        return read_array(self.folder.labels_file)[:, : self.dataset.n_classes]

    @property
    def shifts(self) -> np.ndarray:
        """Each record's randomized class as a shift from its own, shape (n,)."""
        observed = np.argmax(self.scores, axis=1)
        return np.asarray((observed - self.dataset.train.y.numpy()) % self.dataset.n_classes)


def record_gradients(run: FinishedRun, at: Sequence[tuple[Weights, int]], *, single: bool) -> list[Gradient]:
    """Return gradients of single records without clip or noise, for each of some parameters and a record's number."""
    x, y, config = run.dataset.train.x, run.dataset.train.y, run.config
    model = run.subject.new_model(
        float(run.mechanism.clip_norm) if single else config.protection.clip, single=single
    )
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
    plan = plain_descent(RunPlan.checked(unprotected, run.dataset, model=model)).with_silent_device()
    with plan.opened_device() as device:
        noiseless = NoiselessStep(plan.network, plan.algorithm.trainer(device))
        # the names of the run by those of this network, which may be another view of the module
        names = {name: name for name in plan.network.tensors}
        if set(names) != set(at[0][0]):
            names = dict(zip(names, dict(model.named_parameters()), strict=True))
        found = []
        for state, row in at:
            known = {own: state[name] for own, name in names.items()}
            record = Records(x=x[row : row + 1], y=y[row : row + 1])
            gradients = noiseless.gradients(known, record, step=0)
            found.append({name: gradients[own].numpy() for own, name in names.items()})
    return found


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


def noisy_sums(run: FinishedRun) -> list[Gradient]:
    """Return the noisy sum G of each step."""
    config, divisor = run.config, getattr(run.mechanism, "divisor", None) or run.config.divisor
    if config.protection.protects == "labels" and not config.protection.poisson:  # public batch sizes divide
        divisor = config.sampler.batch_size
    factor = divisor / config.optimizer.lr
    return [
        {name: (before[name].double() - after[name].double()).numpy() * factor for name in before}
        for before, after in pairwise(run.states)
    ]


def direction_entries(seed: int, count: int) -> np.ndarray:
    """Return the first entries of a zeroth-order direction, float64, shape (count,)."""
    entries = torch.zeros(count)
    Direction(seed).add_to(entries, 0, 1.0)
    return entries.double().numpy()


# Small batches of records that differ: every record has a feature of its own, and so a direction of its own in the sum
# of a step. Least squares split a sum into an amount for each record: 1 if the record is in the batch and is clipped as
# accounted, 0 if it is not, plus noise of known deviation. That noise is so small that the amounts tell every batch. So
# these runs show what identical records hide: whether two records share a coin, whether a batch of one record or of
# none gets its noise, and whether each record is clipped on its own.

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
    """Return a configuration's keys with small batches, and with little noise if records differ (`single`)."""
    protection = {key: value for key, value in values["protection"].items() if key != "epsilon" or not single}
    changes = {"sampler": {"batch_size": BATCH}}
    if single:
        protection["noise_multiplier"] = _NOISE_MULTIPLIER
    return merged({**values, "protection": protection}, changes)


def read_amounts(run: FinishedRun) -> Amounts:
    """Read what a run released of each record; raise ValueError for a gradient that does not exceed the clip."""
    mechanism, config = run.mechanism, run.config
    clip, z = float(mechanism.clip_norm), float(mechanism.noise_multiplier)
    q = float(mechanism.sampling_probability)
    if config.trainer.kind == "zo":
        return _of_scalars(run)
    # the clipped contribution of each record at the first state, which the others are close to
    rows = range(len(run.dataset.train))
    if config.trainer.kind == "convex":
        expected = [convex_contribution(config, run.dataset, clip, row=row) for row in rows]
    else:
        by_layer, expected = mechanism.clipping == "per_layer", []
        for gradient in record_gradients(run, [(run.states[0], row) for row in rows], single=True):
            layers = layers_of(list(gradient)) if by_layer else [list(gradient)]
            require_beyond([float(np.linalg.norm(flattened(gradient, names))) for names in layers], clip)
            expected.append(clipped(gradient, clip, by_layer=by_layer))
    names = list(expected[0])
    each = np.stack([flattened(gradient, names) for gradient in expected])  # (records, parameters)
    sums = np.stack([flattened(total, names) for total in noisy_sums(run)])
    used = np.any(each != 0, axis=0)
    inverse = np.linalg.pinv(each[:, used])
    return Amounts(
        amounts=sums[:, used] @ inverse,
        std=z * clip * np.linalg.norm(inverse, axis=0),
        noise=sums[:, ~used] / (z * clip),
        probability=q,
    )


def _clipped_scalars(run: FinishedRun) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    """Yield the seeds and the scalars of each step of zeroth-order training, in units of the clip."""
    mechanism, options = run.mechanism, run.config.trainer_as(ZoConfig)
    factor = 2 * options.perturbation * float(mechanism.divisor) / float(mechanism.clip_norm)
    for entry in LogContent.read(run.folder.path / LOG_FILE).entries:
        yield entry.seeds, np.array(entry.scalars, dtype=np.float64) * factor


def _of_scalars(run: FinishedRun) -> Amounts:
    """Read the scalars of zeroth-order training; a record's loss differs along a direction by its own entry."""
    mechanism, n = run.mechanism, len(run.dataset.train)
    z = float(mechanism.noise_multiplier)
    amounts, deviations, noise = [], [], []
    for seeds, scalars in _clipped_scalars(run):
        slopes = np.stack([direction_entries(seed, n) for seed in seeds])  # (directions, records)
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


# Identical records


def released_steps(run: FinishedRun) -> Released:
    """Read a run whose steps are clipped sums plus noise.

    Raises ValueError if a record's gradient does not exceed the clip in every layer.
    """
    mechanism, config, dataset = run.mechanism, run.config, run.dataset
    kind = config.trainer.kind
    if kind == "zo":
        return _scalars(run)
    sums = noisy_sums(run)
    if kind == "convex":
        clip = float(config.trainer.implementing_class().clip_norm(config, dataset.n_classes))
        expected = [convex_contribution(config, dataset, clip)] * len(sums)
        if isinstance(mechanism, ConvexLastIterate):
            return _last_iterate_sums(sums, expected, config, mechanism, clip)
        return _record_sums(sums, expected, dataset, mechanism)
    gradients = record_gradients(run, [(state, 0) for state in run.states[:-1]], single=False)
    if config.protection.protects == "records":
        norms = [
            float(np.linalg.norm(flattened(gradients[0], names))) for names in layers_of(list(gradients[0]))
        ]
        require_beyond(norms, config.protection.clip)
        by_layer = mechanism.clipping == "per_layer"
        expected = [clipped(g, config.protection.clip, by_layer=by_layer) for g in gradients]
        return _record_sums(sums, expected, dataset, mechanism)
    return _label_sums(run, sums, gradients)


def _last_iterate_sums(
    sums: Sequence[Gradient],
    expected: Sequence[Gradient],
    config: RunConfig,
    mechanism: ConvexLastIterate,
    clip: float,
) -> Released:
    """Split the sums of fixed batches, of which the last one has the final noise too.

    A recipient of the last model has none of the others; the self-test reads them while it trains.
    """
    z = mechanism.noise_multiplier
    final = math.hypot(1.0, mechanism.final_noise * mechanism.learning_rate / learning_rates(mechanism)[-1])
    noise = _noise_only(sums, expected, "weight") / (z * clip)
    noise[-1] /= final
    units = [
        _component(total["weight"].ravel(), part["weight"].ravel())
        for total, part in zip(sums, expected, strict=True)
    ]
    along = np.array(units[:-1]) / clip
    return Released(
        noise=noise,
        sums=Sums(along=along, along_std=z, by_layer=along[:, None], shares=np.ones(1)),
        batch=BatchLaw(mean=float(config.sampler.batch_size), variance=0.0),
    )


def _record_sums(
    sums: Sequence[Gradient], expected: Sequence[Gradient], dataset: Dataset, mechanism: Any
) -> Released:
    """Split sums of clipped contributions with noise z C in every coordinate, or with correlated noise."""
    clip, z = float(mechanism.clip_norm), float(mechanism.noise_multiplier)
    names = list(expected[0])
    correlated = mechanism.bands > 1
    free = {
        name: _noise_only(sums, expected, name, mechanism.correlation if correlated else ()) / (z * clip)
        for name in names
    }
    free = {name: part for name, part in free.items() if part.shape[1]}
    # of each two parameters the smaller, and as many first numbers of the other: noise only
    ordered = sorted(free.values(), key=lambda part: part.shape[1])
    prefixes = [(a, b[:, : a.shape[1]]) for a, b in combinations(ordered, 2)]
    ends = np.cumsum([part.shape[1] for part in free.values()])
    layers = layers_of(names)
    along, by_layer = [], []
    for total, part in zip(sums, expected, strict=True):
        whole = flattened(part, names)
        along.append(float(flattened(total, names) @ whole) / float(np.linalg.norm(whole)) / clip)
        by_layer.append([_component(flattened(total, n), flattened(part, n)) / clip for n in layers])
    shares = [float(np.linalg.norm(flattened(expected[0], n))) / clip for n in layers]
    found = Sums(along=np.array(along), along_std=z, by_layer=np.array(by_layer), shares=np.array(shares))
    law = BatchLaw.binomial(len(dataset.train), float(mechanism.sampling_probability))
    return Released(
        noise=np.concatenate(list(free.values()), axis=1),
        parameters={
            name: slice(int(end) - part.shape[1], int(end))
            for (name, part), end in zip(free.items(), ends, strict=True)
        },
        prefixes=prefixes if correlated else _prefixes(sums, expected, list(free)),
        sums=_independent_sums(found, law, mechanism) if correlated else found,
        batch=law,
    )


def _independent_sums(sums: Sums, law: BatchLaw, mechanism: Any) -> Sums:
    """Return sums whose steps are independent under the accounted mechanism, with the same means and variances.

    Under cyclic batches of b subsets, sizes of two steps have covariance n q^2 (b - 1) if their subset is the same,
    else -n q^2, and the noise has covariance z^2 inverse(C) inverse(C)^T. Whitening undoes both.
    """
    steps, b, q = np.arange(len(sums.along)), mechanism.bands, float(mechanism.sampling_probability)
    same = (steps[:, None] - steps) % b == 0
    sizes = law.mean * q * np.where(same, b - 1.0, -1.0)
    np.fill_diagonal(sizes, law.variance)
    inverse = scipy.signal.lfilter([1.0], mechanism.correlation, np.eye(len(steps)), axis=0)
    noise = sums.along_std**2 * inverse @ inverse.T

    def whitened(values: np.ndarray, share: float) -> np.ndarray:
        root = np.linalg.cholesky(share**2 * sizes + noise)
        std = math.sqrt(share**2 * law.variance + sums.along_std**2)
        mean = share * law.mean
        return mean + std * np.linalg.solve(root, values - mean)

    columns = [whitened(column, share) for column, share in zip(sums.by_layer.T, sums.shares, strict=True)]
    return replace(sums, along=whitened(sums.along, 1.0), by_layer=np.stack(columns, axis=1))


def _noise_only(
    sums: Sequence[Gradient], expected: Sequence[Gradient], name: str, correlation: Sequence[float] = ()
) -> np.ndarray:
    """Return the numbers of a parameter that no record moves, shape (steps, numbers).

    Numbers with contribution 0 in all steps are returned as they are. The others are projected orthogonally to the
    contribution, which leaves one number less. Correlated noise is decoded to independent noise times C, of the numbers
    with contribution 0 only.
    """
    part = np.stack([gradient[name].ravel() for gradient in expected])
    total = np.stack([gradient[name].ravel() for gradient in sums])
    used = np.any(part != 0, axis=0)
    if correlation:
        noise = np.ascontiguousarray(total[:, ~used])
        decoded = np.zeros_like(noise)
        for back, coefficient in enumerate(correlation):
            decoded[back:] += coefficient * noise[: len(noise) - back]
        return decoded
    return np.concatenate([total[:, ~used], _across(total[:, used], part[:, used])], axis=1)


def _across(values: np.ndarray, along: np.ndarray) -> np.ndarray:
    """Return each row's components orthogonal to a direction, (steps, n) to (steps, n - 1); N(0, I) stays N(0, I)."""
    pairs = zip(values, along, strict=True)
    return np.stack([_reflected(row, part / np.linalg.norm(part))[1:] for row, part in pairs])


def _prefixes(
    sums: Sequence[Gradient], expected: Sequence[Gradient], names: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each two parameters the smaller, and as many first numbers of the other, without contributions."""
    total, part = (
        {name: np.stack([gradient[name].ravel() for gradient in side]) for name in names}
        for side in (sums, expected)
    )
    found = []
    for a, b in combinations(sorted(names, key=lambda name: total[name].shape[1]), 2):
        unit = part[b] / np.linalg.norm(part[b], axis=1, keepdims=True)
        others = total[b] - unit * np.sum(unit * total[b], axis=1, keepdims=True)
        n = total[a].shape[1]
        found.append((_across(total[a], part[a]), _across(others[:, :n], part[a])))
    return found


def _component(total: np.ndarray, along: np.ndarray) -> float:
    """Return <total, along> / ||along||, or 0 if `along` is 0."""
    norm = float(np.linalg.norm(along))
    return float(total @ along) / norm if norm else 0.0


def _scalars(run: FinishedRun) -> Released:
    """Split the scalars of zeroth-order training: +-C per record along each direction, plus z C N(0, 1).

    The direction determines the sign, or after a joint clip a share of C. A reflection maps these n numbers to the
    first axis; the other n - 1 axes hold only noise.
    """
    mechanism, dataset = run.mechanism, run.dataset
    z, along, noise = float(mechanism.noise_multiplier), [], []
    for seeds, scalars in _clipped_scalars(run):
        # a direction's first nonzero entry, to which the records' loss difference is proportional
        entries = [direction_entries(seed, dataset.train.x.shape[1]) for seed in seeds]
        slopes = np.array([found[np.flatnonzero(found)[0]] for found in entries])
        shares = slopes if mechanism.joint_clip else np.sign(slopes)
        turned = _reflected(scalars, shares / np.linalg.norm(shares))
        along.append(turned[0] / mechanism.spread)
        noise.append(turned[1:] / z)
    sums = np.array(along)
    return Released(
        noise=np.array(noise),
        sums=Sums(along=sums, along_std=z / mechanism.spread, by_layer=sums[:, None], shares=np.ones(1)),
        batch=BatchLaw.binomial(len(dataset.train), float(mechanism.sampling_probability)),
    )


def _reflected(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Reflect values so that a unit vector and the first axis change places."""
    axis = unit.copy()
    axis[0] -= 1.0
    square = float(axis @ axis)
    return values if square < 1e-24 else values - 2 * axis * float(axis @ values) / square


def _label_sums(run: FinishedRun, sums: Sequence[Gradient], gradients: Sequence[Gradient]) -> Released:
    """Split the sums of label protections, whose noise has a covariance that depends on the features.

    The rows of a layer's sum have covariance v_h h h^T / |h|^2 + v_0 (I - h h^T / |h|^2), with h the layer's input
    and the bias's constant 1. The records contribute along delta h^T. Two parts are pure noise: the entries at zero
    features in the first layer, and in each layer the component along h for outputs orthogonal to delta.
    """
    protection = run.config.protection
    z = float(protection.noise_multiplier or math.nan)
    parts = [
        _whitened(total, gradient, state, run)
        for total, gradient, state in zip(sums, gradients, run.states[:-1], strict=True)
    ]
    free, signals, totals, lengths = (np.array(values) for values in zip(*parts, strict=True))
    layered, norms = totals / protection.clip, lengths  # norms before the clip, (steps, layers)
    require_beyond(norms[0].tolist(), protection.clip)
    stated = norms / np.linalg.norm(norms, axis=1, keepdims=True)
    weights = stated / np.linalg.norm(stated, axis=1, keepdims=True)
    return Released(
        noise=free / (z * protection.clip),
        signal_noise=signals / (z * protection.clip),
        sums=Sums(along=np.sum(layered * weights, axis=1), along_std=z, by_layer=layered, shares=stated[0]),
        batch=BatchLaw.binomial(len(run.dataset.train), float(run.mechanism.sampling_probability)),
    )


def _whitened(
    total: Gradient, gradient: Gradient, state: Weights, run: FinishedRun
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return a step's components divided by the standard deviation of its noise at z C = 1.

    Returns:
        Components at zero features, shape (coordinates,); along the layers' inputs and orthogonal to delta, shape
        (outputs - layers,); along contributions, shape (layers,); norms of a contribution before the clip, shape
        (layers,).
    """
    protection: Any = run.config.protection  # of the kind label-amplified
    # the inputs of the tanh network's layers, each with the bias's constant 1
    first = np.append(run.dataset.train.x[0].double().numpy(), 1.0)
    weight, bias = (state[f"layer1.{part}"].double().numpy() for part in ("weight", "bias"))
    inputs = [first, np.append(np.tanh(np.column_stack([weight, bias]) @ first), 1.0)]
    scale = sum(len(h) for h in inputs)  # of h h^T in the covariance
    free, across, sums, norms = [], [], [], []
    for number, (names, h) in enumerate(zip(layers_of(list(total)), inputs, strict=True)):
        rows, signal = _matrix(total, names), _matrix(gradient, names) @ h
        size, length = float(np.linalg.norm(h)), float(h @ h)
        ridge = protection.floor * scale * length / len(h)
        along_h = rows @ h / size / math.sqrt(scale * length + ridge)
        turned = _reflected(along_h, signal / np.linalg.norm(signal))
        sums.append(turned[0])
        across.append(turned[1:])
        delta = float(np.linalg.norm(signal)) / length
        norms.append(delta * (size / math.sqrt(scale * length + ridge)))
        if number == 0:
            free.append((rows[:, h == 0] / math.sqrt(ridge)).ravel())
    return np.concatenate(free), np.concatenate(across), np.array(sums), np.array(norms)


def _matrix(gradient: Gradient, names: Sequence[str]) -> np.ndarray:
    """Return a layer's weight with its bias as the last column, shape (n_l, n_(l-1) + 1)."""
    parts = [gradient[name] for name in sorted(names, key=lambda name: name.endswith("bias"))]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
