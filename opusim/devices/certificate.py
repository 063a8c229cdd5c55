"""The dated certificate of a device: the law of its noise, the limits of its numbers, and their confidence."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from opusim.description.schema import DeviceDescription
from opusim.description.section import StrictSection, readable
from opusim.errors import ConfigError
from opusim.files import parse_toml, read_text, to_toml
from opusim.noise import FluctuatingCountNoise, GaussianNoise, NoiseModel, PhotonCountNoise
from opusim.tables import Shown


class Limits(StrictSection):
    """An estimate with two-sided limits, each at the certificate's confidence.

    Attributes:
        value: the estimate.
        low: lower limit.
        high: upper limit.
        described: what the device's description says, or None if it does not say.
    """

    value: float
    low: float
    high: float
    described: float | None = None


class TestedProperty(StrictSection):
    """A property that a law may need.

    Attributes:
        text: the property.
        standard_errors: the two-sided Gaussian deviate of its p-value, at least 0, at most 999.
        holds: whether no test speaks against it.
        needed: whether the certified law needs it.
    """

    text: str
    standard_errors: float
    holds: bool
    needed: bool = True


class TrustedProperty(StrictSection):
    """A property that the law assumes: the calibration shows only faults above some size.

    Attributes:
        text: the property.
        fault: the fault against it.
        size: smallest fault that this calibration's frames show with probability 0.99; of a period, the longest.
        unit: what the size counts.
    """

    text: str
    fault: str
    size: float = Field(ge=0)
    unit: str

    @property
    def line(self) -> str:
        """Return the property and what the calibration shows of it, as text."""
        size = f"{self.size:,.0f}" if self.size >= 100 else f"{self.size:.2g}"
        return (
            f"taken on trust: {self.text}; the calibration would have shown {self.fault} {size} {self.unit}"
        )


class _Law(StrictSection):
    """The law that a certificate states."""

    def certified(self, noise: Any, device: str, beta: float) -> NoiseModel:
        """Return the described law, of the same name, with these limits in place of its numbers."""
        raise NotImplementedError


class GaussianLaw(_Law):
    """Independent Gaussian readings.

    Attributes:
        std: lower limit of the smallest standard deviation, projection units.
    """

    law: Literal["gaussian"] = "gaussian"
    std: float = Field(gt=0)

    @override
    def certified(self, noise: Any, device: str, beta: float) -> NoiseModel:
        return GaussianNoise(std=self.std, n_outputs=noise.n_outputs, beta=beta)


_ANY_LIGHT_E = 1e12
"""Electrons that no pixel collects, the upper limit of light that is not known."""


class _CountLaw(_Law):
    """Limits of the dark charge and of the light of the counts at the pixels.

    Attributes:
        dark_e_low: lower limit of the dark charge of a frame at every output, electrons, bias light included.
        dark_e_high: upper limit of it.
        dark_mean_e_low: lower limit of the mean over all outputs that a sensor has, D.
        dark_mean_e_high: upper limit of it.
        dark_deviation_e: limit of one output's deviation from D; the mean over n outputs stays within it over sqrt(n)
            at the same probability (`dark_of_groups`).
        light_ratio_low: lower limit of the mean light over the description's.
        light_ratio_high: upper limit of any frame's light over the description's, or of the mean light if the power
            fluctuates; more light is less private.
        frame_ratio_high: upper limit of any frame's light over the mean of frames; None if the power fluctuates, and in
            certificates of earlier versions.
        gain_dn_per_e_low: lower limit of the gain, DN per electron; None likewise.
        gain_dn_per_e_high: upper limit of it.
        light_spread: ``unknown`` if frames speak against the light of single outputs that the description states.
            `light_ratio_low` and `light_ratio_high` are then limits of the mean over outputs, and only a measured law
            of an output's light is credited (``protection.rate_frames``).
    """

    dark_e_low: float = Field(ge=0)
    dark_e_high: float = Field(ge=0)
    dark_mean_e_low: float | None = Field(default=None, ge=0)
    dark_mean_e_high: float | None = Field(default=None, ge=0)
    dark_deviation_e: float | None = Field(default=None, ge=0)
    light_ratio_low: float = Field(ge=0)
    light_ratio_high: float = Field(gt=0)
    frame_ratio_high: float | None = Field(default=None, ge=1)
    gain_dn_per_e_low: float | None = Field(default=None, gt=0)
    gain_dn_per_e_high: float | None = Field(default=None, gt=0)
    light_spread: Literal["unknown"] | None = None

    def dark_of_groups(self, pixels: int) -> tuple[float, float, float]:
        """Return limits of the dark charge D of all outputs, and of a group's mean deviation from it, electrons.

        With dark charges D + e_j, e_j independent N(0, s^2) over outputs, the mean of e over n outputs that were chosen
        without regard to e is N(0, s^2 / n), so it lies within `dark_deviation_e` / sqrt(n) if `dark_deviation_e` is
        the same quantile of N(0, s^2). A certificate without these numbers leaves each output its own limits.
        """
        low, high, deviation = self.dark_mean_e_low, self.dark_mean_e_high, self.dark_deviation_e
        if low is None or high is None or deviation is None:
            middle = (self.dark_e_low + self.dark_e_high) / 2
            return middle, middle, self.dark_e_high - middle
        return low, high, deviation / pixels**0.5

    def _boxes(self, noise: PhotonCountNoise | FluctuatingCountNoise) -> dict[str, Any]:
        """Return the described law with the boxes that the certificate's limits give.

        Dark light does not depend on data, so its part above the lower limit stays out of the boxes: counts
        Poisson(light + d) are Poisson(light + d_low) plus independent counts, whose variance is added instead.
        """
        low = np.asarray(noise.rate_low)
        light = np.asarray(noise.rate_high) - low
        high = noise.added_variance if noise.added_variance_high is None else noise.added_variance_high
        more = np.maximum(self.dark_e_high, low) - self.dark_e_low
        if noise.weight is not None:
            more = np.sum(np.square(noise.weight) * more, axis=0)
        most = _ANY_LIGHT_E if self.light_spread else self.dark_e_low + self.light_ratio_high * light
        return {
            "rate_low": np.full_like(low, self.dark_e_low),
            "rate_high": np.broadcast_to(most, low.shape),
            "weight": noise.weight,
            "added_variance": noise.added_variance,
            "added_variance_high": high + more,
        }


class PhotonCountLaw(_CountLaw):
    """Poisson counts at the pixels."""

    law: Literal["photon_count"] = "photon_count"

    @override
    def certified(self, noise: Any, device: str, beta: float) -> NoiseModel:
        return PhotonCountNoise(**self._boxes(noise), beta=beta)


class FluctuatingCountLaw(_CountLaw):
    """Poisson counts at the pixels under light whose power in a frame has a named law.

    Attributes:
        power_law: the assumed law of a frame's power (`opusim.noise.LightPower`).
        power_rms_low: lower limit of its relative standard deviation.
        power_rms_high: upper limit of it, from which the brightest frame of a use follows.
    """

    law: Literal["fluctuating_photon_count"] = "fluctuating_photon_count"
    power_law: Literal["log_normal", "gaussian"]
    power_rms_low: float = Field(ge=0)
    power_rms_high: float = Field(ge=0, le=1)

    @override
    def certified(self, noise: Any, device: str, beta: float) -> NoiseModel:
        if self.power_law != noise.power_law:
            raise ConfigError(
                device,
                "certificate.noise.power_law",
                f"is {self.power_law!r}, the device's camera.light.power.law is {noise.power_law!r}; calibrate the "
                "device again",
            )
        return FluctuatingCountNoise(
            **self._boxes(noise), power_law=self.power_law, power_rms=self.power_rms_high, beta=beta
        )


class OtherLaw(_Law, extra="allow"):
    """A law of another package, as `NoiseModel.to_json` writes it.

    Attributes:
        law: the law's name; the other keys are its numbers.
    """

    law: str

    @override
    def certified(self, noise: Any, device: str, beta: float) -> NoiseModel:
        try:
            found = NoiseModel.from_json({"law": self.law, **(self.model_extra or {})})
        except (TypeError, ValueError) as error:  # it is unknown, or its numbers are not those that it needs
            raise ConfigError(device, "certificate.noise", " ".join(str(error).split())) from error
        if type(found) is not type(noise) or found.beta != beta:
            raise ConfigError(
                device,
                "certificate.noise",
                f"certifies the law {found.law!r} at beta = {found.beta:g}, the device has {noise.law!r} and the "
                f"certificate beta = {beta:g}; calibrate the device again",
            )
        return found


def _kind_of_law(value: Any) -> str:
    """Return which section describes a law: its own, or the one for laws of other packages."""
    law = value.get("law") if isinstance(value, dict) else getattr(value, "law", None)
    return str(law) if law in ("gaussian", "photon_count", "fluctuating_photon_count") else "other"


CertifiedLaw = Annotated[
    Annotated[GaussianLaw, Tag("gaussian")]
    | Annotated[PhotonCountLaw, Tag("photon_count")]
    | Annotated[FluctuatingCountLaw, Tag("fluctuating_photon_count")]
    | Annotated[OtherLaw, Tag("other")],
    Discriminator(_kind_of_law),
]


class Certificate(Shown, StrictSection):
    """What a calibration found.

    Attributes:
        schema_version: version of the keys' meaning; ``schema`` in files.
        device: name of the device.
        description_digest: of the description it holds for (`digest_of`).
        date: day of the frames, ISO 8601.
        n_inputs: width of the window.
        n_outputs: outputs of the window.
        frames: frames it rests on.
        confidence: of each single interval in `estimates`.
        beta: probability that any number of `noise` is wrong; a guarantee adds it to its delta.
        noise: the certified law, or None if the frames speak against every law that this device could have.
        estimates: constants of the device.
        tests: what speaks for or against the law.
        remarks: what the certificate does not cover, as text.
        trust: properties whose faults its tests show only above some size; empty in certificates of earlier versions.
    """

    schema_version: Literal[3] = Field(default=3, alias="schema")
    device: str
    description_digest: str
    date: str
    n_inputs: int
    n_outputs: int
    frames: int
    confidence: float = Field(gt=0, lt=1)
    beta: float = Field(gt=0, lt=1)
    noise: CertifiedLaw | None = None
    estimates: dict[str, Limits] = Field(default_factory=dict)
    tests: list[TestedProperty] = Field(default_factory=list)
    remarks: list[str] = Field(default_factory=list)
    trust: list[TrustedProperty] = Field(default_factory=list)

    __str__ = Shown.__repr__

    def _shown(self) -> dict[str, object]:
        failed = [test.text for test in self.tests if test.needed and not test.holds]
        return {
            "device": repr(self.device),
            "date": self.date,
            "outputs": self.n_outputs,
            "frames": self.frames,
            "law": "refused" if self.noise is None else self.noise.law,
            "beta": f"{self.beta:g}",
            "fails": "; ".join(failed) or None,
        }

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a statement that rests on the certificate takes on trust: its remarks, and faults too small to show."""
        return *self.remarks, *(entry.line for entry in self.trust)

    def check_device(
        self, description: DeviceDescription, *, n_outputs: int, n_inputs: int | None = None
    ) -> None:
        """Refuse (ConfigError) a certificate of another device, of another state of its description or window.

        The smallest noise of some outputs does not bound that of more. Hardware decodes a reading by the width of its
        window, so the noise of one width, in projection units, does not bound the noise of another (None: not known).
        """
        is_other = n_inputs not in (None, self.n_inputs) and not description.is_simulated
        of_window = self.noise is not None and self.noise.law == "gaussian"
        if self.device != description.name:
            reason = f"is that of {self.device!r}; calibrate this device"
        elif self.description_digest != digest_of(description):
            reason = "was made for another description; calibrate the device again"
        elif of_window and n_outputs > self.n_outputs:
            reason = (
                f"covers {self.n_outputs} outputs, the window has {n_outputs}; calibrate with --outputs {n_outputs}, "
                f"or open {self.n_outputs} outputs at most"
            )
        elif of_window and is_other:
            reason = (
                f"was made with {self.n_inputs} inputs, the window has {n_inputs}, and hardware scales its noise by "
                f"that number; calibrate with --inputs {n_inputs}"
            )
        else:
            return
        raise ConfigError(description.name, "certificate", reason)

    @property
    def digest(self) -> str:
        """BLAKE2b of everything that the certificate says, 16 bytes in hexadecimal, by which a ledger identifies it."""
        return _digest(self.dump())

    def dump(self) -> dict[str, Any]:
        """Return plain values under the files' keys; `Certificate.model_validate` takes them back.

        An empty list of trust is left out, so that certificates of earlier versions keep their digests.
        """
        content = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return content if self.trust else {key: value for key, value in content.items() if key != "trust"}

    def age_days(self, today: datetime.date) -> int:
        """Return how many days ago its frames were taken; 0 also for a date of tomorrow, in another time zone."""
        try:
            made = datetime.date.fromisoformat(self.date)
        except ValueError:
            reason = f"{self.date!r} is no date such as 2026-11-22; calibrate the device again"
            raise ConfigError(self.device, "certificate.date", reason) from None
        age = (today - made).days
        if age < -1:
            reason = f"{self.date} lies after today, {today.isoformat()}; set the clock, or calibrate the device again"
            raise ConfigError(self.device, "certificate.date", reason)
        return max(age, 0)

    def certified(self, noise: NoiseModel) -> NoiseModel:
        """Return the law with the certificate's limits for the description's numbers; ConfigError if it has none."""
        if self.noise is None or _kind_of_law(self.noise) not in ("other", noise.law):
            law = "no law" if self.noise is None else f"the law {self.noise.law!r}"
            raise ConfigError(self.device, "certificate", f"certifies {law}, the device has {noise.law!r}")
        return self.noise.certified(noise, self.device, self.beta)

    def write(self, path: Path) -> None:
        """Write a TOML file."""
        path.write_text(to_toml(self.dump()), encoding="utf-8")


_EARLIER = {
    "1": "1 rests on tests that miss light that varies and noise that repeats",
    "2": "2 states the mean dark charge of counts, which single outputs may fall below",
}


def load_certificate(path: str | Path) -> Certificate:
    """Read what `Certificate.write` wrote, unless it rests on an earlier version's weaker tests (ConfigError)."""
    with readable(str(path), Certificate, whole="certificate"):
        content = parse_toml(read_text(path))
        weakness = _EARLIER.get(str(content.get("schema")))
        if weakness is not None:
            raise ConfigError(str(path), "schema", f"{weakness}; calibrate the device again")
        return Certificate.model_validate(content)


def digest_of(description: DeviceDescription) -> str:
    """BLAKE2b of everything a description says of the device, 16 bytes in hexadecimal.

    It leaves out where numbers come from, and how the device is reached and monitored, which changes no noise.
    """
    left_out = ("provenance", "title", "access", "monitor")
    return _digest({key: value for key, value in description.dump().items() if key not in left_out})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
