"""Small data sets under the names that the benchmarks read, and what the papers' page says of their results."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks import results_file
from benchmarks.pages import papers
from opusim.training.data.formats import CLASSES
from tests.support.image_files import write_archive, write_labelled_images

COMMITTED = results_file.FOLDER


def write_mnist(root: Path, n: int) -> None:
    """Write the digits of scikit-learn, enlarged, under MNIST's names: n to train and 50 to test."""
    digits = load_digits()
    images = np.pad(digits.images.repeat(3, axis=1).repeat(3, axis=2) * 15, ((0, 0), (2, 2), (2, 2)))
    y = digits.target
    parts = {"train": (images[:n], y[:n]), "t10k": (images[n : n + 50], y[n : n + 50])}
    write_labelled_images(root / "MNIST" / "raw", parts)


def write_cifar10(root: Path, n: int) -> None:
    """Write pictures of one colour a class: n a class to train and 2 to test."""
    members = {}
    for label, name in enumerate(CLASSES):
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), (25 * label, 100, 250 - 25 * label)).save(buffer, "JPEG")
        for part, count in (("train", n), ("test", 2)):
            members |= {f"{part}/{name}/{number:04}.jpg": buffer.getvalue() for number in range(count)}
    write_archive(root, members)


def take_committed(results: Path, name: str) -> None:
    """Copy results that a command reads its settings from."""
    results.mkdir(exist_ok=True)
    shutil.copy(COMMITTED / f"{name}.json", results)


def ours(paper: str, item: str) -> tuple[str, str]:
    """Return the state of a row of benchmarks/papers/README.md, and what it shows of ours."""
    lists = [items for title, items in papers.PAPERS.items() if paper in title]
    (found,) = (each for items in lists for each in items if each.name == item)
    return found.now()


def trains_nothing(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a command again: it must find every run finished, and change no figure."""

    def begin(*_: object, **__: object) -> None:
        raise AssertionError("a finished run began again")

    with monkeypatch.context() as patch:
        patch.setattr("opusim.train", begin)
        run()
