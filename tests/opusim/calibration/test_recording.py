"""Recorded frames: the standard's layout, and what an independent implementation of the standard makes of them."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from opusim.calibration.recorded import Recording, read_frames, record, shape_of
from opusim.calibration.recorded_transfer import reduced
from opusim.devices.registry import open_device

pytestmark = pytest.mark.compiled

EXPOSURE_US = 200_000.0


def recorded(folder: Path, seed: int, pixels: int = 40_000, **camera: object) -> tuple[Path, object]:
    settings = {"anchor": {"frames": 0, "lowest": 1e-6, "highest": None}} | camera
    with open_device("camera_low_light", n_inputs=2, n_outputs=pixels, seed=seed, camera=settings) as device:
        width, height = shape_of(pixels)
        wanted = Recording(
            width=width, height=height, bits=12, steps=20, longest_exposure_us=2e6, saturating_photons=5500.0
        )
        return record(device.flat_frames, wanted, folder, exposure_us=EXPOSURE_US), device.description


def test_the_folder_has_the_standards_layout(tmp_path: Path, seed: int) -> None:
    from PIL import Image

    path, _ = recorded(tmp_path / "frames", seed, pixels=600)
    lines = path.read_text().splitlines()
    assert lines[:3] == ["v 4.0", "n 12 25 24", "d 200000000.0"]
    assert sum(line.startswith("b ") for line in lines) == sum(line.startswith("d ") for line in lines) == 21
    images = [path.parent / line[2:].replace("\\", "/") for line in lines if line.startswith("i ")]
    assert len(images) == 2 * 2 * 20 + 2 * 16
    first = np.asarray(Image.open(images[0]))
    assert first.shape == (24, 25)
    assert 95 < first.mean() < 115
    with pytest.raises(FileExistsError, match="is not empty"):
        recorded(tmp_path / "frames", seed, pixels=600)


def test_images_are_as_square_as_the_outputs_allow() -> None:
    assert shape_of(40_000) == (200, 200)
    assert shape_of(600) == (25, 24)
    assert shape_of(13) == (13, 1)


@pytest.mark.slow
def test_an_independent_implementation_finds_the_configured_constants(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package's last release was written for numpy 1.
    monkeypatch.setattr(np, "asfarray", lambda a: np.asarray(a, dtype=float), raising=False)
    emva1288 = pytest.importorskip("emva1288.process", reason="pip install -r requirements-dev.txt")
    path, description = recorded(tmp_path / "frames", seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = emva1288.ParseEmvaDescriptorFile(str(path))
        results = emva1288.Results1288(emva1288.Data1288(emva1288.LoadImageData(parsed.images).data).data)
        got = {
            "gain": results.K,
            "quantum efficiency": results.QE / 100,
            "dark current": results.u_I_mean,
            "read noise": results.sigma_d,
            "DSNU": results.DSNU1288,
            "PRNU": results.PRNU1288 / 100,
        }
    camera = description.camera
    # Two images of 40,000 pixels a point, 20 points: the standard gives no limits, so tolerances are generous to it.
    expected = {
        "gain": (camera.sensor.gain_dn_per_e, 0.03),
        "quantum efficiency": (camera.light.quantum_efficiency, 0.03),
        "dark current": (camera.dark.doubling.dark_current_ref_e_per_s, 0.03),
        "read noise": (camera.sensor.read_noise_e, 0.25),
        "DSNU": (camera.sensor.dsnu_e, 0.15),
        "PRNU": (camera.sensor.prnu, 0.15),
    }
    print(got)
    # and ours, of the same folder, holds the configured constants within twice its limits' width
    ours = reduced(read_frames(path.parent)).estimates(0.95)
    keys = {
        "gain": "gain_dn_per_e",
        "quantum efficiency": "quantum_efficiency",
        "dark current": "dark_current_e_per_s",
        "read noise": "read_noise_e",
        "DSNU": "dsnu_e",
        "PRNU": "prnu",
    }
    for name, key in keys.items():
        width = ours[key].high - ours[key].low
        assert abs(ours[key].value - expected[name][0]) < 2 * width, name
        assert width < expected[name][1] * expected[name][0], name
    for name, (value, tolerance) in expected.items():
        assert got[name] == pytest.approx(value, rel=tolerance), (name, got)
