"""A bench as a noisy device: readings from four frames of a ternary vector, its setup, its checks and its matrix."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from scipy.linalg import hadamard
from typing_extensions import override

from opusim import checks
from opusim.description.camera import FRAMES_PER_TERNARY, BenchSettings
from opusim.description.schema import DeviceDescription, parse_description
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import measure_noise
from opusim.devices.bench.instruments import (
    MARKED,
    Factory,
    MirrorLayout,
    Sequencer,
    factory_of,
    instrument_calls,
    mirror_layout,
    opened,
)
from opusim.devices.bench.setup import (
    LEAST_KNOWN,
    BenchSetup,
    LightLook,
    look_at_light,
    measure_setup,
    nonlinearity,
    require_light,
    require_linear,
    retrieved,
    signed_sum,
)
from opusim.devices.kinds import Capability
from opusim.devices.usage import DeviceWork
from opusim.errors import CapabilityMissing, ConfigError, DeviceFault, DeviceUnavailable, NoiseUnknown
from opusim.files import read_bytes, write_file
from opusim.noise import MeasuredNoise

_LOG = logging.getLogger("opusim")
_PATTERN_METHODS, _GRABBER_METHODS = ("load", "run", "close"), ("configure", "grab", "close")
_MOST_AT_ONCE, _MIRRORS_AT_ONCE = 256, 2**27
"""Patterns, and mirrors of patterns (128 MiB), that are loaded at once."""
_NOISE_READINGS = 32
"""Readings of each vector by which an opening measures the noise."""
_LEAST_LEVEL = 0.5
"""Share of the wanted level below which a setup is told to have weak light."""
_MOST_COLUMNS = 2**13
"""Most inputs for which a matrix is measured; each takes at least four frames."""
_MOST_BYTES = 2**33


class BenchDevice(NoisyDevice):
    """y = B x + noise from the frames of your own mirror array and camera.

    A ternary vector x = p - n takes four frames: p, its complement in the anchor, n and its complement;
    `opusim.devices.bench.setup` decodes them. Opening finds, or reads, exposure, region, outputs and scale, measures
    the noise (which credits nothing), and refuses a bench whose readings are not linear, with the cause. `intensities`
    gives the camera's numbers at the outputs, one frame for each binary vector.

    Attributes:
        setup: the exposure, region, outputs and scale in use.

    Args:
        description: one with a section ``[bench]``.
        patterns: opens the mirror array (`opusim.devices.bench.Patterns`), or None for ``bench.patterns``.
        grabber: opens the camera (`opusim.devices.bench.Grabber`), or None for ``bench.grabber``.
        **window: as for `opusim.devices.base.NoisyDevice`.

    Raises:
        ConfigError: the section is missing, or names no instruments and none are given.
        TypeError: an argument cannot be called.
    """

    can = NoisyDevice.can | {"intensities"}

    _counts_shown = True

    def __init__(
        self,
        description: DeviceDescription,
        *,
        patterns: Factory | None = None,
        grabber: Factory | None = None,
        **window: Any,
    ) -> None:
        super().__init__(description, **window)
        self._settings: BenchSettings = description.needed("bench", "a device of this kind needs [bench]")
        self._factories = {"patterns": patterns, "grabber": grabber}
        for key, given in self._factories.items():
            if given is not None and not callable(given):
                raise TypeError(
                    f"{key} = {given!r}: must open an instrument when it is called; give a class or a function"
                )
            if given is None and not getattr(self._settings, key):
                raise ConfigError(
                    description.name,
                    f"bench.{key}",
                    "names no instrument; write module:factory, or open the bench by opusim.devices.open_bench",
                )
        self._source: Sequencer | None = None
        self._setup: BenchSetup | None = None
        self._noise: MeasuredNoise | None = None
        self._matrix: np.ndarray | None = None
        self._light, self._is_told = 1.0, False

    # Properties

    @property
    def setup(self) -> BenchSetup:
        """The setup in use.

        Raises:
            DeviceUnavailable: the device was never opened.
        """
        if self._setup is None:
            raise DeviceUnavailable(f"device {self.name!r}: its setup is found when it opens; call open()")
        return self._setup

    @property
    @override
    def capabilities(self) -> frozenset[Capability]:
        """`matrix` once it was measured."""
        return self.can if self._matrix is None else self.can | {"matrix"}

    @property
    def described_noise(self) -> MeasuredNoise:
        """Variances of blank, half-dense and dense readings, as this opening measured them; nothing is credited."""
        if self._noise is None:
            raise NoiseUnknown(f"device {self.name!r}: its noise is measured when it opens; call open()")
        return self._noise

    @property
    def repeated_sequences(self) -> int:
        """Sequences that were shown again since the opening, because frames were lost or doubled."""
        return 0 if self._source is None else self._source.repeated

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """Return B as `measure_matrix` found it: float32, shape (n_outputs, n_inputs).

        Raises:
            CapabilityMissing: it was not measured.
        """
        if self._matrix is None:
            raise CapabilityMissing(
                f"device {self.name!r}: its matrix was not measured; call device.measure_matrix()"
            )
        return torch.from_numpy(self._matrix).to(self._torch_device)

    def measure_matrix(self, repeats: int = 4) -> torch.Tensor:  # (n_outputs, n_inputs)
        """Measure B from readings of the rows of a Hadamard matrix, and keep it beside the setup.

        B = (1 / (N R)) sum over readings of y h^T, with h the first n_inputs entries of the N rows, -1 and 1, N a power
        of two, each read R times. An entry's error has the variance Var[y] / (N R), with Var[y] that of a dense
        reading.

        Args:
            repeats: R, at least 1.

        Returns:
            float32, shape (n_outputs, n_inputs), in the units of readings; `matrix` returns it from now on, also after
            the next opening if ``bench.setup`` is given.

        Raises:
            ValueError: repeats is out of range, or the window has more than 8,192 inputs.
            DeviceError: the device fails.
            OSError: the file cannot be written.
        """
        self._require_open()
        setup = self.setup
        signed = self._signed_columns(setup.layout.anchor(), repeats)
        centre = (2 / setup.layout.mirrors_of_anchor) * setup.anchor_dn
        self._matrix = (setup.scale[:, None] * (signed - centre[:, None])).astype(np.float32)
        path = self._file(".matrix.npz")
        if path is not None:
            buffer = io.BytesIO()
            np.savez(buffer, matrix=self._matrix, outputs=setup.outputs, scale=setup.scale)
            write_file(path, buffer.getvalue())
        return self.matrix()

    def measure_transmission(self, repeats: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure the complex transmission matrix T by two anchors, up to a phase and a conjugation at each output.

        Anchors are all groups (field U), and all inputs without the reference (V). Signed frames tell G = Re(conj(U) T)
        and H = Re(conj(V) T), with sums over inputs Re(conj(U) V) and |V|^2, so that with b the angle from U to V
            e^(-i arg U) T = G / |U| + i (H / |V| - cos(b) G / |U|) / sin(b).
        The light of a binary frame x above the blank one is abs(T x)^2, DN; neither phase nor conjugation changes it.
        The sign of b is not known; the positive one is taken.

        Args:
            repeats: readings of each row of a Hadamard matrix under each anchor, at least 1.

        Returns:
            T, complex64, shape (n_outputs, n_inputs), square roots of a DN; and sin(b), float32, shape (n_outputs,):
            the error of T's imaginary part is that of its real part over sin(b).

        Raises:
            ValueError: repeats is out of range, or the window has more than 8,192 inputs.
            DeviceError: the device fails.
        """
        self._require_open()
        layout, size = self.setup.layout, np.sqrt(self.setup.anchor_dn)
        g = self._signed_columns(layout.anchor(), repeats) / 2
        h = self._signed_columns(~layout.reference(), repeats) / 2
        other = np.sqrt(np.maximum(h.sum(axis=1), 1e-9))
        cosine = np.clip(g.sum(axis=1) / (size * other), -1, 1)
        sine = np.sqrt(np.maximum(1 - cosine**2, 1e-6))
        real = g / size[:, None]
        imaginary = (h / other[:, None] - cosine[:, None] * real) / sine[:, None]
        found = torch.from_numpy((real + 1j * imaginary).astype(np.complex64)).to(self._torch_device)
        return found, torch.from_numpy(sine.astype(np.float32)).to(self._torch_device)

    def retrieve_transmission(self, frames_per_input: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the complex transmission matrix T by phase retrieval from intensities of random patterns.

        Neither reference nor anchor is shown, so that all outputs are found equally well, from fewer frames than
        `measure_transmission` takes; T has the same ambiguities. See `opusim.devices.bench.setup.retrieved`.

        Args:
            frames_per_input: random binary frames for each input, at least 6; as many blank frames as inputs, at least
                16, are shown besides.

        Returns:
            T, complex64, shape (n_outputs, n_inputs), square roots of a DN; and the share of the light that it leaves
            unexplained, float32, shape (n_outputs,), which is large where no solution was found.

        Raises:
            ValueError: frames_per_input is out of range, or the window has more than 8,192 inputs.
            DeviceError: the device fails.
        """
        self._require_open()
        checks.integer(minimum=6, frames_per_input=frames_per_input)
        self._require_columns()
        rng = np.random.default_rng(0)
        shown = rng.integers(0, 2, (frames_per_input * self.n_inputs, self.n_inputs), dtype=np.uint8)
        blank = np.zeros((max(16, self.n_inputs), self.n_inputs), dtype=np.uint8)
        dark = self.intensities(blank).astype(np.float64).mean(axis=0)
        matrix, unexplained = retrieved(shown, self.intensities(shown) - dark, rng)
        found = torch.from_numpy(matrix.astype(np.complex64)).to(self._torch_device)
        return found, torch.from_numpy(unexplained.astype(np.float32)).to(self._torch_device)

    def _require_columns(self) -> None:
        """Refuse a window that is too wide for its matrix to be measured."""
        if self.n_inputs > _MOST_COLUMNS:
            raise ValueError(
                f"n_inputs = {self.n_inputs}: columns of at most {_MOST_COLUMNS} inputs are measured; open a smaller "
                "window"
            )

    def _signed_columns(self, anchor: np.ndarray, repeats: int) -> np.ndarray:
        """Return I_p - I_(a-p) - I_n + I_(a-n) of each input, DN, (n_outputs, n_inputs), by a Hadamard matrix."""
        checks.integer(repeats=repeats, minimum=1)
        self._require_columns()
        rows = hadamard(1 << (self.n_inputs - 1).bit_length(), dtype=np.int8)[:, : self.n_inputs]

        def signed(x: torch.Tensor) -> torch.Tensor:
            return self._signed(x, anchor).float()

        total = np.zeros((self.n_outputs, self.n_inputs))
        for _ in range(repeats):
            taken = self._read_in_calls(signed, torch.from_numpy(rows.astype(np.float32)))
            total += taken.double().numpy().T @ rows
        return total / (repeats * len(rows))

    # The interface of NoisyDevice

    def _open(self) -> None:
        settings, period_us = self._settings, self.description.frames.frame_period_us
        patterns = self._opened("patterns", _PATTERN_METHODS)
        grabber = self._opened("grabber", _GRABBER_METHODS)
        layout = mirror_layout(
            (int(patterns.shape[0]), int(patterns.shape[1])),
            self.n_inputs,
            macro_pixel=settings.macro_pixel,
            reference_share=settings.reference_share,
            name=self.name,
            window=(settings.window_rows, settings.window_columns),
        )
        source = Sequencer(
            patterns,
            grabber,
            layout,
            name=self.name,
            period_us=period_us,
            at_once=settings.frames_per_sequence
            or max(MARKED, min(_MOST_AT_ONCE, _MIRRORS_AT_ONCE // math.prod(layout.shape))),
            tries=settings.tries,
            count=self._meter.count,
        )
        self._source = source
        # Without a file, an instrument that is opened again keeps the setup, and with it B.
        kept = self._read_setup(layout, source.bits) or self._setup
        setup = kept or self._measure_setup(source, grabber.shape)
        if setup is not self._setup:
            self._setup, self._matrix = setup, self._read_matrix(setup)
        source.configure(exposure_us=setup.exposure_us, roi=setup.roi, binning=setup.binning)
        first = look_at_light(source, setup.outputs)
        try:
            require_light(first, setup.anchor_dn, settings, self.name, setup_of=kept.date if kept else None)
        except DeviceFault:
            # Numbers that are not proportional to light look like other light, or another medium.
            if first.full <= settings.most_saturated and first.light(setup.anchor_dn) > LEAST_KNOWN:
                self._require_linear(source, first)
            raise
        self._light = first.light(setup.anchor_dn)
        blank, anchor = setup.levels_dn
        source.expect(blank, blank + self._light * (anchor - blank))
        self._noise = measure_noise(self._readings, self.n_inputs, _NOISE_READINGS)
        self._require_linear(source, first)

    def _require_linear(self, source: Sequencer, first: LightLook) -> None:
        """Refuse a bench whose readings do not add up, and one that changes meanwhile."""
        found = nonlinearity(self._readings, self.n_inputs) if self.n_inputs > 1 else (0.0, 0.0)
        last = look_at_light(source, self.setup.outputs)
        require_light(last, first.anchor_dn, self._settings, self.name, setup_of=None)
        require_linear(found, last, source, self._settings, self.name)

    def _close(self) -> None:
        self._source = None

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._readings(x).float().to(self._torch_device)

    def _intensities(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return torch.zeros((0, self.n_outputs), device=self._torch_device)
        source = self._open_source()
        numbers = source.show(source.layout.data(x.cpu().numpy()), self.setup.outputs)
        return torch.from_numpy(numbers.astype(np.float32)).to(self._torch_device)

    def _seek(self, step: int) -> None:
        """Say once if nothing watches the steps; hardware does not repeat its noise."""
        if self.description.monitor is None and not self._is_told:
            self._is_told = True
            _LOG.warning(
                "opusim: device %r: nothing watches the bench, so light or a medium that changes during the steps "
                "passes; add [monitor] to its description (--set device.monitor.every_steps=10), or give open_bench "
                "monitor={'every_steps': 10}",
                self.name,
            )

    @override
    def _saturated_share(self, vectors: torch.Tensor) -> float:
        """Show every frame of the projections."""
        source = self._open_source()
        frames = source.show(source.layout.ternary(vectors.numpy()), self.setup.outputs)
        return float(np.mean(frames >= source.top_dn, axis=1).max())

    @override
    def _pattern_frames(self, patterns: torch.Tensor) -> np.ndarray:
        source = self._open_source()
        shown = source.layout.data(patterns.numpy())
        pairs = np.stack([shown, source.layout.anchor() & ~shown], axis=1).reshape(-1, shown.shape[1])
        frames = source.show(pairs, self.setup.outputs)
        return frames.astype(np.float32)

    @property
    def _saturation_work(self) -> DeviceWork:
        settings = self.description.monitor
        vectors = 0 if settings is None else settings.reference_vectors
        return DeviceWork(frames=vectors * FRAMES_PER_TERNARY, calls=1)

    def _readings(self, x: torch.Tensor) -> torch.Tensor:
        """Return readings of ternary vectors, float64."""
        return torch.from_numpy(self.setup.decode(self._signed(x).numpy(), x.cpu().numpy()))

    def _signed(self, x: torch.Tensor, anchor: np.ndarray | None = None) -> torch.Tensor:
        """Return I_p - I_(a-p) - I_n + I_(a-n) of ternary vectors, DN, float64; `anchor` None: all groups are on."""
        source, vectors = self._open_source(), x.cpu().numpy()
        found = np.empty((len(vectors), self.n_outputs))
        at_once = max(1, source.at_once // FRAMES_PER_TERNARY)
        for start in range(0, len(vectors), at_once):
            part = slice(start, start + at_once)
            frames = source.show(source.layout.ternary(vectors[part], anchor), self.setup.outputs)
            found[part] = signed_sum(frames) / self._light
        return torch.from_numpy(found)

    def _open_source(self) -> Sequencer:
        if self._source is None:
            raise DeviceUnavailable(f"device {self.name!r} lost its instruments; call close() and open()")
        return self._source

    def _opened(self, what: str, methods: tuple[str, ...]) -> Any:
        """Open an instrument, which is closed when the device is, or when the rest of the opening fails."""
        given = self._factories[what]
        named = getattr(self._settings, what)
        factory = factory_of(self.name, f"bench.{what}", named) if given is None else given
        found = opened(self.name, named or what, factory, methods)

        def closed() -> None:
            with instrument_calls(self.name, f"{what}.close"):
                found.close()

        self.opened_parts.callback(closed)
        return found

    def _file(self, ending: str) -> Path | None:
        """Return a file of this window in the setup's folder, or None without one."""
        folder = self._settings.setup
        return None if folder is None else Path(folder) / f"{self.n_inputs}x{self.n_outputs}{ending}"

    def _read_setup(self, layout: MirrorLayout, bits: int) -> BenchSetup | None:
        """Return the setup that an earlier opening kept, or None; ConfigError if it belongs to other settings."""
        path = self._file(".npz")
        if path is None or not path.exists():
            return None
        setup, settings = BenchSetup.load(path, self.name), self._settings
        same = (setup.layout.corner, setup.layout.shape) == (layout.corner, layout.shape)
        same &= np.array_equal(setup.layout.owner, layout.owner) and setup.binning == settings.binning
        same &= settings.exposure_us is None or abs(setup.exposure_us / settings.exposure_us - 1) < 0.01
        if not same or len(setup.outputs) != self.n_outputs:
            raise ConfigError(
                self.name,
                "bench.setup",
                f"{path} was measured with other mirrors, exposure or binning; put the keys of [bench] back, remove "
                "the file to measure anew, or give another bench.setup",
            )
        if setup.bits not in (0, bits):
            raise ConfigError(
                self.name,
                "bench.setup",
                f"{path} was measured with a camera of bits = {setup.bits}, and it now has bits = {bits}; set "
                f"bits = {setup.bits} again, or remove the file to measure anew",
            )
        return setup

    def _measure_setup(self, source: Sequencer, sensor: tuple[int, int]) -> BenchSetup:
        """Measure the setup, and save it if ``bench.setup`` names a folder."""
        settings, period_us = self._settings, self.description.frames.frame_period_us
        longest_us = period_us - settings.readout_us
        if longest_us < settings.shortest_exposure_us:
            raise ConfigError(
                self.name,
                "bench.readout_us",
                f"is {settings.readout_us:g} us, which leaves no exposure of frames.frame_period_us = {period_us:g} "
                "us; lengthen the period",
            )
        setup = measure_setup(
            source,
            settings,
            n_outputs=self.n_outputs,
            name=self.name,
            longest_us=longest_us,
            sensor=(0, 0, int(sensor[0]), int(sensor[1])),
        )
        path = self._file(".npz")
        _LOG.info(
            "opusim: device %r: exposure %.4g us, region %s, an output every %d x %d pixels",
            *(self.name, setup.exposure_us, setup.roi, *setup.grain),
        )
        blank, anchor = setup.levels_dn
        wanted = settings.range_share * (source.top_dn - blank)
        if settings.exposure_us is None and anchor - blank < _LEAST_LEVEL * wanted:
            _LOG.warning(
                "opusim: device %r: weak light: at the longest exposure, %.4g us, the anchor shows %.0f DN, and "
                "bench.range_share asks for %.0f; brighten the laser, or lengthen frames.frame_period_us",
                *(self.name, setup.exposure_us, anchor - blank, wanted),
            )
        if path is None:
            _LOG.warning(
                "opusim: device %r: its setup is not kept, so its matrix is another one in the next process, also if a "
                "run resumes; set bench.setup to a folder",
                self.name,
            )
        else:
            setup.save(path)
        return setup

    def _read_matrix(self, setup: BenchSetup) -> np.ndarray | None:
        """Return the matrix that was measured with this setup, or None."""
        path = self._file(".matrix.npz")
        if path is None or not path.exists():
            return None
        try:
            with np.load(io.BytesIO(read_bytes(path, at_most=_MOST_BYTES)), allow_pickle=False) as found:
                is_same = np.array_equal(found["outputs"], setup.outputs)
                is_same = is_same and np.array_equal(found["scale"], setup.scale)
                return np.asarray(found["matrix"], dtype=np.float32) if is_same else None
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            told = " ".join(str(error).split())
            raise ConfigError(
                self.name, "bench.setup", f"{path} is no matrix ({told}); remove it, and measure it again"
            ) from error


def open_bench(
    patterns: Factory,
    grabber: Factory,
    *,
    n_inputs: int,
    n_outputs: int,
    frame_period_us: float,
    power_w: float = 0.0,
    name: str = "bench",
    access: Mapping[str, Any] | None = None,
    monitor: Mapping[str, Any] | None = None,
    mode: str = "experiment",
    torch_device: torch.device | str = "cpu",
    **settings: Any,
) -> BenchDevice:
    """Open your own mirror array and camera as a device; use the result as a context manager.

        device = open_bench(Mirrors, Camera, n_inputs=100, n_outputs=1000, frame_period_us=1000.0, setup="my_setup")

    Args:
        patterns: opens the mirror array, without arguments: `opusim.devices.bench.Patterns`.
        grabber: opens the camera: `opusim.devices.bench.Grabber`.
        n_inputs: inputs of the device.
        n_outputs: outputs of the device.
        frame_period_us: time from frame to frame, microseconds.
        power_w: power drawn while running, watts.
        name: of the device, for its lock and in messages.
        access: keys of ``[access]``, such as ``{"timeout_s": 60.0}``.
        monitor: keys of ``[monitor]``.
        mode: as for `opusim.open_device`.
        torch_device: where readings are put.
        **settings: keys of ``[bench]`` (`opusim.description.camera.BenchSettings`).

    Returns:
        The device, open.

    Raises:
        ConfigError: a setting out of range.
        TypeError: an instrument is given instead of the function that opens it.
        DeviceError: an instrument does not open, or the bench cannot be used; the message says why.
    """
    given = {"status": "override", "source": "given to open_bench"}
    frames = {
        "frame_period_us": float(frame_period_us),
        "power_w": float(power_w),
        "frames_per_projection": FRAMES_PER_TERNARY,
    }
    content: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "kind": "bench",
        "title": "A bench of one's own",
        "n_inputs": n_inputs,
        "n_outputs": n_outputs,
        "frames": frames,
        "bench": settings,
        "provenance": dict.fromkeys(("n_inputs", "n_outputs", *(f"frames.{key}" for key in frames)), given),
    }
    content |= {
        key: dict(value) for key, value in (("access", access), ("monitor", monitor)) if value is not None
    }
    device = BenchDevice(
        parse_description("open_bench", content),
        patterns=patterns,
        grabber=grabber,
        mode=mode,
        torch_device=torch_device,
    )
    return device.open()
