"""Any module that gives class scores, as zeroth-order training sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from training.data import Dataset
from training.networks.base import Network, require_class_scores
from training.zeroth_order.language import PromptClassifier
from training.zeroth_order.step_log import parameters_digest, tensor_facts


class ModuleNetwork(Network):
    """A person's own module; its parameters that require a gradient are trained, the others stay.

    Args:
        model: Takes records (batch, n_inputs), gives class scores (batch, n_classes). It is put into evaluation mode.
        n_inputs: Features of a record.

    Raises:
        ValueError: No parameter requires a gradient.
    """

    def __init__(self, model: nn.Module, n_inputs: int) -> None:
        self.model = model.eval()
        self._n_inputs = n_inputs
        if not self.tensors:
            raise ValueError(
                "model has no parameter that requires a gradient; those that do are trained: "
                "call requires_grad_(True) on them"
            )

    @property
    def n_inputs(self) -> int:
        """Features of a record."""
        return self._n_inputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained parameters under the module's own names; one that is shared stands once."""
        return {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Its width, class, trained parameters and a digest of the others: to know it again, not to rebuild it."""
        facts = {
            "n_inputs": self._n_inputs,
            "module": type(self.model).__name__,
            "tensors": tensor_facts(self.tensors),
        }
        frozen: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        frozen |= dict(self.model.named_buffers())
        facts |= {"frozen": parameters_digest(frozen)} if frozen else {}
        described = isinstance(self.model, PromptClassifier) and self.model.description
        return facts | ({"language": self.model.description} if described else {})


def fitting_module(model: nn.Module, dataset: Dataset) -> ModuleNetwork:
    """A person's own module, after a look at what it makes of two records.

    Raises:
        TypeError, ValueError: It gives no class scores for the data's classes, or has nothing to train.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    network = ModuleNetwork(model, dataset.n_features)
    place = next(iter(network.tensors.values())).device
    require_class_scores(model, dataset.train.x[:2].to(place), dataset.n_classes)
    return network
