"""The privacy of a device's Gaussian noise: from sigma or temperature to epsilon, and from epsilon back.

The device reads every record's one-hot label once, and the readings are kept and reused. This is the Gaussian mechanism
with mu = max_ab ||B_a - B_b|| / sigma over the device's own matrix B. Accounting gives a sigma; the device's
description gives the temperature that produces it, if there is one.
Source: docs/privacy-labels.md, section 4 (labels read once); opusim.temperature for the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.explanation import number
from opusim.accounting.mechanisms.labels import LabelReadout, label_distance
from opusim.description.schema import DeviceDescription
from opusim.devices.certificate import Certificate
from opusim.devices.registry import open_described
from opusim.errors import ConfigError
from opusim.temperature import TemperatureLaw
from opusim.training.protections.base import creditable_law


@dataclass(frozen=True, kw_only=True)
class DeviceLevel:
    """One noise level of a device.

    Attributes:
        sigma: Standard deviation of a reading's noise, projection units.
        epsilon: Epsilon of one reading of every label, at delta.
        temperature_c: The temperature that gives sigma, or None if there is none.
        remark: How the device reaches sigma, or what to add if it does not.
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
    certificate: Certificate | None = None,
) -> list[DeviceLevel]:
    """Return the level of the device as described or certified, then the level that each target epsilon requires.

    Args:
        description: A device of Gaussian law.
        n_classes: Number of labels, at least 2; the inputs of the device.
        n_outputs: Number of outputs of a reading.
        targets: Epsilons to reach, each above 0.
        delta: Delta at which epsilon is stated, in (0, 1).
        certificate: The device's, whose lower limit then takes the described noise's place, and whose beta is taken
            off delta; None for the description's numbers.

    Raises:
        ConfigError: The device has no Gaussian law, its matrix is not known, or the certificate is not its own.
    """
    settings = description.noise
    if settings is None:
        raise ConfigError(
            description.name,
            "noise",
            f"a device of kind {description.kind!r} has no Gaussian sigma and no photon counts, and no theorem credits "
            "other noise: its status is none; protect runs by central noise, such as --protect record, or take "
            "'gaussian', 'gaussian_temperature', 'camera' or 'camera_low_light'",
        )
    with open_described(
        description, n_inputs=n_classes, n_outputs=n_outputs, certificate=certificate
    ) as device:
        distance = label_distance(device.require("matrix").matrix().cpu().double().numpy())
        own = (
            settings.value()
            if certificate is None
            else creditable_law(device, credit=_credit(certificate)).min_std
        )
    temperature, levels = settings.temperature_law, []
    reading = LabelReadout(mu=1.0, device_law=True, **_credit(certificate))
    if own > 0:
        (guarantee,) = guarantees([replace(reading, mu=distance / own)], delta=delta)
        now = None if temperature is None else temperature.temperature_c
        remark = "as described" if certificate is None else f"as certified on {certificate.date}"
        levels.append(DeviceLevel(sigma=own, epsilon=guarantee.epsilon, temperature_c=now, remark=remark))
    for target in targets:
        found, guarantee = calibrate_noise(reading, target_epsilon=target, delta=delta)
        sigma = distance / found.mu
        wanted, remark = _way_to(sigma, own, None if temperature is None else temperature.law())
        levels.append(
            DeviceLevel(sigma=sigma, epsilon=guarantee.epsilon, temperature_c=wanted, remark=remark)
        )
    return levels


def level_rows(levels: Sequence[DeviceLevel]) -> list[dict[str, str]]:
    """Return a table row for each level."""
    return [
        {
            "epsilon": number(level.epsilon),
            "sigma": f"{level.sigma:.6g}",
            "temperature": "none" if level.temperature_c is None else f"{level.temperature_c:.2f} °C",
            "remark": level.remark,
        }
        for level in levels
    ]


def _credit(certificate: Certificate | None) -> dict[str, Any]:
    """Return the keywords of a mechanism that rests on a certificate."""
    return {} if certificate is None else {"beta": certificate.beta, "certificate": certificate.digest}


def _way_to(sigma: float, own: float, law: TemperatureLaw | None) -> tuple[float | None, str]:
    """Return the temperature that gives a sigma, or None, and a remark."""
    if sigma <= own:
        return None, "the device has more noise than required"
    digital = f"digital noise of standard deviation {math.sqrt(sigma**2 - own**2):.6g} makes up the rest"
    if law is None:
        return None, f"the description sets sigma directly: set noise.sigma, or {digital}"
    try:
        return law.temperature_c(sigma), "temperature is enough"
    except ValueError as error:
        return None, f"{error}; {digital}"
