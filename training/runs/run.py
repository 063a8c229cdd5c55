"""A trained run, read back from its folder: predict, evaluate, and look at metrics and guarantees.

`evaluate_run` measures the model in a run folder on the run's own test records, on a known data set or on
user-supplied arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from opusim import checks
from opusim.plugins import Deferred
from opusim.tables import Shown
from opusim.training.config.run import LossName
from opusim.training.config.sections import OWN_ARRAYS, DataConfig, is_import_path
from opusim.training.data import Dataset, Split
from opusim.training.data.arrays import RecordForm, standardised
from opusim.training.data.catalogue import bits_per_byte, build_dataset
from opusim.training.data.dataset import PrincipalComponents, Standardisation, Target, in_single_precision
from opusim.training.data.public_maps import map_from_facts
from opusim.training.data.tables import (
    Frame,
    as_arrays,
    feature_array,
    is_frame,
    read_records,
    table_of,
)
from opusim.training.errors import DataError
from opusim.training.networks.base import Network
from opusim.training.networks.functions import Objective, measure
from opusim.training.networks.record_independence import preserved_state
from opusim.training.networks.user_code import (
    load_object,
    records_of,
    require_importable,
    require_trusted,
    warn_if_changed,
)
from opusim.training.runs.checkpoints import copy_parameters, read_checkpoint
from opusim.training.runs.drawing import LineChart, alignment_curves, learning_curves, noise_curves
from opusim.training.runs.folder import RunFolder, StoredRun, newest_checkpoint
from opusim.training.runs.storage import read_array

if TYPE_CHECKING:
    from opusim.crossbar.conversion import DeviceModel

conversion = Deferred("opusim.crossbar.conversion")

_CHUNK = 4096


def evaluate_split(
    model: nn.Module | Network, split: Split, loss: LossName, target: Target = "class"
) -> dict[str, float]:
    """Measure a model, or the network of a run, on at least one record.

    Returns "loss", the mean over records, and the figures of the target, such as "accuracy", the share of correct
    classes, in [0, 1]; see `opusim.training.networks.functions.measure`.
    """
    with _evaluated(model) as (compute, at_once):
        place = split.place
        return measure(
            Objective.named(loss, target),
            lambda x: compute(x.to(place, non_blocking=True)),
            split.x,
            split.y,
            at_once=at_once,
        )


@contextmanager
def _evaluated(model: nn.Module | Network) -> Iterator[tuple[Callable[[Tensor], Tensor], int]]:
    """Yield the function that computes outputs, and its records at once; the model's state is restored afterwards."""
    own = (
        (model.model, model.outputs, model.records_at_once)
        if isinstance(model, Network)
        else (model, model, _CHUNK)
    )
    with torch.no_grad(), preserved_state(own[0], follow_hooks=False):
        yield own[1:]


class Run(Shown, StoredRun):
    """A run and its model.

    Attributes:
        folder: The run folder.
        config: The resolved configuration.
        facts: The whole of `config.json`: network, data, device, package versions.
        model: The trained module, on the CPU.
        step: Number of steps that the model was trained for.
    """

    def __init__(self, folder: RunFolder, network: Network, step: int) -> None:
        super().__init__(folder, step)
        self.model = network.model
        self._network = network
        features = self.facts["data"].get("features")
        self._public_map = None if features is None else map_from_facts(features)
        self._components = None
        if self.config.data.components is not None:
            self._components = PrincipalComponents.from_array(read_array(folder.components_file))

    @property
    def n_features(self) -> int:
        """Numbers per record, as the run takes them."""
        if self._public_map is not None:
            return self._public_map.n_inputs
        if self._components is not None:
            return self._components.n_features
        return int(self.facts["network"]["n_inputs"])

    def _shown(self) -> dict[str, object]:
        figures = {**(self.metrics[-1] if self.metrics else {}), **(self.summary or {})}
        names = [
            f"{part}_{name}"
            for part in ("test", "validation")
            for name in ("accuracy", "rmse", "r2", "bits_per_token")
        ]
        state = "finished" if self.folder.finished else "unfinished"
        return {
            "folder": repr(str(self.folder.path)),
            "trainer": repr(self.config.trainer.kind),
            "model": type(self.model).__name__,
            "data": repr(str(self.facts["data"]["name"])),
            "step": f"{self.step} ({state})",
            **{name: f"{figures[name]:.4g}" for name in names if name in figures},
        }

    def predict(self, x: np.ndarray | Tensor | Frame) -> np.ndarray | Tensor:
        """Predict the classes of records, or the run's other target.

        Args:
            x: Records as they were given to training (this method standardises them): features of shape (n, d), images
                (n, c, h, w), tokens (n, T), or a DataFrame with the columns of the training records.

        Returns:
            By data.target: classes, shape (n,), as they were given to training, whole numbers (int64) or strings;
            tokens, shape (n, T), int64; real numbers, shape (n, k), float32; whether each label holds, shape (n, k),
            bool. torch for torch input, else numpy. torch has no strings, so that a class is its number in `classes`.

        Raises:
            ValueError: The shape is wrong, or a value is not finite.
        """
        features = feature_array(x, self.columns, "x") if is_frame(x) else x
        prepared = self._prepared(self.form.features(features, "x"))
        with _evaluated(self._network) as (compute, at_once):
            found = outputs = torch.cat([compute(chunk) for chunk in prepared.split(at_once)])
        if self.form.target in ("class", "tokens"):
            found = outputs.argmax(dim=-1)
        elif self.form.target == "labels":
            found = outputs > 0
        if isinstance(x, Tensor):
            return found
        return np.array(self.classes)[found.numpy()] if self.classes else found.numpy()

    def evaluate(
        self, x: np.ndarray | Tensor | Frame | None = None, y: np.ndarray | Tensor | None = None
    ) -> dict[str, float]:
        """Measure loss and accuracy on user-supplied records, or on the run's own test records.

        Args:
            x: Records as for `predict`; None takes the test records of the data set or the file that the run names.
            y: What is to be predicted, as it was given to training, such as class numbers of shape (n,); None if x
                (n, T + 1) holds the next tokens, or is a DataFrame with the column of the labels.

        Returns:
            {"loss": mean loss, "accuracy": share of correct classes, in [0, 1]}.

        Raises:
            DataError: x is None, and the run was trained on user-supplied arrays or has no test records.
            ValueError: A shape is wrong, or a value is out of range.
        """
        if x is None:
            return _evaluate_named(self)[2]
        if is_frame(x):
            label = self.config.data.label
            user = self.config.data.user
            table = table_of(x, label, "x", columns=self.columns, as_text=bool(self.classes), user=user)
            records = self.form.records(table.x, table.y)
        else:
            records = self.form.records(x, y)
        split = Split(self._prepared(records.x), records.y)
        return evaluate_split(self._network, split, self.config.loss, self.form.target)

    def plot(self, what: Literal["learning", "alignment", "noise"] = "learning") -> LineChart:
        """Return a figure of the run: a notebook draws it, and ``run.plot().savefig("run.svg")`` writes it.

        Args:
            what: "learning", the run's main figure on validation records, or on training records if none were held out;
                "alignment", the cosine of each layer's update with its backpropagation gradient; "noise", the norms of
                the signal that each hidden layer receives and of its noise, or their ratio at a module's points.

        Raises:
            ValueError: There are no metrics to draw: release mode keeps none, before the first epoch has ended there
                are none, and only trainers with feedback have an alignment and a noise, if their signals carry noise.
        """
        checks.choice(("learning", "alignment", "noise"), what=what)
        charts = {"alignment": alignment_curves, "noise": noise_curves}
        chart = charts[what](self) if what in charts else learning_curves([self], [self.config.trainer.kind])
        if chart is None:
            raise ValueError(
                f"run {self.folder.path} has no metrics of {what} to draw; release mode keeps none, others have some "
                "after an epoch; alignment and noise are those of trainers with feedback, noise only of noisy signals"
            )
        return chart

    def put_on_device(self, device: str | Path, *, after_s: float = 0.0, seed: int = 0) -> DeviceModel:
        """Let the model's products run on programmable devices from now on; see `opusim.convert`.

        What no device takes, such as recurrent layers, stays digital; `DeviceModel.placement` lists it.

        Args:
            device: Name or path of a description.
            after_s: Seconds since the devices were programmed, at least 0.
            seed: Seed of the chips and of their noise, in [0, 2^64).

        Returns:
            The model on its devices, which `predict` and `evaluate` use.

        Raises:
            CapabilityMissing: The device cannot be programmed, or does not drift and after_s is not 0.
            ConfigError: The device cannot be used, or is smaller than a layer.
            ValueError: The model has no layer that can run on a device.
        """
        digital = conversion.digital_names(self.model)
        analog: DeviceModel = conversion.convert(self.model, device, seed=seed, digital=digital)
        if after_s:
            analog.wait(after_s)
        self.model = self._network.model = analog
        return analog

    @property
    def form(self) -> RecordForm:
        """The form of the run's records, by which further records are checked."""
        facts = self.facts["data"]
        return RecordForm(
            target=self.target,
            n_classes=facts["n_classes"],
            n_features=self.n_features,
            vocabulary=facts.get("vocabulary"),
            classes=self.classes,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers, if the labels were strings; else empty."""
        return tuple(self.facts["data"].get("classes", ()))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the features, if the run was trained on a table; else empty."""
        return tuple(self.facts["data"].get("columns", ()))

    def _prepared(self, x: Tensor) -> Tensor:
        """Return records as the model takes them: standardised and mapped."""
        facts = self.facts["data"]["standardisation"]
        mean, std = (tuple(v) if isinstance(v, list) else v for v in (facts["mean"], facts["std"]))
        x = standardised(
            x, Standardisation(mean=mean, std=std, source=facts["source"], public=facts["public"])
        )
        if self._public_map is not None:
            x = in_single_precision(self._public_map.apply(x))
        return x if self._components is None else self._components.apply(x)


def load_run(path: str | Path, *, model: nn.Module | None = None, trust_code: bool = False) -> Run:
    """Read a run from its folder, with the model of its newest checkpoint.

    Args:
        path: The run folder.
        model: A module like the one that was trained, if it was user-supplied and the folder cannot describe it; its
            parameters are overwritten.
        trust_code: Whether to execute the user-supplied code that the run names by import path; nothing else in a
            folder executes when it is read.

    Raises:
        RunFolderError: The run names user-supplied code and `trust_code` is False, there is no run or no checkpoint, a
            checkpoint does not fit, a file was changed, or the run is an unfinished release run whose guarantee covers
            only the final model.
    """
    folder = RunFolder(path)
    facts = folder.read_facts()
    folder.require_sealed()
    require_trusted(facts, trust_code=trust_code)
    require_importable(facts)
    config = folder.read_config()
    newest = newest_checkpoint(folder)
    warn_if_changed(facts.get("code", []))
    network = config.trainer.implementing_class().rebuild_network(facts["network"], model)
    checkpoint = read_checkpoint(newest)
    copy_parameters(checkpoint, network.tensors, newest)
    if is_import_path(config.loss):
        load_object(config.loss, key="loss")
    network.model.cpu()  # a user-supplied module may be on a GPU
    return Run(folder, network, checkpoint.step)


def evaluate_run(
    path: Path,
    *,
    data: str | None = None,
    trust_code: bool = False,
    device: str | Path | None = None,
    after_s: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure loss and accuracy of the model in a run folder.

    Args:
        path: The run folder.
        data: Name of a known data set, whose test records are used, or a file (``csv:PATH``, ``parquet:PATH``,
            ``npz:PATH``, ``folder:PATH``, ``text:PATH``), all of whose records are used, even if the run was trained on
            them; None takes the run's own test records.
        trust_code: See `load_run`.
        device: Name or path of a programmable device that the model's products run on, or None for digital ones.
        after_s: Seconds since the device was programmed, at least 0.
        seed: Seed of the chips and of their noise, in [0, 2^64).

    Returns:
        {"data": name, "records": n, "loss": ..., "accuracy": ...}; other targets than classes have other
            figures, and there is "bits_per_byte" for the cross-entropy of a text. With a device, "digital" names the
            layers that no device takes.

    Raises:
        DataError: The records cannot be read, or the run was trained on user-supplied arrays and none are given.
        RunFolderError: There is no run there.
        ValueError: after_s or another seed than 0 without a device.
    """
    if device is None and after_s:
        raise ValueError(f"after_s = {after_s:g}: only a device drifts; name one with device")
    if device is None and seed:
        raise ValueError(f"seed = {seed}: only a device has chips; name one with device")
    run = load_run(path, trust_code=trust_code)
    placed: dict[str, Any] = {}
    if device is not None:
        placed["digital"] = list(conversion.digital_names(run.model))
        run.put_on_device(device, after_s=after_s, seed=seed)
    shown, records, figures = _evaluate_named(run, data)
    return {"data": shown, "records": records, **figures, **placed}


def _evaluate_named(run: Run, data: str | None = None) -> tuple[str, int, dict[str, float]]:
    """Measure a run on a known data set or a file, or on its own test records; return their name, number, figures.

    Raises DataError if they cannot be read, or the run was trained on user-supplied arrays and none are given.
    """
    if data is None and run.config.data.name == OWN_ARRAYS:
        raise DataError(
            f"run {run.folder.path} was trained on user-supplied arrays, which its folder does not hold; give test "
            "records: run.evaluate(x, y), or --data npz:FILE (run.summary has the run's own figures)"
        )
    own = run.config.data
    options = DataConfig(name=data or own.name, split_seed=own.split_seed)
    trained_on = options.name == own.name or (
        options.file_kind is not None
        and own.file_kind == options.file_kind
        and options.file.resolve() == own.file.resolve()
    )
    note = ", on which the run was trained" if data is not None and trained_on else ""
    if options.is_own and options.name != OWN_ARRAYS:
        if data is None and own.test is None:
            raise DataError(
                f"run {run.folder.path} has no test records; give some with --data {options.file_kind or 'npz'}:PATH, "
                "or train with data.test"
            )
        if options.factory is not None:
            records, shown = records_of(options.factory), options.name
            x, y = (records, None) if is_frame(records) else as_arrays(records, "data")[:2]
        else:
            path = options.file if data is not None else Path(str(own.test))
            records, shown = read_records(path, options), path.name
            x, y = (records, None) if is_frame(records) else records[:2]
        figures = run.evaluate(x, y)  # checks the arrays before their length is taken
        return shown + note, len(x), figures
    dataset, part = _other_records(run, data)
    split = getattr(dataset, part)
    figures = run.evaluate(split.x, split.y)
    if run.config.loss == "cross-entropy" and "bytes_per_token" in dataset.origin:
        figures["bits_per_byte"] = bits_per_byte(figures["loss"], dataset.origin["bytes_per_token"][part])
    shown = dataset.name
    if options.file_kind is not None:
        shown = Path(str(own.test)).name if part == "test" else options.file.name + note
    return shown, len(split), figures


def _other_records(run: Run, data: str | None) -> tuple[Dataset, Literal["train", "test"]]:
    """Load records to evaluate a run on, with features as its standardisation expects them, and say which part it is.

    Of a known data set the test records are taken, of a file all; None takes the run's own. Raises DataError if they
    cannot be read, have another number of features, hold no test records, or are a text whose tokens have other numbers
    than those that the run was trained on.
    """
    own, part = run.config.data, "test"
    name = data or own.name
    options = DataConfig(name=name, split_seed=own.split_seed)
    if options.file_kind is not None:
        changes: dict[str, Any] = {"name": name}
        if data is not None:  # then all of the file is for the test
            changes |= {"test": None, "validation_fraction": 0.0}
            part = "train"
        options = own.model_copy(update=changes)
    raw = {"standardise": False, "mean": None, "std": None}
    dataset = build_dataset(options.model_copy(update=raw))
    if dataset.n_features != run.n_features:
        raise DataError(
            f"data set {name} has {dataset.n_features} features, the run's network takes "
            f"{run.n_features}; evaluate it on data with as many features"
        )
    origin, path = run.facts["data"].get("origin"), own.tokenizer
    # a run that does not say where its records come from is not checked
    if origin and dataset.origin and origin.get("tokenizer") != dataset.origin.get("tokenizer"):
        raise DataError(
            f"data.tokenizer = {str(path)!r} is not the file that run {run.folder.path} was trained with, so that "
            "tokens have other numbers; restore it"
        )
    if part == "train":
        return dataset, "train"
    if dataset.test is None:
        raise DataError(
            f"data set {name} has no test records; give some with --data {options.file_kind}:PATH, or train with "
            "data.test"
            if options.file_kind
            else f"data set {name} has no test records; give some with --data npz:FILE"
        )
    return dataset, "test"
