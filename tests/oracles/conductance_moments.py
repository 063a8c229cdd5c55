"""Mean and standard deviation of a programmed conductance by quadrature, from constants typed from the papers' forms.

g is relative to g_max. No line is shared with `opusim.crossbar`: constants stand here as published, and expectations
over the normal numbers are Gauss-Hermite sums.
"""

import math

import numpy as np

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def pcm_spread_us(g: float) -> float:
    return 0.26348 + 1.9650 * g - 1.1731 * g**2


def pcm_drift(g: float) -> tuple[float, float]:
    mean = min(max(-0.0155 * math.log(g) + 0.0244, 0.049), 0.1)
    return mean, min(max(-0.0125 * math.log(g) - 0.0059, 0.008), 0.045)


def pcm_q(g: np.ndarray) -> np.ndarray:
    return np.minimum(0.0088 / g**0.65, 0.2)


def hermes_spread_us(g: float) -> float:
    return 0.16603222 + 4.71806468 * g - 8.48101252 * g**2 + 4.68961419 * g**3


def hermes_drift(g: float) -> tuple[float, float]:
    mean = -0.0436 * g**2 - 0.0126 * g + 0.0736
    if g < 0.0945:
        mean = min(max(-0.0387 * math.log(g) - 0.0182, 0.0720), 0.13)
    std = -0.0118 * g**2 + 0.0093 * g + 0.0073
    if g < 0.3055:
        std = min(max(-0.0117 * math.log(g) - 0.0057, 0.0091), 0.04)
    return mean, std


def hermes_q(g: np.ndarray) -> np.ndarray:
    high = 0.0069 * g**3 - 0.0280 * g**2 + 0.0211 * g + 0.0123
    return np.where(g < 0.16, np.clip(-0.0117 * np.log(g) - 0.0069, 0.015, 0.04), high)


def reram_spread_us(g: float, seconds: float) -> float:
    """Wan 2022 at one second, one and two days; between them linear in the logarithm of time."""
    at = {
        1.0: 0.348 + 16.030 * g - 43.853 * g**2 + 45.393 * g**3 - 16.815 * g**4,
        86400.0: 0.701 + 22.086 * g - 50.773 * g**2 + 47.095 * g**3 - 16.458 * g**4,
        172800.0: 0.782 + 20.274 * g - 43.507 * g**2 + 37.062 * g**3 - 11.934 * g**4,
    }
    return float(np.interp(math.log(max(seconds, 1.0)), np.log(list(at)), list(at.values())))


def moments(name: str, g: float, seconds: float) -> tuple[float, float]:
    """Mean and standard deviation of one device, for targets at which no conductance reaches 0."""
    if name == "reram":
        return g, reram_spread_us(g, seconds) / 40.0
    g_max, t0, t_read, spread, drift, q = {
        "pcm": (25.0, 20.0, 250e-9, pcm_spread_us, pcm_drift, pcm_q),
        "hermes": (20.7, 300.0, 512e-9, hermes_spread_us, hermes_drift, hermes_q),
    }[name]
    programmed = g + spread(g) / g_max * NODES
    mean, std = drift(g)
    nu = np.abs(mean + std * NODES)
    ratio = (t0 + seconds) / t0
    accumulated = math.log((t0 + seconds + t_read) / (2 * t_read))
    first = WEIGHTS @ programmed * (WEIGHTS @ ratio**-nu)
    kept = WEIGHTS > 1e-9  # farther nodes would lie at conductances below 0
    noisy = programmed[kept] ** 2 * (1 + q(programmed[kept]) ** 2 * accumulated)
    second = WEIGHTS[kept] @ noisy * (WEIGHTS @ ratio ** (-2 * nu))
    return float(first), float(math.sqrt(second - first**2))
