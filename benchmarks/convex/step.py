"""What does a noisy step on the gated model cost over its two matrix products, and over DP-SGD by Opacus?

MNIST's size: 784 features, 10 classes, P = 128 hyperplanes, batch 1000; margin objective with clipped residuals, fresh
noise on every weight. Opacus (extra `baselines`) does ghost clipping on the same gated module (one nn.Linear, gates and
sum behind it), and on materialised features (one nn.Linear of 100,352 inputs): formed before the timing, and formed in
every step, which is what training takes, since those of 60,000 records fill 24 GB.
Required: at most 1.15 times the two products; at least 1.5 times faster than Opacus on the gated module, and 10 times
than on materialised features. Two parts of the step are timed too: the noise, and the unit rows and gates, which need
float64 and a third product. A trainer that kept these between epochs, by the number of a record, would take what was
kept for a record that an audit exchanged under its number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.bare import bare
from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.pdfa_step import void
from benchmarks.timing import interleaved
from opusim.randomness.streams import noise_stream
from opusim.training.config import load_config
from opusim.training.convex.trainer import ConvexTrainer, GatedNetwork, GatedRecords, GatedRelu, Objective

MODULE, NAME = "benchmarks.convex.step", "convex_step"
FEATURES, CLASSES, HYPERPLANES, BATCH = 784, 10, 128, 1000
PRODUCTS, OURS, GHOST = "two matrix products", "noisy step", "Opacus, gated module"
FORMED, MATERIALISED = "Opacus, features formed before", "Opacus, features formed in the step"
UNIT_ROWS, NOISE = PARTS = ("unit rows and gates", "noise")
REPEATS = 9


class GatedModule(nn.Module):
    """The gated model as a user would write it for Opacus: one linear layer, then gates and a sum."""

    def __init__(self, hyperplanes: Tensor) -> None:
        super().__init__()
        self.register_buffer("hyperplanes", hyperplanes)
        self.linear = nn.Linear(FEATURES, HYPERPLANES * CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, k)."""
        gates = (x @ self.hyperplanes.t() >= 0).to(x.dtype)
        scale = (x.square().sum(dim=1) * gates.sum(dim=1)).rsqrt()
        products = self.linear(x).unflatten(1, (HYPERPLANES, CLASSES))
        return torch.bmm(gates.unsqueeze(1), products).squeeze(1) * scale.unsqueeze(1)


def opacus_step(module: nn.Module, features: Callable[[], Tensor], y: Tensor) -> Callable[[], None]:
    """DP-SGD as Opacus's make_private(grad_sample_mode="ghost") puts it together, without its data loader."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        module, batch_first=True, loss_reduction="mean", max_grad_norm=0.5, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.01),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        expected_batch_size=BATCH,
        loss_reduction="mean",
    )
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss(), "mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(features()), y).backward()
        optimizer.step()

    return step


def noisy_step(hyperplanes: Tensor, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A step of this package."""
    model = GatedRelu(FEATURES, CLASSES, hyperplanes)
    trainer = bare(
        ConvexTrainer,
        GatedNetwork(model),
        load_config({"trainer": {"kind": "convex"}}),
        optimizer=torch.optim.SGD([model.weight], lr=0.01),
        objective=Objective(name="margin", clip=0.5),
        divisor=float(BATCH),
        noise=noise_stream("experiment", 0, "central-noise"),
        noise_std=1.0,
    )
    count = iter(range(10**8))
    return lambda: void(trainer.step(x, y, step=next(count)))


def two_products(x: Tensor) -> Callable[[], None]:
    """The products x V and V - x^T G, with nothing between."""
    weight, spread = torch.zeros(FEATURES, HYPERPLANES * CLASSES), torch.rand(BATCH, HYPERPLANES * CLASSES)

    def step() -> None:
        x @ weight
        weight.addmm_(x.t(), spread, alpha=-1e-6)

    return step


def materialised(gated: GatedRecords) -> Tensor:
    """x~ of every record, shape (batch, d P)."""
    open_gates = gated.gates * gated.scale.unsqueeze(1)
    return (gated.x.unsqueeze(2) * open_gates.unsqueeze(1)).flatten(1)


def wide_layer() -> nn.Linear:
    """The model as one linear layer on materialised features."""
    return nn.Linear(FEATURES * HYPERPLANES, CLASSES, bias=False)


def speed_rows() -> list[Row]:
    """Return the step's time over its products, and how much faster than Opacus it is."""
    rows: list[Row] = []
    for row in load_results(NAME).get("rows", []):
        faster = ", ".join(
            f"{value:.1f} times faster than {name}" for name, value in row["times_faster"].items()
        )
        claim = f"a noisy step of the convex trainer, P = 128, batch 1000, {row['threads']} thread(s)"
        parts = ", ".join(f"{name} {row['ms'][name] / row['ms'][PRODUCTS]:.2f}" for name in PARTS)
        figure = f"{row['of_two_products']:.2f} of its two matrix products ({parts}), {faster}"
        rows.append((claim, figure, command(MODULE)))
    return rows


def main() -> None:
    """Time them in turn with one thread and two."""
    warnings.filterwarnings("ignore", module="opacus")
    x, y = torch.rand(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))
    hyperplanes = torch.randn(HYPERPLANES, FEATURES)
    model, stream = GatedRelu(FEATURES, CLASSES, hyperplanes), noise_stream("experiment", 0, "central-noise")
    gated = model.gated(x)
    rows = materialised(gated)
    work = {
        PRODUCTS: two_products(x),
        OURS: noisy_step(hyperplanes, x, y),
        UNIT_ROWS: lambda: void(model.gated(x)),
        NOISE: lambda: void(stream.add_to(torch.zeros(FEATURES, HYPERPLANES * CLASSES), 1.0)),
        GHOST: opacus_step(GatedModule(hyperplanes), lambda: x, y),
        FORMED: opacus_step(wide_layer(), lambda: rows, y),
        MATERIALISED: opacus_step(wide_layer(), lambda: materialised(gated), y),
    }
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = interleaved(work, repeats=REPEATS)
        row = {
            "threads": threads,
            "ms": {name: 1e3 * value for name, value in seconds.items()},
            "of_two_products": seconds[OURS] / seconds[PRODUCTS],
            "times_faster": {name: seconds[name] / seconds[OURS] for name in (GHOST, FORMED, MATERIALISED)},
        }
        found.append(row)
        print(row, flush=True)
    save_results(
        NAME,
        {
            "batch": BATCH,
            "hyperplanes": HYPERPLANES,
            "repeats": REPEATS,
            "bar": "of_two_products <= 1.15, times_faster >= 1.5 and 10",
            "rows": found,
        },
    )


if __name__ == "__main__":
    main()
