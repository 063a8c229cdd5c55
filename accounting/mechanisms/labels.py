"""What may be released about labels whose features are public: noisy signals, readings and randomized response.

The theorems and their hypotheses stand above the mechanisms that rest on them; below are the responses themselves, and
the likelihood of an observation under each label, which is post-processing.

Randomized response over k labels: P(observed = b | true = a) = e^epsilon / (e^epsilon + k - 1) for b = a, else
1 / (e^epsilon + k - 1) (Warner 1965). With a prior it answers one of the m likeliest labels only (Ghazi et al. 2021,
algorithm 2): a label among them is randomized over these m, and any other becomes one of them with probability 1 / m.
A reading is r = B y + g with g ~ N(0, sigma^2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Annotated, Any, ClassVar, Protocol, Self

import numpy as np
from typing_extensions import Doc, override

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import Adjacency, EpsilonBounds, Unit
from opusim.accounting.mechanism import (
    CertifiedMechanism,
    CountsSums,
    DeviceNoise,
    ExactlyRounded,
    Hypotheses,
    Mechanism,
    Positive,
    SamplingProbability,
    counted,
)
from opusim.accounting.theorems import NOISE_IS_SECRET, NOISY_SUM, SEED_IS_SECRET, Theorem

_SIGNALS_CHECKED = (
    "each credited noise is drawn independently, for one reading of one layer at one step, after the last nonlinearity "
    "of the signal",
    "every released layer is noised, the output layer too",
    "a record occurs at most once in a batch",
    "no class weights, balanced batches or mixup, and no schedule or early stopping on training labels",
)
PUBLIC_FEATURES = "features, initial weights and the projection are public or do not depend on labels"
_TRAINING_TRUSTED = (PUBLIC_FEATURES, "no loss or accuracy on training labels leaves")
_SIGNALS_TRUSTED = (*_TRAINING_TRUSTED, NOISE_IS_SECRET)
_DEVICE_LAW = (
    "the device's noise is Gaussian, independent of labels and batch, and at least as strong as stated"
)
_PUBLISHED_ORDER = (
    "the signal lies in its ball, and every bit of the credited noise is Gaussian and added after that"
)
_HARDWARE_ORDER = (
    "the reading's noise is Gaussian, of one law for every label, and nothing but a public gain follows"
)
LABEL_BUDGET = Theorem(
    name="label-budget",
    title="leverage scores and a budget for each record",
    statement="If each step is mu_t-GDP for a record's label, mu_t is known from earlier releases, and a record whose"
    " sum of mu_t^2 would exceed B^2 sends no signal from then on, the run is B-GDP for labels, whatever "
    "was spent. The largest realised spending is no guarantee, since it is not known before the run.",
    proof="Given the past, the log-likelihood ratio of two labels grows by N(mu_t^2/2, mu_t^2). Top it up at the end "
    "by an independent Gaussian release of mu^2 = B^2 - sum mu_t^2. With M_t the centred sum and A_t = sum "
    "mu_t^2, exp(i theta M_t + theta^2 A_t / 2) is a martingale and A ends at the constant B^2, so the ratio is"
    " N(B^2/2, B^2). Forgetting the top-up is post-processing. mu_t^2 is a sum over "
    "layers of a record's squared signal distance times its leverage over sigma^2.",
    reference="Dong, Roth and Su 2019",
    code="opusim.accounting.mechanisms.labels.LabelBudget",
    page="privacy-labels.md, sections 1 and 2",
    checked_by_code=("a record over its budget keeps its noise and loses its signal", *_SIGNALS_CHECKED),
    trusted=_SIGNALS_TRUSTED,
)
LABEL_AMPLIFICATION = Theorem(
    name="label-amplification",
    title="a secret batch and noise of a public covariance",
    statement="A step releases sum over a secret Poisson(q) batch of w_i s_i h_i^T + N(0, sigma^2 S) with S "
    "independent of batch and labels, where w_i brings the contribution whitened by S to norm at most C "
    "under every label. For replacing a label it is dominated by P* = (1-q) N(0,1) + q N(C,1) against Q* = "
    "(1-q) N(0,1) + q N(-C,1): the Poisson-sampled Gaussian mechanism under replace_one with noise "
    "multiplier 1 / C.",
    proof="Whiten by S, fix the coins and contributions of the others, whose law does not depend on the label, and "
    "shift: the pair is P = (1-q) f_0 + q f_a, Q = (1-q) f_0 + q f_b, with f_v the density of N(v, I) and |a|, |b| <= "
    "C. For k >= 1, H_k(P, Q) is q E_(f_a) (1 - x L_0 - k L_b)_+ with x = (1-q)(k-1)/q, L_0 = f_0/f_a and L_b = "
    "f_b/f_a: two jointly log-normal ratios of mean 1. (1 - s)_+ is convex in s, so Kahane's convexity inequality "
    "makes it grow with each of their covariances |a|^2 <= C^2, |a - b|^2 <= 4 C^2, <a, a - b> <= 2 C^2, which the "
    "worst pair a = C, b = -C attains at once. For k < 1, H_k(P, Q) = 1 - k + k H_(1/k)(Q, P), the mirror image. "
    "Dominating pairs compose adaptively. Noise that depends on the batch cannot be amplified: it shows who is in the "
    "batch.",
    reference="Kahane 1986; Zhu, Dong and Wang 2022",
    code="opusim.accounting.mechanisms.labels.LabelAmplified",
    page="privacy-labels.md, section 3",
    checked_by_code=(
        "every whitened contribution is scaled to norm C at most, whatever the label",
        "the noise's covariance depends on neither batch nor labels, and no noise comes from the batch's own readings",
        "the batch is a new Poisson sample at each step",
        *_SIGNALS_CHECKED,
    ),
    trusted=(
        "batches stay secret: sizes, frames, joules, times and the sampler's state are not released",
        *_TRAINING_TRUSTED,
        SEED_IS_SECRET,
    ),
)
LABEL_READOUT = Theorem(
    name="label-readout",
    title="one noisy reading of every label, then post-processing",
    statement="Readings r_i = B y_i + g_i with g ~ N(0, sigma^2), kept and reused for the whole training, are mu-GDP "
    "for a label with mu^2 = max over labels a, b of the sum over all distinct readings of ||B_a - B_b||^2 "
    "/ sigma^2.",
    proof="Readings of two labels are Gaussians of one law, shifted by the stacked B_a - B_b. Scales, epochs, "
    "posterior targets and the output layer's target are functions of the readings, hence post-processing.",
    reference="Dong, Roth and Su 2019",
    code="opusim.accounting.mechanisms.labels.LabelReadout",
    page="privacy-labels.md, section 4",
    checked_by_code=(
        "each label is read as often as stated, and every distinct reading of it is counted in mu",
        "the noise is drawn once for each reading, with the same law for all labels",
        "training labels are used only through the readings",
    ),
    trusted=(PUBLIC_FEATURES, SEED_IS_SECRET),
)
LABEL_RELEASE = Theorem(
    name="label-release",
    title="one noisy linear model of public features",
    statement="R = sum_i a_i e(y_i)^T + sigma Z is released, where e(y) is the one-hot label, Z has independent N(0, "
    "1), and the vectors a_i do not depend on labels. It is mu-GDP for a label, mu = sqrt(2) max_i |a_i| / sigma, and "
    "no smaller mu holds. With S = sum_i w_i h_i h_i^T + lambda I = L L^T of public features h_i and a_i = w_i L^-1 "
    "h_i, the model L^-T (R - sum_i a_i 1^T / k), of covariance sigma^2 S^-1, is a function of R. L may be any "
    "invertible matrix, records may repeat, and a record with a_i = 0 costs nothing.",
    proof="Replacing label a of record I by b moves the sum by a_I (e_a - e_b)^T, whatever the other labels are, of "
    "Frobenius norm sqrt(2) |a_I|, and the noise has independent N(0, sigma^2). Two Gaussians of one covariance at "
    "whitened distance mu have a log-likelihood ratio N(mu^2/2, mu^2). Two copies of a record are two labels, of which "
    "one is replaced. The a_i are the vectors as computed, rounded toward zero to multiples of a power of two, so that "
    "float64 forms their sums exactly, whatever the order; how S and L were computed does not matter.",
    reference="Dong, Roth and Su 2019",
    code="opusim.accounting.mechanisms.labels.noise_of",
    page="privacy-labels.md, section 4",
    checked_by_code=(
        "the largest share of a record is computed from the rows that are summed, and rounded up",
        "the noise is drawn once, and a resumed run takes the kept model",
        "training labels are used only through the noisy model",
    ),
    trusted=(PUBLIC_FEATURES, "no loss or accuracy on training labels leaves", SEED_IS_SECRET),
)
RANDOMIZED_RESPONSE = Theorem(
    name="randomized-response",
    title="randomized response",
    statement="A label that stays with probability e^epsilon / (e^epsilon + k - 1), and else becomes one of the k - 1"
    " others with equal probability, is epsilon-DP for the label, with delta = 0; independent responses add"
    " their epsilons.",
    proof="The likelihood ratio of two labels takes the values e^epsilon, 1 and e^-epsilon, so the pure epsilon is "
    "exact and repeats compose on that grid without discretisation.",
    reference="Warner 1965",
    code="opusim.accounting.mechanisms.labels.RandomizedResponse",
    page="privacy-labels.md, section 5",
    checked_by_code=("the noise of every step is fresh", "labels are used only through the randomized ones"),
    trusted=("neither the noise nor the seed that it came from is ever revealed",),
)
STAGED_RESPONSE = Theorem(
    name="staged-response",
    title="randomized response in stages",
    statement="Labels are randomized once each, part after part of the records. A label of a later part is randomized "
    "among a set of m labels: one in the set stays with probability e^epsilon / (e^epsilon + m - 1), and else becomes "
    "one of the m - 1 others with equal probability; one outside becomes any of the m. The sets are functions of "
    "features, and of responses of earlier parts. All responses together are epsilon-DP for a label, with delta = 0.",
    proof="Given the set, an answer has probability e^epsilon / D, 1 / D or 1 / m under a label, with D = e^epsilon + "
    "m - 1 and m <= D <= m e^epsilon: no two differ by a factor above e^epsilon. A record's label enters its own "
    "answer only; earlier answers do not depend on it, and later ones only through that answer. The loss of "
    "randomized response over two labels dominates that of any epsilon-DP mechanism, which gives epsilon at a delta.",
    reference="Ghazi, Golowich, Kumar, Manurangsi and Zhang 2021; Kairouz, Oh and Viswanath 2015",
    code="opusim.accounting.mechanisms.labels.respond_among",
    page="privacy-labels.md, section 5",
    checked_by_code=(
        "every label is randomized once, in the part that its record was drawn into",
        "the sets of a part are made before its labels are touched, of features and earlier responses only",
        "labels are used only through the randomized ones",
    ),
    trusted=(PUBLIC_FEATURES, *RANDOMIZED_RESPONSE.trusted),
)


@dataclass(frozen=True, kw_only=True)
class LabelAmplified(CertifiedMechanism):
    """A secret Poisson batch and noise of a public covariance; every record's whitened contribution is at most C."""

    noise_multiplier: Annotated[
        Positive,
        Doc(
            "1 / C, above 0: the noise's standard deviation (1 after whitening) over the bound of one record."
        ),
    ]
    sampling_probability: SamplingProbability
    device_noise: DeviceNoise = False
    exactly_rounded: ExactlyRounded = False
    counts_sums: CountsSums = False

    kind: ClassVar[str] = "label_amplified"
    audited: ClassVar[bool] = True
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "noise_multiplier"
    noise_law = "gaussian"
    theorem = LABEL_AMPLIFICATION
    device_assumption = _DEVICE_LAW
    rounded = NOISY_SUM

    @property
    def clip(self) -> float:
        """C = 1 / noise_multiplier, the bound on every record's whitened contribution to a step."""
        return 1 / self.noise_multiplier

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"labels under noise of a public covariance, whitened contributions at most {self.clip:g}, Poisson "
            f"batches (q = {self.sampling_probability:g}), {counted(self.steps, 'step')}"
        )


@dataclass(frozen=True, kw_only=True)
class _OfMu(CertifiedMechanism):
    """A mu-GDP mechanism whose parameter is the mu of its whole release of a label; the mu^2 of several add up."""

    audited: ClassVar[bool] = True
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "mu"
    noise_is_inverse: ClassVar[bool] = True
    noise_law = "mu"
    repeats_beta: ClassVar[bool] = True
    device_assumption = _DEVICE_LAW


@dataclass(frozen=True, kw_only=True)
class LabelBudget(_OfMu):
    """Noise on every layer's signal and a preset budget for each record's label; only in stored ledgers.

    A step of this mechanism is a whole run: `steps` counts how often the whole budget is spent. A run that is resumed
    in release mode after a kill spends it again, so mu_total = sqrt(steps) budget_mu.
    """

    budget_mu: Annotated[Positive, Doc("B > 0; the run is B-GDP for labels, whatever was spent.")]
    order: Annotated[
        str,
        Doc(
            "published: any bounded signal, then credited Gaussian noise. hardware: the reading's own Gaussian noise, "
            "of a law that no label changes, followed by nothing but a public constant gain."
        ),
    ] = "published"
    device_noise: Annotated[
        bool,
        Doc("Whether the credited noise is a device's, of Gaussian law; in hardware order it always is."),
    ] = False

    kind: ClassVar[str] = "label_budget"
    audited: ClassVar[bool] = False  # no trainer runs it any more
    noise_field: ClassVar[str | None] = "budget_mu"
    theorem = LABEL_BUDGET

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ("published", "hardware"):
            raise ValueError(f"order = {self.order!r}: must be 'published' or 'hardware'")

    @property
    @override
    def credits_device(self) -> bool:
        return self.device_noise or self.order == "hardware"

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "" if self.steps == 1 else f", spent {counted(self.steps, 'time')}"
        return f"noisy signals and a budget of mu = {self.budget_mu:g} for each record's label{times}"

    @classmethod
    def hypotheses(cls, mechanisms: Sequence[Self], *, delta: float, bounds: EpsilonBounds) -> Hypotheses:
        """Return what each order needs, and the device's law if its noise is credited too."""
        orders = {one.order for one in mechanisms}
        hardware = (_HARDWARE_ORDER,) if "hardware" in orders else ()
        device = (_DEVICE_LAW,) if any(one.device_noise for one in mechanisms) else ()
        return (_PUBLISHED_ORDER,) if "published" in orders else (), (*hardware, *device)


@dataclass(frozen=True, kw_only=True)
class LabelReadout(_OfMu):
    """One noisy reading of each label, taken before training and reused; `steps` counts how often all are read."""

    mu: Annotated[Positive, Doc("Of all readings of one label together, above 0.")]
    device_law: Annotated[
        bool, Doc("Whether the credited noise is a device's; its Gaussian law is then an assumption.")
    ] = False
    exactly_rounded: ExactlyRounded = True

    kind: ClassVar[str] = "label_readout"
    taken_upfront: ClassVar[bool] = True
    theorem = LABEL_READOUT
    device_assumption = (
        "the device's noise is Gaussian, the same for every label, and at least as strong as stated"
    )
    rounded = "number"

    @property
    @override
    def credits_device(self) -> bool:
        return self.device_law

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "once" if self.steps == 1 else f"{self.steps:,} times"
        return f"every label projected {times}, mu = {self.mu:g}, and reused"


@dataclass(frozen=True, kw_only=True)
class LabelRelease(_OfMu):
    """One noisy linear model of public features; `steps` counts how often one is drawn from the same labels."""

    mu: Annotated[
        Positive, Doc("Of one model, above 0: sqrt(2) times a label's largest share over the noise.")
    ]
    device_noise: DeviceNoise = False
    exactly_rounded: ExactlyRounded = True

    kind: ClassVar[str] = "label_release"
    taken_upfront: ClassVar[bool] = True
    theorem = LABEL_RELEASE
    rounded = "number"

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "one noisy linear model" if self.steps == 1 else f"{self.steps:,} noisy linear models"
        return f"{times} of public features, mu = {self.mu:g}"


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(Mechanism):
    """A label stays with probability `keep_probability`, else it becomes one of the others with equal probability."""

    keep_probability: Annotated[
        float, Doc("Probability that a label stays: above 1 / n_classes (which says nothing) and below 1.")
    ]
    n_classes: Annotated[int, Doc("k, at least 2."), partial(checks.integer, minimum=2)]

    kind: ClassVar[str] = "randomized_response"
    audited: ClassVar[bool] = True
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "keep_probability"
    theorem = RANDOMIZED_RESPONSE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 / self.n_classes < self.keep_probability < 1:
            raise ValueError(
                f"keep_probability = {self.keep_probability!r}: must lie in (1 / n_classes, 1), "
                f"here ({1 / self.n_classes:g}, 1)"
            )

    @classmethod
    def from_epsilon(cls, epsilon: float, n_classes: int, steps: int = 1) -> RandomizedResponse:
        """Return the response with e^epsilon = keep (k - 1) / (1 - keep), per step.

        Raises:
            ValueError: epsilon is not above 0, or so large that the label always stays.
        """
        checks.positive(epsilon=epsilon)
        checks.integer(minimum=2, n_classes=n_classes)
        keep = keep_probability(epsilon, n_classes)
        if keep == 1:
            raise ValueError(f"epsilon = {epsilon:g}: is so large that the label always stays; ask for less")
        return cls(keep_probability=keep, n_classes=n_classes, steps=steps)

    @classmethod
    def starting_noise(cls, parameters: Mapping[str, Any]) -> float:
        """Return a probability between guessing, 1 / n_classes, and certainty."""
        classes = parameters["n_classes"] or math.inf  # None and 0 are refused afterwards
        return (1 + 1 / classes) / 2

    @property
    def noise(self) -> float:
        """1 / epsilon of one response."""
        return 1 / self.step_epsilon

    def with_noise(self, noise: float) -> RandomizedResponse:
        """Return the response of epsilon = 1 / noise."""
        return RandomizedResponse.from_epsilon(1 / noise, self.n_classes, self.steps)

    @property
    def step_epsilon(self) -> float:
        """log(keep (k - 1) / (1 - keep)), the pure epsilon of one response."""
        return math.log(self.keep_probability * (self.n_classes - 1) / (1 - self.keep_probability))

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "" if self.steps == 1 else f", {self.steps:,} fresh responses for each label"
        return (
            f"randomized response over {self.n_classes} labels, kept with {self.keep_probability:.4g}{times}"
        )

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return epsilon of all responses for one label; different responses have no common grid of losses."""
        one = mechanisms[0]
        equal = len({each.repeated(1) for each in mechanisms}) == 1
        return pure_bounds(mechanisms, one.keep_probability, one.n_classes, delta, equal=equal)


@dataclass(frozen=True, kw_only=True)
class StagedResponse(Mechanism):
    """Each label randomized once, in parts: later ones among the labels that responses of earlier parts make likely."""

    step_epsilon: Annotated[Positive, Doc("Pure epsilon of the one response that each label gives, above 0.")]
    n_classes: Annotated[int, Doc("k, at least 2."), partial(checks.integer, minimum=2)]
    stages: Annotated[int, Doc("Parts of the records, at least 2."), partial(checks.integer, minimum=2)]

    kind: ClassVar[str] = "staged_response"
    audited: ClassVar[bool] = True
    taken_upfront: ClassVar[bool] = True
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "step_epsilon"
    noise_is_inverse: ClassVar[bool] = True
    theorem = STAGED_RESPONSE

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "" if self.steps == 1 else f", {self.steps:,} fresh responses for each label"
        return (
            f"randomized response over {self.n_classes} labels in {self.stages} stages, pure epsilon "
            f"{self.step_epsilon:.4g}{times}"
        )

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return the sum of pure epsilons; equal responses compose as randomized response over two labels."""
        epsilon = mechanisms[0].step_epsilon
        equal = len({one.step_epsilon for one in mechanisms}) == 1
        return pure_bounds(mechanisms, keep_probability(epsilon, 2), 2, delta, equal=equal)


def pure_bounds(
    mechanisms: Sequence[Any], keep: float, n_classes: int, delta: float, *, equal: bool
) -> EpsilonBounds:
    """Return bounds on epsilon of answers of pure epsilon `step_epsilon`: their sum, unless equal answers compose.

    `equal` answers are all the randomized response that keeps one of `n_classes` labels with probability `keep`.
    """
    if delta > 0 and equal:
        steps = sum(one.steps for one in mechanisms)
        return numerics.response_bounds(keep, n_classes, mechanisms[0].step_epsilon, steps, delta)
    pure = math.fsum(one.steps * one.step_epsilon for one in mechanisms)
    return EpsilonBounds(lower=pure if delta == 0 else 0.0, upper=pure, method="closed form")


def noise_of(mu: float, bound: float) -> float:
    """Return sigma = sqrt(2) bound / mu for max_i |a_i| <= bound."""
    checks.positive(mu=mu)
    checks.non_negative(bound=bound)
    return math.sqrt(2) * bound / mu


def keep_probability(epsilon: float, n_labels: int) -> float:
    """Return e^epsilon / (e^epsilon + k - 1), the probability that one of k >= 2 labels stays."""
    checks.non_negative(epsilon=epsilon)
    checks.integer(minimum=2, n_labels=n_labels)
    return 1 / (1 + (n_labels - 1) * math.exp(-epsilon))


class UniformSource(Protocol):
    """A source of independent uniform numbers in [0, 1), such as a `numpy.random.Generator`."""

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        """Return float64 numbers of the given shape."""


def respond(labels: np.ndarray, *, epsilon: float, n_labels: int, generator: UniformSource) -> np.ndarray:
    """Return one randomized label of k >= 2 for each label, drawn independently, shape (n,), dtype int64.

    Drawing twice for one record spends epsilon twice: draw once and keep the result. For a release the generator is the
    operating system's own (`opusim.randomness.streams`). Raises ValueError for a label out of range.
    """
    stays = keep_probability(epsilon, n_labels)
    given = np.asarray(labels)
    checks.shape((None,), labels=given)
    if given.dtype.kind not in "iu" or (given.size and not (given.min() >= 0 and given.max() < n_labels)):
        raise ValueError(f"labels: must be integers in [0, {n_labels})")
    shift = 1 + np.floor(generator.random(given.shape) * (n_labels - 1)).astype(np.int64)  # one of the others
    kept = generator.random(given.shape) < stays
    return np.where(kept, given, (given + shift) % n_labels).astype(np.int64)


def response_log_likelihood(observed: np.ndarray, *, epsilon: float, n_labels: int) -> np.ndarray:
    """Return log P(observed_i | true label a) of responses of `respond`, shape (n, k)."""
    stays = keep_probability(epsilon, n_labels)
    same = np.arange(n_labels)[None, :] == np.asarray(observed)[:, None]
    return np.where(same, math.log(stays), math.log(stays) - epsilon)


def telling_labels(priors: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Return the labels that a response with a prior may take, bool, shape (n, k).

    These are the m >= 2 likeliest labels, with the m that maximises the mutual information H(response) - H(response |
    label) of `respond_among` under the prior. The m at which the response is most often true (Ghazi et al. 2021) is
    mostly 1 once a prior is good, and such a response reveals nothing. Among equally likely labels the first are taken.
    Priors, rows of sum 1, must not depend on the record's own label; ValueError is raised if one is negative or not
    finite.
    """
    checks.positive(epsilon=epsilon)
    checks.shape((None, None), priors=priors)
    checks.non_negative(priors=priors)
    n, k = priors.shape
    order = np.argsort(-priors, axis=1, kind="stable")
    likely = np.take_along_axis(priors, order, axis=1)
    most, best = np.full(n, -math.inf), np.full(n, 2)
    for size in range(2, k + 1):
        found = _information(likely[:, :size], epsilon)
        better = found > most
        most[better], best[better] = found[better], size
    among = np.zeros((n, k), dtype=bool)
    np.put_along_axis(among, order, np.arange(k) < best[:, None], axis=1)
    return among


def _information(likely: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the mutual information, nats, shape (n,), of labels and responses among m of prior (n, m)."""
    size = likely.shape[1]
    stays = keep_probability(epsilon, size)
    other = stays * math.exp(-epsilon)
    outside = np.maximum(1 - likely.sum(axis=1), 0.0)
    answers = other * (1 - outside[:, None]) + (stays - other) * likely + outside[:, None] / size
    inside = _entropy(np.array([stays] + [other] * (size - 1)))
    return np.asarray(_entropy(answers) - (1 - outside) * inside - outside * math.log(size))


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return -sum p log p over the last axis, nats."""
    return -np.sum(probabilities * np.log(np.maximum(probabilities, np.finfo(float).tiny)), axis=-1)


def respond_among(
    labels: np.ndarray, among: np.ndarray, *, epsilon: float, generator: UniformSource
) -> np.ndarray:
    """Return one randomized label for each label, among those that the record may take, shape (n,), dtype int64.

    If the label is among the m, it stays with probability e^epsilon / (e^epsilon + m - 1), else it becomes one of the m
    - 1 others with equal probability. A label that is not among them becomes any of the m with probability 1 / m. The
    ratio of two labels' probabilities is at most e^epsilon for every m and every set that depends on no label. Which
    labels a record may take, `telling_labels`, has shape (n, k). Raises ValueError if a label is out of range, or a
    record may take none; the generator is as for `respond`.
    """
    given, (n, k) = np.asarray(labels), among.shape
    checks.positive(epsilon=epsilon)
    checks.shape((n,), labels=given)
    if given.dtype.kind not in "iu" or (n and not (given.min() >= 0 and given.max() < k)):
        raise ValueError(f"labels: must be integers in [0, {k})")
    sizes = among.sum(axis=1)
    if n and sizes.min() < 1:
        raise ValueError("among: a record may take no label at all; allow at least one")
    rows = np.arange(n)
    rank = np.cumsum(among, axis=1)[rows, given] - 1  # of a label that is among them
    members = np.argsort(~among, axis=1, kind="stable")
    other = generator.random((n,))
    kept = generator.random((n,)) < 1 / (1 + (sizes - 1) * math.exp(-epsilon))
    moved = (rank + 1 + np.floor(other * (sizes - 1)).astype(np.int64)) % sizes
    inside = np.where(kept, rank, moved)
    chosen = np.where(among[rows, given], inside, np.floor(other * sizes).astype(np.int64))
    return members[rows, chosen].astype(np.int64)


def among_log_likelihood(observed: np.ndarray, among: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Return log P(observed_i | true label a) of responses of `respond_among` among some labels, shape (n, k)."""
    sizes = among.sum(axis=1, keepdims=True)
    stays = -np.log1p((sizes - 1) * math.exp(-epsilon))
    same = np.arange(among.shape[1]) == np.asarray(observed)[:, None]
    return np.where(among, np.where(same, stays, stays - epsilon), -np.log(sizes))


def among_targets(
    observed: np.ndarray, among: np.ndarray, priors: np.ndarray, *, epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return targets of a regression on responses of `respond_among`, shape (n, k), and their weights, shape (n,).

    With a = e^epsilon / (e^epsilon + m - 1) and b = 1 / (e^epsilon + m - 1), u_c = ([observed = c] - b) / (a - b) has
    the mean [true = c], and 1 / m if the true label is not among the m. The target is u_c - (prior's mass outside the
    m) / m for the m labels, and the prior for the others. Its mean is the one-hot label if all labels are among the m;
    else its error is that of the prior's mass outside. A weight is 1 over 1 plus the variance of u, summed over c.
    """
    sizes = among.sum(axis=1, keepdims=True)
    stays = 1 / (1 + (sizes - 1) * math.exp(-epsilon))
    other = stays * math.exp(-epsilon)
    gap = -stays * math.expm1(-epsilon)
    same = np.arange(among.shape[1]) == np.asarray(observed)[:, None]
    outside = np.where(among, 0.0, priors).sum(axis=1, keepdims=True)
    targets = np.where(among, (same - other) / gap - outside / sizes, priors)
    variance = (
        stays * (1 - stays) + (sizes - 1) * other * (1 - other)
    ) / gap**2  # 0 for m = 1, which says nothing
    return targets, 1 / (1 + variance[:, 0])


def reading_log_likelihood(
    readings: Sequence[np.ndarray], codes: Sequence[np.ndarray], sigmas: Sequence[float]
) -> np.ndarray:
    """Return log p(r_i | label a) + const = -sum_l ||r_i^l - B^l_a||^2 / (2 sigma_l^2), shape (m, labels).

    Each reading r^l has shape (m, n_l), its codes B^l (n_l, labels).
    """
    checks.positive(sigmas=sigmas)
    total = np.zeros((len(readings[0]), codes[0].shape[1]))
    for reading, code, sigma in zip(readings, codes, sigmas, strict=True):
        checks.shape((len(total), code.shape[0]), readings=reading)
        r, b = np.asarray(reading, float), np.asarray(code, float)
        total += (r @ b - np.sum(np.square(b), axis=0) / 2) / sigma**2  # ||r||^2 is common to all labels
    return total


def label_distance(projection: np.ndarray) -> float:
    """Return Delta = max_ab ||B_a - B_b||: the error is p - y, so two labels differ by B_b - B_a.

    Args:
        projection: B, one column a label, shape (n, labels).
    """
    checks.finite(projection=projection)
    checks.shape((None, None), projection=projection)
    if projection.shape[1] < 2:
        raise ValueError(f"projection has {projection.shape[1]} column: at least two labels are needed")
    pairs = combinations(range(projection.shape[1]), 2)
    return float(max(np.linalg.norm(projection[:, a] - projection[:, b]) for a, b in pairs))
