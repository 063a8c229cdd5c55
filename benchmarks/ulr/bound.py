"""How close can the proven form come to DP-SGD on MNIST, given the variance of its estimate?

A clipped contribution has norm at most C, so its mean part along the gradient is at most C E cos, with the cosine
between a record's estimate and its gradient. The equivalent epsilon is that at which DP-SGD has a noise multiplier
larger by 1 / E cos. It compares with DP-SGD whose contributions all have norm C, and is no bound against DP-SGD whose
clip small gradients do not fill. The cosine is measured on 1,000 records, on the network of Table 1, before and after
an epoch of backpropagation, at sigma = 0.3, antithetic pairs; the smaller of both counts.
"""

from __future__ import annotations

from typing import Any

import torch
import typer

from accounting import RecordCentral, calibrate_noise, guarantees
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.ulr.epoch import paper_model
from benchmarks.ulr.variance import Measured
from opusim.randomness.streams import noise_stream
from training.data import Dataset, load_dataset
from training.ulr.estimator import Estimator
from training.ulr.network import ModuleSequence

MODULE, NAME = "benchmarks.ulr.bound", "ulr_bound"
RECORDS, SIGMA, DELTA, EPSILONS = 1000, 0.3, 1e-5, (3.0, 1.0)
BATCH, EPOCHS, N_RECORDS = 1000, 10, 60_000
CASES = (
    ("independent", 10),
    ("independent", 128),
    ("orthogonal", 10),
    ("orthogonal", 32),
    ("orthogonal", 128),
)


def cosine(measured: Measured, directions: str, copies: int) -> float:
    """Return the mean over records of the cosine between estimate and gradient, all modules together."""
    network, inputs = measured.network, measured.outputs.inputs
    estimator = Estimator(copies=copies, reduction="antithetic", rows_per_pass=20_000, directions=directions)  # type: ignore[arg-type]
    noise = noise_stream("experiment", 0, "output-noise")
    found = estimator.signals(
        network, measured.outputs, measured.losses, measured.clean, noise, [SIGMA] * network.depth
    )
    products, squares, exact = (torch.zeros(len(measured.y), dtype=torch.float64) for _ in range(3))
    for delta, true, h in zip(found, measured.exact, inputs, strict=True):
        size = h.double().square().sum(dim=1) + 1  # an outer product with (h, 1)
        products += (delta * true).double().sum(dim=1) * size
        squares += delta.double().square().sum(dim=1) * size
        exact += true.double().square().sum(dim=1) * size
    return float((products / (squares * exact).sqrt().clamp_min(1e-30)).mean())


def trained(data: Dataset, epochs: int) -> ModuleSequence:
    """Return the network after some epochs of SGD."""
    model = paper_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, epochs * len(data.train), 100):
        x, y = data.train.x[start : start + 100], data.train.y[start : start + 100]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return ModuleSequence(model, n_inputs=data.n_features)


def mechanism(noise: float) -> RecordCentral:
    """Return the training of `benchmarks.ulr.table1 proven` at a noise multiplier."""
    return RecordCentral(
        noise_multiplier=noise,
        clip_norm=1.0,
        divisor=BATCH,
        sampling_probability=BATCH / N_RECORDS,
        steps=EPOCHS * N_RECORDS // BATCH,
    )


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    rows = [
        (
            row["directions"],
            str(row["copies"]),
            f"{row['cosine']:.2f}",
            *(f"{value:.2f}" for value in row["equivalent"]),
        )
        for row in found.get("rows", [])
    ]
    text = (
        "Mean cosine between a record's estimate and its gradient, and the epsilon at which DP-SGD's multiplier is "
        "larger by its inverse. This compares with DP-SGD whose contributions all have the norm C; a clip that small "
        "gradients do not fill wastes noise in DP-SGD and not here "
        f"({found.get('date')}, {command(MODULE)})."
    )
    header = ("copies are", "K", "cosine", *(f"like DP-SGD's, at epsilon {e:g}" for e in EPSILONS))
    return (
        section("What the estimate's variance allows (MNIST)", text, markdown(header, rows)) if rows else ""
    )


def main() -> None:
    """Measure the cosines and compute the equivalent epsilons."""
    torch.set_num_threads(1)
    data = load_dataset("mnist", validation_fraction=0.0, split_seed=0)
    states = [
        Measured(trained(data, epochs), data.train.x[:RECORDS], data.train.y[:RECORDS]) for epochs in (0, 1)
    ]
    multipliers = [
        calibrate_noise(mechanism(1.0), target_epsilon=epsilon, delta=DELTA)[0].noise for epsilon in EPSILONS
    ]
    rows: list[dict[str, Any]] = []
    for directions, copies in CASES:
        least = min(cosine(state, directions, copies) for state in states)
        equivalent = [guarantees([mechanism(z / least)], delta=DELTA)[0].epsilon for z in multipliers]
        rows.append({"directions": directions, "copies": copies, "cosine": least, "equivalent": equivalent})
        print(rows[-1], flush=True)
    save_results(NAME, {"sigma": SIGMA, "records": RECORDS, "multipliers": multipliers, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
