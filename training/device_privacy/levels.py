"""What a device's own noise is worth: from sigma or temperature to epsilon, and from epsilon back.

The case is one reading of every record's one-hot label through the device, kept and reused (label-once): the Gaussian
mechanism with mu = max_ab ||B_a - B_b|| / sigma over the device's own matrix. Accounting ends at a sigma; the device's
description says which temperature gives it, or that none does.
Source: docs/privacy.md (labels read once); opusim.temperature.law for the law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accounting.calibration import calibrate
from accounting.composition import guarantees
from accounting.labels.budget import label_distance
from accounting.labels.mechanisms import LabelReadout
from accounting.tables import number
from opusim.description.schema import DeviceDescription
from opusim.devices.registry import open_described
from opusim.errors import ConfigError
from opusim.temperature.law import TemperatureLaw


@dataclass(frozen=True, kw_only=True)
class DeviceLevel:
    """One noise level of a device.

    Attributes:
        sigma: Standard deviation of a reading's noise, projection units.
        epsilon: Of one reading of every label, at delta.
        temperature_c: The temperature that gives sigma; None where none does or the device has no temperature law.
        remark: What to do where the device does not reach sigma by itself.
    """

    sigma: float
    epsilon: float
    temperature_c: float | None
    remark: str


def device_levels(
    description: DeviceDescription,
    *,
    n_classes: int,
    n_outputs: int,
    targets: Sequence[float],
    delta: float,
) -> list[DeviceLevel]:
    """The device as it is described, then the level that each target epsilon takes.

    Args:
        description: A device of Gaussian law.
        n_classes: Labels, at least 2: inputs of the device.
        n_outputs: Outputs of a reading.
        targets: Epsilons to reach, each above 0.
        delta: In (0, 1).

    Raises:
        ConfigError: The device has no Gaussian law, or cannot tell its matrix.
    """
    settings = description.noise
    if settings is None:
        raise ConfigError(
            description.name,
            "noise",
            f"a device of kind {description.kind!r} has no Gaussian sigma and no photon counts; take "
            "'gaussian', 'gaussian_temperature', 'camera' or 'camera_low_light'",
        )
    distance = _label_distance(description, n_classes, n_outputs)
    own, temperature = settings.value(), settings.temperature_law
    levels = []
    if own > 0:
        (guarantee,) = guarantees([LabelReadout(mu=distance / own, device_law=True)], delta=delta)
        now = None if temperature is None else temperature.temperature_c
        levels.append(
            DeviceLevel(sigma=own, epsilon=guarantee.epsilon, temperature_c=now, remark="as described")
        )
    for target in targets:
        found, guarantee = calibrate(
            LabelReadout(mu=1.0, device_law=True), target_epsilon=target, delta=delta
        )
        sigma = distance / found.mu
        wanted, remark = _way_to(sigma, own, None if temperature is None else temperature.law())
        levels.append(
            DeviceLevel(sigma=sigma, epsilon=guarantee.epsilon, temperature_c=wanted, remark=remark)
        )
    return levels


def level_rows(levels: Sequence[DeviceLevel]) -> list[dict[str, str]]:
    """Levels as words, for a table."""
    return [
        {
            "epsilon": number(level.epsilon),
            "sigma": f"{level.sigma:.6g}",
            "temperature": "none" if level.temperature_c is None else f"{level.temperature_c:.2f} °C",
            "remark": level.remark,
        }
        for level in levels
    ]


def _label_distance(description: DeviceDescription, n_classes: int, n_outputs: int) -> float:
    """max_ab ||B_a - B_b|| over the device's own matrix."""
    with open_described(description, n_inputs=n_classes, n_outputs=n_outputs) as device:
        matrix = getattr(device, "matrix", None)
        if matrix is None:
            raise ConfigError(
                description.name,
                "kind",
                f"{description.kind!r} cannot tell its matrix; take a simulated device",
            )
        return label_distance(matrix().cpu().double().numpy())


def _way_to(sigma: float, own: float, law: TemperatureLaw | None) -> tuple[float | None, str]:
    """The temperature that gives a sigma, or what to do instead."""
    if sigma <= own:
        return None, "the device has more noise than this takes"
    digital = f"a digital share of {math.sqrt(sigma**2 - own**2):.6g} makes up the rest"
    if law is None:
        return None, f"the description sets sigma directly: set noise.sigma, or {digital}"
    try:
        return law.temperature(sigma), "by temperature alone"
    except ValueError as error:
        return None, f"{error}; {digital}"
