"""A device beside its certificate: whether it still does what the certificate says."""

from __future__ import annotations

from dataclasses import dataclass

from opusim.calibration.calibrate import Calibration
from opusim.calibration.certificate import Certificate, GaussianLaw, PhotonCountLaw
from opusim.calibration.reading_noise import ReadingNoise
from opusim.errors import ConfigError, NoiseBelowCertificate

_STANDARD_ERRORS = 5.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number of a certificate beside a new measurement.

    Attributes:
        name: of the number.
        certified: its certified value.
        measured: its new value.
        standard_errors: their difference in joint standard errors.
    """

    name: str
    certified: float
    measured: float
    standard_errors: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is below five standard errors."""
        return abs(self.standard_errors) < _STANDARD_ERRORS


def compare(certificate: Certificate, measured: Calibration) -> tuple[Comparison, ...]:
    """Every estimate of the certificate beside the new one."""
    from scipy.stats import norm

    found, rows = measured.certificate.estimates, []
    for name, old in certificate.estimates.items():
        if name not in found:
            continue
        new = found[name]
        widths = (old.high - old.low) / norm.isf((1 - certificate.confidence) / 2) / 2
        new_width = (new.high - new.low) / norm.isf((1 - measured.certificate.confidence) / 2) / 2
        error = max((widths**2 + new_width**2) ** 0.5, 1e-300)
        rows.append(
            Comparison(
                name=name,
                certified=old.value,
                measured=new.value,
                standard_errors=float(min(max((new.value - old.value) / error, -999.0), 999.0)),
            )
        )
    return tuple(rows)


def require_noise(certificate: Certificate, measured: Calibration) -> None:
    """Refuses a device whose noise is weaker than certified, beyond what chance allows at the new measurement's beta.

    Raises:
        NoiseBelowCertificate: the certificate's noise law cannot be relied on any more.
        ConfigError: the certificate has no law, or that of another kind of device.
    """
    law, noise, fresh = certificate.noise, measured.reading_noise, measured.certificate.noise
    if law is None:
        raise ConfigError(certificate.device, "certificate", "certifies no law, so there is nothing to check")
    if failed := [test.text for test in measured.certificate.tests if test.needed and not test.holds]:
        raise NoiseBelowCertificate(
            f"{certificate.device}: tests now speak against the certified law: {'; '.join(failed)}; calibrate again"
        )
    if isinstance(law, GaussianLaw):
        high = upper_std(noise)
        if high < law.std:
            raise NoiseBelowCertificate(
                f"{certificate.device}: the smallest standard deviation is at most {high:.6g}, certified is "
                f"{law.std:.6g}; stop private work and calibrate again"
            )
    elif isinstance(law, PhotonCountLaw) and isinstance(fresh, PhotonCountLaw):
        if fresh.dark_e_high < law.dark_e_low:
            raise NoiseBelowCertificate(
                f"{certificate.device}: the dark charge is at most {fresh.dark_e_high:.6g} electrons, certified is "
                f"{law.dark_e_low:.6g}; warm the sensor to its temperature, or calibrate again"
            )
        if fresh.light_ratio_low > law.light_ratio_high:
            raise NoiseBelowCertificate(
                f"{certificate.device}: the light is at least {fresh.light_ratio_low:.6g} of the described, certified "
                f"is at most {law.light_ratio_high:.6g}; dim the laser, or calibrate again"
            )
    else:
        raise ConfigError(
            certificate.device, "certificate", f"certifies the law {law.law!r}, which this device cannot show"
        )


def upper_std(noise: ReadingNoise) -> float:
    """Upper limit of the smallest standard deviation: that of the output with the smallest sample variance."""
    from scipy.stats import chi2

    n = noise.readings - 1
    return float(noise.smallest_std * (n / chi2.ppf(noise.beta / (noise.inputs * noise.n_outputs), n)) ** 0.5)
