"""How the trainer takes part in a run: its network, what it opens, and its step."""

import torch

from opusim.training import Algorithm, StepRecord, Trainer
from opusim.training.networks.functions import cross_entropy
from opusim.training.networks.network import FullyConnected, LayerShape, build_sequential
from opusim.training.networks.optimizers import make_optimizer


class SoftmaxTrainer(Algorithm, Trainer):
    """Trains one linear layer on the features."""

    applies = frozenset({"gradients"})

    @classmethod
    def build_network(cls, config, dataset, model):
        """The layer, drawn from the run's seed."""
        layer = LayerShape(n_outputs=dataset.n_classes, bias=True, activation="identity")
        generator = torch.Generator().manual_seed(config.seed)
        return FullyConnected(build_sequential(dataset.n_features, [layer], generator=generator))

    @classmethod
    def rebuild_network(cls, facts, model):
        """The layer of a run folder."""
        return FullyConnected.from_facts(facts)

    def open(self, device, labels):
        """The optimizer, and the protection's gradients."""
        self.optimizer = make_optimizer(self.network.parameters, self.config.optimizer)
        self.private = self.gradients(device)

    def step(self, x, y, *, step, observe, records=None):
        """Project the error onto the features; the protection clips and noises it."""
        scores = self.model(x).detach() / self.options.temperature
        loss = cross_entropy(scores, y)
        if self.private is None:
            self.network.set_gradient(0, loss.output_gradient, x, max(len(x), 1))
        else:
            self.private.seek(step)
            parts = [self.network.contributions([loss.output_gradient], [x])]
            self.private.set_gradients(parts, records=records)
        self.optimizer.step()
        correct = (scores.argmax(dim=1) == y).sum()
        return StepRecord(loss_sum=loss.per_record.sum().double(), n_correct=correct, n_records=len(x))
