"""View any torch module as the network of a run: shape of its records, parameters, buffers, how to rebuild it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim.errors import ConfigError
from opusim.training.config.run import RunConfig
from opusim.training.config.sections import OWN_MODULE
from opusim.training.data import Dataset
from opusim.training.errors import RunFolderError
from opusim.training.networks.base import (
    DescribedModule,
    Network,
    other_numbers,
    parameters_digest,
    require_not_of_opacus,
    tensor_facts,
)
from opusim.training.networks.models import MODELS, build_model
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.network import build_model as build_mlp
from opusim.training.networks.record_independence import two_records
from opusim.training.networks.user_code import load_object

_CHANNELS = (1, 3, 4)
"""Usual numbers of channels of an image."""


class AnyModule(Network):
    """A view of any module: parameters that require a gradient are trained, the others stay as they are.

    Args:
        model: Maps records (batch, *record_shape) to outputs. It is put into evaluation mode.
        n_inputs: Entries of a record, as data sets store it.
        record_shape: Shape of a record as the module takes it; a vector if it is None.
        only_trained: Whether checkpoints hold only what is trained, not buffers and frozen parameters, which may be
            large.
        recipe: JSON values from which the module can be built again; empty for a user-supplied module.

    Raises:
        TypeError: The model is no module.
        ValueError: No parameter requires a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        n_inputs: int,
        record_shape: Sequence[int] | None = None,
        only_trained: bool = False,
        recipe: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        require_not_of_opacus(model)
        self.model, self._n_inputs, self._recipe = model.eval(), n_inputs, recipe or {}
        self._holds_all = not only_trained
        self.record_shape = (n_inputs,) if record_shape is None else tuple(record_shape)
        self.records_at_once = 256 if self._holds_all else Network.records_at_once
        if not self.parameters:
            raise ValueError(
                "model has no parameter that requires a gradient, so there is nothing to train; "
                "call requires_grad_(True) on the parameters to train"
            )

    @classmethod
    def from_facts(cls, facts: dict[str, Any], model: nn.Module | None) -> AnyModule:
        """Build the network that `facts` describes, to be filled in; raise RunFolderError if its module is missing."""
        recipe = facts.get("recipe", {})
        if recipe:
            model = from_recipe(recipe, seed=0)
        if model is None:
            raise RunFolderError(
                f"the run trained a user-supplied {facts['module']}, which its folder cannot describe; give one "
                "like it: opusim.load_run(path, model=...)"
            )
        return cls(
            model,
            n_inputs=facts["n_inputs"],
            record_shape=facts.get("record_shape"),
            only_trained=facts.get("only_trained", "record_shape" not in facts),
            recipe=recipe,
        )

    @property
    @override
    def n_inputs(self) -> int:
        return self._n_inputs

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters to train; a shared one appears once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by the module's own names; a shared parameter appears once."""
        named, every = self.model.named_parameters(), self._holds_all
        found = {name: parameter.detach() for name, parameter in named if every or parameter.requires_grad}
        return found | self.buffers if every else found

    @property
    def facts(self) -> dict[str, Any]:
        """See Network.facts; of what checkpoints do not hold, a digest."""
        shape = list(self.record_shape or ())
        facts: dict[str, Any] = {
            "n_inputs": self._n_inputs,
            **({"record_shape": shape} if self._holds_all or len(shape) > 1 else {}),
            **({} if self._holds_all or len(shape) == 1 else {"only_trained": True}),
            "module": type(self.model).__name__,
            "tensors": tensor_facts(self.tensors),
        }
        if self._holds_all:
            return facts | ({"recipe": self._recipe} if self._recipe else {})
        frozen: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        frozen |= dict(self.model.named_buffers())
        facts |= {"frozen": parameters_digest(frozen)} if frozen else {}
        described = isinstance(self.model, DescribedModule) and self.model.description
        return facts | ({"language": self.model.description} if described else {})


def own_model_name(config: RunConfig, model: nn.Module | None) -> str:
    """Return model.name of a run: `OWN_MODULE` for a user-supplied module that is no `FullyConnected`.

    Raises ConfigError if model.name names another network.
    """
    if model is None or not config.trainer.any_module or config.model.name == OWN_MODULE:
        return config.model.name
    if config.model.name != "mlp":
        reason = f"{config.model.name!r} names a network, and model={type(model).__name__} was given; leave one out"
        raise ConfigError("configuration", "model.name", reason)
    try:
        FullyConnected(model)
    except (TypeError, ValueError):
        return OWN_MODULE
    return config.model.name


def from_recipe(recipe: dict[str, Any], *, seed: int | None) -> nn.Module:
    """Build a module from its recipe; a recipe with an import path executes user code."""
    if "layers" in recipe:
        return FullyConnected.from_facts(recipe).model
    name = recipe["name"]
    factory = MODELS.get(name) or load_object(name, key="model.name")
    return build_model(
        factory,
        recipe["options"],
        record_shape=recipe["record_shape"],
        n_outputs=recipe["n_outputs"],
        vocabulary=recipe["vocabulary"],
        seed=seed,
        name=name,
    )


def build_any_module(config: RunConfig, dataset: Dataset, model: nn.Module | None) -> AnyModule:
    """View a user-supplied module, or one built from the section `model`; check its output for two records.

    A module that does not take records in their own shape gets them as vectors. Raises TypeError or ValueError if the
    model is no module, refuses its options or the records, returns outputs that do not fit the targets, or has nothing
    to train, and ConfigError if an import path names nothing.
    """
    recipe: dict[str, Any] = {}
    if model is None and config.model.name == OWN_MODULE:
        raise ConfigError(
            "configuration",
            "model.name",
            "stands for a user-supplied module, which no file holds; give it again: opusim.train(..., model=module)",
        )
    if model is None and config.model.name == "mlp":
        model = build_mlp(config, dataset)
        recipe = {"name": "mlp", **FullyConnected(model).facts}
    elif model is None:
        recipe = {
            "name": config.model.name,
            "options": json.loads(json.dumps(config.model.options)),
            "record_shape": list(dataset.record_shape),
            "n_outputs": dataset.n_classes,
            "vocabulary": dataset.vocabulary,
        }
        model = from_recipe(recipe, seed=config.seed_for("initialisation"))
    protected = config.protection.protects == "records"  # a module may keep its inputs
    network = AnyModule(model, n_inputs=dataset.n_features, recipe=recipe)
    records = two_records(dataset, network.parameters[0].device, invented=protected)
    network.record_shape = shape_taken(model, dataset, records, [dataset.record_shape, (dataset.n_features,)])
    return network


def shape_taken(
    model: nn.Module, dataset: Dataset, records: Tensor, shapes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Return the first of the record shapes that a module takes, found from its output for two records.

    The records, shape (n, n_features), are on the device of its parameters. Raises ValueError if it takes none of the
    shapes, or returns outputs that do not fit the targets.
    """
    sequence = dataset.target == "tokens"
    count = len(records)
    wanted = (count, dataset.n_features, dataset.n_classes) if sequence else (count, dataset.n_classes)
    found = ""
    for shape in dict.fromkeys(map(tuple, shapes)):
        try:
            with torch.no_grad():
                output: object = model(records.view(count, *shape))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            found = found or f"cannot take records of shape {shape} ({str(error).partition(chr(10))[0]})"
            continue
        if isinstance(output, Tensor) and tuple(output.shape) == wanted:
            return shape
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        found = found or f"gives {given} for two records of shape {shape}"
    taken = (count, *dataset.record_shape)
    raise ValueError(
        f"model {found}; it must map records {taken} to outputs of shape {wanted}: {_remedy(model, dataset, found)}"
    )


def _remedy(model: nn.Module, dataset: Dataset, found: str) -> str:
    """Return the remedy for a module that refuses the records or returns outputs of a wrong shape."""
    if found.startswith("gives"):
        if not found.startswith("gives ("):
            return "return only the tensor of the outputs, such as the first entry of a tuple"
        return "change its last layer, or data.target and data.n_classes"
    if remedy := other_numbers(model):
        return remedy
    embeds = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in model.modules())
    if dataset.holds_tokens and not embeds:
        fitting = "'transformer-lm'" if dataset.target == "tokens" else "'transformer-encoder' or 'gru'"
        return f"the records hold tokens, so take model.name = {fitting}, or a module that embeds them"
    if embeds and not dataset.holds_tokens:
        return (
            "the module embeds tokens and the records hold features; set data.inputs = 'tokens' for whole numbers, or "
            "take another model"
        )
    shape = dataset.record_shape
    if len(shape) == 3 and shape[-1] in _CHANNELS and shape[0] not in _CHANNELS:
        return "move the channels first, x.transpose(0, 3, 1, 2) in numpy"
    return "reshape x, or change the module"
