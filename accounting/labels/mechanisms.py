"""What may be released about labels whose features are public: three protections of photonic DFA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from accounting.guarantee import Unit
from accounting.mechanisms import Mechanism, counted, register_mechanism
from opusim import checks

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class LabelAmplified(Mechanism):
    """A secret Poisson batch and noise of a public covariance; every record's whitened contribution is at most C.

    Attributes:
        noise_multiplier: 1 / C, above 0: the noise's standard deviation (1 after whitening) over the bound of one
            record.
        sampling_probability: q in (0, 1], of the Poisson batch.
        device_noise: Whether the credited noise is a device's, of Gaussian law.
    """

    noise_multiplier: float
    sampling_probability: float
    device_noise: bool = False

    kind: ClassVar[str] = "label_amplified"
    accountant: ClassVar[str] = "accounting.labels.amplified:guarantees"
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)
        self._to_floats("noise_multiplier", "sampling_probability")

    @property
    def clip(self) -> float:
        """C = 1 / noise_multiplier, the bound on every record's whitened contribution to a step."""
        return 1 / self.noise_multiplier

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"labels under noise of a public covariance, whitened contributions at most {self.clip:g}, Poisson "
            f"batches (q = {self.sampling_probability:g}), {counted(self.steps, 'step')}"
        )

    def event(self) -> DpEvent:
        """Self-composed Poisson-sampled Gaussian, to be read under replace_one by dp_accounting's PLD."""
        import dp_accounting as dp

        step = dp.PoissonSampledDpEvent(self.sampling_probability, dp.GaussianDpEvent(self.noise_multiplier))
        return dp.SelfComposedDpEvent(step, self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class LabelBudget(Mechanism):
    """Noise on every layer's signal and a preset budget for each record's label.

    A step of this mechanism is a whole run: `steps` counts how often the whole budget is spent. A resumed run in
    release mode spends it again, so mu_total = sqrt(steps) budget_mu.

    Attributes:
        budget_mu: B > 0; the run is B-GDP for labels, whatever was spent.
        order: "published": any bounded signal, then credited Gaussian noise. "hardware": the reading's own
            Gaussian noise, of a law that no label changes, followed by nothing but a public constant gain.
        device_noise: Whether the credited noise is a device's, of Gaussian law; in hardware order it always is.
        beta: Probability that the certificate of the device's noise is wrong, in [0, 1); 0 for digital noise.
    """

    budget_mu: float
    order: str = "published"
    device_noise: bool = False
    beta: float = 0.0

    kind: ClassVar[str] = "label_budget"
    accountant: ClassVar[str] = "accounting.labels.budget:guarantees"
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "budget_mu"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(budget_mu=self.budget_mu)
        checks.in_unit_interval(closed="left", beta=self.beta)
        if self.order not in ("published", "hardware"):
            raise ValueError(f"order = {self.order!r}: must be 'published' or 'hardware'")
        self._to_floats("budget_mu", "beta")

    @property
    def noise(self) -> float:
        """1 / budget_mu."""
        return 1 / self.budget_mu

    def with_noise(self, noise: float) -> Self:
        """The same with budget_mu = 1 / noise."""
        return replace(self, budget_mu=1 / noise)

    def describe(self) -> str:
        """What ran, in a few words."""
        times = "" if self.steps == 1 else f", spent {counted(self.steps, 'time')}"
        return f"noisy signals and a budget of mu = {self.budget_mu:g} for each record's label{times}"

    def event(self) -> DpEvent:
        """Self-composed N(0, 1) against N(mu, 1): the Gaussian event of multiplier 1 / mu under add_or_remove_one."""
        import dp_accounting as dp

        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(self.noise), self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class LabelOnce(Mechanism):
    """Noisy readings of every record's label, kept and reused: a step reads every label once.

    Attributes:
        mu: From `label_once.label_once_mu`, above 0.
        device_law: Whether the credited noise is a device's (its Gaussian law is then an assumption).
        beta: Probability that the certificate of the device's noise is wrong, in [0, 1).
    """

    mu: float
    device_law: bool = False
    beta: float = 0.0

    kind: ClassVar[str] = "label_once"
    accountant: ClassVar[str] = "accounting.labels.once:guarantees"
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "mu"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(mu=self.mu)
        checks.in_unit_interval(closed="left", beta=self.beta)
        self._to_floats("mu", "beta")

    @property
    def noise(self) -> float:
        """1 / mu."""
        return 1 / self.mu

    def with_noise(self, noise: float) -> Self:
        """The same with mu = 1 / noise."""
        return replace(self, mu=1 / noise)

    def describe(self) -> str:
        """What ran, in a few words."""
        times = "once" if self.steps == 1 else f"{self.steps:,} times"
        return f"every label projected {times}, mu = {self.mu:g}, and reused"

    def event(self) -> DpEvent:
        """Self-composed N(0, 1) against N(mu, 1): the Gaussian event of multiplier 1 / mu under add_or_remove_one."""
        import dp_accounting as dp

        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(self.noise), self.steps)
