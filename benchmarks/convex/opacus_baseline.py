"""Does DP-SGD by Opacus itself reach what `accuracy.py` shows for its ReLU baseline (MNIST, one seed)?

The baselines there are this package's own trainer `bp`, whose clipped sums equal Opacus's (a test compares them). Here
Opacus (extra `baselines`) does everything: its engine, its Poisson loader, ghost clipping, its optimizer and noise. The
network, learning rate, epochs, batch, clip and noise multiplier are those of the baseline.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.convex.accuracy import NAME, best_point, configuration
from benchmarks.convex.rows import EPSILONS
from benchmarks.markdown import command
from benchmarks.results_file import load_results, save_results
from opusim.training.config import load_config
from opusim.training.config.run import RunConfig
from opusim.training.engine.plan import load_data

MODULE, RESULTS = "benchmarks.convex.opacus_baseline", "convex_opacus"
ROW, DATA, SEED, WIDTH = "ReLU network, DP-SGD", "mnist", 0, 200


def train_by_opacus(config: RunConfig, x: Tensor, y: Tensor) -> nn.Module:
    """The network after the configuration's epochs."""
    from opacus import PrivacyEngine

    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(
        network.parameters(), lr=config.optimizer.lr, momentum=config.optimizer.momentum
    )
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=network,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=config.sampler.batch_size),
        noise_multiplier=config.protection.noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    for _ in range(config.epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
    return network


def row_of(epsilon: float) -> dict[str, Any]:
    """Test accuracy by Opacus and by this package, same numbers."""
    config = load_config(configuration(ROW, DATA, epsilon, best_point(ROW, DATA, epsilon), SEED))
    dataset = load_data(config, None)
    if dataset.test is None:
        raise ValueError(f"data set {DATA!r} has no test records")
    started = time.perf_counter()
    network = train_by_opacus(config, dataset.train.x, dataset.train.y)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        right = network(dataset.test.x).argmax(dim=1) == dataset.test.y
    ours = [
        run["test"]
        for run in load_results(NAME)["runs"]
        if (run["row"], run["data"], run["epsilon"]) == (ROW, DATA, epsilon)
    ]
    return {
        "epsilon": epsilon,
        "opacus": 100 * float(right.double().mean()),
        "ours": ours,
        "lr": config.optimizer.lr,
        "noise_multiplier": config.protection.noise_multiplier,
        "seconds": seconds,
    }


def page_text() -> str:
    """Return what the results page says; empty without results."""
    rows = load_results(RESULTS).get("rows", [])
    if not rows:
        return ""
    text = "; ".join(
        f"epsilon {row['epsilon']:g}: {row['opacus']:.2f} (ours {', '.join(f'{v:.2f}' for v in row['ours'])})"
        for row in rows
    )
    return (
        "The ReLU baseline on MNIST trained by Opacus itself, one seed, same network, settings and noise, test "
        f"accuracy [%]: {text} ({command(MODULE)})."
    )


def main() -> None:
    """Train at both epsilons, print and save."""
    warnings.filterwarnings("ignore", module="opacus")
    torch.set_num_threads(1)
    rows = []
    for epsilon in EPSILONS:
        rows.append(row_of(epsilon))
        print(rows[-1], flush=True)
    save_results(RESULTS, {"data": DATA, "width": WIDTH, "seed": SEED, "rows": rows})


if __name__ == "__main__":
    main()
