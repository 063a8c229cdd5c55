"""Read CIFAR-10 from an archive of JPEG files, and idx files, and name what is wrong with damaged ones."""

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opusim.training.data import load_dataset
from opusim.training.data.formats import ARCHIVE, CLASSES, read_cifar10, read_idx
from opusim.training.errors import DataError
from tests.support.image_files import idx_bytes, write_archive, write_labelled_images


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


def test_a_second_call_reads_what_the_first_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path, small())
    first = read_cifar10(tmp_path)
    assert [p.name for p in (tmp_path / ARCHIVE).parent.iterdir() if p.suffix == ".npz"] == ["cifar10.npz"]
    monkeypatch.setattr("opusim.training.data.formats._decode", None)
    second = read_cifar10(tmp_path)
    for part in first:
        assert all((a == b).all() for a, b in zip(first[part], second[part], strict=True))


def test_a_damaged_cache_is_decoded_again(tmp_path: Path) -> None:
    write_archive(tmp_path, small())
    read_cifar10(tmp_path)
    (tmp_path / ARCHIVE).with_name("cifar10.npz").write_bytes(b"PK\x03\x04 cut")
    assert len(read_cifar10(tmp_path)["train"][1]) == 20


def test_a_folder_without_write_access_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("change", "message"), [
    ({"train/airplane/0000.jpg": b"no image"}, "airplane/0000.jpg is no readable JPEG image"),
    ({"train/airplane/0000.jpg": jpeg((1, 2, 3), (16, 32))}, "16 x 32 pixels, not 32 x 32"),
    ({"train/lorry/0000.jpg": jpeg((1, 2, 3))}, "holds the classes.*not those of CIFAR-10"),
])  # fmt: skip
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


SIDE = 3


def _images(n: int, side: int = SIDE) -> np.ndarray:
    return np.arange(n * side * side, dtype=np.uint8).reshape(n, side, side)


def _fill(raw: Path, compress: bool = True) -> None:
    """Write 20 training and 10 test images with labels."""
    parts = {prefix: (_images(n), np.arange(n) % 10) for prefix, n in (("train", 20), ("t10k", 10))}
    write_labelled_images(raw, parts, compress=compress)


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with small files under MNIST's names."""
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    _fill(tmp_path / "MNIST" / "raw")
    return tmp_path / "MNIST" / "raw"


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    array = _images(5)[:, :, :2]  # not square
    (tmp_path / "images").write_bytes(idx_bytes(array))
    assert np.array_equal(read_idx(tmp_path / "images", n_dimensions=3), array)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
@pytest.mark.parametrize("compress", [True, False])
def test_loads_both_sets_compressed_or_not(
    name: str, folder: str, compress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    _fill(tmp_path / folder / "raw", compress)
    data = load_dataset(name, split_seed=0, standardise=False)
    assert (data.name, data.n_classes, data.n_features) == (name, 10, SIDE * SIDE)
    assert data.test is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 10)
    expected = torch.from_numpy(_images(10).reshape(10, -1)).float() / 255
    assert torch.equal(data.test.x, expected)
    assert data.test.y.tolist() == list(range(10))


def test_each_image_keeps_its_label(raw: Path) -> None:
    data = load_dataset("mnist", split_seed=4, standardise=False)
    for part in (data.train, data.validation):
        first_pixels = (part.x[:, 0] * 255).round().long()
        assert torch.equal(first_pixels // (SIDE * SIDE) % 10, part.y)


def test_standardises_with_the_published_constants(raw: Path) -> None:
    data = load_dataset("mnist", split_seed=0)
    plain = load_dataset("mnist", split_seed=0, standardise=False)
    assert (data.standardisation.mean, data.standardisation.std) == (0.1307, 0.3081)
    assert data.standardisation.public
    torch.testing.assert_close(data.train.x, (plain.train.x - 0.1307) / 0.3081)


def test_a_missing_file_names_variable_and_remedy(raw: Path) -> None:
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is missing.*OPUSIM_DATA.*unset"):
        load_dataset("mnist", split_seed=0)


def test_a_missing_folder_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"OPUSIM_DATA is .*nowhere, which is not a folder.*MNIST/raw/"):
        load_dataset("mnist", split_seed=0)


def _with_content(content: bytes, name: str, raw: Path) -> None:
    (raw / f"{name}.gz").unlink()
    path = raw / (name if content[:2] != b"\x1f\x8b" else f"{name}.gz")
    path.write_bytes(content)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
SOUND = idx_bytes(_images(20))
ZIPPED = gzip.compress(SOUND, mtime=0)  # its bytes are in the names of tests


@pytest.mark.parametrize(("name", "content", "message"), [
    (IMAGES, ZIPPED[: len(ZIPPED) // 2], "cut short, as by an interrupted download .*compressed data"),
    (IMAGES, ZIPPED[:30] + b"\x00" * 9 + ZIPPED[39:], "not a sound gzip file"),
    (IMAGES, SOUND[:-1], "cut short.*promises 180 bytes of data, it holds 179"),
    (IMAGES, SOUND[:9], "cut short.*9 bytes do not hold a header of 16"),
    (IMAGES, SOUND[:3], "cut short.*3 bytes do not hold a header of 16"),
    (IMAGES, b"", "cut short.*0 bytes do not hold a header"),
    (IMAGES, SOUND + b"\x00", "holds more than the 180 bytes that its header promises"),
    (IMAGES, idx_bytes(np.arange(20)), "starts with 0x00000801.*3 dimension.*starts with 0x00000803"),
    (IMAGES, idx_bytes(_images(20), element_type=13), "starts with 0x00000d03"),
    (LABELS, SOUND, "starts with 0x00000803.*1 dimension.*starts with 0x00000801"),
    (LABELS, b"<html>not found</html>", "starts with 0x3c68746d"),
    (LABELS, idx_bytes(np.arange(19) % 10), "holds 20 images and train-labels-idx1-ubyte 19 labels"),
    (LABELS, idx_bytes(np.arange(20)), "labels from 0 to 9, got 0 to 19"),
    (IMAGES, idx_bytes(_images(20, side=2)), "training images of 4 pixels and test images of 9"),
])  # fmt: skip
def test_a_damaged_file_is_named_with_what_to_do(raw: Path, name: str, content: bytes, message: str) -> None:
    _with_content(content, name, raw)
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset("mnist", split_seed=0)
    if "cut short" in message:
        assert name in str(caught.value)
        assert "delete this file and download it again; nothing else is lost" in str(caught.value)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.gz cannot be read: No such file"):
        read_idx(tmp_path / "absent.gz", n_dimensions=1)
