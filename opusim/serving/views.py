"""What one client sees of an instrument: its window of the device, and the law of the noise of that window's outputs.

A view is the part of the instrument that one client sees: its first `n_inputs` inputs, and `n_outputs` outputs from
`first` on. Its readings are those columns of the readings of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from opusim import checks
from opusim.crossbar.programmable import Converter
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import Baseline
from opusim.devices.inputs import drawn_shape
from opusim.devices.usage import Usage
from opusim.noise import (
    ConverterLatticeNoise,
    FluctuatingCountNoise,
    GaussianNoise,
    NoiseModel,
    PhotonCountNoise,
    SignalGaussianNoise,
)

_CUT = GaussianNoise, PhotonCountNoise, FluctuatingCountNoise, SignalGaussianNoise, ConverterLatticeNoise
"""Laws that say how they depend on outputs."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of an instrument that a client opens.

    Attributes:
        n_inputs: inputs, from the first on.
        first: first output.
        n_outputs: outputs.
        mode: ``experiment`` or ``release``.
        seed: seed of the noise of a simulation in ``experiment``.
    """

    n_inputs: int
    first: int
    n_outputs: int
    mode: str
    seed: int

    def overlaps(self, other: Window) -> bool:
        """Whether two windows share outputs."""
        return self.first < other.first + other.n_outputs and other.first < self.first + self.n_outputs


class View:
    """What one client sees; used by the thread that owns the instrument.

    Args:
        device: the open device.
        window: the client's part of it.
        shared: whether other views use the same device; it is not closed then, and steps are not the client's.
        once: makes a call of the device, with a time-out if it needs one.
    """

    def __init__(
        self,
        device: NoisyDevice,
        window: Window,
        *,
        shared: bool,
        once: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._once = once
        self.window = window
        self.shared = shared
        self.device = device
        self._columns = slice(window.first, window.first + window.n_outputs)
        self._whole = (window.first, window.n_outputs) == (0, device.n_outputs)
        # The law of a programmable device is that of what it holds, which is not written before a client asks for it.
        self.law = None if "program" in device.capabilities else self._found_law()
        self.usage = Usage() if shared else device.usage
        """What this client has used."""
        self.held = 0
        """How often the device had been changed when the client opened it, or changed it."""

    def look_up_law(self) -> None:
        """Let `law` be that of what a programmable device holds."""
        self.law = self.count(self._found_law)

    def _found_law(self) -> NoiseModel | None:
        """Return the law of the view's outputs, or None if it is unknown."""
        law = self.device.stated_noise
        if law is None or self._whole:
            return law
        return law_of_outputs(law, self._columns)

    @property
    def converter(self) -> dict[str, Any] | None:
        """The converter that a programmable device states, as JSON values; None for other devices."""
        found = getattr(self.device, "converter", None)
        return asdict(found) if isinstance(found, Converter) else None

    @property
    def baseline(self) -> Baseline | None:
        """What the monitor compares with if the client has a device of its own; the server watches a shared one."""
        return None if self.shared or not self._whole else self.device.monitor.baseline

    def count(self, act: Callable[[], Any]) -> Any:
        """Return what an act returns, and count what the device spends in it for this client."""
        before = self.device.usage
        try:
            return self._once(act)
        finally:
            self.usage += self.device.usage - before

    def read(self, act: str, x: np.ndarray) -> np.ndarray:
        """Return `project`, `intensities`, `multiply` or `multiply_transposed` of the view, a row for each row of x.

        Inputs and outputs of the device that are not the view's stay dark.
        """
        device, inputs = self.device, slice(0, self.window.n_inputs)
        taken, given = (inputs, self._columns), (device.n_inputs, device.n_outputs)
        if act == "multiply_transposed":
            taken, given = taken[::-1], given[::-1]
        width = taken[0].stop - taken[0].start
        checks.shape((None, width), x=x)
        if width != given[0]:
            whole = np.zeros((len(x), given[0]), dtype=x.dtype)
            whole[:, taken[0]] = x
            x = whole
        shown = x if act in ("project", "intensities") else torch.from_numpy(x)
        y = self.count(lambda: getattr(device, act)(shown))
        return np.asarray(y if isinstance(y, np.ndarray) else y.cpu().numpy())[:, taken[1]]

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return `NoisyDevice.draw` of the view: numbers of its outputs only, in whole readings."""
        if self._whole:
            drawn: np.ndarray = self.count(lambda: self.device.draw(shape).cpu().numpy())
            return drawn
        return self.shaped(self.draw_readings(self.readings(shape)), shape)

    def readings(self, shape: tuple[int, ...]) -> int:
        """Return how many readings of the view fill a drawn shape.

        Raises:
            TypeError, ValueError: no shape that can be drawn.
        """
        lengths = drawn_shape(shape, self.window.n_outputs, self.device.stated_noise)
        return -(-math.prod(lengths) // self.window.n_outputs)

    def draw_readings(self, count: int) -> np.ndarray:  # (count, n_outputs)
        """Return some readings of noise only."""
        drawn: np.ndarray = self.count(lambda: self.device.draw((count, self.device.n_outputs)).cpu().numpy())
        return drawn[:, self._columns]

    def shaped(self, drawn: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the numbers of whole readings in a drawn shape."""
        return drawn.reshape(-1)[: math.prod(shape)].reshape(shape)

    def matrix(self) -> np.ndarray:  # (n_outputs, n_inputs)
        """Return the view's part of the device's matrix."""
        return self._part(self.device.require("matrix").matrix())

    @property
    def saturated(self) -> np.ndarray | None:
        """Which rows of the last `multiply` met a converter's bound at any output of the device, uint8, or None."""
        found = getattr(self.device, "saturated", None)
        return None if found is None else found.cpu().numpy().astype(np.uint8)

    def program(self, matrix: np.ndarray) -> np.ndarray:  # (n_outputs, n_inputs)
        """Program the device, all of which the view must be, and return what it realised."""
        device = self.device.require("program")
        if not self._whole or self.window.n_inputs != self.device.n_inputs:
            raise ValueError(
                f"program: the device is written as a whole, {self.device.n_inputs} inputs and "
                f"{self.device.n_outputs} outputs; open that window"
            )
        realised = self._part(self.count(lambda: device.program(torch.from_numpy(matrix.copy()))))
        self.look_up_law()
        return realised

    def wait(self, seconds: float) -> np.ndarray:  # (n_outputs, n_inputs)
        """Let time pass and return the view's part of the matrix of then."""
        device = self.device.require("wait")
        matrix = self._part(self.count(lambda: device.wait(seconds)))
        self.look_up_law()
        return matrix

    def _part(self, matrix: torch.Tensor) -> np.ndarray:
        return np.asarray(matrix.cpu().numpy()[self._columns, : self.window.n_inputs])

    def programming_std(self, matrix: np.ndarray) -> np.ndarray:
        """Return the spread of programming that the device states for a matrix, of its shape; 0 without one."""
        told = getattr(self.device, "programming_std", None)
        if told is None:
            return np.zeros_like(matrix)
        return np.asarray(told(torch.from_numpy(matrix.copy())).cpu().numpy(), dtype=np.float32)

    def seek(self, step: int) -> None:
        """Position the noise, and let the device's monitor look if a check is due."""
        self.count(lambda: self.device.seek(step))

    def compare(self, baseline: np.ndarray) -> None:
        """Compare the client's own device with an earlier baseline."""
        self.count(lambda: self.device.compare_with(Baseline.from_array(baseline)))

    def close(self) -> None:
        """Close the client's own device; a shared one stays open."""
        if not self.shared:
            self.device.close()


def law_of_outputs(law: NoiseModel, outputs: slice) -> NoiseModel | None:
    """Return the law of some outputs, or None if it is unknown how the law depends on outputs.

    Numbers that are told for each output are cut; numbers for all outputs stay, and so does beta: limits that hold for
    all outputs hold for some. The power of fluctuating light is common to a frame, so that some of its pixels see it
    with the same law.
    """
    if not isinstance(law, _CUT):
        return None
    numbers: dict[str, Any] = {}
    for field in fields(law):
        value = getattr(law, field.name)
        is_cut = isinstance(value, np.ndarray) and value.ndim > 0 and value.shape[-1] == law.n_outputs
        numbers[field.name] = value[..., outputs] if is_cut else value
    if "n_outputs" in numbers:
        numbers["n_outputs"] = outputs.stop - outputs.start
    return type(law)(**numbers)


def packed_law(law: NoiseModel | None) -> tuple[dict[str, Any] | None, list[np.ndarray]]:
    """Return a law as JSON values, and the arrays that stand in them as ``{"array": position}``."""
    if law is None:
        return None, []
    arrays: list[np.ndarray] = []
    values: dict[str, Any] = {}
    for name, value in law.to_json().items():
        if isinstance(value, list):
            arrays.append(np.asarray(value, dtype=np.float64))
            value = {"array": len(arrays) - 1}
        values[name] = value
    return values, arrays


def unpacked_law(values: dict[str, Any] | None, arrays: Sequence[np.ndarray]) -> NoiseModel | None:
    """Return what `packed_law` packed.

    Raises:
        ValueError, TypeError: it is no law that is known here.
        LookupError: an array is missing.
    """
    if values is None:
        return None
    plain = {
        name: arrays[value["array"]].tolist() if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return NoiseModel.from_json(plain)
