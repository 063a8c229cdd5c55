"""What memory and time does a zeroth-order step take, against inference and DP-SGD (Table 5 of the DP-ZO paper)?

A decoder of GPT-2's shape (12 layers of width 768, output words of their own: 163 million parameters, random weights,
float32), the language model's whole loss on random tokens: the mean over a sequence's tokens is the record's loss. Each
method runs in a process of its own; its peak is the kernel's maximum of resident memory (ru_maxrss). Two sequences a
step, as in Table 5, and 16, the batch that the paper trains with. Steps are timed in turn with forward passes in the
same process, in processor time on one thread.

- inference: the losses of the batch, twice, without a graph, in a process that has loaded the same libraries and
  kernels as zo; inference, bare: in one that has loaded only torch.
- zo: `ZoTrainer`, whole model; zo, lora: rank 8 on the attention's projections; bfloat16: of the model's parameters,
  whose float32 copies stand on disk.
- dp-sgd, hooks; ghost; lora; bitfit: Opacus, per-sample gradients of the whole model, ghost clipping of the whole
  model, and per-sample gradients of the same LoRA factors, and of only the biases (Zaken et al. 2022). Position
  embeddings are looked up for each sequence, as its hooks need.
"""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import time
import warnings
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.results_file import load_results, save_results
from benchmarks.timing import Step, interleaved, resident_mib

MODULE, NAME = "benchmarks.zeroth_order.memory", "zo_memory"
LAYERS, WIDTH, HEADS, VOCABULARY, LONGEST = 12, 768, 12, 50_257, 1024
RANK = 8
Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((2, 128), (2, 512), (16, 128), (2, 1024))  # sequences, tokens in each
METHODS = (
    *("inference, bare", "inference", "zo", "zo, lora", "inference, bfloat16", "zo, bfloat16"),
    *("dp-sgd, ghost", "dp-sgd, hooks", "dp-sgd, lora", "dp-sgd, bitfit"),
)
MEMORY_BAR, TIME_BAR = 1.1, 2.2


class LowRank(nn.Module):
    """A linear layer with a trained low-rank update; the layer itself stays."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class Block(nn.Module):
    """Attention and two linear layers, each behind a layer norm, on a stream (batch, length, width)."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend: nn.Module = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.first(x)).chunk(3, dim=2)
        q, k, v = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Scores of each sequence's next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.words = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.words(self.last(x))


def build(*, lora: bool = False, biases: bool = False, half: bool = False) -> Decoder:
    """Build the model, of which all, only the low-rank updates or only the biases are trained."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
    model = Decoder()
    torch.set_default_dtype(torch.float32)
    if biases:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
    if lora:
        model.requires_grad_(False)
        for block in model.blocks:
            block.attend = LowRank(block.attend)
    return model


def batch(shape: Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    return ids, torch.zeros(shape[0], dtype=torch.int64)


def sequence_losses(model: nn.Module, ids: Tensor) -> Tensor:  # (batch,)
    logits = model(ids)[:, :-1]
    return torch.stack([nn.functional.cross_entropy(z, i[1:]) for z, i in zip(logits, ids, strict=True)])


class AsScores(nn.Module):
    """The sequence's loss as what cross-entropy makes of two scores: log(e^loss - 1) against 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        losses = sequence_losses(self.model, x.long()).float()
        return torch.stack([torch.zeros_like(losses), torch.log(torch.expm1(losses))], dim=1)


class SequenceLoss(nn.Module):
    """Mean loss of each sequence's tokens, in the form that Opacus asks of a criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)
        return losses if self.reduction == "none" else losses.mean()


def inference(shape: Shape, *, bare: bool = False, half: bool = False, passes: int = 1) -> Step:
    if not bare:
        from opusim.medium.transmission import Direction

        Direction(0).add_to(torch.zeros(1), 0, 1.0)  # loads the compiled kernels
        Direction(0).return_and_move(torch.zeros(1), 0, back=1.0, keep=1.0, move=1.0)
    model, (ids, _) = build(half=half).eval(), batch(shape)

    def work() -> None:
        with torch.no_grad():
            for _ in range(passes):
                sequence_losses(model, ids)

    return work


def zeroth_order(shape: Shape, *, lora: bool, half: bool) -> Step:
    from benchmarks.bare import zo_trainer
    from opusim.training.config import load_config
    from opusim.training.networks.any_module import AnyModule
    from opusim.training.zeroth_order.trainer import ScalarRelease

    config = load_config({"trainer": {"kind": "zo"}, "optimizer": {"lr": 1e-6}})
    ids, y = batch(shape)
    network = AnyModule(AsScores(build(lora=lora, half=half)), n_inputs=shape[1], only_trained=True)
    release = ScalarRelease(clip=0.05, divisor=shape[0])
    trainer = zo_trainer(network, config, release, root=1)
    steps = iter(range(10**9))
    return lambda: trainer.step(ids.float(), y, step=next(steps))


def opacus(shape: Shape, *, ghost: bool, lora: bool, biases: bool) -> Step:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    model, (ids, _) = build(lora=lora, biases=biases).train(), batch(shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(trained, lr=1e-6),
        "data_loader": DataLoader(TensorDataset(ids, ids), batch_size=shape[0]),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "poisson_sampling": False,
    }
    if ghost:
        options |= {"grad_sample_mode": "ghost", "criterion": SequenceLoss()}
    module, optimizer, *others = PrivacyEngine().make_private(**options)
    criterion = others[0] if ghost else SequenceLoss()

    def work() -> None:
        optimizer.zero_grad()
        logits = module(ids)[:, :-1]
        criterion(logits, ids[:, 1:]).backward()
        optimizer.step()

    return work


def worker(method: str, shape: Shape) -> Step:
    """What one step of a method is."""
    if method.startswith("inference"):
        return inference(shape, bare="bare" in method, half="bfloat16" in method, passes=2)
    if method.startswith("zo"):
        return zeroth_order(shape, lora="lora" in method, half="bfloat16" in method)
    return opacus(shape, ghost="ghost" in method, lora="lora" in method, biases="bitfit" in method)


def measured(method: str, shape: Shape, repeats: int) -> dict[str, float]:
    """Peak resident memory and seconds of a step, in this process."""
    torch.set_num_threads(1)
    work = worker(method, shape)
    held = resident_mib("VmRSS")
    work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"peak_mib": peak, "above_model_mib": peak - held}
    if method.startswith("inference"):
        return found
    forward = inference(shape, half="bfloat16" in method)
    forward()  # the first pass of a model finds its memory
    both = {"step": work, "forward": forward}
    seconds = interleaved(both, repeats=repeats, warm_up=0, clock=time.process_time)
    return found | {"seconds": seconds["step"], "forward_passes": seconds["step"] / seconds["forward"]}


def key_of(method: str, shape: Shape) -> str:
    return f"{method}, {shape[0]} x {shape[1]}"


def in_process(method: str, shape: Shape, repeats: int) -> dict[str, Any]:
    """The same in a process of its own; a failure is kept as its last line."""
    call = [sys.executable, "-m", MODULE, "--repeats", str(repeats), "--one", method, *map(str, shape)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def peak_over(method: str, base: str, length: int) -> float:
    """Return the peak memory of a method over that of another one, with two sequences of a length."""
    rows = load_results(NAME)["rows"]
    ours, other = (rows[key_of(each, (2, length))]["peak_mib"] for each in (method, base))
    return float(ours / other)


def main(
    repeats: int = 3, one: Annotated[tuple[str, int, int] | None, typer.Option(hidden=True)] = None
) -> None:
    """Measure what the results lack, each method and shape in a process of its own."""
    if one is not None:
        print(json.dumps(measured(one[0], one[1:], repeats)))
        return
    rows = load_results(NAME).get("rows", {})
    for shape, method in itertools.product(SHAPES, METHODS):
        if key_of(method, shape) not in rows:
            rows[key_of(method, shape)] = in_process(method, shape, repeats)
            save_results(NAME, {"bars": {"memory": MEMORY_BAR, "time": TIME_BAR}, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
