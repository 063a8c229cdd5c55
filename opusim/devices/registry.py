"""Open devices by the name or the path of their description, for one process or for all processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from opusim import checks
from opusim.description.schema import DeviceDescription, load_description, packaged_names
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import Baseline
from opusim.devices.certificate import Certificate, load_certificate
from opusim.devices.inputs import Array, check_reading
from opusim.devices.kinds import device_factory
from opusim.devices.monitor import BEFORE_ALL, Unmonitored
from opusim.devices.usage import DeviceWork, Usage
from opusim.errors import ConfigError, DeviceError, NoiseUnknown
from opusim.noise import NoiseModel
from opusim.processes.ranks import Ranks
from opusim.tables import html_table, table_text


class Descriptions(tuple[DeviceDescription, ...]):
    """Descriptions of devices, which show themselves as a table."""

    __slots__ = ()
    _COLUMNS = ("name", "kind", "inputs", "outputs", "what it is")

    def _rows(self) -> list[tuple[str, ...]]:
        return [(d.name, d.kind, f"{d.n_inputs:,}", f"{d.n_outputs:,}", d.title) for d in self]

    def __repr__(self) -> str:
        """Return the table as text."""
        return table_text(self._COLUMNS, self._rows())

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return html_table(self._COLUMNS, self._rows())


def list_devices() -> Descriptions:
    """Return the descriptions that come with opusim, ordered by name."""
    return Descriptions(load_description(name) for name in packaged_names())


def open_device(
    name_or_path: str | Path,
    *,
    mode: str = "experiment",
    seed: int = 0,
    torch_device: torch.device | str = "cpu",
    n_inputs: int | None = None,
    n_outputs: int | None = None,
    certificate: str | Path | None = None,
    **overrides: Any,
) -> NoisyDevice:
    """Open a device; use the result as a context manager.

        >>> with open_device("gaussian", n_inputs=4, n_outputs=6, noise={"sigma": 0.2}) as device:
        ...     device.noise.describe()
        'Gaussian, standard deviation 0.2 at each of 6 outputs'

    Args:
        name_or_path: name of a packaged description, a path ending in ``.toml``, or the address of a served device,
            ``remote://HOST:PORT`` (`opusim device serve`).
        mode: ``experiment`` or ``release`` (see `opusim.randomness.streams`).
        seed: seed of the noise in ``experiment``, in [0, 2^64). The medium's seed is part of the
            description.
        torch_device: on which a simulation computes.
        n_inputs: width of the window, None for the whole device. A window larger than a simulated programmable device
            uses several of it.
        n_outputs: outputs of the window, or None for all.
        certificate: path of a certificate (`opusim device calibrate`) whose limits `noise` is to state; None for the
            description's numbers.
        **overrides: sections laid over the description's, such as ``noise={"sigma": 0.2}``.

    Returns:
        The device, open.

    Raises:
        ConfigError: a description that cannot be used, an unknown kind, a window larger than the device, or a
            certificate of another device.
        TypeError, ValueError: an argument out of range.
        DeviceError: the device cannot be opened.
    """
    checks.instance((str, Path), name_or_path=name_or_path)
    return open_described(
        load_description(name_or_path, overrides),
        mode=mode,
        seed=seed,
        torch_device=torch_device,
        n_inputs=n_inputs,
        n_outputs=n_outputs,
        certificate=certificate,
    )


def open_described(
    description: DeviceDescription,
    *,
    mode: str = "experiment",
    seed: int = 0,
    torch_device: torch.device | str = "cpu",
    n_inputs: int | None = None,
    n_outputs: int | None = None,
    certificate: str | Path | Certificate | None = None,
) -> NoisyDevice:
    """Open a device from a description that was read before; arguments and errors as for `open_device`.

    The certificate may have been read before, too.
    """
    factory = device_factory(description.name, description.kind)
    try:
        device: NoisyDevice = getattr(factory, "for_window", factory)(
            description,
            n_inputs=n_inputs,
            n_outputs=n_outputs,
            mode=mode,
            seed=seed,
            torch_device=torch_device,
        )
    except KeyError as error:  # the class looked up a key that its options lack
        key = error.args[0] if error.args else None
        if not isinstance(key, str) or key in description.options:
            raise
        reason = f"is missing; the kind {description.kind!r} needs it"
        raise ConfigError(description.name, f"options.{key}", reason) from error
    if certificate is not None:
        read = certificate if isinstance(certificate, Certificate) else load_certificate(certificate)
        device.attach_certificate(read)
    return device.open()


def open_window(name: str, inputs: int, outputs: int, seed: int) -> NoisyDevice:
    """Open a window of a device, no larger than the device is."""
    description = load_description(name)
    return open_described(
        description,
        n_inputs=min(inputs, description.n_inputs),
        n_outputs=min(outputs, description.n_outputs),
        seed=seed,
    )


TIMEOUT_S = 300.0
_NOT_SOUGHT = -1


_PROJECT, _DRAW, _PROJECT_FOR_ALL = range(3)
"""What a call asks for."""


class SharedDevice(NoisyDevice):
    """A device that several processes use as one: `opusim.open_shared_device` opens it.

    The first process holds the device (`held`). In each call the others send it their rows, it reads the rows of all
    processes in the order of ranks, in one reading call, and sends each process its readings. A row therefore has the
    same noise as in a single process that shows all rows in this order.

    Every process must make the same calls in the same order; a process without rows passes an empty batch. An error of
    the device, or of one process's arguments, is raised in every process. `seek` takes effect in the next call.
    """

    reads_noise = True

    def __init__(self, opener: Callable[[], NoisyDevice], ranks: Ranks) -> None:
        self.held: NoisyDevice | None = None
        self._ranks, self._step, self._has_met = ranks, _NOT_SOUGHT, False

        def opened() -> tuple[DeviceDescription, dict[str, Any], NoiseModel | None, Usage]:
            self.held = device = opener().open()
            window = {"n_inputs": device.n_inputs, "n_outputs": device.n_outputs, "mode": device.mode}
            return device.description, window, device.stated_noise, device.usage

        try:
            whole, window, self._law, self._usage = ranks.on_first(opened)
            super().__init__(whole.model_copy(update={"access": None}), **window)  # the held device has it
            self.description, self.world = whole, ranks.world
            self.open()
        except BaseException:
            if self.held is not None:
                self.held.close()
            raise

    # Answered by the held device; the other processes have copies of what does not change

    @property
    @override
    def described_noise(self) -> NoiseModel:
        if self._law is None:
            raise NoiseUnknown(f"device {self.name!r} states no law for its noise; calibrate it")
        return self._law

    @override
    def attach_certificate(self, certificate: Certificate) -> None:
        certificate.check_device(self.description, n_outputs=self.n_outputs, n_inputs=self.n_inputs)
        if self.held is not None:
            self.held.attach_certificate(certificate)
        self._certified = certificate.certified(self.described_noise)

    @override
    def credit_noise(self) -> None:
        if self.held is not None:
            self.held.credit_noise()

    @property
    @override
    def repeats_noise(self) -> bool:
        return super().repeats_noise if self.held is None else self.held.repeats_noise

    @property
    @override
    def usage(self) -> Usage:
        """What the device has done for all processes, up to this one's last call."""
        return self._usage if self.held is None else self.held.usage

    @property
    @override
    def monitor(self) -> Unmonitored:
        return self._monitor if self.held is None else self.held.monitor

    @override
    def compare_with(self, baseline: Baseline, step: int = BEFORE_ALL) -> None:
        if self.held is not None:
            self.held.compare_with(baseline, step)

    @override
    def upkeep(self, first: int, end: int, *, inspections: int = 0) -> DeviceWork:
        return DeviceWork() if self.held is None else self.held.upkeep(first, end, inspections=inspections)

    # Reading

    @override
    def project(self, x: Array) -> Array:
        with self._together():
            return super().project(x)

    @override
    def draw(self, shape: Sequence[int]) -> Tensor:
        """Draw on all processes together; their shapes may differ in the first length only."""
        with self._together():
            return super().draw(shape)

    @override
    def project_for_all(self, x: Tensor) -> Tensor:
        """Read the first process's x once, and send the reading to every process."""
        with self._together():
            self._require_open()
            self._agree_on(_PROJECT_FOR_ALL, len(x), 0)
            reading = torch.empty(len(x), self.n_outputs)
            self._read_on_first(lambda device: reading.copy_(device.project(x).cpu()))
            self._ranks.broadcast_tensors([reading])
            return reading.to(x.device)

    @override
    def agree(self, rows: int) -> tuple[int, int]:
        counts = [found for (found,) in self._ranks.rows([rows])]
        return sum(counts[: self._ranks.rank]), max(counts)

    def _project(self, x: Tensor) -> Tensor:
        counts = self._agree_on(_PROJECT, len(x), x.shape[1])
        rows = self._ranks.gather(x.to("cpu", torch.int8), counts)
        shape = (sum(counts), self.n_outputs)
        return self._shared_out(lambda device: device.project(rows), shape, counts).to(x.device)

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        width = shape[-1] if len(shape) > 1 else 1
        counts = self._agree_on(_DRAW, torch.Size(shape).numel() // max(width, 1), width)
        drawn = self._shared_out(
            lambda device: device.draw((sum(counts), width)), (sum(counts), width), counts
        )
        return drawn.reshape(shape)

    def _seek(self, step: int) -> None:
        self._step = step

    @override
    def _begin_monitor(self, baseline: Baseline | None) -> None:
        """The held device has the monitor."""

    def _shared_out(
        self, read: Callable[[NoisyDevice], Tensor], shape: tuple[int, int], counts: Sequence[int]
    ) -> Tensor:
        """Read on the first process and return this process's rows of the reading."""
        readings = None if self.held is None else torch.empty(shape)

        def act(device: NoisyDevice) -> None:
            if readings is not None:
                found = read(device).cpu()
                check_reading(found, shape, self.name)
                readings.copy_(found)

        self._read_on_first(act)
        mine = torch.empty(counts[self._ranks.rank], shape[1])
        return self._ranks.scatter(readings, mine, counts)

    def _read_on_first(self, act: Callable[[NoisyDevice], object]) -> None:
        """Position the held device and let it act; an error is raised on every process."""

        def read() -> Usage:
            device = self.held
            if device is None:
                raise DeviceError(f"device {self.name!r} is held by no process; open it on the first one")
            if self._step != _NOT_SOUGHT:
                device.seek(self._step)
                self._step = _NOT_SOUGHT
            act(device)
            return device.usage

        self._usage = self._ranks.on_first(read)
        self._step = _NOT_SOUGHT

    def _agree_on(self, act: int, rows: int, width: int) -> list[int]:
        """Return each process's number of rows; DeviceError unless all of them have made the same call."""
        self._has_met = True
        step = self._step - 2**64 if self._step >= 2**63 else self._step  # as a signed number of 64 bits
        found = self._ranks.rows([act, step, int(self._step == _NOT_SOUGHT), width, rows])
        if len({tuple(numbers[:4]) for numbers in found}) > 1:
            raise DeviceError(
                f"device {self.name!r} is shared by {self._ranks.world} processes, which made different calls; seek "
                "the same step and make the same calls in the same order on each, with an empty batch if there is "
                "nothing to show"
            )
        return [numbers[-1] for numbers in found]

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Hand an error to the other processes if it is raised before they have met in this call."""
        self._has_met = False
        try:
            yield
        except Exception as error:
            if not self._has_met:
                self._ranks.meet(error)
            raise

    def _open(self) -> None:
        def opened() -> None:
            if self.held is not None:
                self.held.open()

        self._ranks.on_first(opened)

    def _close(self) -> None:
        if self.held is not None:
            self.held.close()


def open_shared_device(
    name_or_path: str | Path, *, timeout_s: float = TIMEOUT_S, **options: Any
) -> SharedDevice:
    """Open one device for all processes of `torch.distributed`; each process calls this after `init_process_group`.

    The first process opens it and reads for all; see `SharedDevice` for what the others must do. With a
    `opusim.FeedbackAlignment` in a DistributedDataParallel loop nothing else changes.

        >>> with open_shared_device("gaussian", n_inputs=4, n_outputs=6) as device:  # one process here
        ...     device.draw((2, 6)).shape
        torch.Size([2, 6])

    Args:
        name_or_path: See `opusim.open_device`.
        timeout_s: Seconds that a process waits for the others in a call, above 0.
        **options: The other arguments of `opusim.open_device`; the first process's are used.

    Returns:
        The device, open.

    Raises:
        ConfigError, TypeError, ValueError, DeviceError: As `opusim.open_device`, on every process.
        ProcessLost: Another process ended or did not answer in time.
    """
    return SharedDevice(lambda: open_device(name_or_path, **options), Ranks(timeout_s=timeout_s))
