"""The tests that every noisy device must pass, as a class to inherit.

    class TestMyDevice(DeviceContract):
        def open_window(self, **options):
            return open_device("my_device.toml", n_inputs=12, n_outputs=40, **options)

pytest then runs every test below on the device. Statistics allow five standard errors at fixed seeds, so a sound device
fails once in a million times, and noise that is 5 % off is found. A device that states no noise law, or only measured
variances, skips the tests of a law. A failure says what is wrong and what to do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from opusim.crossbar.programmable import Converter
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import measure_noise
from opusim.devices.kinds import CAPABILITIES, Capability
from opusim.errors import CapabilityMissing, DeviceUnavailable
from opusim.noise import ConverterLatticeNoise, GaussianNoise, MeasuredNoise, NoiseModel

N_INPUTS, N_OUTPUTS, BATCH = 12, 40, 5
_SURE = 5.0  # standard errors
_READINGS = 500
_CHECKED = 1.5
"""Most frames that a device shows for one that is asked for; a bench adds frames that check each sequence."""


def ternary_batch() -> torch.Tensor:
    """Return fixed ternary vectors, shape (5, 12)."""
    return torch.randint(-1, 2, (BATCH, N_INPUTS), generator=torch.Generator().manual_seed(2))


class DeviceContract:
    """Tests of a device; a subclass defines `open_window`."""

    replayable = True
    """Whether `seek` repeats the noise of a step in experiment mode; False for hardware."""

    def open_window(self, **options: Any) -> NoisyDevice:
        """Open the device with 12 inputs and 40 outputs; options are those of `opusim.open_device`."""
        raise NotImplementedError("give open_window in your test class")

    # Properties

    def test_it_tells_what_it_is(self) -> None:
        with self.open_window() as device:
            assert (device.n_inputs, device.n_outputs) == (N_INPUTS, N_OUTPUTS)
            assert device.name == device.description.name
            assert device.kind == device.description.kind
            if device.stated_noise is not None:
                low, high = device.noise.variance_bounds()
                assert np.broadcast_to(low, N_OUTPUTS).shape == np.broadcast_to(high, N_OUTPUTS).shape
                assert np.all((low >= 0) & (low <= high))
            assert device.is_open
        assert not device.is_open

    # What it can do

    def test_it_can_do_what_it_declares_and_names_what_it_lacks(self) -> None:
        with self.open_window() as device:
            assert {"project"} <= device.capabilities <= set(CAPABILITIES)
            for capability in CAPABILITIES:
                if capability in device.capabilities:
                    assert callable(getattr(device.require(capability), capability))
                else:
                    message = f"{device.name!r} .* lacks the capability {capability!r}"
                    with pytest.raises(CapabilityMissing, match=message):
                        device.require(capability)

    def test_the_matrix_is_that_of_the_readings(self) -> None:
        with self.open_window() as device:
            b = _able(device, "matrix").matrix()
            assert (b.shape, b.dtype) == ((N_OUTPUTS, N_INPUTS), torch.float32)
            device.seek(0)
            x = ternary_batch()[0]
            left = _mean(device, x) - (x.float() @ b.cpu().T).double().numpy()
            error = math.sqrt(_variance(device) / _READINGS)
            assert _are_small(left, error, bias=2e-2 + _rounding(device)), (
                f"readings differ from matrix() x by {_rms(left):.3g} rms, and their noise explains {error:.3g}: "
                "return the matrix that the device applies, in the units of its readings"
            )

    def test_intensities_are_those_of_one_field(self) -> None:
        """Fields add: abs(u + v) lies between abs(abs(u) - abs(v)) and abs(u) + abs(v) at every output."""
        with self.open_window() as device:
            camera, frames = _able(device, "intensities"), torch.zeros((4, N_INPUTS), dtype=torch.uint8)
            frames[1, : N_INPUTS // 2], frames[2, N_INPUTS // 2 :], frames[3] = 1, 1, 1
            opened = device.usage.frames
            shown = camera.intensities(frames.repeat(_READINGS, 1)).double().cpu().numpy()
            assert 4 * _READINGS <= device.usage.frames - opened <= _CHECKED * 4 * _READINGS
            assert shown.shape == (4 * _READINGS, N_OUTPUTS)
            numbers = shown.reshape(_READINGS, 4, N_OUTPUTS)
            means, errors = numbers.mean(0), numbers.std(0, ddof=1) / math.sqrt(_READINGS)
            error = (_SURE + 1) * np.sqrt(np.sum(errors**2, axis=0)) + 1e-6
            u, v = (np.sqrt(np.maximum(means[row] - means[0], 0)) for row in (1, 2))
            both, slack = means[3] - means[0], 2 * error
            assert np.all(both <= (u + v) ** 2 + slack * (1 + (u + v) / np.maximum(np.minimum(u, v), 1e-9)))
            assert np.all(both >= (u - v) ** 2 - slack * (1 + (u + v) / np.maximum(np.minimum(u, v), 1e-9)))
            assert float(both.mean()) > float(error.mean())
            with pytest.raises(ValueError, match="x holds -1: a frame shows 0 or 1"):
                camera.intensities(-frames.to(torch.int8))

    def test_a_programmed_matrix_is_told_as_realised(self) -> None:
        with self.open_window() as device:
            crossbar = _able(device, "program")
            wanted = _real_matrix()
            told = getattr(device, "programming_std", None)  # the spread that a device may state
            spread = torch.zeros_like(wanted) if told is None else told(wanted).cpu()
            realised = crossbar.program(wanted)
            assert (realised.shape, realised.dtype) == ((N_OUTPUTS, N_INPUTS), torch.float32)
            assert torch.equal(crossbar.matrix(), realised)
            assert float((realised.cpu() * wanted).mean()) > 0.5 * float((wanted * wanted).mean())
            if bool((spread > 0).all()):
                squares = ((realised.cpu() - wanted) / spread).square().double()
                assert abs(float(squares.mean()) - 1) <= _SURE * math.sqrt(2 / squares.numel())
            else:
                assert float(realised.abs().max()) <= 1
                assert torch.equal(crossbar.program(realised), realised)
            for wrong in (wanted[1:], 2 * wanted, wanted.index_fill(0, torch.tensor([1]), torch.nan)):
                with pytest.raises(ValueError, match="matrix"):
                    crossbar.program(wrong)

    def test_products_are_those_of_the_told_matrix(self) -> None:
        with self.open_window() as device:
            product = _able(device, "multiply").multiply
            if "program" in device.capabilities:
                device.require("program").program(_real_matrix())
            x = torch.linspace(-1, 1, N_INPUTS).repeat(2 * _READINGS, 1)
            device.seek(0)
            y = product(x)
            assert (y.shape, y.dtype) == ((2 * _READINGS, N_OUTPUTS), torch.float32)
            self._check_scatter(device, y.double().cpu().numpy())
            if "matrix" in device.capabilities:
                matrix, converter = device.require("matrix").matrix().cpu(), _converter(device)
                self._check_mean(y, converter.shown(x[0]) @ matrix.T, converter.output_step / 2)
            with pytest.raises(ValueError, match="x"):
                product(1.5 * x)

    def test_transposed_products_are_those_of_the_told_matrix(self) -> None:
        with self.open_window() as device:
            product = _able(device, "multiply_transposed").multiply_transposed
            matrix = device.require("program").program(_real_matrix()).cpu()
            x = torch.linspace(-1, 1, N_OUTPUTS).repeat(2 * _READINGS, 1)
            device.seek(0)
            y = product(x)
            assert (y.shape, y.dtype) == ((2 * _READINGS, N_INPUTS), torch.float32)
            converter = _converter(device)
            self._check_mean(y, converter.shown(x[0]) @ matrix, converter.output_step / 2)
            with pytest.raises(ValueError, match="x"):
                product(1.5 * x)

    def _check_mean(self, y: torch.Tensor, expected: torch.Tensor, bias: float) -> None:
        """Check that readings' means are the expected outputs, up to standard errors and a bias of each output."""
        readings = y.double().cpu().numpy()
        error = math.sqrt(float(readings.var(0, ddof=1).mean()) / len(readings))
        assert _are_small(readings.mean(0) - expected.double().numpy(), error, bias=bias + 1e-5)

    def test_the_noise_of_a_product_is_the_one_told_for_its_input(self) -> None:
        """The `reading_variance` of a device holds for every input, small and large."""
        with self.open_window() as device:
            _able(device, "multiply")
            if "program" in device.capabilities:
                device.require("program").program(_real_matrix())
            device.seek(0)
            for size in (0.05, 1.0):
                x = torch.linspace(-1, 1, N_INPUTS).mul(size).repeat(2 * _READINGS, 1)
                y = device.require("multiply").multiply(x).double().cpu().numpy()
                try:
                    told = device.reading_variance(x[:1]).double().cpu().numpy()[0]
                except CapabilityMissing as error:
                    pytest.skip(str(error))
                assert scatter_fits((y[0::2] - y[1::2]) / math.sqrt(2), told, told)
                if _testable_law(device) is None:
                    continue
                low, high = device.noise.variance_bounds()
                assert np.all((told >= low * (1 - 1e-6)) & (told <= high * (1 + 1e-6)))

    def test_time_changes_the_told_matrix_and_nothing_else(self) -> None:
        with self.open_window() as device:
            clock = _able(device, "wait")
            programmed = device.require("program").program(_real_matrix())
            assert torch.equal(clock.wait(0.0), programmed)
            drifted = clock.wait(86400.0)
            assert torch.equal(clock.matrix(), drifted)
            assert float((drifted * programmed).mean()) > 0
            x = torch.linspace(-1, 1, N_INPUTS).repeat(2 * _READINGS, 1)
            device.seek(0)
            y = device.require("multiply").multiply(x)
            self._check_scatter(device, y.double().cpu().numpy())
            converter = _converter(device)
            self._check_mean(y, converter.shown(x[0]) @ drifted.cpu().T, converter.output_step / 2)
            for wrong in (-1.0, math.nan, math.inf):
                with pytest.raises(ValueError, match="seconds"):
                    clock.wait(wrong)

    # Shapes and types

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int8, torch.int64])
    def test_every_dtype_is_taken(self, dtype: torch.dtype) -> None:
        with self.open_window() as device:
            device.seek(0)
            expected = device.project(ternary_batch().float())
            device.seek(0)
            found = device.project(ternary_batch().to(dtype))
            assert found.shape == (BATCH, N_OUTPUTS)
            assert found.dtype == torch.float32
            if self.replayable:
                assert torch.equal(found, expected)

    def test_numpy_in_gives_numpy_out(self) -> None:
        with self.open_window() as device:
            found = device.project(ternary_batch().numpy().astype(np.int8))
            assert isinstance(found, np.ndarray)
            assert found.dtype == np.float32
            assert device.project(np.zeros((0, N_INPUTS))).shape == (0, N_OUTPUTS)

    def test_the_input_is_left_alone(self) -> None:
        x = ternary_batch().float()
        with self.open_window() as device:
            device.project(x).zero_()
        assert torch.equal(x, ternary_batch().float())

    # Noise

    def test_every_reading_has_fresh_noise(self) -> None:
        with self.open_window() as device:
            device.seek(0)
            one, two = device.project(ternary_batch()), device.project(ternary_batch())
            three, four = device.draw((2, N_OUTPUTS))
            device.seek(1)
            other_step = device.project(ternary_batch())
            if _is_noisy(device):
                repeated = (
                    "readings repeat their noise: {} are equal at every entry; read a fresh frame for each"
                )
                assert not torch.equal(one, two), repeated.format("two readings of one batch")
                assert not torch.equal(one, other_step), repeated.format("readings at steps 0 and 1")
                assert not torch.equal(three, four), repeated.format("two rows of draw")

    def test_the_noise_of_readings_is_the_reported_one(self) -> None:
        with self.open_window() as device:
            _with_law(device).seek(0)
            x = ternary_batch()[:1].repeat(2 * _READINGS, 1)
            self._check_scatter(device, device.project(x).double().numpy())

    def test_the_noise_drawn_is_the_reported_one(self) -> None:
        with self.open_window() as device:
            _able(device, "draw")
            _with_law(device).seek(0)
            self._check_scatter(device, device.draw((2 * _READINGS, N_OUTPUTS)).double().numpy())

    def test_the_noise_drawn_has_no_mean_that_readings_lack(self) -> None:
        with self.open_window() as device:
            _able(device, "draw")
            device.seek(0)
            drawn = device.draw((_READINGS, N_OUTPUTS)).double().numpy()
            blank = device.project(torch.zeros(_READINGS, N_INPUTS)).double().numpy()
            error = np.sqrt((drawn.var(0, ddof=1) + blank.var(0, ddof=1)) / _READINGS)
            bound = (_SURE + 1) * error + 1e-6  # one more standard error for the largest of 40 outputs
            apart = np.abs(drawn.mean(0) - blank.mean(0))
            assert np.all(apart <= bound), (
                f"draw has another mean than readings of nothing, by {float(apart.max()):.3g} at output "
                f"{int(np.argmax(apart / bound))}: subtract the same dark level from both"
            )

    def _check_scatter(self, device: NoisyDevice, readings: np.ndarray) -> None:
        """Check that differences of pairs of readings of one vector have a variance within the law's bounds."""
        if _testable_law(device) is None:
            return
        halves = (readings[0::2] - readings[1::2]) / math.sqrt(2)
        low, high = (np.broadcast_to(bound, N_OUTPUTS) for bound in device.noise.variance_bounds())
        if not np.any(high > 0):
            assert not halves.any(), (
                f"readings scatter with variance {np.mean(halves**2):.6g}, and the law says none: state the noise"
            )
            return
        assert scatter_fits(halves, low, high), (
            f"readings scatter with variance {np.mean(halves**2):.6g}, and the law says {np.mean(low):.6g} to "
            f"{np.mean(high):.6g}: correct the law, or raise NoiseUnknown in described_noise until it is measured"
        )

    # The matrix

    def test_readings_are_linear_and_of_unit_entries(self) -> None:
        with self.open_window() as device:
            device.seek(0)
            unit = torch.eye(N_INPUTS)
            columns = np.stack([_mean(device, row) for row in unit])  # (n_inputs, n_outputs)
            error = math.sqrt(_variance(device) / _READINGS)
            x = ternary_batch()[0]
            expected = x.double().numpy() @ columns
            left = _mean(device, x) - expected
            bound = error * math.sqrt(1 + float(x.abs().sum()))
            assert _are_small(left, bound), (
                f"readings are not linear: B x differs from the sum of its columns by {_rms(left):.3g} rms, and "
                f"noise explains {bound:.3g}; return fields and not intensities, subtract the dark level, and avoid "
                "saturation"
            )
            power = float(np.mean(columns**2)) - error**2
            assert power > _SURE * error**2, (
                f"readings of unit vectors are {_rms(columns):.2g} rms, which noise alone explains: no light passes; "
                "check the laser, the shutter and the exposure"
            )
            assert abs(power - 1) <= _SURE * math.sqrt(2 / columns.size) + _SURE * error, (
                f"entries have std {math.sqrt(power):.2g}, not 1: set scale = {1 / math.sqrt(power):.3g} (multiply "
                "readings by it)"
            )

    def test_the_matrix_stays_over_opening_and_closing(self) -> None:
        means = []
        for _ in range(2):
            with self.open_window() as device:
                device.seek(0)
                means.append(_mean(device, ternary_batch()[1]))
                high = _variance(device)
        error = math.sqrt(2 * high / _READINGS)
        left = means[0] - means[1]
        assert _are_small(left, error), (
            f"readings of one vector differ by {_rms(left):.3g} rms between two openings, and noise explains "
            f"{error:.3g}: keep window, exposure and medium the same"
        )

    def test_a_reading_does_not_depend_on_its_batch(self) -> None:
        x = ternary_batch()
        with self.open_window() as device:
            device.seek(0)
            alone = _mean(device, x[1])
            mixed = device.project(x.repeat(_READINGS, 1)).double().numpy()[1::BATCH].mean(axis=0)
            parts = [device.project(x[:2])[1] for _ in range(20)]
            small = torch.stack(parts).double().numpy().mean(axis=0)
            high = _variance(device)
        for other, readings in ((mixed, _READINGS), (small, 20)):
            left, error = other - alone, math.sqrt(high / _READINGS + high / readings)
            assert _are_small(left, error), (
                f"a reading depends on the other rows of its batch: it differs by {_rms(left):.3g} rms, and noise "
                f"explains {error:.3g}; match each frame to its row (a frame is lost or doubled), and "
                "scale no batch as a whole"
            )

    # Replaying

    def test_seek_repeats_a_step_in_experiment(self) -> None:
        if not self.replayable:
            return
        with self.open_window() as device:
            found = []
            for step in (3, 4, 3):
                device.seek(step)
                x = ternary_batch()
                found.append((device.project(x), device.draw((2, N_OUTPUTS)), device.project(x)))
            assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))

    def test_release_noise_is_never_repeated(self) -> None:
        many = 64, N_OUTPUTS  # many, since a converter may round most to the same number
        with self.open_window(mode="release") as device:
            device.seek(0)
            first = device.draw(many)
            device.seek(0)
            if _is_noisy(device):
                assert not torch.equal(device.draw(many), first)

    # Use

    def test_usage_counts_the_frames_of_each_vector_and_survives_closing(self) -> None:
        with self.open_window() as device:
            device.project(ternary_batch())  # before this a programmable device writes its matrix, once
            opened = device.usage
            device.project(ternary_batch())
            device.draw((3, N_OUTPUTS))
            law = device.stated_noise
            if isinstance(law, GaussianNoise) and law.is_uniform:
                device.draw((N_OUTPUTS + 1,))
            else:
                device.draw((2, N_OUTPUTS))
        frames, spent = device.description.frames, device.usage - opened
        wanted = frames.frames_per_projection * (BATCH + 3 + 2)
        assert wanted <= spent.frames <= _CHECKED * wanted
        assert spent.seconds == pytest.approx(spent.frames * frames.period_us(N_OUTPUTS) * 1e-6)
        assert spent.joules == pytest.approx(spent.seconds * frames.power_w)

    def test_a_closed_device_says_what_to_do(self) -> None:
        device = self.open_window()
        device.close()
        device.close()
        for use in (
            lambda: device.project(ternary_batch()),
            lambda: device.draw((1, N_OUTPUTS)),
            lambda: device.seek(0),
        ):
            with pytest.raises(DeviceUnavailable, match=r"is closed; call open\(\)"):
                use()
        with device.open().open():
            assert device.project(ternary_batch()).shape == (BATCH, N_OUTPUTS)

    @pytest.mark.parametrize(
        ("x", "error", "message"),
        [
            (
                torch.full((1, 12), 0.5),
                ValueError,
                "x holds 0.5: a device shows -1, 0 or 1; encode real values first",
            ),
            (torch.full((1, 12), torch.nan), ValueError, "x holds NaN"),
            (torch.full((1, 12), 255, dtype=torch.uint8), ValueError, "unsigned integers wrap -1"),
            (np.full((1, 12), 2), ValueError, "x holds 2"),
            (torch.zeros(12), ValueError, r"x has shape \(12,\): must be \(any, 12\)"),
            (torch.zeros(1, 13), ValueError, r"x has shape \(1, 13\): must be \(any, 12\)"),
            (torch.zeros(1, 12, requires_grad=True), ValueError, r"x requires a gradient.*pass x.detach\(\)"),
            (
                torch.zeros(1, 12, dtype=torch.complex64),
                TypeError,
                "x has dtype torch.complex64: must be real",
            ),
            (np.zeros((1, 12), dtype=complex), TypeError, "x has dtype complex128: must be real"),
            ([[0] * 12], TypeError, "must be Tensor or ndarray, not list"),
        ],
    )
    def test_bad_input_is_refused_by_name(self, x: Any, error: type[Exception], message: str) -> None:
        with self.open_window() as device:
            opened = device.usage.frames
            with pytest.raises(error, match=message):
                device.project(x)
            assert device.usage.frames == opened

    def test_bad_steps_and_shapes_are_refused(self) -> None:
        with self.open_window() as device:
            with pytest.raises(ValueError, match="step = -1"):
                device.seek(-1)
            with pytest.raises(TypeError, match=r"length = 2.5: must be an integer"):
                device.draw((2.5,))  # type: ignore[arg-type]


def scatter_fits(differences: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    """Return whether readings' variance over all outputs lies within a law's limits, at five standard errors."""
    squares = differences**2
    fits = True
    for bound, sign in ((low, 1.0), (high, -1.0)):
        ratio = squares / np.where(bound > 0, bound, 1.0)
        error = float(ratio.std()) / math.sqrt(ratio.size)
        fits = fits and (float(ratio.mean()) - 1) * sign >= -_SURE * error
    return fits


def _are_small(left: np.ndarray, error: float, *, bias: float = 2e-2) -> bool:
    """Return whether deviations have at most this standard error and a bias, root mean square, at five sigma."""
    return bool(np.sqrt(np.mean(left**2)) <= error * (1 + _SURE / math.sqrt(2 * left.size)) + bias)


def _rms(values: np.ndarray) -> float:
    return math.sqrt(float(np.mean(values**2)))


def _testable_law(device: NoisyDevice) -> NoiseModel | None:
    """Return the law that a device states, or None; measured variances do not count, since they have errors."""
    law = device.stated_noise
    return None if isinstance(law, MeasuredNoise) else law


def _with_law(device: NoisyDevice) -> NoisyDevice:
    """Return the device if it states a law; the test is skipped if not."""
    if _testable_law(device) is None:
        pytest.skip(f"{device.name} states no law of its noise; calibrate it")
    return device


def _variance(device: NoisyDevice) -> float:
    """Return the largest variance of a reading, mean over outputs: the law's, or without a law the measured one."""
    law = device.stated_noise or measure_noise(device.project, device.n_inputs)
    return float(np.mean(law.variance_bounds()[1]))


def _is_noisy(device: NoisyDevice) -> bool:
    """Return whether every output has noise by the law, or without a law by measurement."""
    law = _testable_law(device)
    return _variance(device) > 0 if law is None else float(np.min(law.variance_bounds()[0])) > 0


def _mean(device: NoisyDevice, x: torch.Tensor) -> np.ndarray:
    """Return the mean of many readings of one vector, float64, shape (n_outputs,)."""
    rows = x.float().reshape(1, -1).repeat(_READINGS, 1)
    mean: np.ndarray = device.project(rows).double().numpy().mean(axis=0)
    return mean


def _converter(device: NoisyDevice) -> Converter:
    """Return the device's `converter`, or one that leaves inputs as they are."""
    found = getattr(device, "converter", None)
    return found if isinstance(found, Converter) else Converter()


def _rounding(device: NoisyDevice) -> float:
    """Return the largest bias that converters leave in a mean, units of the reading."""
    law = _testable_law(device)
    return law.conversions**0.5 * law.step / 2 if isinstance(law, ConverterLatticeNoise) else 0.0


def _real_matrix() -> torch.Tensor:
    """Return a fixed matrix with entries in [-1, 1]."""
    return torch.rand((N_OUTPUTS, N_INPUTS), generator=torch.Generator().manual_seed(3)).mul_(2).sub_(1)


def _able(device: NoisyDevice, capability: Capability) -> Any:
    """Return the device for a capability that it declares; else skip the test."""
    if capability not in device.capabilities:
        pytest.skip(f"{device.name} does not declare {capability}")
    return device.require(capability)
