"""How many operators does a private step dispatch beside plain backpropagation, and how often does it wait?

On a graphics card small steps are bound by launches and by waiting, so that the ratio of operators predicts the ratio
of times there. One step on the processor under a `TorchDispatchMode`: operators that return or make views are left out,
and so are allocations; casts and copies count. A *wait* is an operator that makes the host know a value: `item`,
`bool`, `nonzero` and what is built on them, `numpy`, `tolist`. The noise counts as one operator, since it is one
kernel. On the processor a step looks once whether every record is finite; on a card it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.results_file import save_results
from benchmarks.speed.steps import new_model
from benchmarks.timing import Step
from opusim.randomness.streams import NoiseStream
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.sequence_models import TransformerLM
from opusim.training.protections.record import RecordGradients

CEILINGS = {"mlp": 2.5, "convolutions": 3.0, "encoder": 2.2, "gpt": 2.8, "lstm": 9.9}
"""Operators of a private step over those of backpropagation; they only fall."""
_WAITS = {
    *("aten._local_scalar_dense", "aten.is_nonzero", "aten.nonzero", "aten.masked_select", "aten.equal"),
    *("aten.unique_dim", "aten._unique2", "aten.unique_consecutive", "aten.allclose"),
    "aten.repeat_interleave",
}
_FREE = {
    *("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"),
    *("aten.scalar_tensor", "aten.squeeze_", "aten.unsqueeze_"),
}
_HOST = {Tensor.numpy, Tensor.tolist}


class Counted(TorchDispatchMode):
    """Counts the operators of a block.

    Attributes:
        operators: How often each was dispatched, without views and allocations.
        waits: How often each operator made the host wait for a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.waits = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().replace("::", ".").partition(".")[0] + "." + func._opname
        masked = name in ("aten.index", "aten.index_put_", "aten.index_put") and any(
            isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in _WAITS or masked:
            self.waits[name] += 1
        aliases = [one.alias_info for one in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not view and name not in _FREE:
            self.operators[name] += 1
        return func(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """Counts tensors that the host reads as a whole, which dispatch no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _HOST
        return func(*args, **(kwargs or {}))


class OneKernel(NoiseStream):
    """Noise that is one operator: what a kernel on a card is."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
        """Return as many numbers."""
        return torch.ones(*shape, device=device)

    def add_to(self, y: Tensor, std: float) -> Tensor:
        """Count as one operator."""
        return y.add_(std)

    def seek(self, step: int) -> None:
        """Do nothing."""


class Encoder(nn.Module):
    """Layers of torch's encoder on vectors, then a mean over positions and scores."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors (batch, positions, width) to scores."""
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x.mean(dim=1))
        return scores


class Recurrent(nn.Module):
    """nn.LSTM and scores of its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors (batch, positions, 64) to scores."""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


def models() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Return modules with a batch and its targets."""
    torch.manual_seed(0)
    classes = torch.randint(0, 10, (16,))
    tokens = torch.randint(0, 256, (4, 33))
    convolutions = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    gpt = TransformerLM((32,), 256, width=64, depth=4, heads=4)
    return {
        "mlp": (new_model(), torch.randn(16, 784), classes),
        "convolutions": (convolutions, torch.randn(16, 3, 16, 16), classes),
        "encoder": (Encoder(64, 4), torch.randn(16, 32, 64), classes),
        "gpt": (gpt, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        "lstm": (Recurrent(), torch.randn(16, 24, 64), classes),
    }


def losses(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each record."""
    found = nn.functional.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="none")
    return found.view(len(y), -1).mean(dim=1) if y.ndim > 1 else found


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step of backpropagation and SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        losses(model(x), y).mean().backward()
        optimizer.step()

    return step


def private_step(model: nn.Module, x: Tensor, y: Tensor, noise: NoiseStream | None = None) -> Step:
    """Return a step on clipped records with noise, of one operator unless given, and SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    writer = RecordGradients(clip_norm=1.0, noise_multiplier=1.0, divisor=len(x), noise=noise or OneKernel())
    tape = RecordTape(model.train(), x)

    def step() -> None:
        with tape.recording(len(x)):
            losses(model(x), y).sum().backward()
        writer.set_gradients([tape.contributions])
        optimizer.step()

    return step


def counted(step: Step) -> tuple[Counter[str], Counter[str]]:
    """Return operators and waits of a step, after one that is not counted."""
    step()
    with HostReads() as reads, Counted() as found:
        step()
    found.waits["numpy or tolist"] += reads.count
    return found.operators, +found.waits


def measured(name: str) -> dict[str, Any]:
    """Return the row of a model."""
    (plain, _), (private, waits) = (counted(make(*models()[name])) for make in (plain_step, private_step))
    return {
        "model": name,
        "plain": plain.total(),
        "private": private.total(),
        "waits": waits.total(),
        "most": private.most_common(40),
        "waiting": dict(waits),
    }


if __name__ == "__main__":
    save_results("operators", {"rows": [measured(name) for name in CEILINGS]})
