"""Data, checkpoints and results of any content end in their reader's documented error, in one line."""

import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

from opusim import training
from opusim.accounting.audit import AuditPlan, AuditResult
from opusim.accounting.journal import Position
from opusim.calibration.conductance_fit import read_measurements
from opusim.devices.usage import Usage
from opusim.errors import ConfigError
from opusim.serving.connections import BadMessage, Message, read_message
from opusim.serving.journal import Entry, read_journal
from opusim.training.attacks.findings import Audit, Finding, Played, Role, audit_rows, paragraphs, read_audit
from opusim.training.config.sections import DataConfig
from opusim.training.data.formats import ARCHIVE, read_arrays, read_cifar10, read_idx
from opusim.training.data.tables import file_dataset
from opusim.training.engine.callbacks import Callback
from opusim.training.errors import DataError, RunFolderError
from opusim.training.private_loop.folder import CHECKPOINT_FILE, SETTINGS_FILE, VERSION, read_save
from opusim.training.runs.checkpoints import read_checkpoint, read_tensors
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import (
    HEADER_KEY,
    digest_of,
    json_digest,
    list_checkpoints,
    read_array,
    read_lines,
    sealed,
)
from opusim.training.sweeps.sweep import Row, read_row
from opusim.training.sweeps.tuning import STATE_FILE, Draw, SearchState
from opusim.training.zeroth_order.language import read_texts
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent, StepLogCorrupt, mark_file
from tests.support.hostile_files import damaged_bytes, damaged_values, examples, read_or_refused, to_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


IDX = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 3) + bytes(18)


@examples(100)
@given(content=damaged_bytes(IDX), packed=st.booleans(), outer=st.booleans(), data=st.data())
def test_idx_files(folder: Path, content: bytes, packed: bool, outer: bool, data: st.DataObject) -> None:
    if packed:
        content = data.draw(damaged_bytes(gzip.compress(IDX))) if outer else gzip.compress(content)
    file = written(folder / ("images.gz" if packed else "images"), content)
    found = read_or_refused(lambda: read_idx(file, n_dimensions=3), DataError, names="images")
    assert found is None or (found.ndim == 3 and found.dtype == np.uint8)


def npz(method: int = zipfile.ZIP_STORED, header: str | None = None, version: tuple = (1, 0)) -> bytes:
    """An .npz file, its first array under another header."""
    arrays = {}
    for name, array in {"x": np.zeros((3, 2)), "y": np.arange(3)}.items():
        stream = io.BytesIO()
        np.lib.format.write_array(stream, array, version=version)
        arrays[name] = stream.getvalue()
    if header is not None:
        text = header.encode("latin1", "replace") + b"\n"
        arrays["x"] = np.lib.format.magic(1, 0) + struct.pack("<H", len(text)) + text + bytes(48)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': (3, 2), }"


@examples(300)
@given(
    content=st.sampled_from(METHODS).flatmap(lambda method: damaged_bytes(npz(method)))
    | damaged_bytes(HEADER.encode()).map(lambda text: npz(header=text[:60_000].decode("latin1")))
    | st.sampled_from(
        ["-" * 9000 + "1", "{'descr': (", "(" * 150, "{'descr': '<f8', 'fortran_order': 0, 'shape': (-1, 2)}"]
    ).map(lambda text: npz(header=text))
)
@example(npz(header=HEADER.replace("'<f8'", "('<f8',)")))  # IndexError of numpy's parser
@example(npz(header=HEADER.replace("'<f8'", "'<,'")))  # SyntaxError
@example(npz(header=HEADER.replace("'descr'", "b'descr'")))  # TypeError
@example(npz(header=HEADER.replace("(3, 2)", "(3L, 2)")))  # a warning; Python 2 wrote such headers
def test_npz_files(folder: Path, content: bytes) -> None:
    file = written(folder / "arrays.npz", content)
    found = read_or_refused(lambda: read_arrays(file, ("x", "y")), DataError, names="arrays.npz")
    assert found is None or all(not array.dtype.hasobject for array in found)


def archive_of(image: bytes, names: tuple[str, ...] = ("train/cat/1.jpg", "test/cat/1.jpg")) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as files:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(image)
            files.addfile(member, io.BytesIO(image))
    return out.getvalue()


def jpeg() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (32, 32)).save(out, "JPEG")
    return out.getvalue()


SMALL = {"format": lzma.FORMAT_XZ, "preset": 0}


@examples(60)
@given(
    content=damaged_bytes(lzma.compress(archive_of(jpeg()), **SMALL))
    | damaged_bytes(archive_of(jpeg())).map(lambda content: lzma.compress(content, **SMALL))
    | damaged_bytes(jpeg()).map(lambda image: lzma.compress(archive_of(image), **SMALL))
)
def test_archives_of_images(folder: Path, content: bytes) -> None:
    file = written(folder / "root" / ARCHIVE, content)
    read_or_refused(lambda: read_cifar10(folder / "root"), DataError, names=file.name)
    for made in file.parent.glob("*.npz"):
        made.unlink()


CELLS = st.sampled_from(
    (
        *("0", "1", "1.5", "-1", "", " ", "nan", "inf", "-inf", "1e400", "9" * 400, "9" * 5000),
        *("1,5", "abc", "True"),
        *("\u00b2", "0x1", "\0", '"', '"a\nb"', "2020-01-01", "#", "=1+1", "\ufeff", "\u202e", "1_000"),
    )
)
ROWS = st.lists(st.lists(CELLS, min_size=1, max_size=5), max_size=6)


def table(header: str, separator: str = ",") -> st.SearchStrategy[bytes]:
    def text(rows: list[list[str]]) -> bytes:
        return "\n".join([header, *(separator.join(row) for row in rows)]).encode()

    return ROWS.map(text)


@examples(150)
@given(content=table("a,b,label") | table("a,a,label") | damaged_bytes(b"a,b,label\n1,2,x\n3,4,y\n" * 5))
def test_tables(folder: Path, content: bytes) -> None:
    file = written(folder / "table.csv", content)
    options = DataConfig(name=f"csv:{file}", label=("label",))
    read_or_refused(lambda: file_dataset(options, "index"), (ValueError, TypeError))


@examples(100)
@given(
    content=table("conductance_us,programmed_us,time_s")
    | table("input;weight;time_s;reading", ";")
    | damaged_bytes(b"conductance_us,programmed_us,time_s,device\n1,2,3,a\n")
)
def test_readings_of_memory_devices(folder: Path, content: bytes) -> None:
    file = written(folder / "readings.csv", content)
    read_or_refused(lambda: read_measurements(file), ConfigError, names="readings.csv")


@examples(100)
@given(content=table("a text\t0", "\t") | damaged_bytes(b"a text\t0\nanother\t1\n"))
def test_labelled_texts(folder: Path, content: bytes) -> None:
    file = written(folder / "texts.tsv", content)
    found = read_or_refused(lambda: read_texts(file), DataError, names="texts.tsv")
    assert found is None or len(found[0]) == len(found[1]) > 0


class Dead(Callback):
    """A watcher who falls dead at the third step."""

    def on_step(self, *, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were killed after three steps."""
    found = {}
    for kind in ("bp", "zo"):
        found[kind] = tmp_path_factory.mktemp("runs") / kind
        config = {"epochs": 1, "threads": 1, "trainer": {"kind": kind}, "model": {"hidden": [4]}}
        with pytest.raises(KeyboardInterrupt):
            training.train({**config, "checkpoint": {"every_steps": 1}}, folder=found[kind], watcher=Dead())
    return found


@examples(100)
@given(data=st.data())
def test_bytes_of_checkpoints(folder: Path, runs: dict[str, Path], data: st.DataObject) -> None:
    sound = list_checkpoints(runs["bp"] / "checkpoints")[-1]
    file = written(folder / sound.name, data.draw(damaged_bytes(sound.read_bytes())))
    found = read_or_refused(lambda: read_checkpoint(file), RunFolderError, names=sound.name)
    if found is not None:
        assert found.header == read_checkpoint(sound).header


@examples(200)
@given(data=st.data())
def test_headers_of_checkpoints(folder: Path, runs: dict[str, Path], data: st.DataObject) -> None:
    """Facts of other values, under a digest that fits them."""
    sound = list_checkpoints(runs["bp"] / "checkpoints")[-1]
    metadata = read_checkpoint(sound).header.to_metadata()
    facts = json.loads(metadata[HEADER_KEY])
    del facts["digest"]
    facts = data.draw(damaged_values(facts))
    try:
        digest = json_digest(facts)
    except ValueError:  # NaN has no digest
        digest = "0"
    content = save({"model.w": np.zeros(3)}, metadata={HEADER_KEY: json.dumps({**facts, "digest": digest})})
    file = written(folder / sound.name, content)
    read_or_refused(lambda: read_checkpoint(file), RunFolderError, names=sound.name)


@examples(100)
@given(content=damaged_bytes(save({"array": np.zeros((2, 3))}, metadata={"schema_version": "1"})))
def test_arrays_and_tensors(folder: Path, content: bytes) -> None:
    file = written(folder / "a.safetensors", content)
    read_or_refused(lambda: read_array(file), ValueError, names="a.safetensors")
    read_or_refused(lambda: read_tensors(file), ValueError, names="a.safetensors")


@examples(150)
@given(data=st.data())
def test_configurations_of_runs(folder: Path, runs: dict[str, Path], data: st.DataObject) -> None:
    sound = json.loads((runs["bp"] / "config.json").read_text())
    content = data.draw(damaged_values(sound).map(to_json) | damaged_bytes(to_json(sound)))
    file = written(folder / "run" / "config.json", content)
    read_or_refused(RunFolder(file.parent).read_config, ValueError, names="config.json")
    read_or_refused(lambda: RunFolder(file.parent).resume_command, ValueError, names="config.json")


@examples(60)
@given(data=st.data())
def test_changed_configurations_of_checkpoints(runs: dict[str, Path], data: st.DataObject) -> None:
    """A run whose config.json was changed is refused as a whole, and trains no further."""
    file = runs["bp"] / "config.json"
    sound = file.read_bytes()
    content = data.draw(damaged_values(json.loads(sound)).map(to_json))
    try:
        file.write_bytes(content)
        found = read_or_refused(lambda: training.load_run(runs["bp"]), ValueError, names="config.json")
        assert found is None or content == sound
    finally:
        file.write_bytes(sound)


LINE = {"schema_version": 1, "step": 3, "epoch": 1, "loss": 0.5}


@examples(100)
@given(
    content=damaged_values([LINE, LINE]).map(lambda lines: b"\n".join(map(to_json, lines)))
    | damaged_bytes(to_json(LINE) + b"\n")
)
def test_lines_of_metrics(folder: Path, content: bytes) -> None:
    file = written(folder / "metrics.jsonl", content + b"\n")
    found = read_or_refused(lambda: read_lines(file, ("step", "epoch")), ValueError, names="metrics.jsonl")
    for line in found or ():
        assert line["step"] + line["epoch"] is not None


@pytest.mark.filterwarnings("ignore:.*has no digest")
@examples(150)
@given(data=st.data())
def test_step_logs(folder: Path, runs: dict[str, Path], data: st.DataObject) -> None:
    sound = runs["zo"] / LOG_FILE
    mark = mark_file(sound)
    file = written(folder / "log" / LOG_FILE, sound.read_bytes())
    written(mark_file(file), mark.read_bytes())
    hurt = data.draw(st.sampled_from([sound, mark]))
    values = damaged_values(json.loads(mark.read_text())).map(to_json) if hurt == mark else st.nothing()
    written(folder / "log" / hurt.name, data.draw(damaged_bytes(hurt.read_bytes()) | values))
    found = read_or_refused(lambda: LogContent.read(file), (StepLogCorrupt, ValueError), names="steps")
    if found is not None:
        assert found.entries == LogContent.read(sound).entries[: len(found.entries)]


@pytest.mark.filterwarnings("ignore:.*has no digest")
@examples(100)
@given(data=st.data())
def test_saves_of_private_loops(folder: Path, data: st.DataObject) -> None:
    out, state = io.BytesIO(), io.BytesIO()
    loop = written(folder / "loop" / SETTINGS_FILE, b"{}").parent
    torch.save({"step": 3, "a": {"b": [1]}}, state)
    content = torch.frombuffer(state.getbuffer(), dtype=torch.uint8)
    position = Position().to_json()
    facts = {"ledger": position, "settings": digest_of(b"{}"), "inode": None}
    sealed_facts = sealed({"content": digest_of(state.getbuffer())}, **facts)
    sound_saves = {
        "of now": {"version": VERSION, "facts": json.dumps(sealed_facts), "content": content},
        "without a digest": {"version": 1, "inode": None, "ledger": position, "step": 3, "a": {"b": [1]}},
    }
    kind = data.draw(st.sampled_from(sorted(sound_saves)))
    torch.save(sound_saves[kind], out)
    written(loop / CHECKPOINT_FILE, out.getvalue())
    assert read_save(loop)[0]["step"] == 3
    out = io.BytesIO()
    torch.save(data.draw(damaged_values(sound_saves[kind])), out)
    sound = out.getvalue()
    file = written(folder / "loop" / CHECKPOINT_FILE, data.draw(st.just(sound) | damaged_bytes(sound)))
    read_or_refused(lambda: read_save(file.parent), RunFolderError, names="loop")


SEARCH = SearchState(
    asked={"configuration": "a" * 32}, payment=1, draw=Draw(trials=(("optimizer.lr=0.1",),), seed=1),
    started=[0], scores={0: 0.5},
)  # fmt: skip


def states(place: Path) -> dict[str, tuple[Any, Callable[[Path], Any]]]:
    """A sound document of every kind of result, and its reader."""
    SEARCH.write(place)
    state = json.loads((place / STATE_FILE).read_text())
    del state["seal"]  # so that what stands behind it is attacked, too
    row = Row(identity="bp-1", status="done", figures={"test_accuracy": 0.5}, noise_std=0.1)
    return {
        STATE_FILE: (state, lambda path: SearchState.read(path.parent)),
        "row.json": (
            {"schema_version": 1, **json.loads(json.dumps(row.__dict__, default=dict))},
            lambda path: accuracy(read_row(path)),
        ),
        "audit.json": (json.loads(json.dumps(AUDIT)), lambda path: told(read_audit(path))),
    }


def accuracy(row: Row | None) -> Any:
    return row and (row.accuracy, row.proven_epsilon, row.claimed_epsilon)


RESULT = AuditResult(
    **{"epsilon_lower": 0.5, "ceiling": 3.0, "n_in": 20, "n_out": 20},
    **{"threshold": 0.1, "false_positives": 1, "false_negatives": 2},
    plan=AuditPlan(threat_model="sees the weights", pair="with and without", delta=1e-5),
)
FOUND = {"attack": "difference", "members": "1.0", "others": "0.5", "auc": 0.9, "result": RESULT}
AUDIT = Audit(
    findings=tuple(Finding(role=role, **FOUND) for role in Role), guarantees=(),
    trials=40, control_trials=40, seed=1, steps=3, played=Played.STEP,
).to_json()  # fmt: skip


def told(audit: Audit) -> Any:
    return audit_rows(audit), paragraphs(audit)


@pytest.mark.filterwarnings("ignore:.*has no digest")
@examples(200)
@given(name=st.sampled_from(["row.json", "audit.json", STATE_FILE]), data=st.data())
def test_results(folder: Path, name: str, data: st.DataObject) -> None:
    sound, read = states(folder)[name]
    content = data.draw(damaged_values(sound).map(to_json) | damaged_bytes(to_json(sound)))
    file = written(folder / name, content)
    read_or_refused(lambda: read(file), RunFolderError, names=name)


USE = Entry(
    time="2026-01-01T00:00:00", device="camera", user="ada", run="r", calls=1,
    used=Usage(frames=3, seconds=1.0), busy_s=0.1,
).to_json()  # fmt: skip


@examples(150)
@given(
    content=damaged_values([USE, USE]).map(lambda lines: b"\n".join(map(to_json, lines)))
    | damaged_bytes(to_json(USE) + b"\n")
)
def test_journals_of_servers(folder: Path, content: bytes) -> None:
    file = written(folder / "usage.jsonl", content + b"\n")
    found = read_or_refused(lambda: read_journal(file), ConfigError, names="usage.jsonl")
    for entry in found or ():
        assert read_journal(written(file, to_json(entry.to_json()) + b"\n")) == [entry]


HEAD = {"schema": 1, "kind": "project", "values": {"n": 3}, "arrays": [["|i1", [2, 3]], ["<f4", [1]]]}
FRAMES = [HEAD, bytes(6), bytes(4)]


@examples(300)
@given(data=st.data())
def test_messages(data: st.DataObject) -> None:
    header, *arrays = FRAMES
    odd = [0, -1, 2**40, 2**63, True, 0.5, "x", None, [0, 2**40, 2**40, 2**40], [2**33, 2**33], []]
    odd = (*odd, ["<f8", [0]], ["|O8", [1]])
    head = data.draw(damaged_values(header, odd=odd).map(to_json) | damaged_bytes(to_json(header)))
    frames = [head, *data.draw(st.just(arrays) | st.lists(st.binary(max_size=9), max_size=3))]
    found = read_or_refused(lambda: read_message(frames, limit=10_000), BadMessage)
    assert found is None or isinstance(found, Message)
