"""What a folder of runs holds, and the removal of runs that are no longer needed.

Listing changes nothing; a damaged folder takes one line. Removal takes only what a run wrote: it refuses a
folder that holds anything else, follows no link, and keeps a release run's ledger unless told otherwise, because that
ledger is the only account of what was revealed about private data.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opusim.accounting.explanation import number
from opusim.accounting.guarantee import Guarantee, NoGuarantee
from opusim.accounting.ledger import LEDGER_FILE, read_ledger
from opusim.devices.access import is_held
from opusim.plugins import FOREIGN_ERRORS
from opusim.tables import data_size
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import LOCK_FILE, kind_of, only_writer

SCHEMA = "opusim-runs"
VERSION = 1

LoopReader = Callable[[Path], Mapping[str, Any]]
State = Literal["finished", "unfinished", "being written", "damaged"]

WRITTEN = frozenset(
    (
        *("config.json", "metrics.jsonl", "timing.jsonl"),
        *("ledger.jsonl", "ledger.head", "ledger.head.partial"),
        *("labels.safetensors", "baseline.safetensors", "components.safetensors", "summary.json"),
        *("report.html", "steps.zo", "steps.mark.json", "base.safetensors", "final-model-scores.json"),
        *(
            f"{name}.{ending}"
            for name in ("audit", "one-run", "final-model", "dossier", "private-dossier")
            for ending in ("json", "html", "pdf")
        ),
        LOCK_FILE,
    )
)
"""Files that training, audits and reports write into a run folder."""
_FOLDERS = ("checkpoints", "figures")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder of a list.

    Attributes:
        path: The folder.
        kind: run, search, sweep, audit or private loop.
        size: Bytes of its files; links are not followed.
        started: Day on which its configuration was written, such as 2026-01-31; None if unknown, as all below.
        state: State of a run; of a private loop "being written", "damaged" or None; None for other kinds.
        trainer: Kind of its trainer.
        data: Name of its data set.
        model: model.name of its configuration.
        mode: experiment or release.
        step: Steps in its newest checkpoint; of a private loop those paid for.
        steps: Steps of the whole run, or None while its first epoch is not over; planned ones of a private loop.
        guarantee: The proven one of least epsilon, or another if none is proven; None if nothing was paid for.
        accuracy: On test records, else on validation records, in [0, 1]; None if it is not known.
        rmse: The same for real numbers; None for other targets.
        measured_on: test or validation.
        problem: Why it is damaged, in one line.
    """

    path: Path
    kind: str
    size: int
    started: str | None = None
    state: State | None = None
    trainer: str | None = None
    data: str | None = None
    model: str | None = None
    mode: str | None = None
    step: int | None = None
    steps: int | None = None
    guarantee: Guarantee | None = None
    accuracy: float | None = None
    rmse: float | None = None
    measured_on: str | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; what is not known is null."""
        stated = None if self.guarantee is None else self.guarantee.to_json()
        keys = ("epsilon", "delta", "unit", "adjacency", "release", "status")
        found: dict[str, Any] = {"path": str(self.path), "kind": self.kind}
        for name in ("state", "trainer", "data", "model", "mode", "step", "steps"):
            found[name] = getattr(self, name)
        found["guarantee"] = None if stated is None else {key: stated[key] for key in keys}
        for name in ("accuracy", "rmse", "measured_on", "started"):
            found[name] = getattr(self, name)
        return found | {"bytes": self.size, "problem": self.problem}

    def to_row(self) -> dict[str, str]:
        """Return the entry as text, in columns that fit a narrow page."""
        what = f"{self.trainer} on {self.data}" if self.trainer else self.kind
        if self.model not in (None, "mlp"):
            what = f"{self.trainer}, {self.model}, on {self.data}"
        if self.mode == "release":
            what += ", release"
        share = "–" if self.rmse is None else f"RMSE {self.rmse:.4g} {self.measured_on}"
        if self.accuracy is not None:
            share = f"{100 * self.accuracy:.1f} % {self.measured_on}"
        stated, epsilon = self.guarantee, "–"
        if stated is not None:
            epsilon = stated.status.value
            if stated.is_proven:
                epsilon = (
                    f"{number(stated.epsilon)} at delta {stated.delta:g}, {stated.unit.value}, {epsilon}"
                )
        state: str = self.state or "–"
        if self.state in ("unfinished", "being written") and self.step is not None:
            total = "" if self.steps is None else f" of {self.steps:,}"
            state += f" at step {self.step:,}{total}"
        return {
            "run": f"{self.path.name}: {what}" + (f", {self.started}" if self.started else ""),
            "state": state,
            "epsilon": epsilon,
            "accuracy": share,
            "size": data_size(self.size),
        }


def list_runs(folder: Path, read_loop: LoopReader) -> list[Entry]:
    """Return what a folder of run folders, or one of them, holds: an entry for each work in it, by name.

    `read_loop` reads what is shown of a private loop. Raises RunFolderError if there is no such folder.
    """
    if not folder.is_dir():
        raise RunFolderError(f"folder {folder} does not exist; name the folder that holds the runs")
    try:
        if _kind(folder) is not None:
            return [_entry(folder, read_loop)]
        children = sorted(child for child in folder.iterdir() if child.is_dir())
    except OSError as error:
        raise RunFolderError(f"folder {folder} cannot be read ({error.strerror}); choose another") from error
    return [entry for entry in (_entry(child, read_loop) for child in children) if entry.kind]


def require_removable(path: Path, *, lose_ledger: bool) -> None:
    """Refuse (RunFolderError) what `remove_runs` would not remove.

    It is a link, no run folder, holds what no run wrote, or a release run's ledger must not be lost.
    """
    if path.is_symlink():
        raise RunFolderError(f"run folder {path} is a link; name the folder that it points to")
    kind = _kind(path) if path.is_dir() else None
    if kind != "run" or not _is_ours(RunFolder(path)):
        holds = f"a {kind} folder, not" if kind not in (None, "run") else "not"
        raise RunFolderError(f"{path} is {holds} a run folder of opusim; only run folders are removed")
    others = sorted(_others(path))
    if others:
        raise RunFolderError(
            f"run folder {path} also holds what no run wrote ({', '.join(others[:3])}); move or remove that first"
        )
    if not lose_ledger and _has_account(path / LEDGER_FILE):
        raise RunFolderError(
            f"run folder {path} holds the only account of what a release run revealed of private data; keep it, or "
            f"copy {LEDGER_FILE} and ledger.head elsewhere and confirm with --lose-ledger"
        )


def remove_runs(paths: list[Path], *, lose_ledger: bool) -> Iterator[Path]:
    """Remove run folders, and yield each once it is gone; all are locked and checked first.

    Raises FolderBusy or RunFolderError (see `require_removable`) before anything is removed, and OSError.
    """
    with ExitStack() as locks:
        for path in paths:
            require_removable(path, lose_ledger=lose_ledger)
            locks.enter_context(only_writer(path, "run folder"))
            require_removable(path, lose_ledger=lose_ledger)  # nothing was written in between
        for path in paths:
            shutil.rmtree(path.resolve())
            yield path


def _kind(folder: Path) -> str | None:
    """Return what a folder holds; a ledger without a run is a damaged run."""
    return kind_of(folder) or ("run" if (folder / LEDGER_FILE).exists() else None)


def _is_ours(folder: RunFolder) -> bool:
    """Whether a folder with the names of a run was written by one; other programs write a config.json too."""
    if folder.ledger_file.exists() or any(folder.checkpoints.glob("*step-*.safetensors*")):
        return True
    try:
        folder.read_facts()
    except (RunFolderError, OSError, ValueError):
        return False
    return True


def _others(path: Path) -> Iterator[str]:
    """Yield the names in a run folder that no run wrote, such as links."""
    for entry in path.iterdir():
        mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode) and entry.name in _FOLDERS:
            yield from (
                f"{entry.name}/{inner.name}"
                for inner in entry.iterdir()
                if not stat.S_ISREG(inner.lstat().st_mode)
            )
        else:
            whole = entry.name.removeprefix(".").removesuffix(".partial")
            if not stat.S_ISREG(mode) or not {entry.name, whole} & WRITTEN:
                yield entry.name


def _has_account(ledger: Path) -> bool:
    """Whether a ledger is that of a release run with payments; an unreadable one counts."""
    if not ledger.exists():
        return False
    try:
        content = read_ledger(ledger)
    except (ValueError, OSError):
        return True
    return content.mode == "release" and bool(content.payments)


def _entry(path: Path, read_loop: LoopReader) -> Entry:
    """Return what is known of a folder, whatever state it is in; its kind is "" if it holds nothing of opusim."""
    kind, busy, found = "", False, {}
    try:
        kind = _kind(path) or ""
        if kind == "private loop":
            found = {
                **read_loop(path),
                "started": _day(path / "private.json"),
                "state": "being written" if is_held(path / LOCK_FILE) else None,
            }
        elif kind == "run":
            folder = RunFolder(path)
            busy = not folder.finished and is_held(path / LOCK_FILE)
            state = "being written" if busy else "finished" if folder.finished else "unfinished"
            found = _facts(folder) | {"state": state}
    except FOREIGN_ERRORS as error:  # whatever a damaged folder or a package raises, the others are listed
        told = " ".join(str(error).split()) or type(error).__name__
        kind = kind or "run"
        found = {"state": "being written"} if busy else {"state": "damaged", "problem": told}
    return Entry(path=path, kind=kind, size=_size(path), **found)


def _facts(folder: RunFolder) -> dict[str, Any]:
    """Read what the files of a run say."""
    config, facts = folder.read_config(), folder.read_facts()
    header, metrics, summary = folder.newest_header(), folder.read_metrics(), folder.read_summary() or {}
    last = metrics[-1] if metrics else {}
    done = summary.get("steps", header.step if header is not None else 0)
    figures: Mapping[str, Any] = {**last, **summary}
    measured_on = next(
        (name for name in ("test", "validation") if figures.keys() & {f"{name}_accuracy", f"{name}_rmse"}),
        None,
    )
    strongest = None
    with suppress(NoGuarantee):
        content = folder.read_ledger()
        stated = content.guarantees()
        # if there are doubts, a proven one is about the part of the run before an alarm
        strongest = stated[0] if content.doubts else strongest_of(stated)
    return {
        "started": _day(folder.config_file),
        "trainer": config.trainer.kind,
        "data": str(facts["data"]["name"]),
        "model": config.model.name,
        "mode": config.mode,
        "step": done,
        "steps": round(config.epochs * last["step"] / last["epoch"]) if last.get("epoch") else None,
        "guarantee": strongest,
        "accuracy": figures.get(f"{measured_on}_accuracy"),
        "rmse": figures.get(f"{measured_on}_rmse"),
        "measured_on": measured_on,
    }


def strongest_of(stated: Sequence[Guarantee]) -> Guarantee:
    """Return the proven guarantee of least epsilon, else one of another status."""
    return min(stated, key=lambda one: (not one.is_proven, one.epsilon))


def _day(file: Path) -> str:
    """Return the day on which a file was written."""
    return time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))


def _size(path: Path) -> int:
    """Return the bytes of the files in a folder; a link counts as itself, a file that was just removed as nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
