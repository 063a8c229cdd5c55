"""A run is a folder with one writer: configuration, metrics, ledger, checkpoints, figures, report."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from opusim import checks, plugins
from opusim.accounting.explanation import LedgerFacts, RunFacts, Statement
from opusim.accounting.guarantee import Assumption, Guarantee, LedgerCorrupt, Unit
from opusim.accounting.journal import Position, Witness
from opusim.accounting.ledger import LEDGER_FILE, LedgerContent, read_ledger
from opusim.errors import ConfigError
from opusim.files import folder_problem, make_folder, quoted, read_bytes, write_file
from opusim.processes import launched_rank
from opusim.tables import html_table
from opusim.training.config.run import RunConfig, stored_config
from opusim.training.errors import RunFolderError
from opusim.training.runs.storage import (
    LOCK_FILE,
    SIZE_LIMIT,
    GrowingFile,
    Header,
    Seal,
    append_line,
    digest_of,
    json_content,
    kind_of,
    list_checkpoints,
    only_writer,
    read_header,
    read_json,
    read_lines,
    require_kind,
    sealed,
    unsealed,
    write_json,
)

if TYPE_CHECKING:
    from opusim.training.data.dataset import Target

SAME_RECORDS = (
    "when training is resumed, it has the same records in the same order, of which no digest is kept"
)
"""What is taken on trust of training that keeps nothing of the records."""
CONFIG_VERSION = 2
"""Schema of `config.json`."""
METRICS_VERSION = 1
"""Schema of the lines of `metrics.jsonl` and `timing.jsonl`."""
SUMMARY_VERSION = 2
"""Schema of `summary.json`."""
AUDIT_FILE = "audit.json"
ONE_RUN_FILE = "one-run.json"
FINAL_MODEL_FILE = "final-model.json"
_LEFT_BY_KILLED_START = {
    "checkpoints",
    *("components.safetensors", ".components.safetensors.partial"),
    *("baseline.safetensors", ".baseline.safetensors.partial"),
}
"""Files that a killed start leaves besides its lock."""
_PARTS = ("config", "network", "data", "device", "noise", "versions")


class RunFolder:
    """Paths and files of a run.

    | file | content |
    | --- | --- |
    | config.json | resolved configuration, network, data set, device, package versions |
    | metrics.jsonl | a line per epoch, identical for a resumed and an uninterrupted run |
    | timing.jsonl | seconds of each epoch, which are not identical |
    | ledger.jsonl | what was released, paid for before it was computed |
    | labels.safetensors | the noisy or randomized labels, or the noisy linear model, if the run reads its labels once |
    | baseline.safetensors | first blank and reference frames of a monitored device; they hold no data |
    | components.safetensors | the principal components that replace the features |
    | summary.json | final figures; its presence marks the run as finished |
    | audit.json, one-run.json, final-model.json | what audits of the run found; never in release mode |
    | checkpoints/, figures/, report.html, lock | |

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
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.report_file = self.path / "report.html"
        self._made_here = False
        self._sealed_metrics = GrowingFile(self.metrics_file)

    def __fspath__(self) -> str:
        """Return the folder's path, so that `opusim.load_run(run.folder)` reads it."""
        return str(self.path)

    @classmethod
    def claimed(cls, path: Path) -> Self | None:
        """Make a folder that no other process can take; None if the name is taken, or raise RunFolderError."""
        try:
            make_folder(path, exclusive=True)
        except OSError as error:
            taken = isinstance(error, FileExistsError)
            if taken and path.parent.is_dir():
                return None
            reason = f": {path.parent} is a file" if taken else f" ({error.strerror})"
            raise RunFolderError(
                f"run folder {path} cannot be made{reason}; choose another with --out"
            ) from error
        folder = cls(path)
        folder._made_here = True
        return folder

    def require_writable(self) -> None:
        """Refuse (RunFolderError) a folder that cannot be written, before data are read; creates nothing."""
        problem = folder_problem(self.path)
        if problem is not None:
            raise RunFolderError(f"run folder {self.path} cannot be used ({problem}); choose another folder")

    @property
    def started(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.exists()

    @property
    def finished(self) -> bool:
        """Whether the run here is finished."""
        return self.summary_file.exists()

    @property
    def resume_command(self) -> str:
        """The command that resumes the run here, with --trust-code if the run names user-supplied code.

        A device of a kind that no installed package brings opens in a program that registers it.
        """
        found = read_json(self.config_file) if self.started else {}
        facts = found if isinstance(found, dict) else {}
        device = facts.get("device")
        kind = device.get("kind") if isinstance(device, dict) else None
        if isinstance(kind, str) and kind not in plugins.names("opusim.devices"):
            call = f"opusim.train(folder={str(self.path)!r}, resume=True)"
            return f"{call}, in a program that calls opusim.register_device({kind!r}, ...) before"
        trust = " --trust-code" if facts.get("code") else ""
        return f"opusim train resume {quoted(self.path)}{trust}"

    @contextmanager
    def writing(self, *, new: bool, private: bool = False) -> Iterator[None]:
        """Hold the folder as its only writer; the kernel releases the lock if the process dies.

        A new run's folder must hold nothing else, and a resumed one must not be finished. Only the owner may read a
        `private` one (release mode: its checkpoints are not for release). Raises RunFolderError.
        """
        self._made_here |= new and not self.path.exists()
        with only_writer(self.path, "run folder", private=private):
            try:
                if new:
                    self._check_new()
                elif self.finished:
                    raise RunFolderError(
                        f"run folder {self.path} holds a finished run; there is nothing to resume"
                    )
                yield
            finally:
                # remove the lock of a refused run, which is still held, and the folder if this process made it
                if new and {path.name for path in self.path.iterdir()} == {LOCK_FILE}:
                    (self.path / LOCK_FILE).unlink()
                    if self._made_here:
                        self.path.rmdir()

    def _check_new(self) -> None:
        """Refuse a folder that holds anything but what a killed start leaves."""
        require_kind(self.path, "run")
        if self.started:
            state = "a finished run" if self.finished else "an unfinished run"
            remedy = "" if self.finished else f", or resume this one: {self.resume_command}"
            raise RunFolderError(
                f"run folder {self.path} already holds {state}; choose another folder{remedy}"
            )
        others = [
            path.name for path in self.path.iterdir() if path.name not in (LOCK_FILE, ".config.json.partial")
        ]
        begun = [path.name for path in self.checkpoints.glob("*")] if self.checkpoints.is_dir() else []
        if set(others) - _LEFT_BY_KILLED_START or any("step-0000000000" not in name for name in begun):
            raise RunFolderError(
                f"run folder {self.path} holds other files ({', '.join(sorted(others)[:3])}); choose an empty folder"
            )

    def configuration(self, config: RunConfig, facts: dict[str, Any]) -> bytes:
        """Return a new run's `config.json`: its resolved configuration and facts of its network, device and data."""
        values = config.model_dump(mode="json")
        if config.mode == "release":
            del values["seed"]
        return json_content({"schema_version": CONFIG_VERSION, "config": values, **facts})

    def begin(self, configuration: bytes) -> None:
        """Write `config.json`, which marks a run as started."""
        write_file(self.config_file, configuration)

    def read_facts(self) -> dict[str, Any]:
        """Read the whole of `config.json`; raise RunFolderError if no run, or one of another version, is here."""
        if not self.path.exists():
            raise RunFolderError(f"run folder {self.path} does not exist, so it holds no run; check the path")
        if not self.started and kind_of(self.path) == "private loop":
            raise RunFolderError(
                f"folder {self.path} holds a private loop of opusim.make_private and no run; `opusim account run "
                f"{quoted(self.path)}` states its guarantee, and your own loop evaluates the model"
            )
        if not self.started:
            raise RunFolderError(f"run folder {self.path} holds no run (no config.json); check the path")
        facts = read_json(self.config_file)
        found = facts.get("schema_version") if isinstance(facts, dict) else None
        if found != CONFIG_VERSION:
            raise RunFolderError(
                f"{self.config_file}: schema_version {checks.short(found)} is not {CONFIG_VERSION}; "
                "read it with the opusim that wrote it"
            )
        missing = [name for name in _PARTS if name not in facts]
        if missing:
            raise RunFolderError(
                f"{self.config_file}: {', '.join(missing)} missing; the file was changed, restore it or start a new run"
            )
        return dict(facts)

    def read_config(self) -> RunConfig:
        """Read the resolved configuration; raise RunFolderError if there is no run here, or it is not valid."""
        try:
            return stored_config(self.read_facts()["config"])
        except ConfigError as error:
            raise RunFolderError(f"{self.config_file}: {error}") from error

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append a line of metrics."""
        append_line(self.metrics_file, {"schema_version": METRICS_VERSION, **record})

    def append_timing(self, record: dict[str, Any]) -> None:
        """Append a line of wall-clock times."""
        append_line(self.timing_file, {"schema_version": METRICS_VERSION, **record})

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read the epochs' metrics; raise RunFolderError if they were changed since the newest checkpoint."""
        header = self.newest_header()
        if header is not None:
            self._require_metrics(header)
        return read_lines(self.metrics_file, ("step", "epoch"))

    def read_timing(self) -> list[dict[str, Any]]:
        """Read the wall-clock times so far, also of repeated epochs; raise RunFolderError for impossible ones."""
        records = read_lines(self.timing_file, ("wall_s",))
        for number, record in enumerate(records, start=1):
            if not 0 <= record["wall_s"] < math.inf:
                raise RunFolderError(
                    f"{self.timing_file}: line {number}: wall_s = {record['wall_s']}: must be finite and at least 0; "
                    "the file was edited, restore it"
                )
        return records

    def finish(self, summary: dict[str, Any], ledger: Position) -> None:
        """Write the summary, which marks the run as finished, with its digest and the length of the ledger."""
        facts = {**summary, "schema_version": SUMMARY_VERSION}
        write_json(self.summary_file, sealed(facts, ledger=ledger.to_json()))

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary, or None if the run is not finished; raise RunFolderError if it was changed."""
        return self._sealed_summary()[0] if self.finished else None

    def _sealed_summary(self) -> tuple[dict[str, Any], Position]:
        """Return the summary and the position of the ledger when it was written."""
        remedy = "restore it from a copy, or train the run again"
        summary, seal = unsealed(self.summary_file, read_json(self.summary_file), remedy=remedy)
        try:
            return summary, Position.from_json(seal["ledger"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{self.summary_file}: its seal names no ledger; {remedy}") from error

    def newest_header(self) -> Header | None:
        """Return the facts of the newest checkpoint, or None without one; raise RunFolderError if it is damaged."""
        while checkpoints := list_checkpoints(self.checkpoints):
            try:
                return read_header(checkpoints[-1])
            except RunFolderError:
                # a file that is no longer listed was replaced by a writer; `exists` would miss a broken link
                if checkpoints[-1] in list_checkpoints(self.checkpoints):
                    raise
        return None

    def digests(self, configuration: bytes | None = None) -> dict[str, str | None]:
        """Return the digest of each file that a run writes once, by name, or None if it does not exist.

        `configuration` is the content that `config.json` is about to get.
        """
        sealed = (self.config_file, self.components_file, self.baseline_file, self.labels_file)
        found = {file.name: digest_of(_content(file)) if file.exists() else None for file in sealed}
        if configuration is not None:
            found[self.config_file.name] = digest_of(configuration)
        return found

    def seal(self, files: Mapping[str, str | None], ledger: Position, *, bound: bool) -> Seal:
        """Return the seal of a new checkpoint; `bound` allows the run to be resumed in this very folder only."""
        return Seal(
            files=files,
            metrics=self._sealed_metrics.prefix(),
            ledger=ledger,
            inode=self.path.stat().st_ino if bound else None,
        )

    def require_sealed(self) -> Header | None:
        """Check the files that never change against the newest checkpoint; return its facts, or None without one.

        RunFolderError names a file that was changed, removed or added.
        """
        header = self.newest_header()
        if header is None:
            return None
        found = self.digests()
        if header.step == 0 and header.seal.files[self.labels_file.name] is None:
            del found[self.labels_file.name]  # labels are drawn after this checkpoint
        checkpoint = f"checkpoint step-{header.step:010d}"
        for name, digest in found.items():
            sealed = header.seal.files[name]
            if digest == sealed:
                continue
            state = (
                f"is not the file that {checkpoint} was written under: it was changed, or the checkpoint is of another "
                "run"
            )
            if digest is None:
                state = f"is missing, and {checkpoint} was written under it"
            elif sealed is None:
                state = f"was added after {checkpoint} was written"
            raise RunFolderError(
                f"{self.path / name} {state}; restore the folder from a copy, or start a new one"
            )
        return header

    def require_resumable(self, *, moved: bool) -> Header:
        """Check everything that a resumed run reads except the ledger, and return the newest checkpoint's facts.

        `moved` confirms that this folder, and no copy of it, is resumed. Raises RunFolderError if there is no
        checkpoint, a file was changed, or a release run is in another folder.
        """
        header = self.require_sealed()
        if header is None:
            raise RunFolderError(f"run folder {self.path} has no checkpoint left; start a new folder")
        self._require_metrics(header)
        if header.seal.inode not in (None, self.path.stat().st_ino) and not moved:
            raise RunFolderError(
                f"run folder {self.path} is not the folder that the run was written in: it was copied or restored. No "
                "ledger counts what two copies release. If no other copy was or will be resumed, confirm it with: "
                f"{self.resume_command} --moved (from Python: moved=True)"
            )
        return header

    def _metrics(self) -> bytes:
        return _content(self.metrics_file) if self.metrics_file.exists() else b""

    def _require_metrics(self, header: Header) -> None:
        metrics, sealed = self._metrics(), header.seal.metrics
        if digest_of(metrics[: sealed.bytes]) != sealed.digest:
            what = "was cut or emptied" if len(metrics) < sealed.bytes else "was changed"
            raise RunFolderError(
                f"{self.metrics_file} {what} since checkpoint step-{header.step:010d} was written; restore it from "
                "a copy"
            )

    def drop_metrics_behind(self, seal: Seal) -> None:
        """Remove the metrics of steps that a resumed run will compute again."""
        metrics = self._metrics()
        if len(metrics) > seal.metrics.bytes:
            write_file(self.metrics_file, metrics[: seal.metrics.bytes])

    def witnesses(self) -> list[Witness]:
        """Return what the newest checkpoint and the summary say of the ledger; raise RunFolderError if damaged."""
        found = []
        header = self.newest_header()
        if header is not None:
            name = f"checkpoint step-{header.step:010d}"
            found.append(Witness(name=name, position=header.seal.ledger))
        if self.finished:
            position = self._sealed_summary()[1]
            found.append(Witness(name=self.summary_file.name, position=position, final=True))
        return found

    def read_ledger(self) -> LedgerContent:
        """Read what the run paid for, and check the ledger against checkpoint and summary.

        Raises:
            LedgerCorrupt: The ledger is missing, older or another one, or was changed, cut or reordered.
            RunFolderError: A checkpoint or the summary is damaged.
        """
        if not self.ledger_file.exists():
            raise LedgerCorrupt(f"{self.ledger_file} is missing; restore it from a copy")
        return read_ledger(self.ledger_file, witnesses=self.witnesses())


def _content(file: Path) -> bytes:
    return read_bytes(file, at_most=SIZE_LIMIT)


def own_folder(path: Path) -> Path:
    """Return the folder of a process that keeps the run itself: `path` for rank 0, `path.rankN` for the others."""
    rank = launched_rank()
    return path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")


def versions(kinds: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the versions of packages that a run's numbers depend on, also of its kinds' (entry-point group, name)."""
    names = ("opusim", "torch", "numpy", "numba", "scipy", "scikit-learn")
    others = {plugins.package(group, name) for group, name in kinds} - {"", *names}
    return {"python": platform.python_version()} | {
        name: _version(name) for name in [*names, *sorted(others)]
    }


_version = cache(version)  # a file of many lines is read for each of six packages


def facts_equal(left: Any, right: Any) -> bool:
    """Whether two values are equal once written as JSON."""
    return bool(json.loads(json.dumps(left)) == json.loads(json.dumps(right)))


pandas = plugins.Deferred("pandas")


class Metrics(list[dict[str, Any]]):
    """The metrics of a run: one mapping per epoch. A notebook shows them as a table."""

    def frame(self) -> Any:
        """Return them as a pandas.DataFrame (ModuleNotFoundError without pandas), indexed by epoch."""
        frame = pandas.DataFrame(list(self)).drop(columns="schema_version", errors="ignore")
        return frame.set_index("epoch") if "epoch" in frame else frame

    def _repr_html_(self) -> str:
        columns = [
            name
            for name in dict.fromkeys(key for record in self for key in record)
            if name != "schema_version"
        ]
        rows = [[_short(record.get(name, "")) for name in columns] for record in self]
        return html_table(columns, rows)


def _short(value: object) -> str:
    """Return a figure, or each figure of a list, to four digits."""
    if isinstance(value, list):
        return " ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class StoredRun:
    """A run as its folder describes it, without parameters: enough for reports, without torch and user code.

    Attributes:
        folder: The run folder.
        config: The resolved configuration.
        facts: The whole of `config.json`: network, data, device, package versions.
        step: Number of steps that the model was trained for.
    """

    def __init__(self, folder: RunFolder, step: int) -> None:
        self.folder = folder
        self.config: RunConfig = folder.read_config()
        self.facts: dict[str, Any] = folder.read_facts()
        self.step = step

    @property
    def target(self) -> Target:
        """What the model predicts of a record."""
        found: Target = self.facts["data"].get("target", "class")  # older runs have only classes
        return found

    @property
    def metrics(self) -> Metrics:
        """One mapping per epoch, as in `metrics.jsonl`; `metrics.frame()` has them as a DataFrame."""
        return Metrics(self.folder.read_metrics())

    @property
    def guarantees(self) -> list[Guarantee]:
        """Privacy guarantees of everything released so far, computed from the ledger.

        Raises:
            LedgerCorrupt: The ledger was changed, cut or reordered, is older than the newest checkpoint, or is missing.
        """
        return self.folder.read_ledger().guarantees()

    @property
    def summary(self) -> dict[str, Any] | None:
        """Final figures, or None if the run is not finished."""
        return self.folder.read_summary()

    @property
    def advice(self) -> str | None:
        """Advice for a run that learned nothing: R^2 < 0, or an accuracy that guessing reaches; else None.

        Guessing reaches 1 / k for k classes, plus two standard errors over the records.
        """
        figures = {**(self.metrics[-1] if self.metrics else {}), **(self.summary or {})}
        for part in ("test", "validation"):
            r2, accuracy = figures.get(f"{part}_r2"), figures.get(f"{part}_accuracy")
            if r2 is not None and r2 < 0:
                return (
                    f"R^2 of {r2:.3g} on {part} records is below 0, so their mean predicts better; "
                    f"standardise the targets, or lower optimizer.lr = {self.config.optimizer.lr:g}"
                )
            if accuracy is None or self.target != "class":
                continue
            facts, protection = self.facts["data"], self.config.protection
            chance, records = 1 / facts["n_classes"], facts.get(f"n_{part}") or 1
            if accuracy <= chance + 2 * math.sqrt(chance * (1 - chance) / records):
                remedy = f"train longer, or change optimizer.lr = {self.config.optimizer.lr:g}"
                if protection.protects != "nothing":
                    remedy = (
                        f"protection.kind = {protection.kind!r} adds more noise than these records can outweigh: use "
                        "more records, a larger epsilon or another protection"
                    )
                return (
                    f"accuracy of {100 * accuracy:.1f} % on {part} records is no better than guessing among "
                    f"{facts['n_classes']} classes; {remedy}"
                )
        return None

    @property
    def device_note(self) -> str | None:
        """A note that a finite epsilon does not count the device's noise, if the protection's is digital; else None."""
        if self.facts["device"] is None or self.config.protection.credits_device:
            return None
        if not any(math.isfinite(guarantee.epsilon) for guarantee in self.guarantees):
            return None
        return (
            f"The noise of device {self.facts['device']['name']!r} earns no privacy here (protection.noise = "
            "'digital'): epsilon counts only the noise that the protection draws in software."
        )

    @property
    def fresh_noise_note(self) -> str | None:
        """A note that a repetition gives other figures, if a device's noise comes from no seed; else None.

        This holds for hardware, and for served devices that clients share. A release run repeats nothing.
        """
        facts = self.facts
        features = facts["data"].get("features", {}).get("device")
        fresh = [each for each in (facts["device"], features) if each is not None and not each.get("medium")]
        fresh += [] if facts.get("noise_repeats", True) else [facts["device"]]
        if not fresh or self.config.mode == "release":
            return None
        names = " and ".join(dict.fromkeys(repr(each["name"]) for each in fresh))
        return f"The noise of device {names} comes from no seed, so a repetition of this run gives other figures."


def read_run(path: str | Path) -> StoredRun:
    """Read a run from its folder without its model; nothing in a folder is executed.

    Raises RunFolderError as `opusim.training.runs.run.load_run`, except that code and parameters are not read.
    """
    folder = RunFolder(path)
    folder.read_facts()
    folder.require_sealed()
    return StoredRun(folder, read_header(newest_checkpoint(folder)).step)


def newest_checkpoint(folder: RunFolder) -> Path:
    """Return the newest checkpoint of a run, whose model its guarantees cover.

    Raises RunFolderError if there is none, or the run is an unfinished release run whose guarantee covers only the
    final model.
    """
    config = folder.read_config()
    only_last = config.mode == "release" and config.protection.last_iterate
    if only_last and not folder.finished:
        raise RunFolderError(
            f"run folder {folder.path} holds an unfinished run whose guarantee covers only the final model; finish it "
            f"with: {folder.resume_command}"
        )
    checkpoints = list_checkpoints(folder.checkpoints)
    if not checkpoints:
        raise RunFolderError(
            f"run folder {folder.path} holds a finished run without its checkpoints, and so without a model; train it "
            "again"
            if folder.finished
            else f"run folder {folder.path} has no checkpoint yet; resume it with: {folder.resume_command}"
        )
    return checkpoints[-1]


def stated(path: Path, *, delta: float | None = None) -> Statement:
    """Return a ledger's statement, at delta or the run's; of a run it is checked against checkpoint and summary.

    A private loop has `private_loop.folder.stated_loop`. Raises LedgerCorrupt if the ledger was changed, cut or
    reordered, is older than its witnesses, or is missing, NoGuarantee if no step was paid for yet, and RunFolderError
    if a checkpoint or the summary is damaged.
    """
    folder, run, checked_against = RunFolder(path if path.is_dir() else path.parent), None, []
    if folder.started and path in (folder.path, folder.ledger_file):
        header, started_with, records = folder.newest_header(), {}, None
        with suppress(RunFolderError, AttributeError):  # a bad configuration, which no guarantee needs
            started_with = {str(key): str(value) for key, value in folder.read_facts()["versions"].items()}
        with suppress(RunFolderError, ConfigError, KeyError, TypeError, ValueError):
            config = folder.read_config()
            if config.counts_are_public and not config.of_users:
                records = int(folder.read_facts()["data"]["n_train"])
        step = None if header is None else header.step
        run = RunFacts(finished=folder.finished, step=step, versions=started_with, records=records)
        checked_against = [witness.name for witness in folder.witnesses()]
        content = folder.read_ledger()
    else:
        content = read_ledger(path)
    content.require_paid(f"folder {folder.path}")
    guarantees = content.guarantees(delta=delta)
    if run is not None and content.mode == "release":
        trusted = Assumption(text=SAME_RECORDS)
        guarantees = [
            replace(one, assumptions=(*one.assumptions, trusted))
            if one.unit in (Unit.RECORD, Unit.USER)
            else one
            for one in guarantees
        ]
    return Statement(
        mode=content.mode,
        guarantees=tuple(guarantees),
        mechanisms=tuple(content.mechanisms),
        certificates=content.certificates,
        alarms=content.alarms,
        ledger=LedgerFacts.of(content, checked_against),
        run=run,
        versions={name: version for name, version in versions().items() if name in ("python", "opusim")},
    )
