"""Photon counts as the mechanism: what counts of known patterns reveal, and what the brightest group of pixels reveals.

Both are for inputs that can be listed, such as labels. Counts that are kept are accounted by the exact law of their
privacy loss (`opusim.accounting.numerics.poisson_loss`). If only the argmax over groups of pixels is kept, the release
has as many values as there are groups, and the full matrix of its probabilities gives a pure epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from typing_extensions import Doc

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import Adjacency, EpsilonBounds, Guarantee, NoGuarantee, Release, Unit
from opusim.accounting.mechanism import Absent, CertifiedMechanism, Hypotheses, Positive, counted
from opusim.accounting.mechanisms.labels import PUBLIC_FEATURES, keep_probability, pure_bounds
from opusim.accounting.mechanisms.readings import FLUCTUATING_LIGHT, readings_guarantee
from opusim.accounting.theorems import Theorem

_ONLY_THIS_WAY = "training labels are used only through what is kept"
_ROUNDING = 1e-9
"""Relative rounding error of a probability in the confusion matrix, at most."""

POISSON_LOSS = Theorem(
    name="poisson-loss",
    title="exact privacy loss of Poisson counts",
    statement="Counts whose rates are w L(x) + d, with w at most w_max and d at least d_min for every input, are at "
    "most as revealing as Poisson(w_max L(x) + d_min). Between rates a and b the loss is sum N c - sum (a - b) with "
    "c = log(a / b) and N Poisson(a): a compound Poisson number, whose law gives delta at every epsilon. The largest "
    "epsilon over ordered pairs of inputs holds.",
    proof="Thin Poisson(w_max L + d_min) by w / w_max and add independent Poisson(d - w d_min / w_max), which is "
    "post-processing. Splitting a pixel into two whose ratios are grid points is undone by adding their counts, so "
    "the pair on the grid dominates, and one Fourier transform gives its law. Gain, read noise, full well and "
    "rounding come after the counts.",
    reference="Doroshenko et al. 2022 for connecting the dots",
    code="opusim.accounting.numerics.poisson_loss.pattern_bounds",
    page="privacy-labels.md, section 7",
    checked_by_code=("each label is shown as often as stated", _ONLY_THIS_WAY),
    trusted=(
        "counts are independent Poisson counts at the stated rates, light at most and dark charge at least as stated",
        PUBLIC_FEATURES,
    ),
)
MEASURED_RATES = Theorem(
    name="measured-rates",
    title="Poisson counts whose rates lie within measured limits",
    statement="Counts at rates a in [a_low, a_high] under one label and b in [b_low, b_high] under another are at most "
    "as revealing as Poisson(a_high) against Poisson(b_low), and Poisson(a_low) against Poisson(b_high), of which a "
    "pair counts where the first may exceed the second, the other one where it may lie below; where both may be, both "
    "are counted. Limits that are wrong with probability beta take it off delta.",
    proof="If a >= b, thin by t = (a - b) / (a_high - b_low) <= 1 and add independent Poisson(c), c = b - t b_low = "
    "a - t a_high >= 0: that takes the pair (a_high, b_low) to (a, b). If a < b, the other pair likewise. Which of "
    "them it is depends on the pixel only, so releasing the counts of both, if both may be, tells no less. Rates "
    "between are those of less light and more dark charge (theorem poisson-loss).",
    reference="Blackwell 1953 for the comparison of experiments",
    code="opusim.accounting.mechanisms.counts.paired_limits",
    page="privacy-labels.md, section 7",
    checked_by_code=(
        *POISSON_LOSS.checked_by_code,
        "rates measured before and behind the labels do not differ by more than noise",
    ),
    trusted=(
        "counts are independent Poisson counts; rates between the two measurements are those of the measurements",
        PUBLIC_FEATURES,
    ),
)
COUNT_ARGMAX = Theorem(
    name="count-argmax",
    title="the argmax of counts as a finite channel",
    statement="Of each label only the number of the brightest group of pixels is kept. With P the matrix of its "
    "probabilities, the release is epsilon-DP with epsilon = max over columns y and labels a, b of "
    "log(P[a, y] / P[b, y]), and delta = 0. If every record's label is first moved by its own secret, uniformly random "
    "permutation, and the answer moved back, it is randomized response that keeps the label with p = mean diagonal of "
    "P: epsilon = |log((k - 1) p / (1 - p))|.",
    proof="A release of finitely many values is as revealing as its largest ratio. Under a uniform permutation s, "
    "P(answer y | label y) is the mean of P[s(y), s(y)], the mean diagonal; for z other than y, (s(y), s(z)) is "
    "uniform over ordered pairs, so that all other probabilities equal (1 - p) / (k - 1). With limits of each "
    "entry the ratio of an upper to a lower limit bounds epsilon. Of light that fluctuates, "
    "epsilon is the largest over all powers up to w_max; brighter frames have a probability beta, taken off delta.",
    reference="Kairouz, Oh and Viswanath 2014 for randomized response",
    code="opusim.accounting.mechanisms.counts.LabelArgmax",
    page="privacy-labels.md, section 8",
    checked_by_code=(
        "counts are discarded where the argmax is taken; ties are broken at random",
        _ONLY_THIS_WAY,
    ),
    trusted=(
        "every step up to the argmax (counts, read noise, full well, rounding) has the stated law",
        "the counts are never seen: an attacker who sees them is not covered",
        PUBLIC_FEATURES,
    ),
)
_NO_EPSILON = "a rate may be 0 for one input and not for another, or doubles cannot follow the loss"


def known_counts_guarantee(
    rates: np.ndarray,
    *,
    delta: float,
    beta: float = 0.0,
    power_error: float = 0.0,
) -> Guarantee:
    """Return the guarantee of one reading by photon counts of labels whose expected counts are known.

    It is sharper than boxes around the counts. For the rates, shape (labels, pixels), see `at_brightest`. Delta pays
    for `beta`, the probability that a rate is wrong, and for `power_error`, that a frame is brighter than accounted
    for; NoGuarantee is raised if it does not exceed both.
    """
    return readings_guarantee(
        _known_bounds(np.asarray(rates, dtype=float), _left_of(delta, beta, power_error)),
        POISSON_LOSS,
        delta=delta,
        beta=beta,
        unit=Unit.LABEL,
        mechanism=f"one reading of {len(rates)} possible inputs by {np.shape(rates)[1]:,} photon counts",
        also=_fluctuating(power_error),
        reason=_NO_EPSILON,
    )


def at_brightest(
    rates: np.ndarray, *, brightest: float = 1.0, dark_low: np.ndarray | float = 0.0
) -> np.ndarray:
    """Return the rates that count for a guarantee, shape (labels, pixels): most light and least dark counts.

    `brightest` is the most light, as a multiple of that within `rates`; `dark_low` the least expected counts, contained
    in `rates`, that no label changes and no light scales.
    """
    checks.positive(brightest=brightest)
    light = np.asarray(rates, dtype=float) - dark_low
    if light.size and light.min() < 0:
        raise ValueError("dark_low: exceeds a rate that contains it; lower it")
    return np.asarray(brightest * light + dark_low)


def _known_bounds(rates: np.ndarray, delta: float) -> EpsilonBounds:
    """Return bounds from the exact loss, or from Renyi divergences if doubles cannot represent the loss."""
    bounds = numerics.pattern_bounds(rates, delta)
    if math.isfinite(bounds.upper):
        return bounds
    upper = numerics.renyi_upper(rates, delta)
    return EpsilonBounds(lower=min(bounds.lower, upper), upper=upper, method="Renyi divergences")


def known_counts_epsilon(
    rates: np.ndarray, *, delta: float, beta: float = 0.0, power_error: float = 0.0
) -> float:
    """Return the epsilon of `known_counts_guarantee` without its lower bound, which a search does not need."""
    left = _left_of(delta, beta, power_error)
    upper = numerics.pattern_upper(rates, left)
    return upper if math.isfinite(upper) else numerics.renyi_upper(rates, left)


def _left_of(delta: float, beta: float, power_error: float) -> float:
    """Return what certificates and light that fluctuates leave of delta."""
    checks.in_unit_interval(closed="neither", delta=delta)
    checks.in_unit_interval(closed="left", beta=beta, power_error=power_error)
    left = delta - beta - power_error
    if left <= 0:
        raise NoGuarantee(
            f"delta = {delta}: must exceed beta = {beta + power_error}, the certificate's own error"
        )
    return left


def paired_limits(low: np.ndarray, high: np.ndarray, a: int, b: int) -> np.ndarray:
    """Return two rows of rates that reveal at least as much as labels a and b with rates anywhere within limits.

    Lower and upper limits have shape (labels, pixels).
    """
    above, below = high[a] > low[b], low[a] < high[b]
    return np.stack(
        [
            np.concatenate([high[a, above], low[a, below]]),
            np.concatenate([low[b, above], high[b, below]]),
        ]
    )


def _rows(rates: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in np.asarray(rates, dtype=float).tolist())


def _expected(**rates: tuple[float, ...]) -> None:
    """Require expected counts: finite and at least 0."""
    for name, row in rates.items():
        named: dict[str, Any] = {name: np.asarray(row)}
        checks.non_negative(**named)


def _patterns(**rates: tuple[tuple[float, ...], ...]) -> None:
    """Require expected counts of at least two labels, of one length."""
    for name, rows in rates.items():
        if len(rows) < 2 or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            raise ValueError(f"{name}: must have a row for each of at least two labels, all of one length")
        for row in rows:
            _expected(**{name: row})


def _patterns_if_any(**rates: tuple[tuple[float, ...], ...]) -> None:
    """Require what `_patterns` does, or no rows at all."""
    _patterns(**{name: rows for name, rows in rates.items() if rows})


@dataclass(frozen=True, kw_only=True)
class _LabelFrame(CertifiedMechanism):
    """A mechanism that shows every label once to a camera, in one frame; light may fluctuate (fluctuating-light)."""

    power_error: Annotated[
        float,
        Doc(
            "Probability in [0, 1) that fluctuating light makes a frame brighter than accounted for; each step adds it."
        ),
        partial(checks.in_unit_interval, closed="left"),
        Absent(0.0),
    ] = 0.0

    audited: ClassVar[bool] = True
    taken_upfront: ClassVar[bool] = True
    unit: ClassVar[Unit] = Unit.LABEL
    release = Release.EVERY_READING
    noise_is_inverse: ClassVar[bool] = True
    repeats_beta: ClassVar[bool] = True
    credits_device = True

    @classmethod
    def delta_errors(cls, mechanisms: Sequence[Self]) -> list[float]:
        """Return probabilities that certificates are wrong, and that frames are brighter than accounted for."""
        brighter = [one.steps * one.power_error for one in mechanisms if one.power_error]
        return [*super().delta_errors(mechanisms), *brighter]

    @classmethod
    def hypotheses(cls, mechanisms: Sequence[Self], *, delta: float, bounds: EpsilonBounds) -> Hypotheses:
        """Return what is taken on trust of light that fluctuates, and of a laser dimmed under a certificate."""
        dimmed = (
            "the laser is dimmed from the certified light by the stated factor, and nothing else of the certified "
            "setting is changed"
        )
        light = _fluctuating(math.fsum(one.steps * one.power_error for one in mechanisms))
        return (), (*light, *((dimmed,) if any(one.certificate for one in mechanisms) else ()))

    @property
    def _under(self) -> str:
        """The part of a description about fluctuating light."""
        return f", light brighter with probability {self.power_error:.3g}" if self.power_error else ""


def _fluctuating(beta: float) -> tuple[str, ...]:
    """Return hypotheses about light that is brighter than accounted for with probability beta; none at 0."""
    why = "the probability that a label's frame is brighter than accounted for (theorem fluctuating-light)"
    return (FLUCTUATING_LIGHT.trusted[1], f"delta holds beta of use = {beta:.3g}: {why}") if beta else ()


@dataclass(frozen=True, kw_only=True)
class LabelCounts(_LabelFrame):
    """Every label shown once to a camera, and the counts of its pixels kept; `steps` counts how often."""

    light: Annotated[
        tuple[tuple[float, ...], ...],
        Doc("Expected electrons of light of each label at every pixel and frame, at light 1."),
        _patterns,
    ]
    dark: Annotated[
        tuple[float, ...],
        Doc("Least expected electrons that no label changes, at every pixel and frame."),
        _expected,
    ]
    brightest: Annotated[Positive, Doc("Most light, as a multiple of that of `light`.")] = 1.0
    light_low: Annotated[
        tuple[tuple[float, ...], ...],
        Doc("Lower limits of `light`, which then holds upper ones, as measured; empty if rates are known."),
        _patterns_if_any,
        Absent(()),
    ] = ()

    kind: ClassVar[str] = "label_counts"
    noise_field: ClassVar[str | None] = "brightest"
    priced: ClassVar[bool] = False

    @property
    def theorem(self) -> Theorem:
        """poisson-loss of known rates, measured-rates of limits."""
        return MEASURED_RATES if self.light_low else POISSON_LOSS

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.dark) != len(self.light[0]):
            raise ValueError(
                f"dark has {len(self.dark)} numbers, light {len(self.light[0])} for each label; give equal numbers"
            )
        if self.light_low:
            low, high = np.asarray(self.light_low), np.asarray(self.light)
            checks.shape(high.shape, light_low=low)
            if np.any(low > high):
                raise ValueError("light_low: exceeds light, the upper limits; exchange the two")

    @classmethod
    def of(
        cls,
        light: np.ndarray,
        dark: np.ndarray,
        *,
        beta: float = 0.0,
        certificate: str = "",
        power_error: float = 0.0,
        light_low: np.ndarray | None = None,
    ) -> LabelCounts:
        """Return the mechanism of arrays, shapes (labels, pixels) and (pixels,)."""
        return cls(
            light=_rows(light),
            light_low=() if light_low is None else _rows(light_low),
            dark=tuple(np.asarray(dark, dtype=float).tolist()),
            beta=beta,
            certificate=certificate,
            power_error=power_error,
        )

    @property
    def rates(self) -> np.ndarray:
        """Expected counts of all steps of each label, shape (labels, pixels); readings of one label add up."""
        return self.steps * (self.brightest * np.asarray(self.light) + np.asarray(self.dark))

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "once" if self.steps == 1 else f"{self.steps:,} times"
        rates = self.rates / self.steps
        return (
            f"every label shown {times} to {counted(len(self.dark), 'pixel')} and its photon counts kept, at most "
            f"{self.brightest:.4g} of the {'measured' if self.light_low else 'described'} light, {rates.min():.4g} to "
            f"{rates.max():.4g} electrons a pixel{self._under}"
        )

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return epsilon of all counts of a label together, by the exact law of the loss.

        Raises:
            NoGuarantee: The mechanisms are about different numbers of labels.
        """
        if len({len(one.light) for one in mechanisms}) > 1:
            raise NoGuarantee("label_counts: readings of different numbers of labels; state each separately")
        if delta == 0:
            return EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers")
        rates = np.concatenate([one.rates for one in mechanisms], axis=1)
        if not any(one.light_low for one in mechanisms):
            return _known_bounds(rates, delta)
        lows = [replace(one, light=one.light_low or one.light).rates for one in mechanisms]
        low = np.concatenate(lows, axis=1)  # at the same light and dark charge
        worst = max(
            (
                _known_bounds(paired_limits(low, rates, *pair), delta)
                for pair in combinations(range(len(rates)), 2)
            ),
            key=lambda found: found.upper,
        )
        return replace(worst, lower=min(numerics.pattern_bounds(rates, delta).lower, worst.upper))

    @classmethod
    def why_infinite(cls, mechanisms: Sequence[Self], delta: float) -> str:
        """Return why `bounds` found no finite epsilon."""
        return _NO_EPSILON if delta > 0 else super().why_infinite(mechanisms, delta)


@dataclass(frozen=True, kw_only=True)
class LabelArgmax(_LabelFrame):
    """Every label shown once to a camera with a group of pixels per label; only the brightest group's index is kept."""

    step_epsilon: Annotated[
        Positive,
        Doc(
            "Largest log ratio of two labels' probabilities of an answer, from limits of the confusion matrix."
        ),
    ]
    n_classes: Annotated[int, Doc("k, at least 2."), partial(checks.integer, minimum=2)]
    symmetrised: Annotated[
        bool,
        Doc("Whether a secret random permutation moved each record's label, and its inverse the answer."),
    ] = True

    kind: ClassVar[str] = "label_argmax"
    noise_field: ClassVar[str | None] = "step_epsilon"
    theorem = COUNT_ARGMAX

    @property
    def keep_probability(self) -> float:
        """P = e^epsilon / (e^epsilon + k - 1), with which a symmetrised label stays."""
        return keep_probability(self.step_epsilon, self.n_classes)

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "" if self.steps == 1 else f", {self.steps:,} times for each label"
        how = "labels permuted secretly for each record" if self.symmetrised else "labels as they are"
        return (
            f"the argmax of photon counts over {self.n_classes} groups of pixels, {how}{times}; counts discarded"
            f"{self._under}"
        )

    @classmethod
    def hypotheses(cls, mechanisms: Sequence[Self], *, delta: float, bounds: EpsilonBounds) -> Hypotheses:
        """Return what is taken on trust of permutations, and of light."""
        permuted = (
            "the permutation of each record's labels is uniform, secret, used once and made by a digital generator",
        )
        checked, trusted = super().hypotheses(mechanisms, delta=delta, bounds=bounds)
        return checked, (*(permuted if any(one.symmetrised for one in mechanisms) else ()), *trusted)

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return the sum of pure epsilons; equal symmetrised answers compose as randomized response."""
        first = mechanisms[0]
        alike = {replace(one, steps=1, beta=0.0, certificate="", power_error=0.0) for one in mechanisms}
        equal = first.symmetrised and len(alike) == 1
        return pure_bounds(mechanisms, first.keep_probability, first.n_classes, delta, equal=equal)


def argmax_epsilon(lowest: np.ndarray, highest: np.ndarray, *, symmetrised: bool) -> float:
    """Return the pure epsilon of the argmax from limits of its confusion matrix, shape (k, k), rounded up.

    Asymmetric: max over columns y and labels a, b of log(highest[a, y] / lowest[b, y]). Symmetrised, by a secret,
    uniformly random permutation of each record's labels, with p between the mean diagonals: the larger of log((k - 1) p
    / (1 - p)) at the highest p and its negative at the lowest. Raises ValueError if the limits contradict each other.
    """
    checks.shape((None, None), lowest=lowest)
    checks.shape(np.shape(lowest), highest=highest)
    checks.non_negative(lowest=lowest)
    if not (np.all(lowest <= highest) and len(lowest) == np.shape(lowest)[1] >= 2):
        raise ValueError("lowest: must be square, of at least two labels, and nowhere above highest")
    low, high = np.asarray(lowest) * (1 - _ROUNDING), np.asarray(highest) * (1 + _ROUNDING)
    with np.errstate(divide="ignore", over="ignore"):
        if symmetrised:
            k, most, least = len(low), min(1.0, np.trace(high) / len(low)), np.trace(low) / len(low)
            return float(
                max(np.log((k - 1) * most) - np.log1p(-most), np.log1p(-least) - np.log((k - 1) * least), 0.0)
            )
        upper = np.log(high)
        ratios = upper[:, None, :] - np.log(low)[None, :, :]  # (a, b, answer)
    others = ~np.eye(len(low), dtype=bool)
    return float(max(np.max(ratios[others]), 0.0))


def confusion_matrix(lowest: np.ndarray, highest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return limits of P[label, answer] for the argmax over groups, ties broken uniformly at random.

    With F the distribution function and f the masses of each group's sum, and u uniform on (0, 1),

    P(g wins) = sum over s of f_g(s) int prod over h != g of (F_h(s - 1) + u f_h(s)) du,

    a polynomial in u, integrated exactly by Gauss's rule. More light on a group's own pixels never makes it less likely
    to win, and more on another's never more likely: the sup of an entry has the group at its highest rates and all
    others at their lowest. Masses of each group's sum under each label have shape (labels, groups, sums), on one grid
    of sums.
    """
    checks.shape((None, None, None), lowest=lowest)
    checks.shape(np.shape(lowest), highest=highest)
    low, high = _wins(own=lowest, others=highest), _wins(own=highest, others=lowest)
    return np.minimum(low, high), np.maximum(low, high)  # near 0 and 1 rounding may exchange them


def _wins(*, own: np.ndarray, others: np.ndarray) -> np.ndarray:
    labels, groups, _ = own.shape
    nodes, weights = np.polynomial.legendre.leggauss((groups + 1) // 2)
    below = np.cumsum(others, axis=2) - others
    found = np.zeros((labels, groups))
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        beaten = below + node * others  # (labels, groups, sums)
        for group in range(groups):
            rest = np.prod(np.delete(beaten, group, axis=1), axis=1)
            found[:, group] += weight * np.sum(own[:, group] * rest, axis=1)
    return found
