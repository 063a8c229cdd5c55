"""The clips of eq. 9 of the PDFA paper, as a configuration names them."""

from __future__ import annotations

from typing import Literal

ClippedLayers = Literal["all", "hidden", "feedback", "none"]
WidthRule = Literal["fan-in", "layer"]


def check_clip(tau_h_max: float | None, tau_h_min: float) -> None:
    """The offset of eq. 9 belongs to a clip, and stays below it."""
    if tau_h_max is None and tau_h_min:
        raise ValueError(
            f"tau_h_min = {tau_h_min} offsets what tau_h_max clips, which is missing; set tau_h_max"
        )
    if tau_h_max is not None and tau_h_min > tau_h_max:
        raise ValueError(f"tau_h_min = {tau_h_min} exceeds tau_h_max = {tau_h_max}; lower it")
