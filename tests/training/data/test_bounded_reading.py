"""Files that promise much, hold more, are damaged or of another kind cost neither memory nor time, and are named.

Every reader of the command ends on them with exit code 2 and one line at once, without a traceback.
"""

import gzip
import io
import json
import os
import shutil
import struct
import tomllib
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opusim import files, training
from opusim.training.data import formats
from opusim.training.data import formats as data_folder
from opusim.training.errors import DataError, RunFolderError
from opusim.training.runs.folder import RunFolder
from tests.support.command import opusim
from tests.support.hostile_files import SECONDS, TooLong, within
from tests.support.image_files import write_archive

MIB = 2**20
IMAGE = "train/airplane/0.jpg"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """The test takes at most 16 MiB of Python memory beyond what it had."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MIB


def idx_header(n: int) -> bytes:
    return bytes([0, 0, 8, 1]) + struct.pack(">I", n)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, little_memory: None) -> None:
    path = tmp_path / "labels.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(idx_header(10))
        for _ in range(128):
            stream.write(bytes(MIB))
    with pytest.raises(DataError, match="holds more than the 10 bytes that its header promises"):
        formats.read_idx(path, n_dimensions=1)


def test_an_idx_file_that_promises_too_much_is_refused(tmp_path: Path, little_memory: None) -> None:
    path = tmp_path / "labels"
    path.write_bytes(idx_header(2**32 - 1) + bytes(100))
    with pytest.raises(DataError, match="promises 4,294,967,295 bytes"):
        formats.read_idx(path, n_dimensions=1)


def test_arrays_come_back_and_others_are_named(tmp_path: Path) -> None:
    x, y = np.arange(6.0).reshape(2, 3), np.array([0, 1])
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "data.npz", x=np.asfortranarray(x), y=y)
        found = formats.read_arrays(tmp_path / "data.npz", ("y", "x"))
        assert np.array_equal(found[0], y)
        assert np.array_equal(found[1], x)
    with pytest.raises(DataError, match="has no array z"):
        formats.read_arrays(tmp_path / "data.npz", ("x", "z"))


def test_no_bomb_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little_memory: None) -> None:
    assert (files.most_unpacked(1), files.most_unpacked(10**8)) == (2**30, 10**10)
    monkeypatch.setattr(formats, "most_unpacked", lambda length: 32 * MIB)
    path = tmp_path / "bomb.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (33 * MIB,)}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            for _ in range(33):
                member.write(bytes(MIB))
        archive.writestr("y.npy", b"")
    with pytest.raises(DataError, match="more than the 33,554,432 that"):
        formats.read_arrays(path, ("x", "y"))


@pytest.mark.parametrize("shape", [(2**40,), (2**62, 4)])
def test_an_array_of_fewer_bytes_is_refused(tmp_path: Path, shape: tuple, little_memory: None) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(64))
        archive.writestr("y.npy", header.getvalue() + bytes(64))
    with pytest.raises(DataError, match=r"x.npy promises [0-9,]+ bytes and has"):
        formats.read_arrays(tmp_path / "data.npz", ("x", "y"))


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError, match="Python objects"):
        formats.read_arrays(tmp_path / "data.npz", ("x", "y"))


def picture(kind: str, side: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side)).save(stream, kind)
    return stream.getvalue()


def test_only_jpeg_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS file would be handed to Ghostscript, which runs the program in it."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n"
    started = []

    def start(*arguments: object, **options: object) -> None:
        started.append(arguments)
        raise OSError("Ghostscript was started")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    for number, content in enumerate((eps, picture("PNG", 32), picture("GIF", 32))):
        write_archive(tmp_path / str(number), {IMAGE: content})
        with pytest.raises(DataError, match="no readable JPEG image"):
            formats.read_cifar10(tmp_path / str(number))
    assert not started


@pytest.mark.parametrize(("limits", "members", "message"), [
    ({"_IMAGE_LIMIT": MIB}, {IMAGE: picture("JPEG", 4000)}, "4000 x 4000 pixels, not 32 x 32"),
    ({}, {IMAGE: bytes(64 * 2**10 + 1)}, "65,537 bytes, more than 65,536"),
    ({"_ARCHIVE_LIMIT": MIB}, {"padding": bytes(2 * MIB)}, "unpacks to more than 1,048,576 bytes"),
    ({"_MEMBER_LIMIT": 3}, {f"notes-{number}": b"" for number in range(4)}, "has more than 3 members"),
], ids=["image", "member", "archive", "members"])  # fmt: skip
@pytest.mark.usefixtures("little_memory")
def test_archives_of_too_much_are_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, int],
    members: dict[str, bytes],
    message: str,
) -> None:
    """A large image is refused before it is decoded, and a large member before it is read."""
    for name, limit in limits.items():
        monkeypatch.setattr(formats, name, limit, raising=name != "_IMAGE_LIMIT")
    write_archive(tmp_path, members)
    with pytest.raises(DataError, match=message):
        formats.read_cifar10(tmp_path)


def test_a_cache_of_another_shape_is_decoded_anew(tmp_path: Path) -> None:
    members = {
        f"{part}/{name}/0.jpg": picture("JPEG", 32) for part in ("train", "test") for name in formats.CLASSES
    }
    cache = write_archive(tmp_path, members).with_name("cifar10.npz")
    wrong = np.zeros((2, 5), np.uint8)
    np.savez(cache, train_x=wrong, train_y=wrong[:, 0], test_x=wrong, test_y=wrong[:, 0])
    assert formats.read_cifar10(tmp_path)["train"][0].shape == (10, 3072)


@pytest.mark.parametrize("depth", [100, 900, 200_000])
def test_deep_nesting_is_a_syntax_error(depth: int) -> None:
    with pytest.raises(json.JSONDecodeError, match="more than 64 tables and lists within each other"):
        files.parse_json("[" * depth + "]" * depth)
    with pytest.raises(tomllib.TOMLDecodeError, match="more than 64 tables and lists within each other"):
        files.parse_toml("a = " + "[" * depth + "]" * depth)
    if depth < 10_000:  # tomllib walks dotted keys once for each part
        with pytest.raises(tomllib.TOMLDecodeError, match="more than 64 tables and lists within each other"):
            files.parse_toml(".".join("a" * depth) + " = 1")
    assert files.parse_json("[" * 64 + "]" * 64)


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b'{"a": "\xff"}', b"9" * 5000])
def test_other_bytes_are_a_syntax_error(text: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        files.parse_json(text)


def test_reading_is_bounded_and_takes_regular_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert files.read_bytes(tmp_path / "link", at_most=5) == b"12345"
    assert files.read_head(tmp_path / "file", 2) == b"12"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        files.read_bytes(tmp_path / "file", at_most=4)
    for read in (files.read_bytes, files.require_regular):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "pipe")
        with pytest.raises(IsADirectoryError):
            read(tmp_path)


def bytes_of(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": bytes_of(b""), "not UTF-8": bytes_of(b'{"a": "\xff\xfe"}\n'),
    "deep JSON": bytes_of(b"[" * 100_000 + b"\n"), "deep TOML": bytes_of(b"a = " + b"[" * 100_000),
    "object": bytes_of(b"{}\n"), "named pipe": pipe, "folder": directory,
}  # fmt: skip
"""What a reader meets before it looks at content, of which tests/test_hostile_data.py and its like draw more."""
TRAIN = ("train", "bp", "--out", "run")
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "run.toml": [(*TRAIN, "--config", "run.toml")],
    "run.json": [(*TRAIN, "--config", "run.json")],
    "opu.toml": [
        ("device", "show", "opu.toml"),
        ("account", "device", "opu.toml"),
        ("train", "pdfa", "--device", "opu.toml"),
    ],
    "certificate.toml": [("device", "check", "gaussian", "certificate.toml")],
    "spec.toml": [("curve", "spec.toml", "--draw-only", "--out", "sweep")],
    "MNIST/raw/train-images-idx3-ubyte": [(*TRAIN, "--data", "mnist")],
    "MNIST/raw/train-images-idx3-ubyte.gz": [(*TRAIN, "--data", "mnist")],
    "CIFAR10-jpeg/cifar10-jpeg.tar.xz": [(*TRAIN, "--data", "cifar-10")],
    "arrays.npz": [("evaluate", "unfinished", "--data", "npz:arrays.npz")],
    "steps.zo": [("zo", "replay", "steps.zo")],
    "tuning.json": [("tune", "convex", "--data", "digits", "--epsilon", "8", "--epochs", "1", "--out", ".")],
}
"""Commands that read a file of the user."""
HARMLESS = {("run.toml", "empty"), ("run.json", "object")}  # the defaults


def refused(folder: Path, *arguments: object, may_pass: bool = False) -> bool:
    """Require that a command ends at once with exit code 2 and one line, or that it passes if it may."""
    with within(SECONDS):
        result = opusim(*arguments, cwd=folder)
    if may_pass and result.returncode == 0:
        return False
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert (result.returncode, len(lines)) == (2, 1), result
    assert lines[0].startswith("opusim: "), result
    return True


@pytest.mark.parametrize(
    ("file", "damage"),
    [(file, damage) for file in COMMANDS for damage in DAMAGES if (file, damage) not in HARMLESS],
)
def test_files_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfinished: Path, file: str, damage: str
) -> None:
    monkeypatch.setenv(data_folder.VARIABLE, str(tmp_path))
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "unfinished").symlink_to(unfinished)
    (tmp_path / "result.json").write_text("{}")  # of a search
    DAMAGES[damage](tmp_path / file)
    for command in COMMANDS[file]:
        assert refused(tmp_path, *command)


SPEC = 'title = "t"\nconfig = { trainer = { kind = "bp" }, model = { hidden = [4] }, epochs = 1 }\n[axes]\nseed = [0]\n'


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_of_sweeps(tmp_path: Path, damage: str) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    arguments = ("curve", tmp_path / "spec.toml", "--draw-only", "--out", tmp_path / "sweep")
    from opusim.training.sweeps.sweep import points_of, read_spec

    (point,) = points_of(*read_spec(tmp_path / "spec.toml"))
    rows = tmp_path / "sweep" / "rows"
    rows.mkdir(parents=True)
    DAMAGES[damage](rows / f"{point.identity}.json")
    assert refused(tmp_path, *arguments)


def begun(folder: Path, kind: str, stop: object, **changes: Any) -> Path:
    config = {"epochs": 1, "threads": 1, "trainer": {"kind": kind}, "model": {"hidden": [4]}, **changes}
    with pytest.raises(KeyboardInterrupt):
        training.train({**config, "checkpoint": {"every_steps": 1}}, folder=folder, watcher=stop)
    return folder


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory, stop_at: type) -> Path:
    return begun(tmp_path_factory.mktemp("odd") / "run", "bp", stop_at(3))


@pytest.fixture(scope="module")
def runs(unfinished: Path, tmp_path_factory: pytest.TempPathFactory, stop_at: type) -> dict[str, Path]:
    """Unfinished runs that have, together, every file that a run folder can have."""
    folder = tmp_path_factory.mktemp("odd")
    return {
        "bp": unfinished,
        "zo": begun(folder / "zo", "zo", stop_at(3)),
        "components": begun(folder / "components", "bp", stop_at(3), data={"components": 5}),
        "monitored": begun(folder / "monitored", "pdfa", stop_at(3), device={"monitor": {"every_steps": 5}}),
    }


EVALUATE, REPORT, RESUME = ("evaluate",), ("report",), ("train", "resume", "--quiet")
ACCOUNT, REPLAY = ("account", "run"), ("zo", "replay")
READERS = {
    ("bp", "config.json"): EVALUATE, ("bp", "checkpoints/step-0000000003.safetensors"): EVALUATE,
    ("bp", "metrics.jsonl"): REPORT, ("bp", "timing.jsonl"): REPORT, ("bp", "audit.json"): REPORT,
    ("bp", "ledger.jsonl"): ACCOUNT, ("bp", "ledger.head"): ACCOUNT, ("bp", "lock"): RESUME,
    ("zo", "steps.zo"): REPLAY, ("zo", "steps.mark.json"): REPLAY, ("zo", "base.safetensors"): REPLAY,
    ("components", "components.safetensors"): EVALUATE, ("monitored", "baseline.safetensors"): RESUME,
}  # fmt: skip
"""A command that reads each file of a run folder."""


def damaged(source: Path, folder: Path, name: str, damage: str) -> Path:
    shutil.copytree(source, folder)
    DAMAGES[damage](folder / name)
    return folder


@pytest.mark.parametrize(("kind", "name"), list(READERS))
def test_run_folders(tmp_path: Path, runs: dict[str, Path], kind: str, name: str) -> None:
    """Some damages leave a sound file, such as an empty table of metrics; no command hangs or shows a traceback."""
    found = 0
    for number, damage in enumerate(DAMAGES):
        folder = damaged(runs[kind], tmp_path / f"run-{number}", name, damage)
        found += refused(tmp_path, *READERS[kind, name], folder, may_pass=True)
    assert found >= len(DAMAGES) // 2


def test_a_command_that_hangs_is_noticed(tmp_path: Path) -> None:
    """The planted fault: a reader that opens whatever stands there."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TooLong), within(0.2):
        (tmp_path / "pipe").read_bytes()


def test_a_checkpoint_that_links_to_itself_ends_in_an_error(tmp_path: Path) -> None:
    """It is listed, and yet `exists` says no: not to be taken for one that a writer has just replaced."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-0000000003.safetensors").symlink_to("step-0000000003.safetensors")
    with within(5), pytest.raises(RunFolderError, match="003.safetensors is not a readable checkpoint"):
        folder.newest_header()
