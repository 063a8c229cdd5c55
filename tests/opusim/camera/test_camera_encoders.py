"""Binary, ternary and real-valued vectors through the camera: what is shown, what comes back, with which noise."""

import pytest
import torch

from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_device
from opusim.encodings import binarize, bit_planes, split_frames, ternarize

SILENT = {"shot_noise": False, "full_well_e": None, "read_noise_e": 0.0, "adc_bits": None}
REAL = 2 * torch.rand(6, 30, generator=torch.Generator().manual_seed(5)) - 1


def silent() -> CameraDevice:
    camera = {"sensor": SILENT, "anchor": {"frames": 0}}
    return open_device("camera_low_light", n_inputs=30, n_outputs=80, camera=camera)


def projected(device: CameraDevice, x: torch.Tensor, planes: int) -> torch.Tensor:
    """Sum over planes of weight times the reading of the plane's digits."""
    digits, weights = bit_planes(x, planes)
    readings = device.project(digits.flatten(0, 1)).view(planes, len(x), -1)
    return torch.tensordot(weights, readings, dims=1)


def test_bit_planes_show_real_numbers_to_their_last_digit() -> None:
    with silent() as device:
        b = device.matrix()
        for planes in (3, 12):
            bound = 2.0**-planes * b.abs().sum(1) + 2e-4
            assert bool(((projected(device, REAL, planes) - REAL @ b.T).abs() <= bound).all())
        with pytest.raises(ValueError, match="encode real values first"):
            device.project(REAL)


@pytest.mark.compiled
def test_the_noise_of_bit_planes_is_that_of_their_weighted_readings(seed: int) -> None:
    """Five standard errors of a variance; weights that are not squared are caught."""
    planes, repeats = 3, 1500
    with open_device("camera_low_light", n_inputs=30, n_outputs=20, seed=seed) as device:
        digits, weights = bit_planes(REAL[:1], planes)
        opened = device.usage.frames
        readings = projected(device, REAL[:1].expand(repeats, -1), planes).double()
        assert device.usage.frames - opened == 4 * planes * repeats
        variances = device.reading_variance(digits[:, 0])  # (planes, n_outputs)
    expected = weights.double().square() @ variances
    z = (readings - readings.mean(0)) / expected.sqrt()
    tolerance = 5 * (2 / z.numel()) ** 0.5
    assert abs(float(z.square().sum() / (z.numel() - z.shape[1])) - 1) < tolerance
    wrong = (readings - readings.mean(0)) / (weights.double() @ variances).sqrt()
    assert abs(float(wrong.square().mean()) - 1) > 2 * tolerance


def test_a_ternary_vector_is_the_difference_of_its_two_passes() -> None:
    x = ternarize(REAL, 0.3)
    positive, negative = split_frames(x)
    with silent() as device:
        passes = device.project(positive) - device.project(negative)
        torch.testing.assert_close(device.project(x), passes, rtol=0, atol=1e-4)


def test_binary_frames_are_shown_as_they_are() -> None:
    frames = binarize(REAL, 0.1)
    assert torch.equal(frames, (REAL > 0.1).float())
    with silent() as device:
        shown, field = device.intensities(frames).double(), device.speckle.fields(frames).double()
        sensor, exposure = device.exposure.sensor, device.exposure
        electrons = torch.from_numpy(exposure.gain_e) * field.square().sum(0) + exposure.dark_current_e
        expected = sensor.black_level_dn + sensor.gain_dn_per_e * (
            electrons + torch.from_numpy(exposure.offset_e)
        )
        torch.testing.assert_close(shown, expected, rtol=1e-5, atol=1e-3)
        with pytest.raises(ValueError, match=r"encode real values first, by .*binarize"):
            device.intensities(REAL)
    for wrong, message in (
        (torch.tensor([torch.nan]), "no binary code"),
        (torch.tensor([1j]), "must be real"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            binarize(wrong, 0.0)
    with pytest.raises(ValueError, match="threshold"):
        binarize(REAL, float("nan"))
