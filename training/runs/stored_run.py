"""A run as its folder describes it, without its model: what reports need, and neither torch nor the user's own code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opusim.accounting.guarantee import Guarantee
from opusim.training.config.run import RunConfig
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import list_checkpoints, read_header

if TYPE_CHECKING:
    from opusim.training.data.dataset import Target


class StoredRun:
    """What a run folder holds of a run besides its parameters.

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
        found: Target = self.facts["data"].get("target", "class")  # older runs know only classes
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per epoch, as in `metrics.jsonl`."""
        return self.folder.read_metrics()

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
        """What to do about a run that learned nothing: R^2 < 0, or an accuracy that guessing reaches; else None.

        Guessing reaches 1 / k of k classes, plus two standard errors of a share of so many records.
        """
        figures = {**(self.metrics[-1] if self.metrics else {}), **(self.summary or {})}
        for part in ("test", "validation"):
            r2, accuracy = figures.get(f"{part}_r2"), figures.get(f"{part}_accuracy")
            if r2 is not None and r2 < 0:
                return (
                    f"R^2 of {r2:.3g} on {part} records is below 0, so their mean predicts better; "
                    f"standardise the targets, or lower optimizer.lr = {self.config.optimizer.lr:g}"
                )
            if accuracy is not None and self.target == "class" and self._guesses(accuracy, part):
                return (
                    f"accuracy of {100 * accuracy:.1f} % on {part} records is no better than guessing among "
                    f"{self.facts['data']['n_classes']} classes; {self._more_signal}"
                )
        return None

    @property
    def device_note(self) -> str | None:
        """That the device's noise counts for nothing in a finite epsilon, if the protection's is digital; else None."""
        protection = self.config.protection
        digital = getattr(protection, "noise", None) == "digital"
        if self.facts["device"] is None or not digital or not math.isfinite(self._least_epsilon):
            return None
        return (
            f"The noise of device {self.facts['device']['name']!r} earns no privacy here (protection.noise = "
            "'digital'): epsilon counts only the noise that the protection draws in software."
        )

    @property
    def _least_epsilon(self) -> float:
        return min((guarantee.epsilon for guarantee in self.guarantees), default=math.inf)

    def _guesses(self, accuracy: float, part: str) -> bool:
        chance = 1 / self.facts["data"]["n_classes"]
        records = self.facts["data"].get(f"n_{part}") or 1
        return bool(accuracy <= chance + 2 * math.sqrt(chance * (1 - chance) / records))

    @property
    def _more_signal(self) -> str:
        protection = self.config.protection
        if protection.protects == "nothing":
            return f"train longer, or change optimizer.lr = {self.config.optimizer.lr:g}"
        return (
            f"protection.kind = {protection.kind!r} adds more noise than these records can outweigh: use more records, "
            "a larger epsilon or another protection"
        )


def read_run(path: str | Path) -> StoredRun:
    """Read a run from its folder without its model; nothing in a folder is executed.

    Args:
        path: The run folder.

    Raises:
        RunFolderError: As `opusim.training.runs.run.load_run`, except that code and parameters are not read.
    """
    folder = RunFolder(path)
    folder.read_facts()
    folder.require_sealed()
    return StoredRun(folder, read_header(newest_checkpoint(folder)).step)


def newest_checkpoint(folder: RunFolder) -> Path:
    """Return the newest checkpoint of a run, whose model its guarantees cover.

    Raises:
        RunFolderError: There is no checkpoint, or the run is an unfinished release run whose guarantee covers only the
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
