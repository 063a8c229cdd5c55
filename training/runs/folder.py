"""A run is a folder with one writer: configuration, metrics, checkpoints, figures, report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accounting.ledger import LEDGER_FILE
from opusim.errors import ConfigError
from training.config.reading import stored_config
from training.config.run import RunConfig
from training.errors import RunFolderError
from training.runs.kinds import require_kind
from training.runs.locking import LOCK_FILE, only_writer
from training.runs.storage import append_line, read_json, read_lines, write_json, write_lines

SCHEMA_VERSION = 1
AUDIT_FILE = "audit.json"
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
        with only_writer(self.path, "run folder", private=private):
            self._check_new() if new else self._check_unfinished()
            yield

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

    def begin(self, config: RunConfig, facts: dict[str, Any]) -> None:
        """Write the resolved configuration of a new run.

        Args:
            config: Resolved configuration.
            facts: What else the run is made of: network, device description, data, versions.
        """
        values = config.model_dump(mode="json")
        if config.mode == "release":
            del values["seed"]
        write_json(self.config_file, {"schema_version": SCHEMA_VERSION, "config": values, **facts})

    def read_facts(self) -> dict[str, Any]:
        """Read `config.json` whole.

        Raises:
            RunFolderError: There is no run here, or its schema is another.
        """
        if not self.started:
            raise RunFolderError(f"run folder {self.path} holds no run (no config.json); check the path")
        facts = read_json(self.config_file)
        version = facts.get("schema_version") if isinstance(facts, dict) else None
        if version != SCHEMA_VERSION:
            raise RunFolderError(
                f"{self.config_file}: schema_version {version!r} is not {SCHEMA_VERSION}; "
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
        """Metrics of the epochs so far."""
        return read_lines(self.metrics_file, ("step", "epoch"))

    def read_timing(self) -> list[dict[str, Any]]:
        """Wall-clock figures so far, those of repeated epochs included."""
        return read_lines(self.timing_file, ("wall_s",))

    def drop_metrics_after(self, step: int) -> None:
        """Forget metrics of steps that a resumed run will compute again."""
        records = self.read_metrics()
        kept = [record for record in records if record["step"] <= step]
        if len(kept) != len(records):
            write_lines(self.metrics_file, kept)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which marks the run as done."""
        write_json(self.summary_file, {"schema_version": SCHEMA_VERSION, **summary})

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None while the run is not done."""
        return read_json(self.summary_file) if self.finished else None


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
