"""Where does the variance of the likelihood ratio estimate come from, layer by layer, and what lowers it?

ResNet-5 on CIFAR-10 (`benchmarks.ulr.resnet`), at its first weights and after one epoch of backpropagation. The figure
is the relative variance of one record's estimate, E |estimate - g_i|^2 / |g_i|^2 with both sums over records first and
g_i the record's gradient by autograd, for each module with parameters. A mean over B records divides the part that is
the estimator's by B. Measured for each reduction of variance, direction and covariance, for several sigma and for
several numbers of copies.
"""

from __future__ import annotations

import time
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
from training.ulr.estimator import Estimator
from training.ulr.network import ModuleSequence, Outputs

MODULE, NAME = "benchmarks.ulr.variance", "ulr_variance"
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

    def squares(self, layer: int, delta: Tensor) -> float:
        """Return sum_i |J_i^T delta_i|^2."""
        return float(self.network.squared_norms(layer, delta, self.outputs.inputs[layer]).sum())

    def relative(
        self, *, sigma: float = 0.3, copies: int = 2, reduction: str = "antithetic", **laws: Any
    ) -> list[float]:
        """Return the relative variance of each layer's estimate, means over repeats."""
        depth = self.network.depth
        estimator = Estimator(copies=copies, reduction=reduction, rows_per_pass=2048, **laws)  # type: ignore[arg-type]
        noise, totals = noise_stream("experiment", SEED, "output-noise"), [0.0] * depth
        for step in range(REPEATS):
            noise.seek(step)
            found = estimator.signals(
                self.network, self.outputs, self.losses, self.clean, noise, [sigma] * depth
            )
            for layer, (delta, exact) in enumerate(zip(found, self.exact, strict=True)):
                totals[layer] += self.squares(layer, delta - exact) / REPEATS
        return [total / self.squares(layer, self.exact[layer]) for layer, total in enumerate(totals)]


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
        f"({found.get('date')}, {command(MODULE)})."
    )
    title = "Where the estimate's variance comes from (ResNet-5)"
    return section(title, text, markdown(("epochs", "estimate", *LAYERS, "s"), rows)) if rows else ""


def main(records: int = RECORDS) -> None:
    torch.set_num_threads(1)
    data = load_dataset("cifar-10", validation_fraction=0.0, split_seed=0)
    rows: list[dict[str, Any]] = []
    for epochs in (0, 1):
        network = trained(resnet5(SEED), data, epochs)
        measured = Measured(network, data.train.x[:records], data.train.y[:records])
        for name, laws in ESTIMATES.items():
            started = time.process_time()
            found = measured.relative(**laws)
            rows.append(
                {"epochs": epochs, "estimate": name, "relative": found, "s": time.process_time() - started}
            )
            print(epochs, name, [f"{value:.3g}" for value in found], flush=True)
            save_results(NAME, {"records": records, "repeats": REPEATS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
