"""The clip, scale and offset operators of the PDFA paper (section 3.1, eqs. 8 and 9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.config.clips import ClippedLayers, WidthRule
from training.networks.norms import multipliers, row_norms


def clip_entries(v: Tensor, bound: float) -> Tensor:
    """clip_c(v)_k = sign(v_k) min(c, |v_k|), entry by entry.

    Args:
        v: Any shape.
        bound: c >= 0.
    """
    return v.clamp(-bound, bound)


def offset_entries(v: Tensor, offset: float) -> Tensor:
    """offset_nu(v)_k = v_k + nu."""
    return v + offset if offset else v


def ball_factors(v: Tensor, radius: float, *, gain: float = 1.0) -> Tensor:
    """min(gain, s / ||v||_2) for each row: what brings gain v into the ball, shape (batch, 1).

    float32, or float64 if a factor would be subnormal or infinite in float32; either multiplies float32 rows in place.

    Args:
        v: Vectors as rows, shape (batch, n).
        radius: s > 0.
        gain: Public constant, > 0.
    """
    norms = row_norms(v).clamp_min_(torch.finfo(torch.float64).tiny)
    return multipliers((radius / norms).clamp_max_(gain)[:, None])


def scale_to_ball(v: Tensor, radius: float) -> Tensor:
    """scale_s(v) = min(s, ||v||_2) v / ||v||_2 for each row; a zero row stays zero.

    Guarantees: every finite float32 row has norm at most s (1 + 1e-6); rows within the ball are returned unchanged.

    Args:
        v: Vectors as rows, shape (batch, n).
        radius: s > 0.
    """
    return (v * ball_factors(v, radius)).to(v.dtype)


def sphere_factors(v: Tensor, radius: float, *, gain: float = 1.0) -> Tensor:
    """The factor s / ||v||_2 that brings each row to the sphere, 0 for a zero row, shape (batch, 1).

    float32, or float64 if a factor would be subnormal or infinite in float32; either multiplies float32 rows in place.
    The PDFA paper's section 4 speaks of a signal whose norm *is* tau_f; eq. 9's scale only bounds it.

    Args:
        v: Vectors as rows, shape (batch, n).
        radius: s > 0.
        gain: Of no effect: the sphere is the same for gain v.
    """
    norms = row_norms(v)
    return multipliers(torch.where(norms > 0, radius / norms, 0.0)[:, None])


class ClippedNeurons(nn.Module):
    """Neurons that hold clip_c(offset_nu(h)), in the forward pass and so at inference too.

    c = tau_h_max / sqrt(n) and nu = tau_h_min / sqrt(n) with n the layer's width, eq. 9 of the PDFA paper.

    Args:
        width: n, the number of neurons.
        tau_h_max: tau_h^max > 0.
        tau_h_min: tau_h^min in [0, tau_h_max].
    """

    def __init__(self, width: int, tau_h_max: float, tau_h_min: float = 0.0) -> None:
        super().__init__()
        self.width, self.tau_h_max, self.tau_h_min = width, tau_h_max, tau_h_min

    def forward(self, h: Tensor) -> Tensor:
        """Clip activations of shape (batch, width)."""
        root = self.width**0.5
        return clip_entries(offset_entries(h, self.tau_h_min / root), self.tau_h_max / root)

    def passes(self, h: Tensor) -> Tensor:
        """Where the clip lets a change of h through: 1 inside the interval, 0 outside, shape (batch, width)."""
        root = self.width**0.5
        return (offset_entries(h, self.tau_h_min / root).abs() < self.tau_h_max / root).to(h.dtype)

    def extra_repr(self) -> str:
        """What stands between the brackets when the module is printed."""
        return f"{self.width}, tau_h_max={self.tau_h_max}, tau_h_min={self.tau_h_min}"


@dataclass(frozen=True, kw_only=True)
class ActivationClipping:
    """clip_c(offset_nu(h)) on the activations that enter a weight update.

    Eq. 8 writes h_l where the update of layer l needs h_(l-1), and eq. 9 divides by sqrt(n_l); which
    layers are clipped, and by which width, is therefore a choice with a name.

    Attributes:
        tau_h_max: tau_h^max > 0; c = tau_h_max / sqrt(n). None switches the clip off.
        tau_h_min: tau_h^min >= 0; the offset is nu = tau_h_min / sqrt(n).
        layers: "all"; "hidden": not the network's input; "feedback": only layers that receive a
            projected error, so not the output layer; "none".
        width: n above: "fan-in" takes the width of the clipped vector, "layer" that of the updated layer.
    """

    tau_h_max: float | None = None
    tau_h_min: float = 0.0
    layers: ClippedLayers = "all"
    width: WidthRule = "fan-in"

    def applies_to(self, layer: int, depth: int) -> bool:
        """Whether the update of a layer (0 .. depth-1) takes clipped activations."""
        if self.tau_h_max is None or self.layers == "none":
            return False
        if self.layers == "hidden":
            return layer > 0
        if self.layers == "feedback":
            return layer < depth - 1
        return True

    def __call__(self, h: Tensor, *, layer: int, depth: int, n_layer: int) -> Tensor:
        """Return what the update of a layer takes for h_(l-1).

        Args:
            h: Activations h_(l-1), shape (batch, n_(l-1)).
            layer: Layer number, 0 .. depth-1.
            depth: Number of layers L.
            n_layer: Width n_l of the updated layer.
        """
        if self.tau_h_max is None or not self.applies_to(layer, depth):
            return h
        root = (h.shape[1] if self.width == "fan-in" else n_layer) ** 0.5
        return clip_entries(offset_entries(h, self.tau_h_min / root), self.tau_h_max / root)
