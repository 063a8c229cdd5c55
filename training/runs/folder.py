"""A run is a folder with one writer: configuration, metrics, checkpoints, figures, report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from accounting.errors import LedgerCorrupt
from accounting.ledger.journal import Position, Witness
from accounting.ledger.ledger import LEDGER_FILE, LedgerContent, read_ledger
from opusim.errors import ConfigError
from opusim.files import make_folder, read_bytes
from training.config.reading import stored_config
from training.config.run import SCHEMA_VERSION as CONFIG_VERSION
from training.config.run import RunConfig
from training.errors import RunFolderError
from training.runs.locking import LOCK_FILE, only_writer, require_kind
from training.runs.seal import Header, Seal, facts_digest, list_checkpoints, read_header
from training.runs.storage import (
    append_line,
    digest_of,
    json_content,
    read_json,
    read_lines,
    write_file,
    write_json,
)

SCHEMA_VERSION = 1
AUDIT_FILE = "audit.json"
SUMMARY_VERSION = 2
_FILE_LIMIT = 2**30
"""Bytes of a file that a seal covers, at most."""
_BEFORE_BEGINNING = {
    "checkpoints",
    *("components.safetensors", ".components.safetensors.partial"),
    *("baseline.safetensors", ".baseline.safetensors.partial"),
}
"""What a start that was killed leaves beside its lock."""
_PARTS = ("config", "network", "data", "device", "noise", "versions")


class RunFolder:
    """Paths and files of a run.

    Files: `config.json` (resolved configuration, network, thread count, versions), `metrics.jsonl` (a line
    per epoch, the same for a resumed run as for an uninterrupted one), `timing.jsonl` (seconds, which are
    not), `ledger.jsonl` (what was released, paid for before it was computed), `labels.safetensors` (where a run looks
    at its labels once), `baseline.safetensors` (the device's first blank and reference frames, where it is monitored;
    no data are in them), `components.safetensors` (the principal components that replace features), `summary.json`
    (written when the run is done), `audit.json` (what an audit of the run found; never
    in release mode), `checkpoints/`, `figures/`,
    `report.html`, `lock`.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.timing_file = self.path / "timing.jsonl"
        self.summary_file = self.path / "summary.json"
        self.ledger_file = self.path / LEDGER_FILE
        self.labels_file = self.path / "labels.safetensors"
        self.components_file = self.path / "components.safetensors"
        self.baseline_file = self.path / "baseline.safetensors"
        self.audit_file = self.path / AUDIT_FILE
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.report_file = self.path / "report.html"
        self._made = False

    @classmethod
    def claimed(cls, path: Path) -> Self | None:
        """The run folder of a name that is free, made at once so that no other process takes it; None if it is taken.

        Raises:
            RunFolderError: The folder cannot be made.
        """
        try:
            make_folder(path, exclusive=True)
        except FileExistsError as error:
            if path.parent.is_dir():
                return None
            raise RunFolderError(
                f"run folder {path} cannot be made: {path.parent} is a file; choose another with --out"
            ) from error
        except OSError as error:
            raise RunFolderError(
                f"run folder {path} cannot be made ({error.strerror}); choose another with --out"
            ) from error
        folder = cls(path)
        folder._made = True
        return folder

    @property
    def started(self) -> bool:
        """Whether a run was ever begun here."""
        return self.config_file.exists()

    @property
    def finished(self) -> bool:
        """Whether the run here is done."""
        return self.summary_file.exists()

    @contextmanager
    def writing(self, *, new: bool, private: bool = False) -> Iterator[None]:
        """Hold the folder as its only writer; the kernel gives the lock back if the process dies.

        Args:
            new: Whether a new run is to begin here (nothing else may be here) or one goes on (it must not be done).
            private: Whether only the owner may read the folder (release mode: checkpoints on the way are not for
                release).

        Raises:
            RunFolderError: Another process writes here, the folder holds something else, or it cannot be used.
        """
        self._made |= new and not self.path.exists()
        with only_writer(self.path, "run folder", private=private):
            try:
                self._check_new() if new else self._check_unfinished()
                yield
            finally:
                if new:
                    self._leave_no_trace()

    def _leave_no_trace(self) -> None:
        """Remove what a refused run leaves: its lock, which is still held, and the folder if this process made it."""
        if {path.name for path in self.path.iterdir()} != {LOCK_FILE}:
            return
        (self.path / LOCK_FILE).unlink()
        if self._made:
            self.path.rmdir()

    def _check_new(self) -> None:
        """Refuse a folder that holds anything but what a start that was killed leaves."""
        require_kind(self.path, "run")
        if self.started:
            state = "a finished run" if self.finished else "an unfinished run"
            remedy = "" if self.finished else f", or go on with it: opusim train resume {self.path}"
            raise RunFolderError(
                f"run folder {self.path} already holds {state}; choose another folder{remedy}"
            )
        others = [
            path.name for path in self.path.iterdir() if path.name not in (LOCK_FILE, ".config.json.partial")
        ]
        begun = [path.name for path in self.checkpoints.glob("*")] if self.checkpoints.is_dir() else []
        if set(others) - _BEFORE_BEGINNING or any("step-0000000000" not in name for name in begun):
            raise RunFolderError(
                f"run folder {self.path} holds other files ({', '.join(sorted(others)[:3])}); choose an empty folder"
            )

    def _check_unfinished(self) -> None:
        if self.finished:
            raise RunFolderError(f"run folder {self.path} holds a finished run; there is nothing to resume")

    def configuration(self, config: RunConfig, facts: dict[str, Any]) -> bytes:
        """The content of `config.json` for a new run.

        Args:
            config: Resolved configuration.
            facts: What else the run is made of: network, device description, data, versions.
        """
        values = config.model_dump(mode="json")
        if config.mode == "release":
            del values["seed"]
        return json_content({"schema_version": CONFIG_VERSION, "config": values, **facts})

    def begin(self, configuration: bytes) -> None:
        """Write `config.json`, which marks a run as begun."""
        write_file(self.config_file, configuration)

    def read_facts(self) -> dict[str, Any]:
        """Read `config.json` whole.

        Raises:
            RunFolderError: There is no run here, or its schema is another.
        """
        if not self.started:
            raise RunFolderError(f"run folder {self.path} holds no run (no config.json); check the path")
        facts = read_json(self.config_file)
        version = facts.get("schema_version") if isinstance(facts, dict) else None
        if version != CONFIG_VERSION:
            raise RunFolderError(
                f"{self.config_file}: schema_version {version!r} is not {CONFIG_VERSION}; "
                "read it with the opusim that wrote it"
            )
        missing = [name for name in _PARTS if name not in facts]
        if missing:
            raise RunFolderError(
                f"{self.config_file}: {', '.join(missing)} missing; the file was changed, restore it or start anew"
            )
        return dict(facts)

    def read_config(self) -> RunConfig:
        """Read the resolved configuration."""
        try:
            return stored_config(self.read_facts()["config"])
        except ConfigError as error:
            raise RunFolderError(f"{self.config_file}: {error}") from error

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line of metrics."""
        append_line(self.metrics_file, {"schema_version": SCHEMA_VERSION, **record})

    def append_timing(self, record: dict[str, Any]) -> None:
        """Add one line of wall-clock figures."""
        append_line(self.timing_file, {"schema_version": SCHEMA_VERSION, **record})

    def read_metrics(self) -> list[dict[str, Any]]:
        """Metrics of the epochs so far.

        Raises:
            RunFolderError: They were changed, cut or emptied since the newest checkpoint.
        """
        header = self.newest_header()
        if header is not None:
            self._require_metrics(header)
        return read_lines(self.metrics_file, ("step", "epoch"))

    def read_timing(self) -> list[dict[str, Any]]:
        """Wall-clock figures so far, those of repeated epochs included."""
        return read_lines(self.timing_file, ("wall_s",))

    def finish(self, summary: dict[str, Any], ledger: Position) -> None:
        """Write the summary, which marks the run as done, with its digest and how far the ledger went."""
        facts = {**summary, "schema_version": SUMMARY_VERSION}
        seal = {"ledger": ledger.to_json(), "digest": facts_digest({**facts, "ledger": ledger.to_json()})}
        write_json(self.summary_file, {**facts, "seal": seal})

    def require_summary(self) -> dict[str, Any]:
        """The summary of a run that must be done.

        Raises:
            RunFolderError: It is not, or its summary was changed.
        """
        summary = self.read_summary()
        if summary is None:
            raise RunFolderError(
                f"run folder {self.path} holds no finished run; finish it with: opusim train resume"
            )
        return summary

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None while the run is not done.

        Raises:
            RunFolderError: It was changed.
        """
        return self._sealed_summary()[0] if self.finished else None

    def _sealed_summary(self) -> tuple[dict[str, Any], Position | None]:
        """The summary, and how far the ledger went; None if an earlier version wrote it."""
        summary = read_json(self.summary_file)
        try:
            if summary["schema_version"] == SCHEMA_VERSION and not self._seals_checkpoints():
                return summary, None
            seal = summary.pop("seal")
            if facts_digest({**summary, "ledger": seal["ledger"]}) == seal["digest"]:
                return summary, Position.from_json(seal["ledger"])
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
        raise RunFolderError(
            f"{self.summary_file} was changed since the run ended; restore it from a copy, or train the run anew"
        )

    def _seals_checkpoints(self) -> bool:
        header = self.newest_header()
        return header is not None and header.seal is not None

    def newest_header(self) -> Header | None:
        """The facts of the newest checkpoint, or None if there is none.

        Raises:
            RunFolderError: It is damaged.
        """
        while checkpoints := list_checkpoints(self.checkpoints):
            try:
                return read_header(checkpoints[-1])
            except RunFolderError:
                if checkpoints[-1] in list_checkpoints(
                    self.checkpoints
                ):  # else a writer has just replaced it
                    raise
        return None

    def digests(self, configuration: bytes | None = None) -> dict[str, str | None]:
        """Digest of each file that a run writes once, by its name; None for one that is not there.

        Args:
            configuration: The content that `config.json` is about to have; None to read it.
        """
        sealed = (self.config_file, self.components_file, self.baseline_file, self.labels_file)
        found = {file.name: digest_of(_content(file)) if file.exists() else None for file in sealed}
        if configuration is not None:
            found[self.config_file.name] = digest_of(configuration)
        return found

    def seal(self, files: Mapping[str, str | None], ledger: Position, *, bound: bool) -> Seal:
        """What stands beside a checkpoint that is about to be written.

        Args:
            files: What `digests` found when this process began.
            ledger: How far the ledger goes.
            bound: Whether the run may be resumed in this very folder only.
        """
        metrics = _content(self.metrics_file) if self.metrics_file.exists() else b""
        return Seal(
            files=files,
            metrics_bytes=len(metrics),
            metrics_digest=digest_of(metrics),
            ledger=ledger,
            inode=self.path.stat().st_ino if bound else None,
        )

    def require_sealed(self) -> Header | None:
        """Check the files that never change against the newest checkpoint; returns its facts, None without checkpoint.

        Raises:
            RunFolderError: A file was changed, removed or added; the message names it.
        """
        header = self.newest_header()
        if header is None:
            return None
        if header.seal is None:
            return header
        found = self.digests()
        if header.step == 0 and header.seal.files[self.labels_file.name] is None:
            del found[self.labels_file.name]  # drawn behind this checkpoint
        for name, digest in found.items():
            if digest != header.seal.files[name]:
                state = _state(digest, header.seal.files[name], f"checkpoint step-{header.step:010d}")
                raise RunFolderError(
                    f"{self.path / name} {state}; restore the folder from a copy, or start a new one"
                )
        return header

    def require_resumable(self, *, moved: bool) -> Header:
        """Check everything that a resumed run reads but the ledger; returns the facts of the newest checkpoint.

        Args:
            moved: Whether the user confirms that this folder, and no copy of it, goes on.

        Raises:
            RunFolderError: There is no checkpoint, a file was changed, or a release run is in another folder.
        """
        header = self.newest_header()
        if header is None:
            raise RunFolderError(f"run folder {self.path} has no checkpoint left; start a new folder")
        if header.seal is None:
            raise RunFolderError(
                f"run folder {self.path} was begun by an opusim that kept no digests of its files, so that changes "
                "would go unnoticed; resume it with the opusim that began it, or start a new folder"
            )
        self.require_sealed()
        self._require_metrics(header)
        if header.seal.inode not in (None, self.path.stat().st_ino) and not moved:
            raise RunFolderError(
                f"run folder {self.path} is not the folder that the run was written in: it was copied or restored. No "
                "ledger counts what two copies release; if no other copy was or will be resumed, confirm it with: "
                f"opusim train resume {self.path} --moved (from Python: moved=True)"
            )
        return header

    def _require_metrics(self, header: Header) -> None:
        seal = header.seal
        if seal is None:
            return
        metrics = _content(self.metrics_file) if self.metrics_file.exists() else b""
        if digest_of(metrics[: seal.metrics_bytes]) != seal.metrics_digest:
            what = "was cut or emptied" if len(metrics) < seal.metrics_bytes else "was changed"
            raise RunFolderError(
                f"{self.metrics_file} {what} since checkpoint step-{header.step:010d} was written; restore it from "
                "a copy"
            )

    def drop_metrics_behind(self, seal: Seal) -> None:
        """Remove the metrics of steps that a resumed run will compute again."""
        if self.metrics_file.exists() and self.metrics_file.stat().st_size > seal.metrics_bytes:
            write_file(self.metrics_file, _content(self.metrics_file)[: seal.metrics_bytes])

    def witnesses(self) -> list[Witness]:
        """What the newest checkpoint and the summary know of the ledger.

        Raises:
            RunFolderError: One of them is damaged.
        """
        found = []
        header = self.newest_header()
        if header is not None and header.seal is not None:
            name = f"checkpoint step-{header.step:010d}"
            found.append(Witness(name=name, position=header.seal.ledger))
        position = self._sealed_summary()[1] if self.finished else None
        if position is not None:
            found.append(Witness(name=self.summary_file.name, position=position, final=True))
        return found

    def read_ledger(self) -> LedgerContent:
        """What the run paid for; the ledger must be the one that checkpoint and summary know.

        Raises:
            LedgerCorrupt: The ledger is missing, older or another, or was changed, cut or reordered.
            RunFolderError: A checkpoint or the summary is damaged.
        """
        if not self.ledger_file.exists():
            raise LedgerCorrupt(f"{self.ledger_file} is missing; restore it from a copy")
        return read_ledger(self.ledger_file, witnesses=self.witnesses())


def _content(file: Path) -> bytes:
    return read_bytes(file, at_most=_FILE_LIMIT)


def _state(found: str | None, sealed: str | None, checkpoint: str) -> str:
    """What became of a file whose digest is not the sealed one."""
    if found is None:
        return f"is missing, and {checkpoint} was written under it"
    if sealed is None:
        return f"was added after {checkpoint} was written"
    return f"is not the file that {checkpoint} was written under: it was changed, or the checkpoint is of another run"


def own_folder(path: Path) -> Path:
    """The run folder of this process: the one asked for, or beside it with the rank where several were launched."""
    rank = int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def versions() -> dict[str, str]:
    """Versions of the packages whose arithmetic a run depends on."""
    import platform
    from importlib.metadata import version

    names = ("opusim", "torch", "numpy", "numba", "scipy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def facts_equal(left: Any, right: Any) -> bool:
    """Whether two JSON-able values are equal once written."""
    return bool(json.loads(json.dumps(left)) == json.loads(json.dumps(right)))
