"""Read CIFAR-10 from an archive of JPEG files, cache it, and name what is wrong with an archive."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opusim.training.data import load_dataset
from opusim.training.data.formats import ARCHIVE, CLASSES, read_cifar10
from opusim.training.errors import DataError
from tests.support.image_files import write_archive


def jpeg(colour: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def small() -> dict[str, bytes]:
    """Two training images and one test image a class; the red of a class is 20 times its number."""
    return {
        f"{part}/{name}/{number:04}.jpg": jpeg((20 * label, 100, 250 if part == "test" else 10))
        for part, count in (("train", 2), ("test", 1))
        for number in range(count)
        for label, name in reversed(list(enumerate(CLASSES)))
    }


def test_images_are_read_channels_first_with_their_labels(tmp_path: Path) -> None:
    write_archive(tmp_path, small())
    parts = read_cifar10(tmp_path)
    pixels, labels = parts["train"]
    assert pixels.shape == (20, 3072)
    assert pixels.dtype == np.uint8
    assert labels.tolist() == sorted(2 * list(range(10)))
    red, green, blue = np.split(pixels.astype(int), 3, axis=1)
    assert np.abs(red - 20 * labels[:, None].astype(int)).max() <= 4  # JPEG keeps colours nearly
    assert np.abs(green - 100).max() <= 4
    assert np.abs(blue - 10).max() <= 4
    assert parts["test"][0][:, 2048:].mean() > 240


def test_a_second_call_reads_what_the_first_one_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path, small())
    first = read_cifar10(tmp_path)
    assert [path.name for path in (tmp_path / ARCHIVE).parent.iterdir() if path.suffix == ".npz"] == [
        "cifar10.npz"
    ]
    monkeypatch.setattr("opusim.training.data.formats._decode", None)
    second = read_cifar10(tmp_path)
    for part in first:
        assert all((a == b).all() for a, b in zip(first[part], second[part], strict=True))


def test_a_damaged_cache_is_decoded_again(tmp_path: Path) -> None:
    write_archive(tmp_path, small())
    read_cifar10(tmp_path)
    (tmp_path / ARCHIVE).with_name("cifar10.npz").write_bytes(b"PK\x03\x04 cut")
    assert len(read_cifar10(tmp_path)["train"][1]) == 20


def test_a_folder_that_is_not_to_be_written_to_keeps_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path, small())
    folder = (tmp_path / ARCHIVE).parent
    folder.chmod(0o555)  # the superuser could write all the same
    assert len(read_cifar10(tmp_path)["test"][1]) == 10
    assert [path.name for path in folder.iterdir()] == [Path(ARCHIVE).name]
    folder.chmod(0o755)

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("numpy.savez", refuse)
    assert len(read_cifar10(tmp_path)["test"][1]) == 10
    assert not (folder / "cifar10.npz").exists()


def test_it_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path, small())
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    data = load_dataset("cifar-10", validation_fraction=0.0, split_seed=0)
    assert (len(data.train), data.n_features, data.n_classes) == (20, 3072, 10)
    monkeypatch.delenv("OPUSIM_DATA")
    with pytest.raises(DataError, match="OPUSIM_DATA is not set.*cifar10-jpeg.tar.xz"):
        load_dataset("cifar-10", split_seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/airplane/0000.jpg": b"no image"}, "airplane/0000.jpg is no readable JPEG image"),
        ({"train/airplane/0000.jpg": jpeg((1, 2, 3), (16, 32))}, "16 x 32 pixels, not 32 x 32"),
        ({"train/lorry/0000.jpg": jpeg((1, 2, 3))}, "holds the classes.*not those of CIFAR-10"),
    ],
)
def test_wrong_archives_are_named(tmp_path: Path, change: dict[str, bytes], message: str) -> None:
    write_archive(tmp_path, small() | change)
    with pytest.raises(DataError, match=message):
        read_cifar10(tmp_path)


def test_missing_and_damaged_archives_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing: put CIFAR-10 there"):
        read_cifar10(tmp_path)
    write_archive(tmp_path, small())
    path = tmp_path / ARCHIVE
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match="is damaged"):
        read_cifar10(tmp_path)
