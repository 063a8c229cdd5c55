"""The device behind an OPU: opened in the window that a fit needs, with the exposure that the user sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opusim import checks
from opusim.description.loading import load_description
from opusim.description.schema import DeviceDescription
from opusim.description.section import merged
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.features.optical import require_window

_KNOWN_ARRAYS = {912 * 1140: (912, 1140)}
"""Rows and columns of mirror arrays, by their number of mirrors: that of LightOn's OPU."""
_PROBE_INPUTS = 16
"""Window that is opened before a fit tells the number of features: it finds a missing device at once."""
_READOUT_US = 50.0
"""Time that a frame needs beyond its exposure."""


class OpuDevice:
    """A device by its name, or one that is open; `OPU.device`.

    Args:
        device: Name or file of a description, or an open device, whose window stays as it is.
        options: Sections laid over the description.
        mirror_shape: Rows and columns of its mirrors; None takes 912 x 1140 for devices of that many inputs, and no
            geometry for others.
        seed: Seed of the noise.
        mode: "experiment" or "release".

    Raises:
        ConfigError: There is no such device, or an option is wrong.
        ValueError: A geometry that the device does not have.
    """

    def __init__(
        self,
        device: str | Path | NoisyDevice,
        options: Mapping[str, Any] | None,
        *,
        mirror_shape: tuple[int, int] | None,
        seed: int,
        mode: str,
    ) -> None:
        self._given = device if isinstance(device, NoisyDevice) else None
        if self._given is not None and options:
            raise ValueError(
                f"options = {dict(options)!r}: device {self._given.name!r} is open already; open it with them, or give "
                "its name"
            )
        self._name = "" if isinstance(device, NoisyDevice) else str(device)
        self._options, self._seed, self._mode = dict(options or {}), seed, mode
        self._open: NoisyDevice | None = None
        self._window: tuple[Any, ...] = ()
        self.description: DeviceDescription = (
            self._given.description
            if self._given is not None
            else load_description(self._name, self._options)
        )
        self.mirror_shape = _KNOWN_ARRAYS.get(self.max_inputs)
        if mirror_shape is not None:
            rows, columns = mirror_shape
            checks.integer(mirror_rows=rows, mirror_columns=columns, minimum=1)
            if rows * columns > self.max_inputs:
                raise ValueError(
                    f"mirror_shape = {mirror_shape}: has {rows * columns} mirrors, and device {self.name!r} "
                    f"{self.max_inputs}; give a smaller shape"
                )
            self.mirror_shape = int(rows), int(columns)

    @property
    def name(self) -> str:
        """The device's name."""
        return self.description.name

    @property
    def max_inputs(self) -> int:
        """Mirrors that can be used."""
        return self.description.n_inputs if self._given is None else self._given.n_inputs

    @property
    def max_outputs(self) -> int:
        """Outputs that can be used."""
        return self.description.n_outputs if self._given is None else self._given.n_outputs

    @property
    def input_shape(self) -> tuple[int, int]:
        """Rows and columns of the mirrors; one row for devices without a geometry."""
        return self.mirror_shape or (1, self.max_inputs)

    @property
    def is_hardware(self) -> bool:
        """Whether it is LightOn's appliance."""
        return self.description.lighton is not None and not self.description.lighton.simulated

    @property
    def unit(self) -> str:
        """Unit of intensities."""
        return "DN" if self.description.camera is not None or self.is_hardware else "projection units"

    @property
    def exposure_us(self) -> float | None:
        """Exposure, microseconds, or None if the device has no camera or keeps its own.

        Setting it opens the device again at its next use, and lengthens the time of a frame if it must.
        """
        if self.description.camera is not None:
            return self.description.camera.light.exposure_us
        return None if self.description.lighton is None else self.description.lighton.exposure_us

    @exposure_us.setter
    def exposure_us(self, value: float) -> None:
        self._set(self._timing(value, None))

    @property
    def frametime_us(self) -> float:
        """Time from frame to frame, microseconds; setting it opens the device again at its next use."""
        return self.description.frames.frame_period_us

    @frametime_us.setter
    def frametime_us(self, value: float) -> None:
        self._set(self._timing(None, value))

    def reader(
        self,
        n_inputs: int,
        n_outputs: int,
        *,
        exposure_us: float | None = None,
        frametime_us: float | None = None,
    ) -> NoisyDevice:
        """Return the open device in a window of at least this size, opening it if it is not.

        Raises:
            ConfigError: The device is too small, or the exposure is wrong.
            DeviceError: The device cannot be had.
        """
        if self._given is not None:
            if exposure_us is not None or frametime_us is not None:
                self._refuse_timing()
            require_window(self._given, n_inputs, n_outputs)
            return self._given
        window = (n_inputs, n_outputs, exposure_us, frametime_us)
        if self._open is None or not self._open.is_open or self._window != window:
            self.close()
            options = self._options
            if exposure_us is not None or frametime_us is not None:
                options = merged(options, self._timing(exposure_us, frametime_us))
            self._open = open_device(
                self._name,
                n_inputs=n_inputs,
                n_outputs=n_outputs,
                seed=self._seed,
                mode=self._mode,
                **options,
            )
            self._window = window
        return self._open

    def probe(self, n_outputs: int) -> None:
        """Open a small window, unless some window is open."""
        if self._given is not None:
            self._given.open()
        elif self._open is None:
            self.reader(min(_PROBE_INPUTS, self.max_inputs), n_outputs)

    def close(self) -> None:
        """Close a device that was opened here; one that was given stays open."""
        device, self._open = self._open, None
        if device is not None:
            device.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._given is not None:
            raise TypeError(
                f"device = {self._given.name!r} is open, and an open device cannot be pickled; give its name or file"
            )
        return self.__dict__ | {"_open": None, "_window": ()}

    def _timing(self, exposure_us: float | None, frametime_us: float | None) -> dict[str, Any]:
        """Return the sections that set times; a frame is made long enough for its exposure."""
        sections: dict[str, Any] = {}
        if exposure_us is not None:
            checks.positive(exposure_us=exposure_us)
            exposure_us = float(exposure_us)
            if self.description.camera is not None:
                sections["camera"] = {"light": {"exposure_us": exposure_us}}
            elif self.is_hardware:
                sections["lighton"] = {"exposure_us": exposure_us}
            else:
                raise ValueError(
                    f"exposure_us = {exposure_us:g}: device {self.name!r} has no camera, and it would do nothing; "
                    "leave it out, or take the device camera"
                )
            if frametime_us is None:
                frametime_us = max(self.frametime_us, exposure_us + _READOUT_US)
        if frametime_us is not None:
            checks.positive(frametime_us=frametime_us)
            sections["frames"] = {"frame_period_us": float(frametime_us)}
        return sections

    def _set(self, sections: dict[str, Any]) -> None:
        if self._given is not None:
            self._refuse_timing()
        options = merged(self._options, sections)
        self.description = load_description(self._name, options)
        self._options = options
        self.close()

    def _refuse_timing(self) -> None:
        raise ValueError(
            f"device {self.name!r} is open already, and its times cannot be changed; open it with them, as "
            "open_device('camera', camera={'light': {'exposure_us': 200.0}}), or give its name"
        )
