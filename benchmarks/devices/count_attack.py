"""What does an attacker learn of a label that a camera counted, who knows the medium, the light and the sensor exactly?

The camera twin shows every label with the light that `label-readout` takes at an epsilon. The attacker computes exact
likelihood ratios of two labels, from the electron counts (which only the law of the device protects) and from the
digital numbers that leave the camera. For every label against the one that it is told from best:

- delta at the stated epsilon is at most the stated one: the mean of max(0, 1 - e^(epsilon - loss)), and Clopper-Pearson
  limits of P(S) - e^epsilon Q(S);
- the largest epsilon that error rates prove (Clopper-Pearson), as a share of the stated one.

The same with 20 % more light than stated must be found. Of the argmax, the measured confusion matrix lies inside the
computed one, without and with secret permutations.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.results_file import load_results, save_results
from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.audit import clopper_pearson_upper
from opusim.devices.registry import open_device
from opusim.training.protections.argmax_labels import ArgmaxReadout, Cell, LabelFrames, confusion
from opusim.training.protections.counted_labels import CountsReadout

NAME, MODULE = "count_attack", "benchmarks.devices.count_attack"
N_CLASSES, N_OUTPUTS, DELTA, ALARM = 10, 128, 1e-5, 1e-3
_AT_ONCE = 20_000


def certified_confusion(counts: np.ndarray, *, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return Clopper-Pearson limits of all entries together from readings, wrong with probability at most beta.

    Args:
        counts: How often each label (row) gave each answer (column), integers, shape (k, k); independent readings.
        beta: In (0, 1); each limit takes beta / (2 k^2).

    Returns:
        Lower and upper limits, each of shape (k, k).
    """
    checks.in_unit_interval(closed="neither", beta=beta)
    checks.shape((None, None), counts=counts)
    found = np.asarray(counts)
    if found.dtype.kind not in "iu" or found.min() < 0 or not np.all(found.sum(axis=1) > 0):
        raise ValueError("counts: must be whole numbers of at least 0; each label needs at least one reading")
    level, trials = beta / (2 * found.size), np.broadcast_to(found.sum(axis=1, keepdims=True), found.shape)
    lower = numerics.beta_quantile(level, np.maximum(found, 1), trials - found + 1)
    upper = numerics.beta_quantile(1 - level, found + 1, np.maximum(trials - found, 1))
    return np.where(found == 0, 0.0, lower), np.where(found == trials, 1.0, upper)


def losses_of(rates: np.ndarray, a: int, b: int, own: int, readings: int, seed: int) -> np.ndarray:
    """Exact log-likelihood ratios of label a against b from electron counts of one of them."""
    generator, slope = np.random.default_rng([seed, a, b, own]), np.log(rates[a] / rates[b])
    parts = [
        generator.poisson(rates[own], (min(_AT_ONCE, readings - start), rates.shape[1])) @ slope
        for start in range(0, readings, _AT_ONCE)
    ]
    return np.concatenate(parts) - float((rates[a] - rates[b]).sum())


def number_losses(readout: CountsReadout, light: float, a: int, b: int, own: int, n: int) -> np.ndarray:
    """Exact log-likelihood ratios of label a against b from the twin's digital numbers."""
    frames = readout.frames
    law, pixels = frames.numbers(frames.rates(light), readout.pixels), np.arange(len(readout.pixels))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(law.masses[a]) - np.log(law.masses[b])
    ratio = np.where(np.isfinite(ratio), ratio, 0.0)
    found = []
    for start in range(0, n, _AT_ONCE):
        labels = torch.full((min(_AT_ONCE, n - start),), own)
        numbers = frames.taken(labels, light)[:, readout.pixels].astype(np.int64) - law.first
        found.append(ratio[pixels, np.clip(numbers, 0, ratio.shape[1] - 1)].sum(axis=1))
    return np.concatenate(found)


def judged(with_a: np.ndarray, with_b: np.ndarray, epsilon: float) -> dict[str, float]:
    """What losses of a pair say about a stated epsilon and DELTA."""
    excess = np.maximum(0.0, -np.expm1(epsilon - with_a))
    thresholds = np.quantile(with_a, 1 - np.logspace(-0.5, -5.5, 21))
    level = ALARM / (2 * len(thresholds))
    proven, delta_low, n = 0.0, 0.0, len(with_a)
    for threshold in thresholds:
        hits, alarms = int((with_a > threshold).sum()), int((with_b > threshold).sum())
        hit = 1 - clopper_pearson_upper(n - hits, n, level)
        alarm = clopper_pearson_upper(alarms, len(with_b), level)
        delta_low = max(delta_low, hit - math.exp(epsilon) * alarm)
        proven = max(proven, math.log(max(hit - DELTA, 1e-300) / alarm))
    return {
        "delta": float(excess.mean()),
        "delta_error": float(excess.std() / math.sqrt(n)),
        "delta_low": delta_low,
        "epsilon_low": max(proven, 0.0),
    }


def farthest(rates: np.ndarray) -> dict[int, int]:
    """For every label the one that it is told from best."""
    found = {}
    for a in range(len(rates)):
        others = [b for b in range(len(rates)) if b != a]
        bounds = [numerics.poisson_bounds(rates[a], rates[b], DELTA).upper for b in others]
        found[a] = others[int(np.argmax(bounds))]
    return found


def attack_counts(readout: CountsReadout, epsilon: float, readings: int, more_light: float) -> dict[str, Any]:
    """Attack kept counts at a multiple of the stated light; one entry a label, and the digital numbers of the worst.

    With more light than stated only two labels are attacked: one fault that is found is enough.
    """
    rates = readout.frames.rates(readout.light * more_light)[:, readout.pixels]
    found, worst = [], 0.0
    pairs = list(farthest(rates).items())
    for a, b in pairs if more_light == 1 else pairs[:2]:
        losses = [losses_of(rates, a, b, own, readings, 7) for own in (a, b)]
        entry = {"label": a, "against": b, "counts": judged(losses[0], losses[1], epsilon)}
        if entry["counts"]["epsilon_low"] >= worst:
            worst, pair = entry["counts"]["epsilon_low"], (a, b)
        found.append(entry)
    a, b = pair
    numbers = [number_losses(readout, readout.light * more_light, a, b, own, readings) for own in (a, b)]
    return {
        "more_light": more_light,
        "readings": readings,
        "labels": found,
        "worst": {"label": a, "against": b, "numbers": judged(*numbers, epsilon)},
        "stated": {"delta": DELTA, "epsilon": epsilon},
    }


class _NoPermutation:
    """A source that permutes no labels, and breaks ties as usual."""

    def __init__(self, seed: int) -> None:
        self._generator, self._calls = np.random.default_rng(seed), 0

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        """Return sorted numbers for a permutation, then random ones for ties."""
        self._calls += 1
        if self._calls % 2:
            return np.tile(np.arange(size[1]) / size[1], (size[0], 1))
        return self._generator.random(size)


def attack_argmax(frames: LabelFrames, epsilon: float, readings: int, more_light: float) -> dict[str, Any]:
    """Measure the confusion matrix of the argmax, and what it says about the computed one and the stated epsilon."""
    readout = ArgmaxReadout.within(frames, epsilon=epsilon)
    shown = ArgmaxReadout(**{**vars(readout), "light": readout.light * more_light})
    labels, k = torch.arange(readings) % N_CLASSES, N_CLASSES
    measured = []
    for source in (_NoPermutation(3), np.random.default_rng(3)):
        found = np.zeros((k, k), dtype=np.int64)
        np.add.at(found, (labels.numpy(), shown.answers(labels, source)), 1)
        measured.append(found)
    computed = confusion(frames, readout.groups, Cell(least=readout.light, most=readout.light))[0]
    p = readout.keep
    response = (1 - p) / (k - 1) + (p - (1 - p) / (k - 1)) * np.eye(k)
    inside = []
    for found, law in zip(measured, (computed, response), strict=True):
        low, high = certified_confusion(found, beta=ALARM)
        inside.append(bool(np.all(low <= law) and np.all(law <= high)))
    low, high = certified_confusion(measured[1], beta=ALARM)
    proven = np.log(low[:, None, :] / high[None, :, :])
    return {
        "more_light": more_light,
        "epsilon": readout.mechanism.step_epsilon,
        "readings": readings,
        "inside_computed": inside[0],
        "inside_response": inside[1],
        "epsilon_low": float(np.max(proven)),
        "keep": p,
    }


def exceeded(found: dict[str, float]) -> bool:
    """Whether losses show more than DELTA at the stated epsilon, by five standard errors or by proven error rates."""
    return found["delta"] - 5 * found["delta_error"] > DELTA or found["delta_low"] > DELTA


def main(
    readings: Annotated[int, typer.Option(help="Simulated readings of each label.")] = 1_000_000,
    epsilons: str = "8 3 1",
) -> None:
    """Attack every epsilon, with the stated light and with 20 % more."""
    results = load_results(NAME)
    content: dict[str, Any] = {key: results.get(key, {}) for key in ("counts", "argmax")}
    with open_device("camera_low_light", n_inputs=N_CLASSES, n_outputs=N_OUTPUTS) as device:
        frames = LabelFrames.of(device, N_CLASSES)
        for text in epsilons.split():
            epsilon = float(text)
            readout = CountsReadout.within(frames, epsilon=epsilon, delta=DELTA)
            content["counts"][text] = [attack_counts(readout, epsilon, readings, more) for more in (1.0, 1.2)]
            content["argmax"][text] = [attack_argmax(frames, epsilon, readings, more) for more in (1.0, 1.2)]
            save_results(NAME, content)


def table_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the epsilon that each attack proves, and which attacks find more than is stated."""
    rows = []
    for text, (stated, brighter) in results["counts"].items():
        answer, brighter_answer = results["argmax"][text]
        found = (
            max(entry["counts"]["epsilon_low"] for entry in stated["labels"]),
            stated["worst"]["numbers"]["epsilon_low"],
            answer["epsilon_low"],
        )
        seen = (
            # whether any label's losses show more than DELTA at the stated epsilon, and whether the argmax does
            _SEEN[any(exceeded(entry["counts"]) for entry in attack["labels"]), not argmax["inside_computed"]]
            for attack, argmax in ((stated, answer), (brighter, brighter_answer))
        )
        rows.append((text, *(f"{value:.2f}" for value in found), *seen))
    return rows


_SEEN = {
    (True, True): "found, both",
    (True, False): "found, counts",
    (False, True): "found, argmax",
    (False, False): "not found",
}


if __name__ == "__main__":
    typer.run(main)
