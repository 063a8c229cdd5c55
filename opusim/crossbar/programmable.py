"""The base of programmable devices: a matrix is written, then multiplies inputs through converters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from opusim import checks
from opusim.crossbar.programmable import Converter
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.inputs import Array, like_input, real_batch
from opusim.errors import ConfigError
from opusim.medium.transmission import Medium, gaussian_table


class ProgrammableDevice(NoisyDevice):
    """A device that multiplies by the matrix that was programmed last.

    Until a matrix is programmed, the device holds a random one: a `Medium` of the description's seed, divided by its
    largest entry so that it fits into [-1, 1]. Readings are multiplied by that number, so that `project` reads a B with
    entries of variance 1, as on every device, and photonic DFA runs on it. After `program` readings are W x.
    `matrix` and `noise` are always those of the readings.

    A subclass gives `_program`, `_multiply`, `described_noise` and `_seek`; with the capability `multiply_transposed`
    also `_multiply_transposed`, with `wait` also `_wait`. It overrides `converter`, `programming_std` and
    `programming_cost` if they are not those of an exact device.

    Args:
        description: a description with a section ``[medium]``, whose seed gives the random matrix.
        **window: as for `NoisyDevice`.

    Raises:
        ConfigError: the section is missing.
    """

    can = NoisyDevice.can | {"matrix", "program", "multiply"}

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        if description.medium is None:
            raise ConfigError(
                description.name,
                "medium",
                "missing; a programmable device needs [medium] with the seed of its chip",
            )
        self._medium_settings = description.medium
        self._weights: torch.Tensor | None = None
        self._scale = 1.0
        self._elapsed_s = 0.0

    # What the device states

    @property
    def converter(self) -> Converter:
        """Bits and bounds of inputs and outputs; exact by default."""
        return Converter()

    @property
    def reading_scale(self) -> float:
        """Factor of all readings: 1 for a programmed matrix; for the random one the largest entry of B, 4.32."""
        self._held()
        return self._scale

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last programming, as `wait` counts them."""
        return self._elapsed_s

    def programming_std(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the standard deviation of what `program` realises about the matrix, of its shape; 0 if it is exact."""
        return torch.zeros_like(matrix)

    @property
    def saturated(self) -> torch.Tensor | None:
        """Which rows of the last `multiply` met the bound of a converter, shape (batch,); None if that is not told."""
        return None

    def weight_moments(self, matrix: torch.Tensor, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of what the device holds so many seconds after programming a matrix.

        The matrix itself and `programming_std` at every time, unless a device knows better. Each entry's moments depend
        on that entry only.
        """
        return matrix, self.programming_std(matrix)

    def programming_cost(self) -> tuple[float, float]:
        """Return seconds and joules that a programming of the whole window takes; 0 by default."""
        return 0.0, 0.0

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """Return the matrix that readings are noisy readings of, float32, on the device's torch device."""
        weights = self._held()
        return weights if self._scale == 1.0 else weights * self._scale

    # What it does

    def program(self, matrix: torch.Tensor) -> torch.Tensor:
        """Write a matrix and return the one that the device realised; time since programming starts at 0.

        Args:
            matrix: real, shape (n_outputs, n_inputs), entries in [-1, 1].

        Returns:
            float32, same shape, on the device's torch device: what `multiply` uses from now on.

        Raises:
            TypeError, ValueError: another shape, or an entry that is not a number in [-1, 1].
            DeviceUnavailable: the device is closed.
        """
        self._write(self._checked_matrix(matrix), scale=1.0)
        return self._held()

    def multiply(self, x: Array) -> Array:  # (batch, n_inputs) -> (batch, n_outputs)
        """W x + fresh noise, a row for each row of x, through the converters.

        Args:
            x: torch tensor on any torch device, or numpy array; shape (batch, n_inputs), real, entries in [-1, 1].

        Returns:
            float32, shape (batch, n_outputs); numpy for numpy, a tensor on x's torch device for a tensor.

        Raises:
            TypeError, ValueError: another type, shape or entry; the message says what to do.
            DeviceUnavailable: the device is closed.
        """
        self._require_open()
        self._held()
        batch = real_batch(x, self.n_inputs, self._torch_device)
        return like_input(self._read(lambda: self._scaled(batch), (len(batch), self.n_outputs)), x)

    def multiply_transposed(self, x: Array) -> Array:  # (batch, n_outputs) -> (batch, n_inputs)
        """Return x W + fresh noise, a row for each row of x of shape (batch, n_outputs); see `multiply`.

        Raises:
            CapabilityMissing: the device cannot.
        """
        self._require_open()
        self.require("multiply_transposed")
        self._held()
        batch = real_batch(x, self.n_outputs, self._torch_device)

        def act() -> torch.Tensor:
            return self._multiply_transposed(batch).mul_(self._scale)

        return like_input(self._read(act, (len(batch), self.n_inputs), readings=len(batch)), x)

    def wait(self, seconds: float) -> torch.Tensor:
        """Let time pass and return the matrix that readings use from now on; readings themselves take no time here.

        Args:
            seconds: finite, at least 0; they add up from the last programming.

        Raises:
            CapabilityMissing: the device does not drift.
            ValueError: another number.
            DeviceUnavailable: the device is closed.
        """
        self._require_open()
        self.require("wait")
        checks.non_negative(seconds=seconds)
        weights = self._held()
        if seconds:
            self._elapsed_s += float(seconds)
            self._weights = self._read(lambda: self._wait(self._elapsed_s), tuple(weights.shape), readings=0)
            self._begin_monitor(None)
        return self.matrix()

    def held_state(self) -> dict[str, torch.Tensor]:
        """Return what `restore` needs besides the matrix that was programmed last: tensors on the CPU, by name."""
        return {"elapsed_s": torch.tensor(self._elapsed_s, dtype=torch.float64)}

    def restore(self, matrix: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
        """Hold a matrix as this device held it when `held_state` was called, such as in a run that is resumed.

        The matrix is programmed again and the same time passes, so programming noise is drawn again. A subclass that
        can do better overrides this.

        Args:
            matrix: as it was given to `program`.
            state: what `held_state` returned.

        Returns:
            Whether the realised matrix is that of before; if not, corrections that were measured with it are void.

        Raises:
            TypeError, ValueError, DeviceUnavailable: as for `program`.
        """
        self.program(matrix)
        if elapsed_s := float(state["elapsed_s"]):
            self.wait(elapsed_s)
        return False

    # For subclasses

    @abstractmethod
    def _program(self, matrix: torch.Tensor) -> torch.Tensor:
        """Write a checked float32 matrix and return what was realised, float32."""

    @abstractmethod
    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return W x + noise for a checked float32 batch, with the realised W."""

    def _multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W + noise for a checked float32 batch; for the capability `multiply_transposed`."""
        raise NotImplementedError(
            f"{type(self).__name__} declares the capability 'multiply_transposed' and does not override it"
        )

    def _wait(self, elapsed_s: float) -> torch.Tensor:
        """Return the realised matrix at so many seconds since programming; for the capability `wait`."""
        raise NotImplementedError(
            f"{type(self).__name__} declares the capability 'wait' and does not override _wait"
        )

    def _checked_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix to program, float32, on the device's torch device; see `program`."""
        self._require_open()
        checks.instance(torch.Tensor, matrix=matrix)
        checks.shape(
            (self.n_outputs, self.n_inputs), matrix=matrix, remedy="pad it with zeros, or open another window"
        )
        checks.in_range(-1, 1, matrix=matrix.detach().cpu(), remedy="divide by the largest magnitude")
        return matrix.detach().to(device=self._torch_device, dtype=torch.float32)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        self._held()
        return self._scaled(x)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        y = self._multiply(x)
        return y if self._scale == 1.0 else y.mul_(self._scale)

    def _held(self) -> torch.Tensor:
        """Return the realised matrix without the scale of readings; programs the random one if there is none."""
        if self._weights is None:
            seed, limit = self._medium_settings.seed, self._medium_settings.dense_limit_mib
            medium = Medium(self.n_inputs, self.n_outputs, seed, dense_limit_mib=limit)
            largest = float(gaussian_table().max())
            self._write(medium.dense(self._torch_device).T / largest, scale=largest)
        if self._weights is None:  # pragma: no cover  # _write sets it or raises
            raise RuntimeError("no matrix was programmed")
        return self._weights

    def _write(self, matrix: torch.Tensor, *, scale: float) -> None:
        """Program a checked matrix, whose readings are multiplied by `scale`, and count it."""
        shape = tuple(matrix.shape)
        self._weights = self._read(lambda: self._program(matrix.contiguous()), shape, readings=0)
        self._scale, self._elapsed_s = scale, 0.0
        seconds, joules = self.programming_cost()
        self._meter.count_programming(seconds=seconds, joules=joules)
        if scale == 1.0 and self.is_open:
            self._begin_monitor(None)
