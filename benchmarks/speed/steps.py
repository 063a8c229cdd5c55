"""What does a training step cost beside backpropagation, DP-SGD by Opacus, or its own matrix products?

    python -m benchmarks.speed.steps [pdfa_step] [record_step] [ulr_epoch] [convex_step]     (all four by default)

One thread and two, medians of interleaved turns, SGD with momentum, fresh noise; only the step is timed. Opacus (extra
`baselines`) is asked for its fastest form, ghost clipping, without its data loader.

- `pdfa_step`: 784-512-512-10 tanh, batch 256, over autograd as everyone writes it. Required: at most its time.
- `record_step`: the same network, records clipped to 1, noise multiplier 1, over Opacus. Required: 1.8 times faster.
- `ulr_epoch`: 120 steps of 784-128-64-32-10 GELU, batch 500, records clipped to 1, K antithetic pairs a module, over
  Opacus. Required: at most its time at K = 1.
- `convex_step`: the gated model with MNIST's 784 features, P = 128 hyperplanes and batch 1000, over its two matrix
  products and over Opacus on the same model. Required: at most 1.15 times the products; 1.5 times faster than Opacus.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bare import bare, feedback_trainer
from benchmarks.options import program_of_parts
from benchmarks.timing import Step, interleaved, with_threads
from opusim import open_device
from opusim.randomness.streams import noise_stream
from opusim.training.config import load_config
from opusim.training.config.kinds import TRAINERS
from opusim.training.config.sections import OptimizerConfig
from opusim.training.convex.trainer import ConvexTrainer, GatedNetwork, GatedRelu, Objective
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import PdfaConfig
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.record import RecordGradients
from opusim.training.ulr.config import UlrConfig
from opusim.training.ulr.estimator import Estimator, ModuleSequence
from opusim.training.ulr.trainer import PlainUpdate, PublishedUpdate, UlrTrainer

MODULE = "benchmarks.speed.steps"
BATCH, REPEATS, STEPS = 256, 15, 40
CLIP_NORM, NOISE_MULTIPLIER = 1.0, 1.0
AUTOGRAD, OPACUS, PLAIN = "autograd backpropagation", "Opacus, ghost clipping", "plain forward and backward"
ULR_BATCH, STEPS_AN_EPOCH, COPIES, WIDTHS = 500, 120, (2, 5, 10, 20, 50, 100), (784, 128, 64, 32, 10)
FEATURES, CLASSES, HYPERPLANES, CONVEX_BATCH = 784, 10, 128, 1000
PRODUCTS, NOISY, GATED = "two matrix products", "noisy step", "Opacus, gated module"


def new_model() -> nn.Sequential:
    """Return 784-512-512-10 with tanh."""
    return nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))


def paper_model(seed: int = 0, hidden: Sequence[int] = WIDTHS[1:-1]) -> nn.Sequential:
    """Return 784-128-64-32-10, or other hidden layers, GELU between the layers."""
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise((WIDTHS[0], *hidden, WIDTHS[-1])):
        modules += [nn.Linear(fan_in, fan_out), nn.GELU()]
    return nn.Sequential(*modules[:-1])


def batch_of(size: int, width: int, place: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return invented records and classes on a torch device."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, width, generator=generator)
    return x.to(place), torch.randint(0, 10, (size,), generator=generator).to(place)


def repeated(trainer: Any, x: Tensor, y: Tensor) -> Step:
    """Return a trainer's step on one batch, each call the next one."""
    count = itertools.count()
    return lambda: trainer.step(x, y, step=next(count))


def autograd_step(x: Tensor, y: Tensor, model: nn.Module | None = None, *, update: bool = True) -> Step:
    """Return a step of backpropagation, or only its two passes."""
    model, loss = (model or new_model()).to(x.device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        if update:
            optimizer.step()

    return step


def ghost_training(
    module: nn.Module,
    *,
    batch: int,
    lr: float,
    momentum: float,
    noise_multiplier: float,
    clip: float = CLIP_NORM,
) -> tuple[Callable[[Tensor, Tensor], None], torch.optim.Optimizer]:
    """Return a step of DP-SGD, and the optimizer whose rate a schedule may change.

    Opacus's make_private(grad_sample_mode="ghost") puts it together so, without its data loader.
    """
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        module, batch_first=True, loss_reduction="mean", max_grad_norm=clip, use_ghost_clipping=True
    )
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    private = {"noise_multiplier": noise_multiplier, "max_grad_norm": clip, "expected_batch_size": batch}
    optimizer = DPOptimizerFastGradientClipping(sgd, loss_reduction="mean", **private)
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss(), "mean")

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        shape = tuple(y.shape) if y.ndim == 2 else None  # of records of several tokens
        criterion(model(x).flatten(0, -2), y.flatten(), shape=shape).backward()
        optimizer.step()

    return step, sgd


def ghost_step(module: nn.Module, x: Tensor, y: Tensor, **options: float) -> Step:
    """Return a step of DP-SGD by Opacus on one batch."""
    settings = {"lr": 0.01, "momentum": 0.9, "noise_multiplier": NOISE_MULTIPLIER} | options
    step, _ = ghost_training(module, batch=len(x), **settings)
    return lambda: step(x, y)


def clipped(divisor: float, mode: Any = "experiment", **options: Any) -> RecordGradients:
    """Return what clips records and adds central noise."""
    noise = noise_stream(mode, 0, "central-noise")
    return RecordGradients(
        clip_norm=CLIP_NORM, noise_multiplier=NOISE_MULTIPLIER, divisor=divisor, noise=noise, **options
    )


def feedback_step(
    x: Tensor,
    y: Tensor,
    options: dict[str, Any],
    *,
    mode: Any = "experiment",
    protection: RecordGradients | None = None,
) -> Step:
    """Return a step of `new_model` by a feedback trainer of these options in closed form."""
    network, config = FullyConnected(new_model().to(x.device)), TRAINERS.validated(options)
    window = {"n_inputs": 10, "n_outputs": 1024, "mode": mode, "torch_device": x.device}
    device = open_device("gaussian", **window) if isinstance(config, PdfaConfig) else None
    optimizer = make_optimizer(network.parameters, OptimizerConfig())
    source = ClosedForm(network, config, device=device)
    return repeated(feedback_trainer(source, optimizer, protection=protection), x, y)


def protected_step(x: Tensor, y: Tensor, mode: str, kind: str) -> Step:
    """Return a step on clipped records with central noise."""
    return feedback_step(x, y, {"kind": kind}, mode=mode, protection=clipped(BATCH, mode))


def ulr_step(x: Tensor, y: Tensor, network: ModuleSequence, update: PlainUpdate | PublishedUpdate) -> Step:
    """Return a step of likelihood ratio training."""
    config = load_config({"trainer": {"kind": "ulr"}})
    optimizer = make_optimizer(network.parameters, OptimizerConfig())
    return repeated(bare(UlrTrainer, network, config, optimizer=optimizer, update=update), x, y)


def proven_step(x: Tensor, y: Tensor, copies: int, mode: Any = "experiment") -> Step:
    """Return a step of the proven form: K antithetic pairs, records clipped and noised."""
    network = ModuleSequence(paper_model(), n_inputs=WIDTHS[0])
    estimator = Estimator(copies=copies, reduction="antithetic")
    noise = noise_stream(mode, 0, "output-noise")
    update = PlainUpdate(network, estimator, sigma=0.1, noise=noise, protection=clipped(ULR_BATCH, mode))
    return ulr_step(x, y, network, update)


def published_step(x: Tensor, y: Tensor, copies: int) -> Step:
    """Return a step of Algorithm 1 with its eigendecompositions, extra noise added."""
    network = ModuleSequence(paper_model(), n_inputs=WIDTHS[0])
    options = UlrConfig(
        form="published", copies=copies, sigma=1.0, target_std=4.0, clip_norm=CLIP_NORM, remedy="extra-noise"
    )
    noise, extra = (noise_stream("experiment", 0, name) for name in ("output-noise", "extra-noise"))
    return ulr_step(x, y, network, PublishedUpdate(network, options, ULR_BATCH, noise=noise, extra=extra))


class GatedModule(nn.Module):
    """The gated model as a user would write it for Opacus: one linear layer, then gates and a sum."""

    def __init__(self, hyperplanes: Tensor) -> None:
        super().__init__()
        self.register_buffer("hyperplanes", hyperplanes)
        self.linear = nn.Linear(FEATURES, HYPERPLANES * CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (batch, d) to logits (batch, k)."""
        gates = (x @ self.hyperplanes.t() >= 0).to(x.dtype)
        scale = (x.square().sum(dim=1) * gates.sum(dim=1)).rsqrt()
        products = self.linear(x).unflatten(1, (HYPERPLANES, CLASSES))
        return torch.bmm(gates.unsqueeze(1), products).squeeze(1) * scale.unsqueeze(1)


def convex_step(hyperplanes: Tensor, x: Tensor, y: Tensor) -> Step:
    """Return a noisy step of the convex trainer."""
    model = GatedRelu(FEATURES, CLASSES, hyperplanes)
    trainer = bare(
        ConvexTrainer,
        GatedNetwork(model),
        load_config({"trainer": {"kind": "convex"}}),
        optimizer=torch.optim.SGD([model.weight], lr=0.01),
        objective=Objective(name="margin", clip=0.5),
        divisor=float(CONVEX_BATCH),
        noise=noise_stream("experiment", 0, "central-noise"),
        noise_std=1.0,
    )
    return repeated(trainer, x, y)


def compared(work: dict[str, Step], base: str, *, faster: bool) -> list[dict[str, Any]]:
    """Return the time of each step over that of one of them, or how many times faster than that one it is."""
    return [
        {"threads": threads, "work": name, "ms": 1e3 * value}
        | ({"times_faster": seconds[base] / value} if faster else {"ratio": value / seconds[base]})
        for threads, seconds in with_threads(work, repeats=REPEATS, inner=STEPS)
        for name, value in seconds.items()
    ]


SETTING = {"batch": BATCH, "repeats": REPEATS, "steps_in_a_turn": STEPS}


def measure_pdfa() -> dict[str, Any]:
    """Return photonic DFA's time over autograd's."""
    x, y = batch_of(BATCH, 784)
    published = {"order": "published", "tau_b": 1.0, "tau_h_max": 1.0, "clipped_layers": "hidden"}
    work = {
        AUTOGRAD: autograd_step(x, y),
        "bp, closed form": feedback_step(x, y, {"kind": "bp"}),
        "dfa": feedback_step(x, y, {"kind": "dfa"}),
        "pdfa, hardware order": feedback_step(x, y, {"kind": "pdfa"}),
        "pdfa, published order (two noises)": feedback_step(x, y, {"kind": "pdfa", **published}),
    }
    return {**SETTING, "bar": "ratio <= 1", "rows": compared(work, AUTOGRAD, faster=False)}


def measure_record() -> dict[str, Any]:
    """Return how much faster than Opacus protected steps are."""
    x, y = batch_of(BATCH, 784)
    work = {
        OPACUS: ghost_step(new_model(), x, y),
        "pdfa, record-protected": protected_step(x, y, "experiment", "pdfa"),
        "pdfa, record-protected, release mode": protected_step(x, y, "release", "pdfa"),
        "bp, record-protected": protected_step(x, y, "experiment", "bp"),
    }
    return {**SETTING, "bar": "times_faster >= 1.8", "rows": compared(work, OPACUS, faster=True)}


def measure_ulr() -> dict[str, Any]:
    """Return an epoch's time over that of Opacus; larger K and the published form on one thread only."""
    x, y = batch_of(ULR_BATCH, WIDTHS[0])
    work = {
        OPACUS: ghost_step(paper_model(), x, y),
        PLAIN: autograd_step(x, y, paper_model(), update=False),
        "ulr, K = 1": proven_step(x, y, 1),
        "ulr, K = 1, release mode": proven_step(x, y, 1, "release"),
    }
    rows = []
    for threads, seconds in with_threads(work, repeats=REPEATS, inner=10):
        if threads == 1:
            more = {f"ulr, K = {copies}": proven_step(x, y, copies) for copies in COPIES}
            more |= {f"ulr as published, K = {copies}": published_step(x, y, copies) for copies in (1, 10)}
            seconds = seconds | interleaved(more, repeats=5, warm_up=1)
        for name, value in seconds.items():
            row = {"threads": threads, "work": name, "epoch_s": STEPS_AN_EPOCH * value}
            rows.append(row | {"ratio": value / seconds[OPACUS]})
    facts = {"batch": ULR_BATCH, "steps_an_epoch": STEPS_AN_EPOCH, "repeats": REPEATS}
    return {**facts, "bar": "ratio <= 1 at K = 1", "rows": rows}


def measure_convex() -> dict[str, Any]:
    """Return a convex step's time over its products, and how much faster than Opacus it is."""
    x, y = torch.rand(CONVEX_BATCH, FEATURES), torch.randint(CLASSES, (CONVEX_BATCH,))
    hyperplanes = torch.randn(HYPERPLANES, FEATURES)
    # The products x V and V - x^T G, with nothing between.
    weight, spread = torch.zeros(FEATURES, HYPERPLANES * CLASSES), torch.rand(len(x), HYPERPLANES * CLASSES)
    work = {
        PRODUCTS: lambda: (x @ weight, weight.addmm_(x.t(), spread, alpha=-1e-6)),
        NOISY: convex_step(hyperplanes, x, y),
        GATED: ghost_step(GatedModule(hyperplanes), x, y, momentum=0.0, clip=0.5),
    }
    rows = [
        {
            "threads": threads,
            "ms": {name: 1e3 * value for name, value in seconds.items()},
            "of_two_products": seconds[NOISY] / seconds[PRODUCTS],
            "times_faster": {GATED: seconds[GATED] / seconds[NOISY]},
        }
        for threads, seconds in with_threads(work, repeats=9)
    ]
    facts = {"batch": CONVEX_BATCH, "hyperplanes": HYPERPLANES, "repeats": 9}
    return {**facts, "bar": "of_two_products <= 1.15, times_faster >= 1.5", "rows": rows}


PARTS = {
    "pdfa_step": measure_pdfa,
    "record_step": measure_record,
    "ulr_epoch": measure_ulr,
    "convex_step": measure_convex,
}
"""What measures each file of results."""


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="opacus")
    program_of_parts(PARTS)
