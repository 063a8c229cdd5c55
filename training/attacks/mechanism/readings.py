"""Read what a finished run of the self-test released, and split it into pure noise and the sums along the records.

Everything is read from the run's folder, as any recipient could: the parameters before and after each step, or the step
log, or the labels that were read once; and the accounted mechanism from the ledger. A step of plain gradient descent is
W' = W - (lr / divisor) G with the noisy sum G, so G = (W - W') divisor / lr.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import scipy.signal
from torch import Tensor

from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.convex import ConvexLastIterate, learning_rates
from opusim.training.attacks.mechanism.checks import BatchLaw, Released, Sums
from opusim.training.attacks.mechanism.readings import (
    Gradient,
    Weights,
    clipped,
    convex_contribution,
    direction_entries,
    flattened,
    layers_of,
    noisy_sums,
    record_gradients,
    require_beyond,
)
from opusim.training.attacks.mechanism.subjects import Subject
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.protections.config import LabelAmplifiedConfig
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent


def released_steps(
    folder: RunFolder, config: RunConfig, subject: Subject, dataset: Dataset, states: Sequence[Weights]
) -> Released:
    """Read a run whose steps are clipped sums plus noise.

    Args:
        folder: The folder of the finished run.
        config: Its resolved configuration.
        subject: The records and model that it was trained with.
        dataset: Its records.
        states: The parameters before the first step and after each step; unused for zo.

    Raises:
        ValueError: A record's gradient does not exceed the clip in every layer.
    """
    mechanism = read_ledger(folder.ledger_file).mechanisms[0]
    kind = config.trainer.kind
    if kind == "zo":
        return _scalars(folder, config, mechanism, dataset)
    sums = noisy_sums(states, config, mechanism)
    if kind == "convex":
        clip = float(config.trainer.implementing_class().clip_norm(config, dataset.n_classes))
        expected = [convex_contribution(config, dataset, clip)] * len(sums)
        if isinstance(mechanism, ConvexLastIterate):
            return _last_iterate_sums(sums, expected, config, mechanism, clip)
        return _record_sums(sums, expected, dataset, mechanism)
    model = subject.model(config.protection.clip)
    gradients = record_gradients(config, model, dataset, [(state, 0) for state in states[:-1]])
    if config.protection.protects == "records":
        norms = [
            float(np.linalg.norm(flattened(gradients[0], names))) for names in layers_of(list(gradients[0]))
        ]
        require_beyond(norms, config.protection.clip)
        by_layer = kind == "ulr" and getattr(config.trainer, "clip", "joint") == "module"
        expected = [clipped(g, config.protection.clip, by_layer=by_layer) for g in gradients]
        return _record_sums(sums, expected, dataset, mechanism)
    return _label_sums(sums, gradients, states, dataset, config, mechanism)


def kept_states(folder: RunFolder) -> list[dict[str, Tensor]]:
    """Return the parameters before the first step and after each step, as checkpoints keep them."""
    return [read_checkpoint(path).named("model.") for path in list_checkpoints(folder.checkpoints)]


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
    split = _noise_only if mechanism.bands == 1 else partial(_decoded_noise, mechanism.correlation)
    free = {name: split(sums, expected, name) / (z * clip) for name in names}
    free = {name: part for name, part in free.items() if part.shape[1]}
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
        prefixes=_prefixes(sums, expected, list(free)) if mechanism.bands == 1 else _decoded_prefixes(free),
        sums=found if mechanism.bands == 1 else _independent_sums(found, law, mechanism),
        batch=law,
    )


def _decoded_noise(
    correlation: Sequence[float], sums: Sequence[Gradient], expected: Sequence[Gradient], name: str
) -> np.ndarray:
    """Return the numbers of a parameter that no record moves, times C: independent under the accounted mechanism."""
    untouched = ~np.any([gradient[name].ravel() != 0 for gradient in expected], axis=0)
    noise = np.stack([gradient[name].ravel()[untouched] for gradient in sums])
    decoded = np.zeros_like(noise)
    for back, coefficient in enumerate(correlation):
        decoded[back:] += coefficient * noise[: len(noise) - back]
    return decoded


def _decoded_prefixes(free: Gradient) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each two parameters the smaller, and as many first numbers of the other; noise only."""
    return [
        (a, b[:, : a.shape[1]])
        for a, b in combinations(sorted(free.values(), key=lambda part: part.shape[1]), 2)
    ]


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


def _noise_only(sums: Sequence[Gradient], expected: Sequence[Gradient], name: str) -> np.ndarray:
    """Return the numbers of a parameter that no record moves, shape (steps, numbers).

    Numbers with contribution 0 in all steps are returned as they are. The others are projected orthogonally to the
    contribution, which leaves one number less.
    """
    part = np.stack([gradient[name].ravel() for gradient in expected])
    total = np.stack([gradient[name].ravel() for gradient in sums])
    used = np.any(part != 0, axis=0)
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


def _scalars(folder: RunFolder, config: RunConfig, mechanism: Any, dataset: Dataset) -> Released:
    """Split the scalars of zeroth-order training: +-C per record along each direction, plus z C N(0, 1).

    The direction determines the sign, or after a joint clip a share of C. A reflection maps these n numbers to the
    first axis; the other n - 1 axes hold only noise.
    """
    clip, z = float(mechanism.clip_norm), float(mechanism.noise_multiplier)
    factor = 2 * float(getattr(config.trainer, "perturbation")) * float(mechanism.divisor) / clip  # noqa: B009
    along, noise = [], []
    for entry in LogContent.read(folder.path / LOG_FILE).entries:
        scalars = np.array(entry.scalars, dtype=np.float64) * factor
        # a direction's first nonzero entry, to which the records' loss difference is proportional
        entries = [direction_entries(seed, dataset.train.x.shape[1]) for seed in entry.seeds]
        slopes = np.array([found[np.flatnonzero(found)[0]] for found in entries])
        shares = slopes if mechanism.joint_clip else np.sign(slopes)
        turned = _reflected(scalars, shares / np.linalg.norm(shares))
        along.append(turned[0] / mechanism.spread)
        noise.append(turned[1:] / z)
    sums = np.array(along)
    return Released(
        noise=np.array(noise),
        sums=Sums(
            along=sums,
            along_std=z / mechanism.spread,
            by_layer=sums[:, None],
            shares=np.ones(1),
        ),
        batch=BatchLaw.binomial(len(dataset.train), float(mechanism.sampling_probability)),
    )


def _reflected(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Reflect values so that a unit vector and the first axis change places."""
    axis = unit.copy()
    axis[0] -= 1.0
    square = float(axis @ axis)
    return values if square < 1e-24 else values - 2 * axis * float(axis @ values) / square


def _label_sums(
    sums: Sequence[Gradient],
    gradients: Sequence[Gradient],
    states: Sequence[Weights],
    dataset: Dataset,
    config: RunConfig,
    mechanism: Any,
) -> Released:
    """Split the sums of label protections, whose noise has a covariance that depends on the features.

    The rows of a layer's sum have covariance v_h h h^T / |h|^2 + v_0 (I - h h^T / |h|^2), with h the layer's input
    and the bias's constant 1. The records contribute along delta h^T. Two parts are pure noise: the entries at zero
    features in the first layer, and in each layer the component along h for outputs orthogonal to delta.
    """
    protection = config.protection
    z = float(protection.noise_multiplier or math.nan)
    parts = [
        _whitened(total, gradient, state, dataset, config)
        for total, gradient, state in zip(sums, gradients, states[:-1], strict=True)
    ]
    free, signals, totals, lengths = (np.array(values) for values in zip(*parts, strict=True))
    layered, norms = totals / protection.clip, lengths  # norms before the clip, (steps, layers)
    require_beyond(norms[0].tolist(), protection.clip)
    stated = norms / np.linalg.norm(norms, axis=1, keepdims=True)
    weights = stated / np.linalg.norm(stated, axis=1, keepdims=True)
    return Released(
        noise=free / (z * protection.clip),
        signal_noise=signals / (z * protection.clip),
        sums=Sums(
            along=np.sum(layered * weights, axis=1),
            along_std=z,
            by_layer=layered,
            shares=stated[0],
        ),
        batch=BatchLaw.binomial(len(dataset.train), float(mechanism.sampling_probability)),
    )


def _whitened(
    total: Gradient, gradient: Gradient, state: Weights, dataset: Dataset, config: RunConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return a step's components divided by the standard deviation of its noise at z C = 1.

    Returns:
        Components at zero features, shape (coordinates,); along the layers' inputs and orthogonal to delta, shape
        (outputs - layers,); along contributions, shape (layers,); norms of a contribution before the clip, shape
        (layers,).
    """
    floor = config.protection_as(LabelAmplifiedConfig).floor
    inputs = _layer_inputs(state, dataset)
    scale = sum(len(h) for h in inputs)  # of h h^T in the covariance
    free, across, sums, norms = [], [], [], []
    for number, (names, h) in enumerate(zip(layers_of(list(total)), inputs, strict=True)):
        rows, signal = _matrix(total, names), _matrix(gradient, names) @ h
        size, length = float(np.linalg.norm(h)), float(h @ h)
        ridge = floor * scale * length / len(h)
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


def _layer_inputs(state: Weights, dataset: Dataset) -> list[np.ndarray]:
    """Return the inputs of the tanh network's layers, each with the bias's constant 1."""
    first = np.append(dataset.train.x[0].double().numpy(), 1.0)
    z = (
        np.column_stack([state["layer1.weight"].double().numpy(), state["layer1.bias"].double().numpy()])
        @ first
    )
    return [first, np.append(np.tanh(z), 1.0)]


def kept_scores(folder: RunFolder, dataset: Dataset) -> np.ndarray:
    """Return the log-likelihood of every class that a run keeps for each record, shape (n, k)."""
    return read_array(folder.labels_file)[:, : dataset.n_classes]


def responses(folder: RunFolder, dataset: Dataset) -> np.ndarray:
    """Return each record's randomized class as a shift from its own, shape (n,)."""
    observed = np.argmax(kept_scores(folder, dataset), axis=1)
    return np.asarray((observed - dataset.train.y.numpy()) % dataset.n_classes)
