"""Measuring a run's model on its own test records, on a known data set, or on a person's file.

Loss and accuracy of a model on records.

A trained run, read back from its folder: predict, evaluate, look at its metrics.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting.guarantee import Guarantee
from training.config.run import LossName, RunConfig
from training.data import Split, load_dataset
from training.data.arrays import check_lengths, check_range, checked_features, checked_labels
from training.data.catalogue import OWN_ARRAYS
from training.data.dataset import DataError, PrincipalComponents, Standardisation
from training.data.formats import read_arrays
from training.errors import RunFolderError
from training.networks.losses import LOSSES
from training.runs.checkpoints import copy_parameters, list_checkpoints, read_checkpoint
from training.runs.folder import RunFolder
from training.runs.storage import read_array

_CHUNK = 4096


def model_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs h_L for records, computed a few thousand at a time.

    Args:
        model: Takes (batch, d), gives (batch, n_classes).
        x: Shape (n, d).
    """
    with torch.no_grad():
        return torch.cat([model(chunk) for chunk in x.split(_CHUNK)])


def evaluate_split(model: nn.Module, split: Split, loss: LossName) -> dict[str, float]:
    """Mean loss and accuracy, as {"loss": ..., "accuracy": ...}; the accuracy lies in [0, 1].

    Args:
        model: Takes (batch, d), gives (batch, n_classes).
        split: At least one record.
        loss: Which loss.
    """
    output = model_outputs(model, split.x)
    per_record = LOSSES[loss](output, split.y).per_record
    return {
        "loss": float(per_record.mean(dtype=torch.float64)),
        "accuracy": float((output.argmax(dim=1) == split.y).double().mean()),
    }


class Run:
    """A run and its model.

    Attributes:
        folder: The run folder.
        config: The resolved configuration.
        facts: The whole of `config.json`: network, data, device, versions.
        model: The trained module, on the CPU.
        step: Steps that the model was trained for.
    """

    def __init__(self, folder: RunFolder, model: nn.Module, step: int) -> None:
        self.folder = folder
        self.config: RunConfig = folder.read_config()
        self.facts: dict[str, Any] = folder.read_facts()
        self.model = model
        self.step = step
        self._components = None
        if self.config.data.components is not None:
            self._components = PrincipalComponents.from_array(read_array(folder.components_file))

    @property
    def n_features(self) -> int:
        """Features of a record as it is given to the run."""
        if self._components is not None:
            return self._components.n_features
        return int(self.facts["network"]["n_inputs"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per epoch, as in `metrics.jsonl`."""
        return self.folder.read_metrics()

    @property
    def guarantees(self) -> list[Guarantee]:
        """What can be said about the privacy of all that was released so far: the ledger, replayed.

        Raises:
            LedgerCorrupt: The ledger was changed, cut or reordered, is older than the newest checkpoint, or is missing.
        """
        return self.folder.read_ledger().guarantees()

    @property
    def summary(self) -> dict[str, Any] | None:
        """Final figures, or None while the run is not done."""
        return self.folder.read_summary()

    def predict(self, x: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """Class numbers of records.

        Args:
            x: Features as they were given to training (the run's standardisation is applied here),
                shape (n, d), numpy or torch.

        Returns:
            Class numbers, shape (n,), int64, numpy for numpy and torch for torch.

        Raises:
            ValueError: Wrong shape, or values that are not finite.
        """
        classes = model_outputs(self.model, self._prepared(x)).argmax(dim=1)
        return classes.numpy() if isinstance(x, np.ndarray) else classes

    def evaluate(self, x: np.ndarray | Tensor, y: np.ndarray | Tensor) -> dict[str, float]:
        """Mean loss and accuracy on records of one's own.

        Args:
            x: Features as for `predict`.
            y: Class numbers, shape (n,).

        Returns:
            {"loss": ..., "accuracy": ...}.
        """
        features, labels = self._prepared(x), checked_labels(y, "y")
        check_lengths(features, labels, "x", "y")
        check_range(labels, self.facts["data"]["n_classes"], "y")
        return evaluate_split(self.model, Split(features, labels), self.config.loss)

    def _prepared(self, x: np.ndarray | Tensor) -> Tensor:
        features = checked_features(x, "x")
        if features.shape[1] != self.n_features:
            raise ValueError(
                f"x has {features.shape[1]} features a record; this run takes (n, {self.n_features})"
            )
        standardised = read_standardisation(self.facts["data"]).apply(features)
        return standardised if self._components is None else self._components.apply(standardised)


def load_run(path: str | Path, *, model: nn.Module | None = None) -> Run:
    """Read a run back from its folder, with the model of its newest checkpoint.

    Args:
        path: The run folder.
        model: The module that the run was given, where its folder cannot describe it; its parameters are overwritten.

    Raises:
        RunFolderError: No run there, no checkpoint yet, a checkpoint that does not fit, a file that was changed, or a
            release run of the last iterate that is not done: its model so far has no guarantee.
    """
    folder = RunFolder(path)
    facts = folder.read_facts()
    header = folder.require_sealed()
    if header is not None and header.seal is None:
        warnings.warn(
            f"run folder {path} was written by an opusim that kept no digests of its files: only the tensors of its "
            "checkpoints were checked for changes, not its configuration, metrics or ledger",
            stacklevel=2,
        )
    config = folder.read_config()
    last_alone = config.mode == "release" and config.protection.last_iterate
    if last_alone and not folder.finished:
        raise RunFolderError(
            f"run folder {path} holds a model on the way, and only the last one is covered by its guarantee; finish it "
            f"with: opusim train resume {path}"
        )
    checkpoints = list_checkpoints(folder.checkpoints)
    if not checkpoints:
        raise RunFolderError(
            f"run folder {path} holds a finished run without its checkpoints, and so without a model; train it anew"
            if folder.finished
            else f"run folder {path} has no checkpoint yet; go on with: opusim train resume {path}"
        )
    network = config.trainer.implementation().rebuild_network(facts["network"], model)
    checkpoint = read_checkpoint(checkpoints[-1])
    copy_parameters(checkpoint, network.tensors, checkpoints[-1])
    return Run(folder, network.model.cpu(), checkpoint.step)  # a person's own module may come from elsewhere


def read_standardisation(data_facts: dict[str, Any]) -> Standardisation:
    """The standardisation that `config.json` holds."""
    facts = data_facts["standardisation"]
    mean, std = (tuple(v) if isinstance(v, list) else v for v in (facts["mean"], facts["std"]))
    return Standardisation(mean=mean, std=std, source=facts["source"], public=facts["public"])


def evaluate_run(path: Path, *, data: str | None = None, arrays: Path | None = None) -> dict[str, Any]:
    """Loss and accuracy of the model in a run folder.

    Args:
        path: The run folder.
        data: A known data set; its test records are taken. None for the run's own.
        arrays: An .npz file with x (n, d) and y (n,) instead.

    Returns:
        {"data": name, "records": n, "loss": ..., "accuracy": ...}.

    Raises:
        DataError: The records cannot be read, or the run was trained on arrays and none are given.
        RunFolderError: There is no run there.
        ValueError: Both data and arrays are given.
    """
    if data is not None and arrays is not None:
        raise ValueError(
            f"data = {data!r} and arrays = {str(arrays)!r}: one of them is enough; leave the other out"
        )
    run = load_run(path)
    if arrays is not None:
        x, y = read_npz(arrays)[:2]
        figures = run.evaluate(x, y)  # it checks the arrays, whose length is asked for next
        return {"data": arrays.name, "records": len(x), **figures}
    if data is None and run.config.data.name == OWN_ARRAYS:
        raise DataError(
            f"run {path} was trained on a person's own arrays; give test records with --arrays FILE.npz"
        )
    name = data or run.config.data.name
    split = _test_records(run, name)
    return {"data": name, "records": len(split), **run.evaluate(split.x, split.y)}


def _test_records(run: Run, name: str) -> Split:
    """Test records of a known data set, features in [0, 1] as the run's own standardisation takes them."""
    dataset = load_dataset(name, split_seed=run.config.data.split_seed, standardise=False)
    if dataset.n_features != run.n_features:
        raise DataError(
            f"data set {name} has {dataset.n_features} features, the run's network takes "
            f"{run.n_features}; evaluate it on data of that width"
        )
    if dataset.test is None:
        raise DataError(f"data set {name} has no test records; give some with --arrays FILE.npz")
    return dataset.test


def read_npz(
    path: Path,
) -> tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays x and y of a user-supplied .npz file, and ids if it holds them.

    Raises:
        DataError: It cannot be read, or holds other arrays.
    """
    x, y, *ids = read_arrays(path, ("x", "y"), optional=("ids",))
    return (x, y, ids[0]) if ids else (x, y)
