"""Rules that bring contributions within norm C: those of `protection.clipping` and of `make_private`.

For a record with gradient g, of norm |g| over all layers and |g_l| in layer l, the contribution is

- flat: min(1, C / |g|) g;
- per_layer: min(1, C_l / |g_l|) g_l in each layer, where the C_l^2 add up to C^2;
- automatic: C g / (|g| + s) with a constant s, whose norm is below C (AUTO-S of Bu et al. 2023, "Automatic clipping");
- adaptive: min(1, C_t / |g|) g, where C_t follows a quantile of the norms, as noisy counts of earlier steps show it
  (Andrew et al. 2021, "Differentially private learning with adaptive clipping").

The norms are upper bounds of the true ones, in float64 (`opusim.training.networks.clipping`), so that the rules hold
for what float32 arithmetic adds up. A record whose norm is infinite there contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from opusim import checks
from opusim.accounting.mechanisms.records import CLIPPINGS, share_of_sum
from opusim.training.networks.clipping import CLIP_RANGE, LEAST_FACTOR

_COUNT_NOISE = 5.0
"""Noise of a count over the noise multiplier if none is given: the sum's noise grows by 0.5 %."""


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """A rule that brings contributions within norm C, with its constants.

    Attributes:
        kind: "flat", "per_layer", "automatic" or "adaptive"; see above.
        layer_norms: C_l of each layer, under per_layer; None for C / sqrt(layers).
        stability: s, under automatic, in units of a gradient's norm, in [1e-6, 1e6].
        target_quantile: Under adaptive, the share of records whose norm the bound exceeds in the long run, in (0, 1).
        bound_rate: eta, under adaptive: C_(t+1) = C_t exp(-eta (share below C_t - target_quantile)), above 0.
        count_noise: r, the noise of a step's count over the noise multiplier, at least 0.6; None unless adaptive, which
            takes 5 then.

    Raises:
        ValueError: A constant is out of its range.
    """

    kind: Literal["flat", "per_layer", "automatic", "adaptive"] = "flat"
    layer_norms: tuple[float, ...] | None = None
    stability: float = 0.01
    target_quantile: float = 0.5
    bound_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in CLIPPINGS:
            checks.choice(CLIPPINGS, clipping=self.kind)
        if self.layer_norms is not None:
            norms = tuple(map(float, self.layer_norms))
            object.__setattr__(self, "layer_norms", norms)
            checks.in_range(*CLIP_RANGE, layer_norms=norms)
        if self.layer_norms is not None and self.kind != "per_layer":
            raise ValueError(
                f"layer_norms = {self.layer_norms}: are for clipping = 'per_layer', not for {self.kind!r}; give one "
                "norm for all layers together"
            )
        if self.kind == "automatic":
            checks.in_range(1e-6, 1e6, stability=self.stability)
        if self.kind == "adaptive":
            checks.in_unit_interval(closed="neither", target_quantile=self.target_quantile)
            checks.in_range(1e-6, 10.0, bound_rate=self.bound_rate)
            noise = _COUNT_NOISE if self.count_noise is None else self.count_noise
            share_of_sum(noise)
            object.__setattr__(self, "count_noise", noise)
        elif self.count_noise is not None:
            raise ValueError(
                f"count_noise = {self.count_noise}: is for clipping = 'adaptive', not for {self.kind!r}; leave it out"
            )

    def with_norms(self, norms: float | tuple[float, ...]) -> tuple[Self, float]:
        """Return the rule, with norms of layers if these are given, and C.

        Args:
            norms: C, or the norm of each layer.

        Raises:
            ValueError: Norms of layers are given twice, or to another rule than per_layer.
        """
        if not isinstance(norms, tuple):
            if self.layer_norms is not None:
                raise ValueError(
                    f"max_grad_norm = {norms:g}: follows from layer_norms = {self.layer_norms}; give these as "
                    "max_grad_norm, and leave layer_norms out"
                )
            return self, norms
        found = replace(self, layer_norms=norms)
        return found, math.hypot(*norms)

    def factors(self, squares: Tensor, bound: float) -> Tensor:
        """Return the factor on the contribution of each record in each layer, float64, shape (layers, batch).

        Args:
            squares: Squares of the norms by layer, float64, shape (layers, batch).
            bound: C, or C_t.

        Raises:
            ValueError: The number of layers is not that of `layer_norms`.
        """
        whole = squares.sum(dim=0)  # infinite if any layer's is
        if self.kind == "automatic":
            factors = bound / (whole.sqrt() + self.stability)
        elif self.kind == "per_layer":
            factors = (self._bounds(len(squares), bound).to(squares.device) / squares.sqrt()).clamp(max=1.0)
        else:
            factors = (bound / whole.sqrt()).clamp(max=1.0)
        kept = factors >= LEAST_FACTOR  # false for NaN and 1 / infinity
        if self.kind == "per_layer":
            kept &= whole < torch.inf
        return torch.where(kept, factors, 0.0).expand(len(squares), -1)

    def _bounds(self, layers: int, bound: float) -> Tensor:
        """Return C_l of each layer, shape (layers, 1)."""
        self.require_layers(layers)
        norms = self.layer_norms or (bound / layers**0.5,) * layers
        return torch.tensor(norms, dtype=torch.float64)[:, None]

    def require_layers(self, layers: int, names: Sequence[object] = ()) -> None:
        """Refuse `layer_norms` whose number is not that of the layers.

        Args:
            layers: Layers of the module, that is groups of parameters that are measured together.
            names: Names of the parameters in them, for the message.

        Raises:
            ValueError: The numbers differ.
        """
        if self.layer_norms is not None and len(self.layer_norms) != layers:
            listed = f" ({', '.join(map(str, names))})" if names else ""
            raise ValueError(
                f"layer_norms = {self.layer_norms}: has {len(self.layer_norms)} norms, and the module has {layers} "
                f"layers{listed}; give one norm for each"
            )

    def within(self, squares: Tensor, bound: float) -> Tensor:
        """Return the sum over records of 1/2 for a norm within the bound and -1/2 for others, float64, shape (1,).

        A record that float32 cannot hold, and a row that only fills the batch, have infinite norms and add 0.

        Args:
            squares: As for `factors`.
            bound: C_t.
        """
        norms = squares.sum(dim=0).sqrt()
        each = torch.where(norms < torch.inf, (norms <= bound).double() - 0.5, 0.0)
        return each.sum(dim=0, keepdim=True)


FLAT = Clipping()
RELEASED_COUNTS = "released_counts"
"""Name of the released counts in a writer's state."""


class MovingBound:
    """The bound C_t of adaptive clipping: a function of the noisy counts that were released, and of constants.

    With a_t the sum of the noisy counts of all steps before t over the divisor, C_t = C_0 exp(-eta (a_t + t (1/2 - p)))
    for the target quantile p. It stays within the range of a clip norm.

    Attributes:
        released: a_t and t, float64, shape (2,); all that a resumed run needs.

    Args:
        clipping: Its constants.
        start: C_0.
    """

    def __init__(self, clipping: Clipping, start: float) -> None:
        self._clipping, self._start = clipping, start
        self.released = torch.zeros(2, dtype=torch.float64)

    @property
    def value(self) -> float:
        """C_t."""
        total, steps = self.released.tolist()
        options, (low, high) = self._clipping, CLIP_RANGE
        moved = -options.bound_rate * (total + steps * (0.5 - options.target_quantile))
        return min(max(self._start * math.exp(min(max(moved, -100.0), 100.0)), low), high)

    def move(self, count: float) -> None:
        """Add a step's noisy count over the divisor."""
        self.released += torch.tensor([count, 1.0], dtype=torch.float64)
