"""Photonic DFA as published: the run in the paper's symbols, or what the paper's formula lacks.

Symbols: m batch size, n width of the updated layer, gmin <= |phi'| <= gmax, tmin and tmax the paper's bounds on
activations, tB the radius of the ball that a projected error is scaled to.
The paper: Ohana et al., "Photonic Differential Privacy with Direct Feedback Alignment", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from accounting.mechanisms import Mechanism, counted, register_mechanism
from opusim import checks

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True, kw_only=True)
class PublishedLayer:
    """What eq. 17 asks of one layer.

    Attributes:
        fan_in: n_(l-1), the columns of the update; one more where a bias is trained.
        width: n_l, the rows.
        gamma_min: gmin >= 0, the infimum of |phi'| over the real line (0 for tanh and ReLU).
        gamma_max: gmax > 0, its supremum.
        inputs_bounded_below: Whether every entry of the (offset, clipped) input is at least tmin / sqrt(n) in
            absolute value; true for an offset of inputs that are never negative, false for a signed activation.
        noised: Whether the layer's signal carries noise; the published output layer's does not.
    """

    fan_in: int
    width: int
    gamma_min: float
    gamma_max: float
    inputs_bounded_below: bool
    noised: bool = True

    def __post_init__(self) -> None:
        checks.integer(minimum=1, fan_in=self.fan_in, width=self.width)
        checks.non_negative(gamma_min=self.gamma_min)
        checks.positive(gamma_max=self.gamma_max)
        if self.gamma_min > self.gamma_max:
            raise ValueError(f"gamma_min = {self.gamma_min}: must not exceed gamma_max = {self.gamma_max}")


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class PublishedPdfa(Mechanism):
    """A PDFA run with all the constants of the paper's Proposition 3.

    Attributes:
        layers: Every trained layer, the output layer too.
        batch_size: m >= 1.
        sigma: Standard deviation of the noise on each output of the projection, above 0.
        tau_b: tB > 0.
        tau_h_min: tmin >= 0.
        tau_h_max: tmax >= tmin, above 0.
        order: One Renyi order alpha > 1, or None for the best of a grid.
    """

    layers: tuple[PublishedLayer, ...]
    batch_size: int
    sigma: float
    tau_b: float
    tau_h_min: float
    tau_h_max: float
    order: float | None = None

    kind: ClassVar[str] = "pdfa_published"
    accountant: ClassVar[str] = "accounting.pdfa.published:guarantees"

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = tuple(
            PublishedLayer(**layer) if isinstance(layer, Mapping) else layer for layer in self.layers
        )
        if not layers:
            raise ValueError("layers = (): must name at least one layer")
        object.__setattr__(self, "layers", layers)
        checks.integer(minimum=1, batch_size=self.batch_size)
        checks.positive(sigma=self.sigma, tau_b=self.tau_b, tau_h_max=self.tau_h_max)
        checks.non_negative(tau_h_min=self.tau_h_min)
        if self.tau_h_min > self.tau_h_max:
            raise ValueError(f"tau_h_min = {self.tau_h_min}: must not exceed tau_h_max = {self.tau_h_max}")
        if self.order is not None and not (math.isfinite(self.order) and self.order > 1):
            raise ValueError(f"order = {self.order}: must be finite and above 1")
        for layer in layers:
            most = layer.gamma_max * self.tau_h_max
            checks.positive(**{"(gamma_max tau_h_max)^2": most * most})  # eq. 17 is made of these squares
        object.__setattr__(self, "batch_size", int(self.batch_size))
        self._to_floats("sigma", "tau_b", "tau_h_min", "tau_h_max")

    def squares(self, layer: PublishedLayer) -> tuple[float, float]:
        """(gmin tmin)^2 and (gmax tmax)^2 of a layer: lo and hi."""
        return (layer.gamma_min * self.tau_h_min) ** 2, (layer.gamma_max * self.tau_h_max) ** 2

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"PDFA as published, {len(self.layers)} layers, {counted(self.steps, 'step')} of {self.batch_size}, "
            f"sigma {self.sigma:g}"
        )

    def event(self) -> DpEvent:
        """No privacy for whole records, whatever the paper claims."""
        import dp_accounting as dp

        return dp.NonPrivateDpEvent()


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class PdfaWithoutFormula(Mechanism):
    """A PDFA run whose device or clips do not give the paper's formula its constants.

    Attributes:
        missing: What is missing, such as "the clip of the projected error, trainer.tau_b".
    """

    missing: str

    kind: ClassVar[str] = "pdfa_without_formula"
    accountant: ClassVar[str] = "accounting.pdfa.published:guarantees"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.missing.strip():
            raise ValueError("missing = '': must say which constant of the paper's formula is missing")

    def describe(self) -> str:
        """What ran, in a few words."""
        return f"PDFA, {counted(self.steps, 'step')}; the paper's formula lacks {self.missing}"

    def event(self) -> DpEvent:
        """No privacy for whole records."""
        import dp_accounting as dp

        return dp.NonPrivateDpEvent()
