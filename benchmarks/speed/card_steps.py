"""What does a private step of usual models cost on an NVIDIA GPU over backpropagation, and over Opacus?

Models and batches of a user: an MLP, convolutions with group norm, an encoder, a decoder, GPT-2 small's shape, an LSTM.
Float32, TF32 off for products (torch's default), on for cuDNN (its default). A step is the forward and backward pass,
clip, noise and SGD: by `RecordTape` and `RecordGradients`, the arithmetic of `make_private`; and by `make_private`
itself, whose loader hands out all records as one batch. Opacus (extra `baselines`) by hooks and by ghost clipping.
Medians of single steps that wait for the GPU's end; memory is the peak of a step.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import opusim
from benchmarks.markdown import markdown
from benchmarks.results_file import save_results
from benchmarks.speed.operators import Encoder, Recurrent, plain_step, private_step
from benchmarks.speed.steps import ghost_step, new_model
from benchmarks.timing import Step
from benchmarks.zeroth_order.memory import Block
from opusim.randomness.streams import NoiseStream, noise_stream

MODULE, NAME = "benchmarks.speed.card_steps", "card_steps"
REPEATS, WARM = 9, 3


class Decoder(nn.Module):
    """Blocks on embedded tokens, and scores of their mean."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, T) to scores."""
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        scores: Tensor = self.head(self.norm(h).mean(dim=1))
        return scores


def convolutions() -> nn.Module:
    """Return six 3 x 3 convolutions with group norm."""
    widths, layers = [3, 32, 32, 64, 64, 64, 64], []
    for number in range(6):
        layers += [nn.Conv2d(widths[number], widths[number + 1], 3, padding=1)]
        layers += [nn.GroupNorm(8, widths[number + 1]), nn.ReLU()]
        layers += [nn.AvgPool2d(2)] if number % 2 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def works(place: str) -> Iterator[tuple[str, Callable[[], nn.Module], Tensor]]:
    """Yield a name, what makes the module, and its batch."""

    def tokens(records: int, positions: int) -> Tensor:
        return torch.randint(0, 8192, (records, positions), device=place)

    yield "MLP 784-512-512-10, 256 records", new_model, torch.randn(256, 784, device=place)
    yield "six convolutions, 256 records", convolutions, torch.randn(256, 3, 32, 32, device=place)
    yield "encoder 4 x 256, 128 x 128", lambda: Encoder(256, 4), torch.randn(128, 128, 256, device=place)
    yield "decoder 4 x 256, 256 x 128", lambda: Decoder(8192, 256, 4, 4), tokens(256, 128)
    yield "GPT-2 small, 32 x 256", lambda: Decoder(8192, 768, 12, 12), tokens(32, 256)
    yield "LSTM 64-128, 128 x 64", Recurrent, torch.randn(128, 64, 64, device=place)


def noise_of(mode: Any) -> NoiseStream:
    """Return the noise of a mode."""
    return noise_stream(mode, 1, "central-noise")


def by_make_private(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step of a private loop whose loader hands out all records as one batch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    records = torch.utils.data.TensorDataset(torch.arange(len(x)))  # the batch is on the card already
    loader = torch.utils.data.DataLoader(records, batch_size=len(x))
    private = opusim.make_private(
        module=module.train(),
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        example_inputs=(x[:2],),
        folder=tempfile.mkdtemp() + "/loop",
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        target_delta=1e-5,
        seed=1,
    )
    caught, optimizer, criterion, _ = private
    next(batches_of(private))
    batches = batches_of(private)

    def step() -> None:
        next(batches)
        criterion(caught(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    criterion(caught(x), y).backward()
    optimizer.step()
    return step


def batches_of(private: Any) -> Iterator[Any]:
    """Yield batches without end."""
    while True:
        yield from private.data_loader


def opacus(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step of Opacus by hooks, without its data loader."""
    from opacus import PrivacyEngine

    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.cpu(), y.cpu()), batch_size=len(x))
    parts: dict[str, Any] = {"module": module.train(), "optimizer": optimizer, "data_loader": loader}
    options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    wrapped, optimizer, _ = PrivacyEngine().make_private(**parts, **options)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()

    return step


STEPS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "backpropagation": plain_step,
    "opusim, experiment mode": lambda module, x, y: private_step(module, x, y, noise_of("experiment")),
    "opusim, release mode": lambda module, x, y: private_step(module, x, y, noise_of("release")),
    "opusim, make_private": by_make_private,
    "Opacus, hooks": opacus,
    "Opacus, ghost clipping": lambda module, x, y: ghost_step(module.train(), x, y, lr=1e-3, momentum=0.0),
}


def timed(step: Step) -> tuple[float, float]:
    """Return the median time of a step in milliseconds and its peak memory in GB."""
    times = []
    for number in range(WARM + REPEATS):
        torch.cuda.synchronize()
        if number == WARM:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARM:]), torch.cuda.max_memory_allocated() / 2**30


def measured(place: str = "cuda") -> list[dict[str, Any]]:
    """Return a row for each model and step; what cannot run says why in place of a time."""
    rows: list[dict[str, Any]] = []
    for name, make, x in works(place):
        y = torch.randint(0, 10, (len(x),), device=place)
        for kind, prepare in STEPS.items():
            if kind.startswith("Opacus") and name.startswith("LSTM"):
                continue  # Opacus takes a layer of its own instead
            torch.manual_seed(0)
            row: dict[str, Any] = {"model": name, "step": kind}
            try:
                row["ms"], row["gb"] = timed(prepare(make().to(place), x, y))
            except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
                row["refused"] = " ".join(str(error).split())[:200]
            rows.append(row)
            print(row, flush=True)
            gc.collect()  # modules and their hooks hold each other, and their memory
            torch.cuda.empty_cache()
    return rows


def steps_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page: a line for each model."""
    times = {(row["model"], row["step"]): row.get("ms") for row in rows}

    def cell(model: str, step: str) -> str:
        ms = times.get((model, step))
        return "-" if ms is None else f"{ms:.2f} ({ms / times[model, 'backpropagation']:.2f})"

    models = dict.fromkeys(row["model"] for row in rows)
    return markdown(("model", *STEPS), [(model, *(cell(model, step) for step in STEPS)) for model in models])


def main() -> None:
    """Time all steps and save them."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.speed.card_steps: needs an NVIDIA GPU, and torch sees none")
    warnings.simplefilter("ignore")
    save_results(NAME, {"repeats": REPEATS, "rows": measured()})


if __name__ == "__main__":
    main()
