"""What each fault of a real instrument does: to readings, to learning, to privacy, and whether it is noticed.

Every effect is laid over a camera's description at one plausible size, and the same things are measured as on the
camera without it:

| column | what it is |
| --- | --- |
| correlation | of readings of random ternary vectors with B x, B the matrix of the camera without the effect |
| noise | standard deviation of a reading, relative to the camera without the effect |
| learning | cosine of a hidden layer's feedback update through readings with that through B x without noise, relative |
| epsilon | of one reading of a label by the described law, in light dimmed until the sound camera has `EPSILON` |
| certified | the same by a calibration's limits, or the test that refuses the certificate |
| monitor | what a monitor says whose baseline is the camera without the effect |

The update is that of the first layer of an untrained 64-outputs-10 tanh network on 256 digits, with B the camera's own
at step 0: a fault that only changes B costs no learning. Dimmed light scales the light of the described law, before a
certificate's limits are applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import brentq
from sklearn.datasets import load_digits

from accounting.devices.readings import DeviceReadings, device_readings_guarantee
from accounting.errors import NoGuarantee
from accounting.guarantee import Unit
from opusim import checks
from opusim.calibration.calibrate import Calibration, Plan, calibrate
from opusim.description.camera import CameraSettings
from opusim.description.loading import load_description
from opusim.description.schema import DeviceDescription
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import Certificate
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, DeviceFault, NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise, NoiseModel, PhotonCountNoise

EPSILON, DELTA, BETA = 8.0, 1e-5, 1e-6
"""Epsilon of the sound camera's described law in the dimmed light, delta of all, and the certificates' beta."""
LABELS = 10
_VECTORS, _READINGS, _BATCH = 400, 200, 256
CHECKS = 10
"""Of the monitor, after an effect came."""
_MONITOR = {"every_steps": 1, "false_alarm_per_run": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A fault at a plausible size.

    Attributes:
        name: what it is.
        size: how much of it, in words.
        camera: the keys under ``[camera]`` that switch it on.
        step: training step at which the device is read, for effects that grow with time.
        frames: the keys under ``[frames]``, likewise.
    """

    name: str
    size: str
    camera: Mapping[str, Any]
    step: int = 0
    frames: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Any]:
        """The description's sections with the keys that switch it on."""
        return {"camera": self.camera, "frames": self.frames}


def effects_of(description: DeviceDescription) -> tuple[Effect, ...]:
    """Return the effects that a camera can show, the sound camera first.

    Raises:
        ConfigError: the description has no camera.
    """
    camera = description.camera
    if camera is None:
        raise ConfigError(
            description.name, "camera", "missing; effects of an instrument need a camera's twin"
        )
    power = {"law": "log_normal", "rms": 0.01}
    slow = power | {"rms": 0.002, "drift_rms": 0.01, "drift_s": 3600.0, "seconds_per_step": 1.0}
    drift = {"decorrelation_s": 1000.0, "seconds_per_step": 1.0}
    ambient = 0.1 * camera.light.anchor_flux_per_s
    found = [
        Effect(name="none", size="", camera={}),
        Effect(name="laser power", size="1 % rms, named log-normal", camera={"light": {"power": power}}),
        Effect(
            name="slow laser drift", size="1 % rms in an hour", camera={"light": {"power": slow}}, step=5000
        ),
        Effect(
            name="ambient light", size="10 % of the anchor", camera={"light": {"ambient_flux_per_s": ambient}}
        ),
        Effect(
            name="stuck mirrors",
            size="5 % on, 5 % off",
            camera={"mirrors": {"stuck_on": 0.05, "stuck_off": 0.05}},
        ),
        Effect(name="mirror contrast", size="1000 : 1", camera={"mirrors": {"contrast": 1000.0}}),
        Effect(name="dead pixels", size="3 %", camera={"pixels": {"dead_share": 0.03}}),
        Effect(name="cross-talk", size="1 % to each neighbour", camera={"pixels": {"crosstalk": 0.01}}),
        Effect(name="nonlinearity", size="2 % at saturation", camera={"pixels": {"nonlinearity": 0.02}}),
        Effect(
            name="vibration, pointing",
            size="0.05 pixels rms",
            camera={"vibration": {"pointing_rms_pixels": 0.05}},
        ),
        *_reference_effects(camera),
        Effect(name="dropped frames", size="1 %", camera={"transfer": {"dropped": 0.01}}),
        Effect(name="repeated frames", size="1 %", camera={"transfer": {"repeated": 0.01}}),
        Effect(name="moving medium", size="after 5 % of its time", camera={"drift": drift}, step=50),
        Effect(
            name="re-anchored medium",
            size="every 1 % of its time",
            camera={"drift": drift | {"reanchor_steps": 10}},
            step=50,
        ),
    ]
    if camera.dark is not None:
        hot = {"pixels": {"hot_share": 0.02, "hot_factor": 30.0}}
        found.insert(6, Effect(name="hot pixels", size="2 %, 30 times the dark current", camera=hot))
        found.insert(8, Effect(name="uneven dark current", size="10 % rms", camera={"pixels": {"dcnu": 0.1}}))
    return (*found, *_packings(camera.sensor.adc_bits or 0))


def _packings(bits: int) -> Iterator[Effect]:
    """Yield the links that send fewer bits than the converter has."""
    for packing, sent in (("mono10p", 10), ("mono8", 8)):
        if bits > sent:
            size = f"{packing}: {sent} of {bits} bits"
            yield Effect(name=f"{sent}-bit link", size=size, camera={}, frames={"packing": packing})


def _reference_effects(camera: CameraSettings) -> list[Effect]:
    """Return the effects that need a reference beam."""
    if camera.reference_beam is None:
        return []
    return [
        Effect(
            name="vibration, path",
            size="0.1 rad rms (10 nm at 633 nm)",
            camera={"vibration": {"phase_rms_rad": 0.1}},
        ),
        Effect(
            name="phase steps",
            size="2 % too long",
            camera={"reference_beam": {"step_error": 0.02}},
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class EffectRow:
    """What an effect does; see the table of this module.

    Attributes:
        effect: its name.
        size: how much of it.
        correlation: at most 1.
        noise: above 0.
        learning: at most about 1.
        epsilon: by the described law, or None if the device states none.
        certified: by a certificate, or None if it is refused.
        refusal: why there is no certificate, or nothing.
        monitor: what the monitor says, or nothing.
    """

    effect: str
    size: str
    correlation: float
    noise: float
    learning: float
    epsilon: float | None
    certified: float | None
    refusal: str
    monitor: str


class EffectTable:
    """Measures effects on one camera.

    Args:
        name: of the camera, or the path of its description, without the effects.
        n_outputs: outputs of a reading, at least 80.
        seed: of the noise.

    Raises:
        ConfigError: it is no camera.
    """

    def __init__(self, name: str | Path, *, n_outputs: int = 128, seed: int = 1) -> None:
        checks.integer(n_outputs=n_outputs, minimum=80)
        self._name = name
        self._window: dict[str, Any] = {"n_inputs": LABELS, "n_outputs": n_outputs, "seed": seed}
        self.effects = effects_of(load_description(name))
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randint(-1, 2, (_VECTORS, LABELS), generator=generator).float()

    def rows(self) -> Iterator[EffectRow]:
        """Measure all effects, one after the other."""
        yield from map(self.row, self.effects)

    def row(self, effect: Effect) -> EffectRow:
        """Measure one effect."""
        with self._opened(effect) as device:
            device.seek(effect.step)
            y, noise = device.project(self._x), _noise(device, self._x[:8])
        with self._opened(effect) as device:
            learning = _alignment(device, effect.step)
        with self._opened(effect) as device:
            law = device.stated_noise
            found = calibration_of(device, BETA)
        sound = self._sound
        certified, refusal = self._certified(found, law)
        return EffectRow(
            effect=effect.name,
            size=effect.size,
            correlation=float(np.corrcoef(y.flatten(), sound.ideal.flatten())[0, 1]),
            noise=noise / sound.noise,
            learning=learning / sound.learning,
            epsilon=None if law is None else label_epsilon(dimmed(law, sound.dimming)),
            certified=certified,
            refusal=refusal,
            monitor=self.monitored(effect),
        )

    def _opened(self, effect: Effect, **options: Any) -> CameraDevice:
        """Open the camera with an effect."""
        device = open_device(self._name, **{**self._window, **effect.changes, **options})
        if not isinstance(device, CameraDevice):
            raise ConfigError(str(self._name), "kind", "is no camera; take a device of kind 'camera'")
        return device

    @cached_property
    def _sound(self) -> _Sound:
        """The camera without effects."""
        effect = self.effects[0]
        with self._opened(effect) as device:
            ideal, noise = self._x @ device.matrix().T, _noise(device, self._x[:8])
            law = device.noise
        with self._opened(effect) as device:
            learning = _alignment(device, 0)

        def excess(exponent: float) -> float:
            return label_epsilon(dimmed(law, math.exp(exponent))) - EPSILON

        dimming = math.exp(float(brentq(excess, -25.0, 0.0, xtol=1e-3))) if excess(0.0) > 0 else 1.0
        return _Sound(ideal=ideal.numpy(), noise=noise, learning=learning, dimming=dimming)

    def _certified(self, found: Calibration | str, law: NoiseModel | None) -> tuple[float | None, str]:
        """Return the certified epsilon in the dimmed light, or why there is none."""
        if isinstance(found, str):
            return None, found
        certificate = found.certificate
        if certificate.noise is None:
            return None, refusal_of(certificate)
        if law is None:
            return None, "the device states no law"
        return label_epsilon(certificate.certified(dimmed(law, self._sound.dimming))), ""

    def monitored(self, effect: Effect, **options: Any) -> str:
        """Return what the monitor says within `CHECKS` checks after the effect came; nothing if it finds nothing.

        Args:
            effect: the effect.
            **options: of `opusim.open_device`, such as another medium; both openings get them.
        """
        try:
            with self._opened(self.effects[0], monitor=_MONITOR, **options) as device:
                baseline = device.monitor.baseline
            with self._opened(effect, monitor=_MONITOR, **options) as device:
                if baseline is not None:
                    device.compare_with(baseline)
                for step in range(effect.step + 1, effect.step + 1 + CHECKS):
                    device.seek(step)
        except (DeviceFault, NoiseBelowCertificate) as error:
            return str(error).partition("' ")[2].partition(";")[0]
        return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sound:
    """The camera without effects: B x, noise, alignment, and the light at which its law has `EPSILON`."""

    ideal: np.ndarray
    noise: float
    learning: float
    dimming: float


def _noise(device: CameraDevice, x: torch.Tensor) -> float:
    """Root mean square over vectors and outputs of readings' standard deviation."""
    y = [device.project(row.expand(_READINGS, -1).contiguous()).double() for row in x]
    return float(torch.stack(y, dim=1).var(dim=0).mean().sqrt())


def _alignment(device: CameraDevice, step: int) -> float:
    """Cosine of a hidden layer's update through readings at a step with that through the device's own B at step 0."""
    data = load_digits()
    h = torch.from_numpy(data.data[:_BATCH] / 16).float()
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(h.shape[1], device.n_outputs, generator=generator) / h.shape[1] ** 0.5
    last = torch.randn(device.n_outputs, LABELS, generator=generator) / device.n_outputs**0.5
    z = torch.tanh(h @ first)
    error = torch.softmax(z @ last, dim=1)
    error[torch.arange(_BATCH), torch.from_numpy(data.target[:_BATCH])] -= 1
    shown = torch.where(error.abs() > 0.1, error.sign(), torch.zeros(()))
    ideal = shown @ device.matrix().T
    device.seek(step)
    updates = [h.T @ ((1 - z**2) * feedback) for feedback in (device.project(shown), ideal)]
    noisy, exact = (update.flatten() for update in updates)
    return float(torch.cosine_similarity(noisy, exact, dim=0))


def calibration_of(device: CameraDevice, beta: float) -> Calibration | str:
    """Return a calibration of some 0.2 s of computing, or why its frames cannot be evaluated."""
    try:
        return calibrate(device, plan=Plan(frames=64), readings=_READINGS, beta=beta)
    except ValueError as error:
        return f"frames cannot be evaluated: {error}"


def refusal_of(certificate: Certificate) -> str:
    """Return what speaks against the law of a certificate that has none: the first test or remark that does."""
    failed = [test.text for test in certificate.tests if test.needed and not test.holds]
    remarks = [text for text in certificate.remarks if text.startswith("no law is certified")]
    return [*failed, *(text.partition(": ")[2].partition(". ")[0] for text in remarks), "no law"][0]


def dimmed(law: NoiseModel, light: float) -> NoiseModel:
    """Return a law of counts in a share of its light."""
    if not isinstance(law, PhotonCountNoise | FluctuatingCountNoise):
        raise NoGuarantee(f"noise law {law.law!r}: has no light to dim")
    low, high = np.asarray(law.rate_low), np.asarray(law.rate_high)
    return replace(law, rate_high=low + light * (high - low))


def label_epsilon(law: NoiseModel) -> float:
    """Return epsilon of one reading of a label: of the half of its frames that depend on it."""
    if not isinstance(law, PhotonCountNoise | FluctuatingCountNoise):
        raise NoGuarantee(f"noise law {law.law!r}: its frames are not known")
    frames = replace(
        law, rate_low=_label_frames(law.rate_low), rate_high=_label_frames(law.rate_high), weight=None
    )
    readings = DeviceReadings(noise=frames, readings=1, unit=Unit.LABEL)
    return device_readings_guarantee(readings, DELTA).epsilon


def _label_frames(rates: np.ndarray | float) -> np.ndarray:
    """Return the frames of the positive part, which a label is."""
    frames = np.asarray(rates)
    return frames[: len(frames) // 2]


def effect_rows(rows: Iterable[EffectRow]) -> list[dict[str, str]]:
    """Return the rows of a printed table."""
    return [
        {
            "effect": row.effect,
            "size": row.size,
            "correlation": f"{row.correlation:.4f}",
            "noise": f"{row.noise:.3f}",
            "learning": f"{row.learning:.3f}",
            "epsilon": "no law" if row.epsilon is None else f"{row.epsilon:.3g}",
            "certified": f"refused: {row.refusal}" if row.certified is None else f"{row.certified:.3g}",
            "monitor": row.monitor or "sees nothing",
        }
        for row in rows
    ]


def effects_figure(rows: Sequence[EffectRow], name: str) -> Figure:
    """Draw the rows: one panel for readings, noise, learning and privacy each."""
    figure = Figure(figsize=(12, 0.36 * len(rows) + 1.4), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    places = np.arange(len(rows))
    columns: tuple[tuple[str, Callable[[EffectRow], float | None]], ...] = (
        ("correlation with B x", lambda row: row.correlation),
        ("noise, relative", lambda row: row.noise),
        ("learning, relative alignment", lambda row: row.learning),
        (f"certified epsilon (sound law: {EPSILON:g})", lambda row: row.certified),
    )
    for panel, (title, value) in zip(panels, columns, strict=True):
        values = [value(row) for row in rows]
        widths = [0.0 if number is None else number for number in values]
        panel.barh(places, widths, color="tab:blue")
        for place, number in enumerate(values):
            text = "refused" if number is None else f"{number:.3g}"
            panel.text(widths[place], place, f" {text}", va="center", fontsize=8)
        panel.set_title(title, fontsize=10)
        panel.set_xlim(0, 1.25 * max([1.0, *widths]))
    panels[0].set_yticks(places, [f"{row.effect} {row.size}".strip() for row in rows], fontsize=8)
    panels[0].invert_yaxis()
    figure.suptitle(f"{name}: effects of a real instrument", fontsize=11)
    return figure
