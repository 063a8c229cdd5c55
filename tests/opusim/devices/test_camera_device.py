"""The camera twin: exact where nothing is noisy, lawful where something is, and the same whatever computes it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opusim import ConfigError, open_device
from opusim.camera.speckle import Speckle
from opusim.devices.camera import CameraDevice
from opusim.encodings import split_frames
from tests.opusim.common import SILENT, refuses, ternary


def silent(*, n_outputs: int = 300, **camera: object) -> CameraDevice:
    """A twin without noise, saturation or rounding; its fixed pattern stays."""
    settings = {"sensor": SILENT, "anchor": {"frames": 0}} | camera
    return open_device("camera", n_inputs=60, n_outputs=n_outputs, camera=settings)


BARE = {"anchor": {"frames": 0, "reference_share": 0.0}}


@pytest.mark.parametrize(
    "extra", [{}, {"grain_correlation": 0.3}, {"grain_pixels": 3}, {"speckle_modes": 3}, BARE]
)
def test_the_noiseless_twin_is_the_ideal_device_on_its_matrix(extra: dict[str, object], seed: int) -> None:
    x = ternary(9, 60, seed)
    with silent(**extra) as device:
        ideal = x.double() @ device.matrix().double().T
        torch.testing.assert_close(device.project(x).double(), ideal, rtol=0, atol=2e-5)
        assert device.draw((2, 300)).abs().max() < 2e-5


@pytest.mark.compiled
def test_a_measured_anchor_changes_the_matrix_and_keeps_the_identity(seed: int) -> None:
    noisy = {"sensor": SILENT | {"shot_noise": True}, "anchor": {"frames": 5}}
    x = ternary(4, 60, seed)
    with silent() as exact, silent(**noisy) as measured:
        assert not torch.equal(exact.matrix(), measured.matrix())
        rows = (exact.matrix() - measured.matrix()).abs().max()
        assert rows < 0.3
        mean = torch.stack([measured.project(x) for _ in range(200)]).double().mean(0)
        std = (measured.reading_variance(x) / 200).sqrt()
        z = (mean - x.double() @ measured.matrix().double().T) / std
    assert z.abs().max() < 6.5
    assert abs(float((z**2).mean()) - 1) < 5 * (2 / z.numel()) ** 0.5


def test_recovery_uses_intensities_as_the_formula_says(seed: int) -> None:
    x = ternary(3, 60, seed)
    with silent(**BARE) as device:
        positive, negative = split_frames(x)
        anchor = torch.ones(1, 60, dtype=torch.uint8)
        shown = torch.cat([positive, 1 - positive, negative, 1 - negative, anchor])
        dn = device.intensities(shown).double().numpy() - 4.0
        offset = device.exposure.sensor.gain_dn_per_e * (device.exposure.offset_e + device.exposure.dark_e)
        p, pc, n, nc = dn[:12].reshape(4, 3, 300)
        a = dn[12] - offset
        share = x.sum(1).double().numpy()[:, None] / 60
        y = ((p - pc - n + nc) / (2 * np.sqrt(a)) - share * np.sqrt(a)) * device.recovery.column_norm
        np.testing.assert_allclose(device.project(x).numpy(), y, atol=2e-4)


def entries_are_standard(b: np.ndarray) -> bool:
    n = b.size
    return bool(
        abs(b.mean()) < 5 / np.sqrt(n)
        and abs(np.mean(b**2) - 1) < 5 * np.sqrt(2 / n)
        and abs(np.mean(b**4) - 3) < 5 * np.sqrt(96 / n)
    )


def test_entries_of_the_effective_matrix_are_standard_normal(seed: int) -> None:
    sound = {"sensor": {"prnu": 0.0}, "anchor": {"frames": 0}}
    with open_device("camera", n_inputs=300, n_outputs=800, medium={"seed": seed}, camera=sound) as device:
        b = device.matrix().double().numpy()
    assert entries_are_standard(b)
    assert not entries_are_standard(b * (1 + 10 / np.sqrt(2 * b.size)))
    assert not entries_are_standard(b + 10 / np.sqrt(b.size))


def test_without_reference_mirrors_rows_sum_to_zero() -> None:
    with silent(**BARE) as device:
        assert device.matrix().sum(1).abs().max() < 1e-3
        assert device.speckle.law.reference == 0


def test_masked_pixels_leave_a_window_the_first_outputs_of_a_larger_one() -> None:
    window = {"n_inputs": 12, "camera": {"anchor": {"frames": 0}}}
    small, large = (open_device("camera", n_outputs=n, **window) for n in (30, 5000))
    with small, large:
        np.testing.assert_array_equal(large.speckle.pixels[:30], small.speckle.pixels)
        intensity = np.sum(large.speckle.anchor**2, axis=0) / (2 * 24)
        assert 0.1 <= intensity.min() <= intensity.max() <= 3.5
        assert 5000 / large.speckle.pixels[-1] == pytest.approx(np.exp(-0.1) - np.exp(-3.5), abs=0.03)


def test_streamed_and_dense_fields_agree(seed: int) -> None:
    frames = (ternary(5, 60, seed) > 0).float()
    with silent(grain_correlation=0.2) as device:
        law = device.speckle.law
        dense = device.speckle.fields(frames)
        streamed = Speckle(replace(law, dense_limit_mib=0.0), 300, "test")
        assert torch.equal(streamed.fields(frames), dense)


@pytest.mark.parametrize("grain", [0.3, 0.0])
def test_grain_correlates_neighbours_by_the_configured_number(grain: float) -> None:
    with silent(**({"grain_correlation": grain} if grain else {})) as device:
        fields, pixels = device.speckle.fields(torch.eye(60)).double().numpy(), device.speckle.pixels
    together = np.flatnonzero(np.diff(pixels) == 1)
    left, right = fields[:, :, together], fields[:, :, together + 1]
    assert abs(float(np.mean(left * right)) - grain) < (1.5 if grain else 1.0) * 5 / np.sqrt(left.size)


@pytest.mark.parametrize("span", [2, 5])
def test_pixels_of_one_grain_have_correlated_fields(span: int) -> None:
    with silent(grain_pixels=span) as device:
        fields = device.speckle.fields(torch.eye(60)).double()
        pixels = torch.from_numpy(device.speckle.pixels)
        for lag in range(1, span + 2):
            first = torch.nonzero(torch.isin(pixels + lag, pixels)).squeeze(1)
            second = torch.searchsorted(pixels, pixels[first] + lag)
            products = (fields[:, :, first] * fields[:, :, second]).numpy()
            tolerance = 5 * products.std() * span / products.size**0.5
            assert abs(products.mean() - max(0.0, 1 - lag / span)) < tolerance
        power = fields.square().mean()
        assert abs(float(power) - 1) < 5 * (2 * span / fields.numel()) ** 0.5
    refuses(ConfigError, "grain_pixels and grain_correlation", silent, grain_pixels=2, grain_correlation=0.1)


def test_the_medium_drifts_by_the_law_and_comes_back(seed: int) -> None:
    drift = {"decorrelation_s": 10.0, "seconds_per_step": 2.0}
    settings = {"sensor": SILENT, "anchor": {"frames": 0}, "drift": drift}
    x = torch.eye(60)
    with silent(**settings) as device:
        first = device.speckle.fields(x).double()
        device.seek(5)
        later = device.speckle.fields(x).double()
        correlation = float((first * later).mean() / (first**2).mean())
        assert abs(correlation - np.exp(-1)) < 5 / np.sqrt(first.numel())
        assert abs(float((later**2).mean()) - 1) < 5 * np.sqrt(2 / first.numel())
        b = device.matrix().double()
        torch.testing.assert_close(device.project(x).double(), b.T.contiguous(), rtol=0, atol=2e-5)
        device.seek(0)
        assert torch.equal(device.speckle.fields(x).double(), first)
    with silent() as still, pytest.raises(ConfigError, match="camera.drift: missing"):
        still.drift_to(1.0)


def test_frames_hold_whole_numbers_of_the_converter(seed: int) -> None:
    bright = {"light": {"anchor_flux_per_s": 1e8}, "anchor": {"most_saturated": 1.0}}
    with open_device("camera", n_inputs=60, n_outputs=500, camera=bright) as device:
        dn = device.intensities(ternary(6, 60, seed).abs())
        assert torch.equal(dn, dn.round())
        assert dn.min() >= 0
        assert dn.max() == 255
        refuses(ValueError, "x holds -1: a frame shows 0 or 1", device.intensities, -torch.ones(1, 60))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"camera": {"dark": {"temperature_c": 90.0}}}, r"camera: temperature_c = 90.0: must lie in \[-30"),
        ({"camera": {"light": {"exposure_us": 600.0}}}, "camera.light.exposure_us: 600: is longer than"),
        ({"frames": {"frames_per_projection": 2}}, "a camera shows 4"),
        ({"noise": {"sigma": 0.1}}, "a camera's noise comes from its stages"),
        ({"camera": {"anchor": {"lowest": 3.0}}}, "almost no pixel is left"),
        ({"camera": {"sensor": {"read_nois_e": 1.0}}}, "unknown key; did you mean 'read_noise_e'?"),
        ({"kind": "gaussian"}, "belong together"),
        ({"n_inputs": 1, "camera": {"anchor": {"reference_share": 0.0}}}, "an anchor of one mirror"),
    ],
)
def test_descriptions_that_contradict_themselves_fail(overrides: dict[str, object], message: str) -> None:
    refuses(ConfigError, message, open_device, "camera", n_outputs=40, **{"n_inputs": None} | overrides)


def test_a_grain_spans_rows_and_columns_of_the_sensor(seed: int) -> None:
    span, width = 3, 17
    with silent(grain_pixels=span, sensor=SILENT | {"row_pixels": width}) as device:
        speckle = device.speckle
        whole = speckle._pixel_tile(1, range(40 * width), range(60), 0).double().view(60, 40, width).numpy()
        for rows, columns in ((0, 1), (1, 0), (1, 1), (2, 1), (span, 0), (0, span), (span - 1, span - 1)):
            one = whole[:, : 40 - rows, : width - columns]
            products = one * whole[:, rows:, columns:]
            expected = max(0.0, 1 - rows / span) * max(0.0, 1 - columns / span)
            tolerance = 5 * products.std() * span**2 / products.size**0.5
            assert abs(products.mean() - expected) < tolerance, (rows, columns)
            if rows == 1 and columns == 1:  # a grain of one row only
                assert abs(products.mean()) > tolerance
        assert abs((whole**2).mean() - 1) < 5 * (2 * span**4 / whole.size) ** 0.5
        flat = whole.reshape(60, -1)
        for window in (range(20, 30), range(30, 31), range(33, 90), range(500, 680)):  # parts of rows
            part = speckle._pixel_tile(1, window, range(60), 0).double().numpy()
            np.testing.assert_array_equal(part, flat[:, window.start : window.stop])


def test_modes_lower_the_contrast_and_keep_readings_linear(seed: int) -> None:
    modes, x = 3, ternary(30, 60, seed)
    limits = {"lowest": 1e-3, "highest": None, "frames": 0}
    with silent(speckle_modes=modes, anchor=limits, n_outputs=4000) as device:
        power = device.speckle.fields((x > 0).float()).double().square().sum(0)
        light = device.exposure.light_of(power.numpy())
        contrast = light.var(axis=1) / light.mean(axis=1) ** 2
        error = np.sqrt(contrast.var() / contrast.size)
        assert abs(contrast.mean() - 1 / modes) < 5 * error + 1e-3 < abs(contrast.mean() - 1 / (modes + 1))
        b = device.matrix().double()
        torch.testing.assert_close(device.project(x).double(), x.double() @ b.T, rtol=0, atol=2e-4)
        entries = b.numpy().ravel()
        assert abs(entries.mean()) < 5 / entries.size**0.5 + 1e-3
        assert abs(entries.var() - 1) < 5 * (2 / entries.size) ** 0.5 + 2e-3
    with silent(speckle_modes=modes, mirrors={"stuck_on": 0.1, "contrast": 50.0}) as device:
        ideal = x.double() @ device.matrix().double().T
        torch.testing.assert_close(device.project(x).double(), ideal, rtol=0, atol=2e-4)
