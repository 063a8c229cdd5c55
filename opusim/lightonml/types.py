"""The choices that lightonml's users name: rescaling, region of interest, format of a frame."""

from __future__ import annotations

from enum import Enum


class OutputRescaling(Enum):
    """What `OPU.linear_transform` divides B x by; entries of B are N(0, 1) on every device."""

    variance = 1
    """sqrt(n_features): entries of variance 1 / n_features."""
    norm = 2
    """sqrt(n_components): lengths are kept on average."""
    none = 3
    """1: projection units."""


class InputRoiStrategy(Enum):
    """How 2-D features are laid out on a mirror array."""

    full = 1
    """As the largest square macro-pixels that fit, in the middle of the array."""
    small = 2
    """One mirror a feature; the other mirrors are left out of the window."""
    auto = 3
    """As `full`: lightonml would count ones to balance the exposure, which is a setting of its own here."""


class FeaturesFormat(Enum):
    """How features became mirrors."""

    lined = 1
    """One after the other."""
    macro_2d = 2
    """Each as a square of mirrors."""
