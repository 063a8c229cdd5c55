"""Frames in files: every layout gives the same frames, what cannot be read is named, the standard's program agrees."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opusim import ConfigError, open_device
from opusim.calibration.recorded import RecordedFrames, Recording, read_frames, record, shape_of
from opusim.calibration.recorded_transfer import reduced
from tests.opusim.common import refuses
from tests.oracles.sensor_frames import Sensor, recording

Arrays = dict[str, np.ndarray]
BOTH = ("dark", "flat")


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return recording(Sensor(), np.random.default_rng(7), frames=2, levels=6, shape=(24, 32))


def as_npz(folder: Path, arrays: Arrays) -> Path:
    np.savez(folder / "frames.npz", **arrays)
    return folder / "frames.npz"


def as_hdf5(folder: Path, arrays: Arrays) -> Path:
    h5py = pytest.importorskip("h5py", reason="pip install 'opusim[frames]'")
    with h5py.File(folder / "frames.h5", "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
    return folder / "frames.h5"


def named(arrays: Arrays) -> list[tuple[str, np.ndarray]]:
    """Each level's stack under a name that says what it is."""
    found = []
    for kind in ("dark", "flat"):
        photons = arrays["flat_photons"] if kind == "flat" else np.zeros(len(arrays[kind]))
        for stack, exposure, light in zip(arrays[kind], arrays[f"{kind}_exposure_us"], photons, strict=True):
            name = f"{kind}_{exposure:.3f}us" + (f"_{light:.6f}ph" if light else "")
            found.append((name, stack))
    return found


def as_npy_stacks(folder: Path, arrays: Arrays) -> Path:
    for name, stack in named(arrays):
        np.save(folder / f"{name}.npy", stack)
    return folder


def as_tiff_stacks(folder: Path, arrays: Arrays) -> Path:
    for name, stack in named(arrays):
        first, *rest = (Image.fromarray(frame) for frame in stack)
        first.save(folder / f"{name}.tif", save_all=True, append_images=rest, compression="tiff_deflate")
    return folder


def as_single_images(folder: Path, arrays: Arrays) -> Path:
    for name, stack in named(arrays):
        (folder / name).mkdir()
        for number, frame in enumerate(stack):
            Image.fromarray(frame).save(folder / name / f"frame_{number:03d}.png")
    return folder


def as_emva_folder(folder: Path, arrays: Arrays) -> Path:
    """The layout of the standard's reference implementation, with a decimal comma and a comment."""
    lines = ["# a comment", "v 4.0", "n 12 32 24"]
    (folder / "images").mkdir()
    for number, (name, stack) in enumerate(named(arrays)):
        _, exposure, *light = name.replace("us", "").replace("ph", "").split("_")
        exposure_ns = f"{1e3 * float(exposure):.1f}".replace(".", ",")
        lines.append(f"b {exposure_ns} {light[0]}" if light else f"d {exposure_ns}")
        for frame, image in enumerate(stack):
            Image.fromarray(image).save(folder / "images" / f"i{number}_{frame}.tif")
            lines.append(f"i images\\i{number}_{frame}.tif")
    (folder / "EMVA1288descriptor.txt").write_text("\n".join(lines) + "\n")
    return folder


WRITERS = (as_npz, as_hdf5, as_npy_stacks, as_tiff_stacks, as_single_images, as_emva_folder)


def same(found: RecordedFrames, arrays: Arrays) -> bool:
    """Whether every level holds the frames that were written, at its setting."""
    wanted = [*arrays["dark"], *arrays["flat"]]
    exposures = [*arrays["dark_exposure_us"], *arrays["flat_exposure_us"]]
    photons = [*np.zeros(len(arrays["dark"])), *arrays["flat_photons"]]
    return len(found.levels) == len(wanted) and all(
        np.array_equal(found.frames_of(level), frames)
        and abs(level.exposure_us - exposure) < 1e-2
        and abs((level.photons or 0.0) - light) < 1e-2
        for level, frames, exposure, light in zip(found.levels, wanted, exposures, photons, strict=True)
    )


@pytest.mark.parametrize("write", WRITERS)
def test_every_layout_gives_the_frames_that_were_written(write: Any, arrays: Arrays, tmp_path: Path) -> None:
    found = read_frames(write(tmp_path, arrays))
    assert same(found, arrays)
    assert (found.bits, found.shift) == (12, 0)


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """GenICam's monoNp, a bit at a time: the lowest bits of the first pixel come first."""
    found = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] * bits // 8)), np.uint8)
    for pixel in range(numbers.shape[-1]):
        for bit in range(bits):
            place = pixel * bits + bit
            value = (numbers[..., pixel] >> bit) & 1
            found[..., place // 8] |= (value << (place % 8)).astype(np.uint8)
    return found


@pytest.mark.parametrize("bits", [10, 12])
def test_packed_numbers_are_unpacked(bits: int, arrays: Arrays, tmp_path: Path) -> None:
    # 31 columns, so that a row ends within a byte
    plain = arrays | {kind: arrays[kind][..., :31] >> (12 - bits) for kind in ("dark", "flat")}
    stored = plain | {kind: packed(plain[kind], bits) for kind in ("dark", "flat")}
    del stored["bits"]
    assert same(read_frames(as_npz(tmp_path, stored), packing=f"mono{bits}p"), plain)


def test_packing_is_the_published_one_and_wide_words_are_shifted_down(tmp_path: Path, arrays: Arrays) -> None:
    # two pixels of 12 bits, 0xABC and 0x123: bytes BC 3A 12
    assert packed(np.array([0xABC, 0x123]), 12).tolist() == [0xBC, 0x3A, 0x12]
    stored = arrays | {kind: arrays[kind] << 4 for kind in ("dark", "flat")}
    del stored["bits"]
    found = read_frames(as_npz(tmp_path, stored))
    assert (found.bits, found.shift) == (12, 4)
    assert same(found, arrays)


def test_light_of_unknown_strength_makes_each_stack_a_level(arrays: Arrays, tmp_path: Path) -> None:
    (tmp_path / "darks").mkdir()
    for number, stack in enumerate(arrays["flat"]):
        np.save(tmp_path / f"flat_2.5ms_{number}.npy", stack)
        np.save(tmp_path / "darks" / f"black_2,5ms_{number}.npy", arrays["dark"][0])
        for frame, image in enumerate(stack):  # and single images, whose last number counts frames
            Image.fromarray(image).save(tmp_path / f"white_1ms_step{number}_{frame:02d}.png")
    levels = read_frames(tmp_path).levels
    assert [level.exposure_us for level in levels] == [2500.0] + [1000.0] * 6 + [2500.0] * 6
    assert [len(level.parts) for level in levels] == [6] + [2] * 6 + [1] * 6
    assert all(level.photons is None for level in levels[1:])


def test_lost_frames_and_the_date_come_from_timestamps(arrays: Arrays, tmp_path: Path) -> None:
    from opusim.calibration.recorded_transfer import require_lawful
    from opusim.calibration.report import CameraReport

    longer = recording(Sensor(), np.random.default_rng(7), frames=6, levels=8, shape=(24, 32))
    times = 1.7e9 + 0.01 * np.arange(48).reshape(8, 6)
    times[3, 4:] += 0.02
    stored = longer | {"flat_time_s": times, "dark_time_s": times - 10}
    transfer = reduced(read_frames(as_npz(tmp_path, stored)))
    remarks = require_lawful(transfer)
    assert [text for text in remarks if text.startswith("2 of 80 steps of time")]
    assert CameraReport.of(transfer, remarks, 0.95, None).date == "2023-11-14"


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was loaded",)


def test_pickles_few_bits_and_huge_data_are_refused(arrays: Arrays, tmp_path: Path, monkeypatch: Any) -> None:
    np.savez(tmp_path / "frames.npz", **arrays | {"dark": np.array([[[[Hostile()]]]])})
    refuses(ConfigError, "cannot be read", read_frames, tmp_path / "frames.npz")
    as_npy_stacks(tmp_path, arrays)
    (tmp_path / "dark_1us.npy").write_bytes(pickle.dumps(Hostile()))
    refuses(ConfigError, "cannot be read", read_frames, tmp_path)
    path = as_npz(tmp_path, arrays)
    assert read_frames(path, bits=14).bits == 14
    refuses(ConfigError, r"8 bits do not hold the largest number", read_frames, path, bits=8)
    refuses(ConfigError, "mono12p is packed .* uint16", read_frames, path, packing="mono12p")
    np.savez_compressed(tmp_path / "frames.npz", flat=np.zeros(10**6, np.uint8))
    monkeypatch.setattr("opusim.calibration.recorded.most_unpacked", lambda length: 100 * length)
    refuses(ConfigError, r"1,000,\d+ bytes in memory.*numpy.savez", read_frames, tmp_path / "frames.npz")


Writer = Callable[[Path, Arrays], Path]


def image(name: str, *channels: int) -> Writer:
    """Write one image."""
    pixels = Image.fromarray(np.zeros((24, 32, *channels), np.uint8))
    return lambda folder, _: pixels.save(folder / name)


def stack(name: str, kind: str = "dark", rows: slice = slice(None)) -> Writer:
    """Write one level's stack."""
    return lambda folder, arrays: np.save(folder / name, arrays[kind][0][:, rows]) or folder


def descriptor(lines: str) -> Writer:
    """Write the standard's file alone."""
    return lambda folder, _: (folder / "d.txt").write_text(f"v 4.0\nn 12 32 24\n{lines}\n") and folder


def damaged(folder: Path, arrays: Arrays) -> Path:
    path = as_npz(folder, arrays)
    path.write_bytes(path.read_bytes()[:5000])
    return path


def zeros(folder: Path, arrays: Arrays) -> Path:
    return as_npz(folder, arrays | {kind: arrays[kind] * 0 for kind in BOTH})


SIZES = [stack("dark_1us.npy"), stack("flat_1us.npy", "flat", slice(1, None))]


@pytest.mark.parametrize(
    ("writers", "file", "words"),
    [
        ([image("dark_1us.png", 3)], "", "is of mode RGB: colours are computed, and share noise"),
        ([image("dark_1us.jpg")], "", "is compressed with loss, which changes noise; record raw frames"),
        ([stack("series_1us.npy")], "", "says no kind, dark or flat; name it such as flat_400us_5200ph.npy"),
        ([stack("dark.npy")], "", "says no exposure with its unit"),
        (SIZES, "", "have several sizes, 32 x 23 and 32 x 24 pixels; keep one region"),
        ([damaged], "frames.npz", "format: cannot be read"),
        ([lambda folder, arrays: as_npz(folder, {"flat": arrays["flat"]})], "frames.npz", "dark: is missing"),
        ([stack("dark_1us.npy")], "dark_1us.npy", "is a single file, which holds one level"),
        ([descriptor("d 1000.0\ni ..\\image.png")], "", "leads out of the folder"),
        ([descriptor("b nan 12\ni image.png")], "", "entry 3: b nan 12 cannot be read: exposure_ns = nan"),
        ([descriptor("d 1000.0\ni image.png")], "", r"cannot be read \(No such file"),
        ([zeros], "frames.npz", "hold zeros only"),
        ([], "none", "is not there"),
        ([], "", "holds 0 files of frames"),
    ],
)
def test_files_of_no_use(writers: list, file: str, words: str, arrays: Arrays, tmp_path: Path) -> None:
    for write in writers:
        write(tmp_path, arrays)
    refuses(ConfigError, words, read_frames, tmp_path / file)


def test_hdf5_without_its_library_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from opusim.calibration import recorded
    from opusim.plugins import Deferred

    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.setattr(recorded, "h5py", Deferred("h5py"))
    (tmp_path / "frames.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    refuses(ConfigError, r"needs h5py; pip install 'opusim\[frames\]'", read_frames, tmp_path / "frames.h5")


EXPOSURE_US = 200_000.0


def recorded(folder: Path, seed: int, pixels: int = 40_000, **camera: object) -> tuple[Path, object]:
    settings = {"anchor": {"frames": 0, "lowest": 1e-6, "highest": None}} | camera
    with open_device("camera_low_light", n_inputs=2, n_outputs=pixels, seed=seed, camera=settings) as device:
        width, height = shape_of(pixels)
        light = {"longest_exposure_us": 2e6, "saturating_photons": 5500.0}
        wanted = Recording(width=width, height=height, bits=12, steps=20, **light)
        return record(device.flat_frames, wanted, folder, exposure_us=EXPOSURE_US), device.description


@pytest.mark.compiled
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
    refuses(FileExistsError, "is not empty", recorded, tmp_path / "frames", seed, pixels=600)


@pytest.mark.compiled
def test_images_are_as_square_as_the_outputs_allow() -> None:
    assert shape_of(40_000) == (200, 200)
    assert shape_of(600) == (25, 24)
    assert shape_of(13) == (13, 1)


@pytest.mark.slow
@pytest.mark.compiled
def test_the_standards_program_finds_the_constants(tmp_path: Path, seed: int, monkeypatch: Any) -> None:
    # The package's last release was written for numpy 1.
    monkeypatch.setattr(np, "asfarray", lambda a: np.asarray(a, dtype=float), raising=False)
    emva1288 = pytest.importorskip("emva1288.process", reason="pip install -r requirements-dev.txt")
    path, description = recorded(tmp_path / "frames", seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = emva1288.ParseEmvaDescriptorFile(str(path))
        results = emva1288.Results1288(emva1288.Data1288(emva1288.LoadImageData(parsed.images).data).data)
        names = [
            "gain_dn_per_e",
            "quantum_efficiency",
            "dark_current_e_per_s",
            "read_noise_e",
            "dsnu_e",
            "prnu",
        ]
        theirs = results.K, results.QE / 100, results.u_I_mean, results.sigma_d
        theirs = *theirs, results.DSNU1288, results.PRNU1288 / 100
        got = dict(zip(names, map(float, theirs), strict=True))
    camera = description.camera
    # Two images of 40,000 pixels a point, 20 points: the standard gives no limits, so tolerances are generous to it.
    sensor, dark = camera.sensor, camera.dark.doubling.dark_current_ref_e_per_s
    wanted = sensor.gain_dn_per_e, camera.light.quantum_efficiency, dark
    wanted = *wanted, sensor.read_noise_e, sensor.dsnu_e, sensor.prnu
    expected = dict(zip(names, zip(wanted, (0.03, 0.03, 0.03, 0.25, 0.15, 0.15), strict=True), strict=True))
    print(got)
    # and ours, of the same folder, holds the configured constants within twice its limits' width
    ours = reduced(read_frames(path.parent)).estimates(0.95)
    for name, (value, tolerance) in expected.items():
        width = ours[name].high - ours[name].low
        assert abs(ours[name].value - value) < 2 * width < 2 * tolerance * value, name
        assert got[name] == pytest.approx(value, rel=tolerance), (name, got)
