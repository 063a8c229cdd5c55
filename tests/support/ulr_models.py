"""Small models of every kind of module that likelihood ratio training takes, and their records."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opusim.training.networks.functions import cross_entropy
from opusim.training.ulr.estimator import ModuleSequence


class Residual(nn.Module):
    """x + W2 tanh(W1 x): its Jacobian comes from torch.func."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Scaled(nn.Module):
    """A user-supplied callable: exp(a) sin(x + b), entry by entry."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.a.exp() * torch.sin(x + self.b)


class Positions(nn.Module):
    """Mean over the positions of a record, (batch, positions, features) to (batch, features)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def _images(*modules: nn.Module, features: int) -> nn.Sequential:
    return nn.Sequential(nn.Unflatten(1, (2, 4, 5)), *modules, nn.Flatten(), nn.Linear(features, 3))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], int]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)), 6),
    "linear without bias": (
        lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)),
        6,
    ),
    "linear over positions": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 3)), nn.Linear(3, 5), nn.Tanh(), Positions(), nn.Linear(5, 3)
        ),
        12,
    ),
    "convolution": (lambda: _images(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), features=60), 40),
    "strided, grouped, dilated convolution": (
        lambda: _images(
            nn.Conv2d(2, 4, 2, stride=(2, 1), groups=2, dilation=(1, 2), bias=False), nn.Tanh(), features=24
        ),
        40,
    ),
    "residual block": (lambda: nn.Sequential(Residual(4), nn.Tanh(), nn.Linear(4, 3)), 4),
    "callable": (lambda: nn.Sequential(nn.Linear(5, 4), Scaled(4), nn.Linear(4, 3)), 5),
}


def new_network(name: str) -> ModuleSequence:
    """A model with fixed weights."""
    make, n_inputs = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return ModuleSequence(make(), n_inputs=n_inputs)


def records(n: int, n_inputs: int, seed: int = 8) -> tuple[Tensor, Tensor]:
    """Features and labels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, n_inputs, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def losses_of(y: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """The loss of each record of some rows, for each copy of them, shape (copies, rows)."""

    def losses(output: Tensor, rows: slice) -> Tensor:
        labels = y[rows]
        copies = len(output) // max(len(labels), 1)
        return cross_entropy(output, labels.repeat(copies)).per_record.view(copies, len(labels))

    return losses


def whole_jacobian(network: ModuleSequence, layer: int, h: Tensor) -> Tensor:
    """The Jacobian at one record by autograd, shape (outputs, parameters)."""
    jacobian = network.jacobians[layer]
    value = jacobian.module(h)
    rows = []
    for unit in torch.eye(value.numel()).view(-1, *value.shape):
        rows.append(torch.autograd.grad(value, jacobian.parameters, unit, retain_graph=True))
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
