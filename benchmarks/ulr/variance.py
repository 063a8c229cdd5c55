"""Where does the variance of the likelihood ratio estimate come from, layer by layer, and what lowers it?

ResNet-5 on CIFAR-10 (`benchmarks.ulr.resnet`), at its first weights and after one epoch of backpropagation. The figure
is the relative variance of one record's estimate, E |estimate - g_i|^2 / |g_i|^2 with both sums over records first and
g_i the record's gradient by autograd, for each module with parameters. A mean over B records divides the part that is
the estimator's by B. Measured for each reduction of variance, direction and covariance, for several sigma and for
several numbers of copies.

`bias` tells what sigma does to the mean, which is the gradient of a smoothed loss: |E G - g|^2 / |g|^2 for the sum G of
the records' estimates and their gradient g, from the products of independent estimates' errors, which have this mean
whatever their variance. Its standard error is the jackknife's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.ulr.resnet import BATCH, LR, resnet5
from opusim.randomness.streams import noise_stream
from training.data import Dataset, load_dataset
from training.data.samplers import ShuffledEpochsSampler
from training.networks.functions import LOSS_VALUES
from training.ulr.estimator import Estimator, ModuleSequence, Outputs

MODULE, NAME, BIAS = "benchmarks.ulr.variance", "ulr_variance", "ulr_bias"
RECORDS, REPEATS, SEED = 64, 8, 0
LAYERS = ("conv 3-8", "conv 8-16", "conv 16-32", "residual 32-32", "linear 2048-10")
ESTIMATES: dict[str, dict[str, Any]] = {
    "none": {"reduction": "none"},
    "clean-loss": {"reduction": "clean-loss"},
    "leave-one-out": {"reduction": "leave-one-out"},
    "antithetic": {},
    "antithetic, sigma 0.03": {"sigma": 0.03},
    "antithetic, sigma 0.1": {"sigma": 0.1},
    "antithetic, sigma 1": {"sigma": 1.0},
    "antithetic, K = 8": {"copies": 8},
    "antithetic, orthogonal": {"directions": "orthogonal"},
    "antithetic, orthogonal, K = 10": {"directions": "orthogonal", "copies": 10},
    "antithetic, matched": {"matched": True},
    "antithetic, matched, sigma 0.1": {"matched": True, "sigma": 0.1},
    "antithetic, matched, orthogonal": {"matched": True, "directions": "orthogonal"},
    "antithetic, matched, orthogonal, K = 10": {"matched": True, "directions": "orthogonal", "copies": 10},
}
SIGMAS, PASSES = (0.01, 0.03, 0.1, 0.3, 1.0), 128
"""Noises whose bias is measured, and independent estimates of each."""

app = typer.Typer(no_args_is_help=True)


def trained(model: nn.Sequential, data: Dataset, epochs: int) -> ModuleSequence:
    """Return the network after some epochs of backpropagation with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    sampler = ShuffledEpochsSampler(n_records=len(data.train), seed=SEED, batch_size=BATCH, drop_last=True)
    for step in range(epochs * sampler.steps_per_epoch):
        index = sampler.indices(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.train.x[index]), data.train.y[index]).backward()
        optimizer.step()
    return ModuleSequence(model, n_inputs=data.n_features)


class Measured:
    """A network at some records: their gradients, and the variance of estimates."""

    def __init__(self, network: ModuleSequence, x: Tensor, y: Tensor) -> None:
        self.network, self.y = network, y
        self.outputs: Outputs = network.forward(x)
        self.clean = self.losses(self.outputs.output, slice(None))[0]
        self.exact = [self._by_autograd(layer) for layer in range(network.depth)]

    def losses(self, output: Tensor, rows: slice) -> Tensor:
        """Map outputs to losses of the records."""
        labels = self.y[rows]
        copies = len(output) // len(labels)
        return LOSS_VALUES["cross-entropy"](output, labels.repeat(copies)).view(copies, len(labels))

    def _by_autograd(self, layer: int) -> Tensor:
        value = self.outputs.values[layer].clone().requires_grad_(True)
        loss = nn.functional.cross_entropy(self.network.output_from(layer, value), self.y, reduction="sum")
        return torch.autograd.grad(loss, value)[0]

    def gradient(self, layer: int, delta: Tensor) -> Tensor:
        """Return sum_i J_i^T delta_i, flat and in float64."""
        value = self.network.layer(layer, self.outputs.inputs[layer])
        parts = torch.autograd.grad(value, self.network.layer_parameters(layer), delta)
        return torch.cat([part.flatten() for part in parts]).double()

    def squares(self, layer: int, delta: Tensor) -> float:
        """Return sum_i |J_i^T delta_i|^2."""
        h = self.outputs.inputs[layer]
        return float(self.network.jacobians[layer].contributions(delta, h).squared_norms().sum())

    def relative(
        self, *, sigma: float = 0.3, copies: int = 2, reduction: str = "antithetic", **laws: Any
    ) -> list[float]:
        """Return the relative variance of each layer's estimate, means over repeats."""
        estimator = Estimator(copies=copies, reduction=reduction, rows_per_pass=2048, **laws)  # type: ignore[arg-type]
        totals = [0.0] * self.network.depth
        for found in self._estimates(estimator, sigma, REPEATS):
            for layer, (delta, exact) in enumerate(zip(found, self.exact, strict=True)):
                totals[layer] += self.squares(layer, delta - exact) / REPEATS
        return [total / self.squares(layer, self.exact[layer]) for layer, total in enumerate(totals)]

    def bias(self, sigma: float, passes: int) -> list[tuple[float, float]]:
        """Return |E G - g|^2 / |g|^2 of each layer and its standard error: matched, K = 10, orthogonal."""
        estimator = Estimator(
            copies=10, reduction="antithetic", rows_per_pass=2048, directions="orthogonal", matched=True
        )
        errors: list[list[Tensor]] = [[] for _ in self.exact]
        for found in self._estimates(estimator, sigma, passes):
            for layer, (delta, exact) in enumerate(zip(found, self.exact, strict=True)):
                errors[layer].append(self.gradient(layer, delta - exact))
        gradients = [self.gradient(layer, exact) for layer, exact in enumerate(self.exact)]
        return [mean_product(torch.stack(rows) / g.norm()) for rows, g in zip(errors, gradients, strict=True)]

    def _estimates(self, estimator: Estimator, sigma: float, repeats: int) -> Iterator[list[Tensor]]:
        """Yield the signals of independent estimates."""
        noise = noise_stream("experiment", SEED, "output-noise")
        for step in range(repeats):
            noise.seek(step)
            sigmas = [sigma] * self.network.depth
            yield estimator.signals(self.network, self.outputs, self.losses, self.clean, noise, sigmas)


def mean_product(rows: Tensor) -> tuple[float, float]:
    """Return the mean of r_a . r_b over all pairs of different rows, |E r|^2 without bias, and its standard error.

    The standard error is the jackknife's, too large by up to a half if E r is small. The rows are independent with one
    mean, float64, at least three.
    """
    n = len(rows)
    gram = rows @ rows.T
    gram.fill_diagonal_(0.0)
    total = float(gram.sum())
    without = (total - 2 * gram.sum(dim=1)) / ((n - 1) * (n - 2))
    error = float(((n - 1) / n * (without - without.mean()).square().sum()).sqrt())
    return total / (n * (n - 1)), error


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    rows = [
        (
            str(row["epochs"]),
            row["estimate"],
            *(f"{value:.3g}" for value in row["relative"]),
            f"{row['s']:.1f}",
        )
        for row in found.get("rows", [])
    ]
    text = (
        f"Relative variance of a record's estimate by layer, {found.get('records')} records of CIFAR-10, before "
        f"training and after an epoch of backpropagation; K = 2 and sigma = 0.3 unless named; s are core seconds "
        f"({found.get('date')}, {command(MODULE, 'variance')})."
    )
    title = "Where the estimate's variance comes from (ResNet-5)"
    table = markdown(("epochs", "estimate", *LAYERS, "s"), rows)
    return section(title, text, f"{table}\n\n{_bias_table()}".rstrip()) if rows else ""


def _bias_table() -> str:
    """Return the bias by sigma; empty without results."""
    found = load_results(BIAS)
    rows = [
        (
            str(row["epochs"]),
            f"{row['sigma']:g}",
            *(f"{mean:.3f} ± {error:.3f}" for mean, error in row["bias"]),
        )
        for row in found.get("rows", [])
    ]
    text = (
        f"Squared bias over the squared gradient, |E G - g|^2 / |g|^2, G the sum over {found.get('records')} records, "
        f"and standard errors: smoothing turns the gradient. Antithetic, matched, orthogonal, K = 10; below zero by "
        f"chance only ({found.get('date')}, {command(MODULE, 'bias')})."
    )
    return f"{text}\n\n" + markdown(("epochs", "sigma", *LAYERS), rows) if rows else ""


def states(records: int) -> Iterator[tuple[int, Measured]]:
    """Yield the network at its first weights and after an epoch of backpropagation, at some records."""
    torch.set_num_threads(1)
    data = load_dataset("cifar-10", validation_fraction=0.0, split_seed=0)
    for epochs in (0, 1):
        network = trained(resnet5(SEED), data, epochs)
        yield epochs, Measured(network, data.train.x[:records], data.train.y[:records])


@app.command()
def bias(records: int = RECORDS, passes: int = PASSES) -> None:
    """Measure the bias of the estimates by sigma."""
    rows: list[dict[str, Any]] = []
    for epochs, measured in states(records):
        for sigma in SIGMAS:
            rows.append({"epochs": epochs, "sigma": sigma, "bias": measured.bias(sigma, passes)})
            print(rows[-1], flush=True)
            save_results(BIAS, {"records": records, "passes": passes, "rows": rows})


@app.command()
def variance(records: int = RECORDS) -> None:
    """Measure the variance of the estimates."""
    rows: list[dict[str, Any]] = []
    for epochs, measured in states(records):
        for name, laws in ESTIMATES.items():
            started = time.process_time()
            found = measured.relative(**laws)
            rows.append(
                {"epochs": epochs, "estimate": name, "relative": found, "s": time.process_time() - started}
            )
            print(epochs, name, [f"{value:.3g}" for value in found], flush=True)
            save_results(NAME, {"records": records, "repeats": REPEATS, "rows": rows})


if __name__ == "__main__":
    app()
