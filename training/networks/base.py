"""What a run asks of the network that it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class Network(ABC):
    """A view on a module, whose parameters are the module's own.

    Attributes:
        model: Takes records (batch, ...), gives class scores (batch, n_classes).
    """

    model: nn.Module

    @property
    @abstractmethod
    def n_inputs(self) -> int:
        """Features of a record."""

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The trained parameters by name, as a checkpoint holds them; it is restored by copying into them."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What `config.json` says of the network, enough to rebuild it: JSON values, "n_inputs" among them."""
