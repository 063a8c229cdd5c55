"""The ridge trainer: the closed form W = S^-1 sum_i h_i t_i^T, or the protected model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim.accounting.guarantee import NoGuarantee
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Algorithm, DeviceShape, StepRecord, Trainer
from opusim.training.errors import TrainingDiverged
from opusim.training.networks.clipping import full_precision
from opusim.training.networks.functions import LOSSES
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.base import SoftLabels
from opusim.training.protections.released_model import Design
from opusim.training.ridge.config import RidgeConfig
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array


class RidgeTrainer(Algorithm[RidgeConfig, FullyConnected, "RidgeTrainer"], Trainer):
    """One step: the weights become the closed form of all records, or the model, (k, d), that a protection released.

    The figures of the step are those of the fitted model.
    """

    network: FullyConnected
    applies = frozenset({"own noise"})
    given: Tensor | None = None

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> FullyConnected:
        """See Algorithm.build_network; the weights start at 0."""
        if model is not None:
            raise ValueError(
                f"model is a {type(model).__name__}: trainer.kind = 'ridge' fits its own linear model; leave it out"
            )
        linear = nn.Linear(dataset.n_features, dataset.n_classes)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return FullyConnected(nn.Sequential(linear))

    @classmethod
    @override
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> FullyConnected:
        return FullyConnected.from_facts(facts)

    @property
    def device_shape(self) -> DeviceShape:
        """A blank reading is the noise of one class's weights."""
        return DeviceShape(n_inputs=self.network.widths[-1], n_outputs=self.network.n_inputs + 1)

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; the protection draws all noise before."""
        return DeviceWork()

    @override
    def open(self, device: NoisyDevice | None, labels: SoftLabels | None) -> None:
        self.device = device
        self.optimizer = torch.optim.SGD(self.network.parameters)  # holds a rate that nothing uses

    def prepare(self, trainer: RidgeTrainer, folder: RunFolder) -> None:
        """Hand the trainer the model that the protection released; without one it fits its own."""
        if self._protected:
            trainer.given = torch.from_numpy(read_array(folder.labels_file))

    @property
    def _protected(self) -> bool:
        """Whether the run protects labels, so that a step takes the released model only."""
        return self.config.protection.protects != "nothing"

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; there are no diagnostics.

        Raises NoGuarantee if labels are protected and no model was released, and TrainingDiverged for a weight beyond
        float32.
        """
        if self._protected and self.given is None:
            raise NoGuarantee(
                "trainer.kind = 'ridge': no protected model was released; prepare the run first"
            )
        linear = self.network.linears[0]
        with full_precision():
            solved = self.given
            if solved is None:
                design = Design.of(x, ridge=self.options.ridge)
                solved = design.solved(design.sums(x, y, self.network.widths[-1]))  # float64, shape (k, d)
            found = solved.to(linear.weight)
            if not torch.isfinite(found).all():
                raise TrainingDiverged("the model is not finite in float32; rescale the features (data.std)")
            linear.weight.copy_(found[:, :-1])
            linear.bias.copy_(found[:, -1])
            output = linear(x)
        return StepRecord(
            loss_sum=LOSSES[self.config.loss](output, y).per_record.sum(dtype=torch.float64),
            n_correct=(output.argmax(dim=1) == y).sum(),
            n_records=len(x),
        )
