"""How close can the proven form come to DP-SGD on MNIST, given the variance of its estimate?

At equal clip C and multiplier both add the same noise to a sum of clipped records, so their signals decide. Along its
own gradient g, a record contributes min(|g|, C) to DP-SGD and E min(|e|, C) cos(e, g) here, with the estimate e. If e
is unbiased and never points against g (antithetic pairs of a smooth loss, to the first order in sigma), then
E min(|e|, C) cos <= E |e| cos = |g| and <= C: the ratio of the sums over records is at most 1. The equivalent epsilon
is that at which DP-SGD has a noise multiplier larger by the inverse of this ratio. The variance of the sum of the
estimates is left out, so the equivalent is what the clip allows at most, not a forecast of accuracy; another clip has
another ratio. Measured on 1,000 records, on the network of Table 1, before and after an epoch of backpropagation, at
sigma = 0.3, antithetic pairs and the clip of `benchmarks.ulr.table1 proven`; the smaller ratio counts.
"""

from __future__ import annotations

from typing import Any

import torch
import typer
from torch import Tensor

from accounting import RecordCentral, calibrate_noise, guarantees
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.ulr.epoch import paper_model
from benchmarks.ulr.variance import Measured
from opusim.randomness.streams import noise_stream
from training.data import Dataset, load_dataset
from training.ulr.estimator import Estimator, ModuleSequence

MODULE, NAME = "benchmarks.ulr.bound", "ulr_bound"
RECORDS, SIGMA, DELTA, EPSILONS, CLIP = 1000, 0.3, 1e-5, (3.0, 1.0), 1.0
BATCH, EPOCHS, N_RECORDS = 1000, 10, 60_000
CASES = (
    ("independent", 10),
    ("independent", 128),
    ("orthogonal", 10),
    ("orthogonal", 32),
    ("orthogonal", 128),
)


def cosine_and_ratio(measured: Measured, directions: str, copies: int) -> tuple[float, float]:
    """Return the mean cosine between estimate and gradient, and the sum of signals over that of DP-SGD.

    All modules count together, as in a joint clip.
    """
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
    return signals_compared(products, squares, exact, clip=CLIP)


def signals_compared(products: Tensor, squares: Tensor, exact: Tensor, *, clip: float) -> tuple[float, float]:
    """Return the mean cosine, and sum min(|e|, C) cos / sum min(|g|, C).

    Args:
        products: e g of each record, shape (n,).
        squares: |e|^2.
        exact: |g|^2.
        clip: C.
    """
    cosines = products / (squares * exact).sqrt().clamp_min(1e-30)
    signal = squares.sqrt().clamp_max(clip) * cosines
    return float(cosines.mean()), float(signal.sum() / exact.sqrt().clamp_max(clip).sum())


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
        clip_norm=CLIP,
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
            f"{row['ratio']:.2f}",
            *(f"{value:.2f}" for value in row["equivalent"]),
        )
        for row in found.get("rows", [])
    ]
    text = (
        "Mean cosine between a record's estimate e and its gradient g; the ratio of the signals at equal clip and "
        "noise, sum min(|e|, C) cos / sum min(|g|, C), at most 1 for an unbiased e that never points against g; and "
        "the epsilon at which DP-SGD's multiplier is larger by the inverse of the ratio. The variance of the sum is "
        "left out, so this is what the clip allows at most, not a forecast of accuracy. "
        f"C = {CLIP:g}, the smaller ratio of two: before training and after an epoch of backpropagation "
        f"({found.get('date')}, {command(MODULE)})."
    )
    header = ("copies are", "K", "cosine", "ratio", *(f"like DP-SGD's, at epsilon {e:g}" for e in EPSILONS))
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
        found = [cosine_and_ratio(state, directions, copies) for state in states]
        cosine, ratio = (min(values) for values in zip(*found, strict=True))
        equivalent = [guarantees([mechanism(z / ratio)], delta=DELTA)[0].epsilon for z in multipliers]
        figures = {"cosine": cosine, "ratio": ratio, "equivalent": equivalent}
        rows.append({"directions": directions, "copies": copies, **figures})
        print(rows[-1], flush=True)
    save_results(
        NAME, {"sigma": SIGMA, "clip": CLIP, "records": RECORDS, "multipliers": multipliers, "rows": rows}
    )


if __name__ == "__main__":
    typer.run(main)
