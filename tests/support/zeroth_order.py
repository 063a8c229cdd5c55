"""Records of zeroth-order runs, and what many steps from one point have in common."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from opusim.training.networks.network import FullyConnected
from opusim.training.zeroth_order.trainer import ZoTrainer


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    y = np.arange(100) % 3
    return generator.normal(size=(100, 6)) + 2 * np.eye(6)[y], y


def require_mean_move(
    trainer: ZoTrainer, network: FullyConnected, x: Tensor, y: Tensor, *, steps: int
) -> None:
    """Require that the mean move of a linear layer at rate 0.1 is -0.1 times its gradient for a squared error.

    Coordinate by coordinate, five standard errors of that mean; the opposite sign, the planted fault, is far off.
    """
    start = {name: tensor.clone() for name, tensor in network.tensors.items()}
    scores = network.model(x)
    residual = (scores - nn.functional.one_hot(y, scores.shape[1])).detach()
    gradient = torch.cat([(residual.t() @ x).flatten(), residual.flatten()]).double()
    moves = []
    for step in range(steps):
        trainer.step(x, y, step=step)
        moves.append(torch.cat([(t - start[n]).flatten() for n, t in network.tensors.items()]).double())
        for name, tensor in network.tensors.items():
            tensor.copy_(start[name])
    sample = -torch.stack(moves) / 0.1
    error = sample.std(dim=0) / math.sqrt(len(sample))
    assert ((sample.mean(dim=0) - gradient).abs() < 5 * error).all()
    assert not ((sample.mean(dim=0) + gradient).abs() < 5 * error).all()
