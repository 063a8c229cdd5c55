"""The frozen description of a device, as its configuration file gives it.

Every number of a device has its unit in its name, and a source and a status in the table ``[provenance]``; a stage that
0 switches off needs none. The meaning of a key never changes under one `schema` number.

It also holds the sections for a device driven by lightonml, for time-outs and exclusive use, and for the monitor.
`load_description` reads a TOML file, lays overrides over it, and refuses contradictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from opusim import plugins
from opusim.description.camera import (
    FRAMES_PER_TERNARY,
    ArrheniusSettings,
    BenchSettings,
    CameraSettings,
    DoublingSettings,
)
from opusim.description.crossbar import (
    CrossbarSettings,
    CrossbarTemperatureSettings,
    MeshSettings,
    RingSettings,
)
from opusim.description.section import (
    StrictSection,
    did_you_mean,
    exactly_one,
    flat,
    merged,
    nested,
    readable,
)
from opusim.errors import ConfigError
from opusim.files import parse_toml, read_text
from opusim.tables import Shown
from opusim.temperature import TemperatureLaw, thermal_charge_e2_per_k


class LightonSettings(StrictSection):
    """Which OPU lightonml drives, and how.

    Attributes:
        simulated: whether lightonml's own simulated device, a noiseless product, takes the place of hardware.
        config_file: lightonml's configuration of the appliance, a path from / or an http address; empty for the
            configuration that the machine names under /etc/lighton.
        exposure_us: exposure of the camera, microseconds, or None for the default of lightonml.
        scale: factor that brings the entries of the factory-calibrated linear transform to standard deviation 1, or
            None for 1; the device contract measures it.
    """

    simulated: bool = False
    config_file: str = ""
    exposure_us: float | None = Field(default=None, gt=0)
    scale: float | None = Field(default=None, gt=0)


class AccessSettings(StrictSection):
    """Time-outs, retries and exclusive use; the defaults are those of a simulation, which never fails.

    Attributes:
        timeout_s: longest time of one call, seconds, or None to wait without limit.
        attempts: how often the opening or a call is tried, with a new connection each time, before its failure is
            reported; an opening that runs on after its time-out is not tried again.
        backoff_s: wait before the second try, seconds; it doubles from try to try.
        exclusive: whether only one process on this machine may have the device open.
        wait_s: seconds to wait for an exclusive device that another process holds; None takes OPUSIM_WAIT, or 0.
    """

    timeout_s: float | None = Field(default=None, gt=0)
    attempts: int = Field(default=1, ge=1, le=100)
    backoff_s: float = Field(default=0.5, ge=0)
    exclusive: bool = False
    wait_s: float | None = Field(default=None, ge=0)


class MonitorSettings(StrictSection):
    """Blank and reference frames between the data, which show whether the device has changed.

    Attributes:
        every_steps: steps from one check to the next.
        blank_readings: blank readings in a check, at least 2; narrow windows take more, for 4,096 numbers.
        reference_vectors: fixed ternary vectors that a check projects.
        baseline_readings: readings of each reference vector that are averaged at opening, at least 8, beside at least
            twice as many blank ones; narrow windows take more blank ones, for 65,536 numbers.
        false_alarm_per_run: probability that a device within its tolerances is stopped during its first `checks`
            checks.
        checks: number of checks of one opening that false_alarm_per_run covers.
        least_correlation: least correlation of the reference readings with those at opening, corrected for noise.
        gain_tolerance: tolerated relative change of the readings' size.
        noise_tolerance: tolerated relative change of the noise's variance.
        silent_outputs: share of the outputs that may stop responding, or lose more than `gain_tolerance` and
            1 - `least_correlation` together.
        saturated_outputs: share of the outputs that may be saturated in a frame or all read the same extreme value.
    """

    every_steps: int = Field(default=10, ge=1)
    blank_readings: int = Field(default=4, ge=2)
    reference_vectors: int = Field(default=8, ge=1)
    baseline_readings: int = Field(default=32, ge=8)
    false_alarm_per_run: float = Field(default=1e-6, gt=0, lt=0.01)
    checks: int = Field(default=100_000, ge=1)
    least_correlation: float = Field(default=0.98, gt=0, lt=1)
    gain_tolerance: float = Field(default=0.03, gt=0)
    noise_tolerance: float = Field(default=0.05, gt=0)
    silent_outputs: float = Field(default=0.01, ge=0, lt=1)
    saturated_outputs: float = Field(default=0.02, gt=0, lt=1)


Status = Literal["measured", "datasheet", "fitted", "assumed", "override"]
Number = int | float | list[float] | list[list[float]]
EXEMPT_FROM_PROVENANCE = ("schema", "medium", "access", "monitor", "bench")
"""Numbers that describe the file, the simulation or its use, not a physical device."""
_STAGES = ("camera.", "crossbar.", "mesh.", "rings.")
"""Sections of stages that 0 switches off."""
_OWN_SECTION = {
    "bench": "bench",
    "camera": "camera",
    "crossbar": "crossbar",
    "gaussian": None,
    "ideal": None,
    "lighton": "lighton",
    "microring_bank": "rings",
    "mzi_mesh": "mesh",
}
"""The section that each of opusim's kinds needs beyond the shared ones; a registered kind may use either."""
_SECTIONS = ("camera", "bench", "lighton", "crossbar", "mesh", "rings")

LARGEST_SIGMA = 1e12
"""Squares and sums of such noise stay far below the largest float32, 3e38."""

TEMPERATURE = "temperature_c"
"""The override that sets the operating temperature of any description, in degrees Celsius."""
_TEMPERATURES = (
    ("camera", "dark"),
    ("noise", "temperature_law"),
    ("crossbar", "temperature"),
    ("mesh",),
    ("rings",),
    ("options",),
)
"""Sections whose key `temperature_c` it sets; in `options` only if the file has that key."""

NUMBERS = (int, float, list)
"""Types of plain values that count as numbers or lists of numbers, and need a provenance; a bool does not count."""


class MediumSettings(StrictSection):
    """The scattering medium (see `opusim.medium.transmission`).

    Attributes:
        seed: which matrix this device has, in [0, 2^63), the largest integer that TOML holds.
        dense_limit_mib: largest matrix kept in memory, MiB; does not change results.
    """

    seed: int = Field(ge=0, lt=2**63)
    dense_limit_mib: float = Field(default=1024.0, ge=0)


class FrameSettings(StrictSection):
    """Time, energy and transport of the frames. What is not given is off.

    Attributes:
        frame_period_us: time from frame to frame, microseconds; that of narrow windows, if wide ones take longer.
        power_w: power drawn while running, watts.
        frames_per_projection: frames that one ternary projection takes: 2, for its positive and its negative
            part.
        host_us_per_frame: time that the host and its driver add to each frame (transfers, encoding), microseconds, or
            None if it is not known.
        host_us_per_call: time that they add to each call, likewise.
        readout_us_per_output: time to read out one output, microseconds, or None if it is not known; a frame takes at
            least this time for each output of its window (`period_us`).
        packing: format in which the link sends an output's number (GenICam pixel format names): mono8, mono10p, mono12p
            or mono16, of 8, 10, 12 and 16 bits. A camera whose converter has more bits sends the most significant ones.
        link_mb_s: rate at which the link carries the packed numbers, 10^6 bytes per second, or None if it is not known;
            given with packing. A frame takes at least the time that its bytes need.
    """

    frame_period_us: float = Field(gt=0)
    power_w: float = Field(ge=0)
    frames_per_projection: int = Field(default=2, ge=1)
    host_us_per_frame: float | None = Field(default=None, ge=0)
    host_us_per_call: float | None = Field(default=None, ge=0)
    readout_us_per_output: float | None = Field(default=None, gt=0)
    packing: Literal["mono8", "mono10p", "mono12p", "mono16"] | None = None
    link_mb_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _a_link_packs(self) -> Self:
        if self.link_mb_s is not None and self.packing is None:
            raise ValueError(
                f"link_mb_s = {self.link_mb_s:g}: how many bytes a frame has is not said; give packing, such as "
                '"mono12p"'
            )
        return self

    @property
    def packed_bits(self) -> int | None:
        """Bits of an output's number on the link, or None if the description does not say."""
        return None if self.packing is None else int(self.packing.removeprefix("mono").removesuffix("p"))

    def frame_bytes(self, n_outputs: int) -> int:
        """Return the bytes of a window's packed numbers, ceil(n_outputs bits / 8); 0 without packing.

        The formats ending in p leave no bits between pixels (GenICam Pixel Format Naming Convention 2.1). Headers of
        frames and packets do not count; `link_mb_s` is the rate without them.
        """
        return math.ceil(n_outputs * (self.packed_bits or 0) / 8)

    def period_us(self, n_outputs: int) -> float:
        """Return the time from frame to frame of a window, microseconds.

        max(frame_period_us, n_outputs readout_us_per_output, frame_bytes / link_mb_s); a term without its key is left
        out.
        """
        link_us = 0.0 if self.link_mb_s is None else self.frame_bytes(n_outputs) / self.link_mb_s
        return max(self.frame_period_us, n_outputs * (self.readout_us_per_output or 0.0), link_us)

    def call_seconds(self, frames: int, n_outputs: int = 0) -> float:
        """Return the seconds of a call end to end, as far as they are known: frame periods and what the host adds."""
        each = self.period_us(n_outputs) + (self.host_us_per_frame or 0.0)
        return 1e-6 * (frames * each + (self.host_us_per_call or 0.0))


class TemperatureSettings(StrictSection):
    """Gaussian noise of a read-out with dark current and thermal noise (`opusim.temperature`), at one temperature.

    The dark current follows the Arrhenius law (`activation_ev`) or the doubling rule (`doubling_k`). Under the rule,
    readings too have the smaller current that a guarantee may rest on
    (`opusim.temperature.DoublingDarkCurrent.credited`).

    Attributes:
        sigma_0: noise that does not depend on temperature (amplifier and the like), projection units.
        variance_per_e: squared projection units for an electron of dark charge.
        exposure_us: exposure of a frame, or time over which an analog read-out integrates, microseconds.
        temperature_c: operating temperature, degrees Celsius.
        dark_current_ref_e_per_s: dark current at temperature_ref_c, electrons per second; 0 switches it off.
        temperature_ref_c: temperature at which dark_current_ref_e_per_s holds, degrees Celsius.
        temperature_min_c: lowest working temperature, degrees Celsius.
        temperature_max_c: highest working temperature.
        doubling_k: rise of temperature that doubles the dark current, kelvin; this or activation_ev.
        activation_ev: activation energy of the dark current, electronvolts.
        load_ohm: resistance of an analog read-out (the load, or an amplifier's feedback resistor), whose thermal noise
            is added, ohm; None is off.
    """

    sigma_0: float = Field(ge=0)
    variance_per_e: float = Field(gt=0)
    exposure_us: float = Field(gt=0)
    temperature_c: float
    dark_current_ref_e_per_s: float = Field(ge=0)
    temperature_ref_c: float = Field(gt=-273.15)
    temperature_min_c: float = Field(gt=-273.15)
    temperature_max_c: float
    doubling_k: float | None = Field(default=None, gt=0)
    activation_ev: float | None = Field(default=None, gt=0)
    load_ohm: float | None = Field(default=None, gt=0)

    _one_dark_law = exactly_one("doubling_k", "activation_ev")

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if not self.temperature_min_c <= self.temperature_c <= self.temperature_max_c:
            raise ValueError(
                f"temperature_c = {self.temperature_c:g}: must lie between temperature_min_c = "
                f"{self.temperature_min_c:g} and temperature_max_c = {self.temperature_max_c:g}"
            )
        self.law()
        return self

    def law(self) -> TemperatureLaw:
        """Return the law as a function of temperature; ValueError if its numbers contradict each other."""
        load, section = self.load_ohm, ArrheniusSettings if self.doubling_k is None else DoublingSettings
        dark = section(**{key: getattr(self, key) for key in section.model_fields}).dark_current()
        return TemperatureLaw(
            floor_variance=self.sigma_0**2,
            variance_per_e=self.variance_per_e,
            exposure_us=self.exposure_us,
            dark=dark.credited(),
            thermal_e2_per_k=0.0 if load is None else thermal_charge_e2_per_k(load, self.exposure_us),
        )


class NoiseSettings(StrictSection):
    """Gaussian noise of a reading, given by exactly one of sigma and temperature_law.

    Attributes:
        sigma: standard deviation in projection units (an entry of B has standard deviation 1).
        temperature_law: the law and the temperature that give sigma.
    """

    sigma: float | None = Field(default=None, ge=0)
    temperature_law: TemperatureSettings | None = None

    _one_of_two = exactly_one("sigma", "temperature_law")

    @model_validator(mode="after")
    def _no_overflow(self) -> Self:
        if self.sigma is not None and self.sigma > LARGEST_SIGMA:
            raise ValueError(
                f"sigma = {self.sigma:g} exceeds {LARGEST_SIGMA:g}, beyond which float32 overflows; lower it"
            )
        return self

    def value(self) -> float:
        """Return the standard deviation in projection units."""
        if self.temperature_law is not None:
            return self.temperature_law.law().std(self.temperature_law.temperature_c)
        return float(self.sigma or 0.0)


class Provenance(StrictSection):
    """Where a number comes from.

    Attributes:
        status: measured on this device, from a datasheet, fitted to named data, assumed, or overridden by the caller.
        source: paper, page, date or person; not empty.
    """

    status: Status
    source: str = Field(min_length=1)


class DeviceDescription(Shown, StrictSection):
    """Everything that a configuration file says about a device.

    Attributes:
        schema_version: version of the keys' meaning; written ``schema`` in files.
        name: the device's name.
        kind: the class that runs it: ``ideal``, ``gaussian``, ``camera``, ``crossbar``, ``bench``, or a registered
            kind.
        title: what the device is, in one line.
        n_inputs: largest number of inputs; a caller may open a smaller window.
        n_outputs: largest number of outputs, likewise.
        medium: the simulated medium, or None if the device is hardware.
        frames: time and energy.
        noise: noise of a reading, or None if the kind has no noise or defines its own.
        camera: the physical twin's numbers, for the kind ``camera`` and registered subclasses of `CameraDevice`.
        bench: how the user's own mirror array and camera are used, for the kind ``bench``.
        lighton: which OPU lightonml drives, for the kind ``lighton`` and registered subclasses of `LightonDevice`.
        crossbar: conductances, noise and converters, for the kind ``crossbar`` and registered subclasses of
            `CrossbarDevice`.
        mesh: meshes of interferometers, for the kind ``mzi_mesh`` and registered subclasses of `MeshDevice`.
        rings: banks of microrings, for the kind ``microring_bank`` and registered subclasses of `RingDevice`.
        access: time-outs, retries and exclusive use.
        monitor: how the device is monitored, or None if it is not.
        options: keys of a registered kind, checked by its factory.
        provenance: for each dotted key that holds a number, its status and source.
    """

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    kind: str = Field(min_length=1)
    title: str
    n_inputs: int = Field(ge=1, le=2**32)
    n_outputs: int = Field(ge=1, le=2**35)
    medium: MediumSettings | None = None
    frames: FrameSettings
    noise: NoiseSettings | None = None
    camera: CameraSettings | None = None
    bench: BenchSettings | None = None
    lighton: LightonSettings | None = None
    crossbar: CrossbarSettings | None = None
    mesh: MeshSettings | None = None
    rings: RingSettings | None = None
    access: AccessSettings | None = None
    monitor: MonitorSettings | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    provenance: dict[str, Provenance] = Field(default_factory=dict)

    __str__ = Shown.__repr__

    @property
    def is_simulated(self) -> bool:
        """Whether the device is a simulation; a hardware's medium and noise come from no seed."""
        return self.medium is not None

    def _shown(self) -> dict[str, object]:
        return {
            "name": repr(self.name),
            "kind": repr(self.kind),
            "n_inputs": self.n_inputs,
            "n_outputs": self.n_outputs,
            "title": repr(self.title),
        }

    @model_validator(mode="after")
    def _every_number_has_provenance(self) -> Self:
        found = {k: v for k, v in self.numbers().items() if k.split(".")[0] not in EXEMPT_FROM_PROVENANCE}
        numbers = set(found)
        switched_off = {key for key, value in found.items() if key.startswith(_STAGES) and value == 0}
        missing = sorted(numbers - switched_off - set(self.provenance))
        if missing:
            raise ValueError(
                f"no provenance for {', '.join(missing)}; add to [provenance], for each, "
                '"key" = {status = "measured", "datasheet", "fitted" or "assumed", source = "..."}'
            )
        idle = sorted(set(self.provenance) - numbers)
        if idle:
            raise ValueError(f"provenance for {', '.join(idle)}, which is no number of this file; remove it")
        return self

    @model_validator(mode="after")
    def _sections_fit_the_kind(self) -> Self:
        if self.kind in _OWN_SECTION:
            for kind, section in ((k, s) for k, s in _OWN_SECTION.items() if s is not None):
                if (getattr(self, section) is not None) != (_OWN_SECTION[self.kind] == section):
                    raise ValueError(
                        f'a section [{section}] and kind = "{kind}" belong together; give both or neither, '
                        "or the kind that your class is registered under"
                    )
        elif sum(getattr(self, section) is not None for section in _SECTIONS) > 1:
            *others, last = (f"[{section}]" for section in _SECTIONS)
            raise ValueError(f"sections {', '.join(others)} and {last} describe different devices; keep one")
        is_hardware = self.bench is not None or (self.lighton is not None and not self.lighton.simulated)
        if is_hardware and self.medium is not None:
            raise ValueError(
                f"medium: is a simulation's, and the kind {self.kind!r} drives hardware here; remove the section"
            )
        return self

    @model_validator(mode="after")
    def _frames_fit(self) -> Self:
        if self.camera is not None and self.noise is not None:
            raise ValueError(
                "noise: a camera's noise comes from its stages; set camera.light or camera.sensor instead (leave out "
                "--sigma)"
            )
        shown, packing = self.frames.frames_per_projection, self.frames.packing
        if self.camera is not None:
            wanted, exposure_us = self.camera.frames_per_projection, self.camera.light.exposure_us
            if shown != wanted:
                how = "" if self.camera.reference_beam is None else " with this reference beam"
                raise ValueError(
                    f"frames.frames_per_projection: a camera shows {wanted} for a ternary vector{how}; write {wanted}"
                )
            if exposure_us > self.frames.frame_period_us:
                raise ValueError(
                    f"camera.light.exposure_us = {exposure_us:g}: is longer than "
                    f"frames.frame_period_us = {self.frames.frame_period_us:g}; lengthen the period"
                )
        if self.bench is not None and shown != FRAMES_PER_TERNARY:
            raise ValueError(
                f"frames.frames_per_projection = {shown}: a bench shows {FRAMES_PER_TERNARY} for a ternary vector; "
                f"write {FRAMES_PER_TERNARY}"
            )
        if packing is not None and any((self.crossbar, self.mesh, self.rings)):
            raise ValueError(
                f"frames.packing = {packing!r}: a programmable chip has no camera's link; remove it"
            )
        if packing is not None and self.camera is not None and self.camera.sensor.adc_bits is None:
            raise ValueError(
                f"frames.packing = {packing!r}: numbers without a converter have no bits to send; give "
                "camera.sensor.adc_bits, or remove packing"
            )
        return self

    @property
    def joins_readings(self) -> bool:
        """Whether a reading may hold the frame of another, so that one record enters the reading of the next."""
        transfer = None if self.camera is None else self.camera.transfer
        return transfer is not None and transfer.repeated > 0

    def needed(self, section: str, remedy: str) -> Any:
        """Return a section; ConfigError if the description lacks it."""
        if (found := getattr(self, section)) is None:
            raise ConfigError(self.name, section, f"missing; {remedy}")
        return found

    def refuse_options(self) -> None:
        """Refuse the options of a description whose kind takes none."""
        for key in self.options:
            raise ConfigError(
                self.name, f"options.{key}", f"the kind {self.kind!r} takes no options; remove it"
            )

    def dump(self) -> dict[str, Any]:
        """Return plain values under the files' keys, fit for TOML and JSON; the loader takes them back."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def numbers(self) -> dict[str, Number]:
        """Return every number, and every list of numbers, under its dotted key, in the files' order."""
        content = self.dump()
        content.pop("provenance", None)
        return {key: value for key, value in flat(content).items() if type(value) in NUMBERS}


SCHEME_GROUP = "opusim.description_schemes"
"""Entry points that read descriptions by a name with a scheme: called with the name, they return a file's content."""
_ALTERNATIVES = (
    {"noise.sigma", "noise.temperature_law"},
    {"noise.temperature_law.doubling_k", "noise.temperature_law.activation_ev"},
    {"camera.dark.doubling", "camera.dark.arrhenius", "camera.dark.table"},
)
"""Keys that exclude each other: an override of one removes the others."""


def load_description(
    name_or_path: str | Path, overrides: Mapping[str, Any] | None = None
) -> DeviceDescription:
    """Read and check a device description.

    Args:
        name_or_path: the name of a description shipped with opusim, such as ``gaussian``, a path that ends in
            ``.toml``, or the address of a served device, ``remote://HOST:PORT``, whose server is asked.
        overrides: nested mapping laid over the file's keys, such as ``{"noise": {"sigma": 0.1}}``; the
            provenance of an overridden number becomes ``override``. A value of None removes a key. ``temperature_c``
            sets the key of that name in the section with the description's temperature law.

    Returns:
        The frozen description.

    Raises:
        ConfigError: names file, key and reason: no such file, not TOML, an unknown key (with a close match),
            a value out of range, a number without provenance.
        DeviceUnavailable: a server does not answer.
    """
    file = str(name_or_path)
    content = _read(file)
    if overrides:
        overrides = _with_temperature(file, content, overrides)
        laid = flat(overrides)
        given = {*_sections(overrides), *laid}
        removed = {other for group in _ALTERNATIVES if group & given for other in group - given}
        content = _pruned(merged(content, overrides), removed)
        # provenance of the given numbers; that of removed numbers is dropped
        provenance, stated = dict(content.get("provenance", {})), overrides.get("provenance", {})
        for key, value in laid.items():
            is_number = isinstance(value, NUMBERS) and not isinstance(value, bool) and key not in stated
            if is_number and key.split(".")[0] not in (*EXEMPT_FROM_PROVENANCE, "provenance"):
                provenance[key] = {"status": "override", "source": "given by the caller"}
        present = flat(content)
        content["provenance"] = {key: entry for key, entry in provenance.items() if key in present}
    return parse_description(file, content)


def copied(
    original: DeviceDescription, changed: DeviceDescription, title: str | None, source: str | None
) -> DeviceDescription:
    """Return a description of another device; what is known only of the original becomes an assumption.

    `changed` has its own name and the keys that the caller set, whose source is `source` unless that is None.
    """
    content = changed.dump()
    if title is not None or changed.title == original.title:
        content["title"] = title or f"copy of {original.name}: {original.title}"
    for key, entry in content.get("provenance", {}).items():
        before = original.provenance.get(key)
        if entry["status"] == "override":
            entry["source"] = source or entry["source"]
        elif before is not None:
            entry |= {
                "status": "assumed",
                "source": f"copied from {original.name} ({before.status}): {before.source}",
            }
    return parse_description(changed.name, content)


def parse_description(file: str, content: Mapping[str, Any]) -> DeviceDescription:
    """Make a description of plain values, such as `DeviceDescription.dump` returns; errors name the source `file`."""
    off = [
        f"{name}.{part}.{key}"
        for (name, part, bits), keys in _CONVERTERS.items()
        if isinstance(section := content.get(name), Mapping)
        and isinstance(inner := section.get(part), Mapping)
        if type(inner.get(bits)) is int and inner[bits] == 0
        for key in keys
    ]
    if off:
        content = _without(content, set(off))
    with readable(file, DeviceDescription, whole="description"):
        return DeviceDescription.model_validate(dict(content))


def packaged_names() -> tuple[str, ...]:
    """Return the names of the descriptions that come with opusim, in order."""
    files = resources.files("opusim.hw_configs").iterdir()
    return tuple(sorted(file.name[: -len(".toml")] for file in files if file.name.endswith(".toml")))


def _read(file: str) -> dict[str, Any]:
    """Return the raw content of a packaged description, of a path, or of a name with a scheme."""
    if "://" in file:
        try:
            found: dict[str, Any] = plugins.load(SCHEME_GROUP, file.partition("://")[0])(file)
        except plugins.PluginError as error:
            raise ConfigError(file, "name", f"cannot be read: {error}") from error
        return found
    with readable(file):
        if file.endswith(".toml"):
            return parse_toml(read_text(file))
        names = packaged_names()
        if file not in names:
            reason = f"no such device; known are {', '.join(names)}, or give a path ending in .toml"
            raise ConfigError(file, "name", reason + did_you_mean(file, names))
        return parse_toml(
            resources.files("opusim.hw_configs").joinpath(f"{file}.toml").read_text(encoding="utf-8")
        )


def _with_temperature(file: str, content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides with `TEMPERATURE` moved to the section whose law uses it; ConfigError if none does."""
    given = dict(overrides)
    if TEMPERATURE not in given:
        return given
    wanted = given.pop(TEMPERATURE)
    described = _pruned(merged(content, given), set())
    for path in _TEMPERATURES:
        section, own = _at(described, path), _at(given, path)
        if section is None or (path == ("options",) and TEMPERATURE not in section):
            continue
        key = ".".join((*path, TEMPERATURE))
        if own is not None and TEMPERATURE in own:
            raise ConfigError(file, TEMPERATURE, f"{key} is given too; give one of them")
        return merged(given, nested(key, wanted))
    kind = str(described.get("kind", ""))
    if kind == "crossbar":
        return merged(given, _thermal_read_out(described, wanted))
    reason = {
        "camera": "without dark current nothing depends on it; give some, such as a section camera.dark.arrhenius",
        "gaussian": "sigma is given directly; give noise.temperature_law instead of noise.sigma, as "
        "'gaussian_temperature' does",
        "ideal": "the kind 'ideal' has no noise; leave it out, or take 'gaussian_temperature'",
        **dict.fromkeys(
            ("bench", "lighton"),
            "an instrument has the temperature of its room; leave it out, and calibrate the instrument there",
        ),
    }.get(kind, "no number of this device depends on it; leave it out, or take 'gaussian_temperature'")
    raise ConfigError(file, TEMPERATURE, reason)


def _thermal_read_out(described: Mapping[str, Any], temperature_c: Any) -> dict[str, Any]:
    """Return a crossbar's section with the thermal noise of its read-out, and the provenance of its numbers."""
    period_us = (_at(described, ("frames",)) or {}).get("frame_period_us")
    if not isinstance(period_us, int | float) or period_us <= 0:
        return {"crossbar": {"temperature": {TEMPERATURE: temperature_c}}}  # fails at its frames first
    section = CrossbarTemperatureSettings.thermal(25.0, period_us).model_dump(exclude_none=True)
    sources = {
        "read_v": "order of magnitude of a voltage that disturbs no device",
        "bandwidth_hz": "1 / (2 t) for an integration over the frame",
    }
    provenance = {
        f"crossbar.temperature.{key}": {"status": "assumed", "source": source}
        for key, source in sources.items()
    }
    return {"crossbar": {"temperature": section | {TEMPERATURE: temperature_c}}, "provenance": provenance}


def _at(values: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any] | None:
    """Return the section at a path, or None if there is none."""
    found: Any = values
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _sections(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the dotted names of all sections."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{prefix}{key}"
            yield from _sections(value, f"{prefix}{key}.")


_CONVERTERS = {
    ("camera", "sensor", "adc_bits"): ("adc_bits",),
    **{
        (section, "converter", f"{name}_bits"): keys
        for section in ("crossbar", "mesh", "rings")
        for name, keys in (("adc", ("adc_bits", "adc_bound")), ("dac", ("dac_bits",)))
    },
}
"""Keys of converters' bits; 0 bits leave the converter out, and its keys in the section are removed."""


def _without(content: Mapping[str, Any], removed: set[str]) -> dict[str, Any]:
    """Return the content without the removed numbers and their provenance."""
    kept = _pruned(content, removed)
    stated = kept.get("provenance")
    if isinstance(stated, Mapping):
        kept["provenance"] = {key: entry for key, entry in stated.items() if key not in removed}
    return kept


def _pruned(values: Mapping[str, Any], removed: set[str], prefix: str = "") -> dict[str, Any]:
    """Return the values without the removed keys and without those that are None."""
    return {
        key: _pruned(value, removed, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None and f"{prefix}{key}" not in removed
    }
