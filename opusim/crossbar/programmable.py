"""The base of programmable devices: a matrix is written, then multiplies inputs through converters."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from opusim import checks
from opusim.description.schema import DeviceDescription, MediumSettings
from opusim.devices.base import NoisyDevice
from opusim.devices.inputs import Array, like_input, matrix_to_program, real_batch
from opusim.devices.kinds import Capability
from opusim.errors import NoiseUnknown
from opusim.medium.transmission import Medium, gaussian_table
from opusim.noise import ConverterLatticeNoise, GaussianNoise, NoiseModel, SignalGaussianNoise
from opusim.randomness.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class Converter:
    """Bits and bounds between which a programmable device works; the default converts exactly.

    b bits give the 2^b - 1 codes -L ... L with L = 2^(b-1) - 1, so that 0 and both bounds are codes. A number v is
    shown as step * round(v / step), half-way cases to the even code, limited to the bound; step = bound / L.

    Attributes:
        input_bits: bits of an input in [-1, 1], sign included, 2 to 16; None shows inputs as they are.
        output_bits: bits of an output; None reads them as they are.
        output_bound: largest output that is shown, in units of the product, above 0; None without output_bits.
        tile_inputs: inputs that one conversion adds up, at least 1, or None for all; outputs of the tiles are added
            after their conversion.
    """

    input_bits: int | None = None
    output_bits: int | None = None
    output_bound: float | None = None
    tile_inputs: int | None = None

    def __post_init__(self) -> None:
        bits = {
            key: value for key in ("input_bits", "output_bits") if (value := getattr(self, key)) is not None
        }
        checks.integer(minimum=2, maximum=16, **bits)
        if self.tile_inputs is not None:
            checks.integer(minimum=1, tile_inputs=self.tile_inputs)
        if (self.output_bits is None) != (self.output_bound is None):
            raise ValueError("output_bits and output_bound belong together; give both or neither")
        if self.output_bound is not None:
            checks.positive(output_bound=self.output_bound)

    @property
    def output_step(self) -> float:
        """Distance of neighbouring outputs of a tile, 0 without output_bits."""
        if self.output_bits is None or self.output_bound is None:
            return 0.0
        return self.output_bound / levels(self.output_bits)

    def tiles(self, n_inputs: int) -> int:
        """Return the number of conversions that a product over `n_inputs` inputs adds up."""
        return 1 if self.tile_inputs is None else math.ceil(n_inputs / self.tile_inputs)

    def shown(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs that the device sees, for x in [-1, 1]; ternary inputs stay as they are."""
        if self.input_bits is None:
            return x
        most = levels(self.input_bits)
        return (x * most).round_().div_(most)


def levels(bits: int) -> int:
    """Return L, the largest code of `bits` bits."""
    checks.integer(minimum=2, maximum=16, bits=bits)
    return int(2 ** (bits - 1) - 1)


class ProgrammableDevice(NoisyDevice):
    """A device that multiplies by the matrix that was programmed last.

    Until a matrix is programmed, the device holds a random one: a `Medium` of the description's seed, divided by its
    largest entry so that it fits into [-1, 1]. Readings are multiplied by that number, so that `project` reads a B with
    entries of variance 1, as on every device, and photonic DFA runs on it. After `program` readings are W x.
    `matrix` and `noise` are always those of the readings.

    A subclass gives `_program`, `_multiply`, `described_noise` and `_seek`; with the capability `multiply_transposed`
    also `_multiply_transposed`, with `wait` also `_wait`. It overrides `converter`, `programming_std` and
    `programming_cost` if they differ from an exact device's.

    Args:
        description: a description with a section ``[medium]``, whose seed gives the random matrix.
        **window: as for `NoisyDevice`.

    Raises:
        ConfigError: the section is missing.
    """

    can = NoisyDevice.can | {"matrix", "program", "multiply"}

    @classmethod
    def for_window(
        cls,
        description: DeviceDescription,
        *,
        n_inputs: int | None = None,
        n_outputs: int | None = None,
        **options: Any,
    ) -> ProgrammableDevice:
        """Return a device of the window: one chip of this class, or several if the window is larger than a chip.

        A class that overrides `_open` drives a single instrument, so its window has to fit.
        """
        window = (n_inputs or description.n_inputs, n_outputs or description.n_outputs)
        fits = window[0] <= description.n_inputs and window[1] <= description.n_outputs
        if fits or cls._open is not NoisyDevice._open:
            return cls(description, n_inputs=n_inputs, n_outputs=n_outputs, **options)
        return SeveralChips(cls, description, *window, **options)

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._medium_settings: MediumSettings = description.needed(
            "medium", "a programmable device needs [medium] with the seed of its chip"
        )
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
        """Return the standard deviation of the realised matrix about the programmed one, of its shape; 0 if exact."""
        return torch.zeros_like(matrix)

    @property
    def saturated(self) -> torch.Tensor | None:
        """Which rows of the last `multiply` met the bound of a converter, shape (batch,); None if unknown."""
        return None

    def weight_moments(self, matrix: torch.Tensor, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of the matrix on the device `seconds` after a programming.

        By default the matrix itself and `programming_std` at every time. Each entry's moments depend on that entry
        only.
        """
        return matrix, self.programming_std(matrix)

    def spread_error(self) -> float | None:
        """Return the error of programming relative to the entries' root mean square, if each error spreads over all.

        None if every entry has a law of its own, which `weight_moments` tells.
        """
        return None

    def programming_cost(self) -> tuple[float, float]:
        """Return seconds and joules that a programming of the whole window takes; 0 by default."""
        return 0.0, 0.0

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """Return the matrix W of the readings W x + noise, float32, on the device's torch device."""
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
        return like_input(self._read_in_calls(self._project, batch), x)

    def multiply_transposed(self, x: Array) -> Array:  # (batch, n_outputs) -> (batch, n_inputs)
        """Return x W + fresh noise, a row for each row of x of shape (batch, n_outputs); see `multiply`.

        Raises:
            CapabilityMissing: the device cannot.
        """
        self._require_open()
        self.require("multiply_transposed")
        self._held()
        batch = real_batch(x, self.n_outputs, self._torch_device)

        def act(rows: torch.Tensor) -> torch.Tensor:
            return self._multiply_transposed(rows).mul_(self._scale)

        return like_input(self._read_in_calls(act, batch, width=self.n_inputs), x)

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
            Whether the realised matrix is the former one; if not, corrections that were measured with it are void.

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
        """Return the realised matrix `elapsed_s` seconds after programming; for the capability `wait`."""
        raise NotImplementedError(
            f"{type(self).__name__} declares the capability 'wait' and does not override _wait"
        )

    def _checked_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix to program, float32, on the device's torch device; see `program`."""
        self._require_open()
        return matrix_to_program(matrix, (self.n_outputs, self.n_inputs), self._torch_device)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        self._held()
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


class SeveralChips(ProgrammableDevice):
    """A matrix on several chips of one kind and description, each with its own part of the rows and columns.

    All chips work at once: a frame takes the time of one chip and the power of all. Outputs of chips that share rows
    are added digitally, after their converters. Each chip has a seed of its own.
    """

    def __init__(
        self,
        chip: type[ProgrammableDevice],
        description: DeviceDescription,
        n_inputs: int,
        n_outputs: int,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        rows, columns = _parts(n_outputs, description.n_outputs), _parts(n_inputs, description.n_inputs)
        count = len(rows) * len(columns)
        frames = description.frames.model_copy(update={"power_w": count * description.frames.power_w})
        whole = {"n_inputs": n_inputs, "n_outputs": n_outputs, "frames": frames}
        super().__init__(description.model_copy(update=whole), seed=seed, **options)
        medium = self._medium_settings

        def of(i: int, j: int) -> ProgrammableDevice:
            own = medium.model_copy(update={"seed": derive_seed(medium.seed, "chip", i, j) >> 1})
            return chip(
                description.model_copy(update={"medium": own, "monitor": None, "access": None}),
                n_inputs=columns[j].stop - columns[j].start,
                n_outputs=rows[i].stop - rows[i].start,
                seed=derive_seed(seed, "chip", i, j),
                **options,
            )

        self._placed = [
            (of(i, j), rows[i], columns[j]) for i in range(len(rows)) for j in range(len(columns))
        ]
        """Each chip with its outputs and inputs of the window, by rows."""
        self._chips, self._across = [chip for chip, _, _ in self._placed], len(columns)
        self._saturated: torch.Tensor | None = None

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of a chip."""
        return self._chips[0].capabilities

    @property
    def converter(self) -> Converter:
        """The converter of a chip; each chip converts its own part of the inputs."""
        own, columns = self._chips[0].converter, self._placed[0][2]
        return replace(own, tile_inputs=min(own.tile_inputs or sys.maxsize, columns.stop))

    @property
    def saturated(self) -> torch.Tensor | None:
        """Which rows met a bound on any chip."""
        return self._saturated

    @property
    def described_noise(self) -> NoiseModel:
        """The law of the sum over the chips of an output, its limits over all outputs; NoiseUnknown if none is."""
        self._held()
        laws, scale = [chip.noise for chip in self._chips], self._scale
        lattices = [law for law in laws if isinstance(law, ConverterLatticeNoise)]
        if len(lattices) == len(laws) and len({law.step for law in lattices}) == 1:
            return ConverterLatticeNoise(
                step=scale * lattices[0].step,
                std_low=scale * min(law.std_low for law in lattices),
                std_high=scale * max(law.std_high for law in lattices),
                conversions=sum(law.conversions for law in lattices[: self._across]),
                clips=any(law.clips for law in lattices),
                n_outputs=self.n_outputs,
            )
        if all(isinstance(law, (SignalGaussianNoise, GaussianNoise)) for law in laws):
            bounds = [law.variance_bounds() for law in laws]
            rows = [bounds[first : first + self._across] for first in range(0, len(bounds), self._across)]
            low = min(sum(float(np.min(each[0])) for each in row) for row in rows)
            high = max(sum(float(np.max(each[1])) for each in row) for row in rows)
            return SignalGaussianNoise(
                std_low=scale * low**0.5, std_high=scale * high**0.5, n_outputs=self.n_outputs
            )
        raise NoiseUnknown(
            f"device {self.name!r}: the law of several chips is known for chips with Gaussian noise, or with equal "
            "converters; calibrate the device"
        )

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Return the sum of the chips' variances; CapabilityMissing if they compute none."""
        self._held()
        total = torch.zeros((len(x), self.n_outputs), dtype=torch.float64, device=self._torch_device)
        for chip, (_, rows, columns) in zip(self._chips, self._placed, strict=True):
            total[:, rows] += chip.reading_variance(x[:, columns])
        return total.mul_(self._scale**2)

    def programming_std(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the chips' programming spread, each for its own part of the matrix."""
        return self._each(matrix, lambda chip, part: chip.programming_std(part))

    def weight_moments(self, matrix: torch.Tensor, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the moments of a chip, which depend on the entry only."""
        return self._chips[0].weight_moments(matrix, seconds)

    def spread_error(self) -> float | None:
        """Return the error of the first chip, the largest one."""
        return self._chips[0].spread_error()

    def programming_cost(self) -> tuple[float, float]:
        """Return the seconds of the slowest chip and the joules of all."""
        costs = [chip.programming_cost() for chip in self._chips]
        return max(seconds for seconds, _ in costs), sum(joules for _, joules in costs)

    def held_state(self) -> dict[str, torch.Tensor]:
        """Return the states of all chips, numbered by rows."""
        state = super().held_state()
        for number, chip in enumerate(self._chips):
            state |= {f"{number}.{name}": value for name, value in chip.held_state().items()}
        return state

    def restore(self, matrix: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
        """See `ProgrammableDevice.restore`; return whether all chips hold their former matrices."""
        checked, same = self._checked_matrix(matrix), True
        for number, (chip, rows, columns) in enumerate(self._placed):
            named = (name.partition(".") for name in state)
            own = {key: state[f"{first}.{key}"] for first, _, key in named if key and first == str(number)}
            same &= chip.restore(checked[rows, columns].contiguous(), own)
        self._scale, self._elapsed_s = 1.0, float(state["elapsed_s"])
        self._weights = self._each(checked, lambda chip, _: chip.matrix())
        self._begin_monitor(None)
        return same

    def _open(self) -> None:
        for chip in self._chips:
            self.opened_parts.callback(chip.open().close)

    def _each(
        self, matrix: torch.Tensor, act: Callable[[ProgrammableDevice, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return a matrix put together from each chip's result for its own part."""
        found = torch.empty_like(matrix)
        for chip, rows, columns in self._placed:
            found[rows, columns] = act(chip, matrix[rows, columns].contiguous())
        return found

    def _program(self, matrix: torch.Tensor) -> torch.Tensor:
        return self._each(matrix, lambda chip, part: chip.program(part))

    def _wait(self, elapsed_s: float) -> torch.Tensor:
        return self._each(self._held(), lambda chip, _: chip.require("wait").wait(elapsed_s - chip.elapsed_s))

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        y, self._saturated = x.new_zeros((len(x), self.n_outputs)), None
        for chip, rows, columns in self._placed:
            y[:, rows] += chip.multiply(x[:, columns])
            met = chip.saturated
            if met is not None:
                self._saturated = met if self._saturated is None else self._saturated | met
        return y

    def _multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros((len(x), self.n_inputs))
        for chip, rows, columns in self._placed:
            y[:, columns] += chip.require("multiply_transposed").multiply_transposed(x[:, rows])
        return y

    def _seek(self, step: int) -> None:
        for chip in self._chips:
            chip.seek(step)


def _parts(length: int, most: int) -> list[slice]:
    """Return the range up to `length` in parts of at most `most`."""
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]
