"""Noisy gradient descent on a convex objective whose last iterate alone is released, as frozen data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from accounting.guarantee import Adjacency
from accounting.mechanisms import Mechanism, counted, register_mechanism
from accounting.records.mechanisms import ClippedRecords
from opusim import checks

if TYPE_CHECKING:
    from dp_accounting import DpEvent


SCHEDULES = ("constant", "linear", "cosine")


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class ConvexLastIterate(Mechanism):
    """Noisy cyclic gradient descent on a gated ReLU model, fixed disjoint batches; the last model alone is released.

    Step t is v <- (1 - eta_t lambda) v - eta_t (sum of the batch's gradients / b + N(0, (z C / b)^2)), C being the
    residual's bound; the last step also adds N(0, (f eta z C / b)^2), eta being the first rate. A step counts whole
    runs, each with fresh noise.

    Attributes:
        objective: squared, margin, one-against-rest or softmax.
        learning_rate: eta > 0, below 2 / (beta + lambda).
        batches: k, steps of an epoch; 1 for full batches.
        epochs: E.
        noise_multiplier: z > 0, standard deviation of the noise on a batch's sum over C; the paper's sigma.
        clip: Bound of a record's residual; softmax and one-against-rest need none.
        regularisation: lambda >= 0 of lambda/2 |v|^2.
        schedule: constant, linear (to 0) or cosine.
        final_noise: f >= 0, in units of one step's noise at the first rate.
        n_classes: Logits of a record.
        hyperplanes: P, gates of a record; they matter to the paper's claim alone.
        device_noise: Whether the noise is a device's, of Gaussian law.
    """

    objective: str
    learning_rate: float
    batches: int
    epochs: int
    noise_multiplier: float
    clip: float | None = None
    regularisation: float = 0.0
    schedule: str = "constant"
    final_noise: float = 0.0
    n_classes: int = 10
    hyperplanes: int = 128
    device_noise: bool = False

    kind: ClassVar[str] = "convex"
    accountant: ClassVar[str] = "accounting.convex.last_iterate:guarantees"
    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        from accounting.convex.constants import check_objective

        super().__post_init__()
        check_objective(self.objective, self.clip)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule = {self.schedule!r}: must be one of {', '.join(SCHEDULES)}")
        checks.positive(learning_rate=self.learning_rate, noise_multiplier=self.noise_multiplier)
        checks.non_negative(regularisation=self.regularisation, final_noise=self.final_noise)
        checks.integer(minimum=1, batches=self.batches, epochs=self.epochs, hyperplanes=self.hyperplanes)
        checks.integer(minimum=2, n_classes=self.n_classes)
        self._to_floats("learning_rate", "noise_multiplier", "regularisation", "final_noise")
        if self.clip is not None:
            self._to_floats("clip")

    def describe(self) -> str:
        """What ran, in a few words."""
        runs = "" if self.steps == 1 else f", {counted(self.steps, 'run')}"
        source = "device" if self.device_noise else "Gaussian"
        final = f" and {self.final_noise:g} times a step's at the end" if self.final_noise else ""
        return (
            f"noisy cyclic gradient descent, {self.objective} objective, {counted(self.epochs, 'epoch')} of "
            f"{counted(self.batches, 'batch') if self.batches == 1 else f'{self.batches:,} batches'}, {source} noise "
            f"with multiplier {self.noise_multiplier:g}{final}, rate {self.learning_rate:g} ({self.schedule}), "
            f"lambda {self.regularisation:g}{runs}"
        )

    def event(self) -> DpEvent:
        """The Gaussian mechanism of the proven mu, self-composed."""
        import dp_accounting as dp

        from accounting.convex.last_iterate import proven_mu

        mu = proven_mu(self.repeated(1))
        if not 0 < mu < math.inf:
            return dp.NonPrivateDpEvent()
        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(1 / mu), self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class RecordReplaced(ClippedRecords):
    """Per-record clipping and central noise on Poisson batches, for replacing a record; every update is released.

    The other parameters are those of `ClippedRecords`.

    Attributes:
        clip_norm: C > 0; replacing a record moves a batch's sum by up to 2 C.
    """

    kind: ClassVar[str] = "record_replaced"
    accountant: ClassVar[str] = "accounting.records.central:replaced_guarantees"
    adjacency: ClassVar[Adjacency] = Adjacency.REPLACE_ONE
