"""What do devices and trainers gain on an NVIDIA GPU, and do they keep their lead over other code there?

The work of `benchmarks.speed.projections` and `steps`, at their sizes and at batches of 4096, and a step of likelihood
ratio training of ResNet-5 (`benchmarks.ulr.resnet`: ten orthogonal copies, records clipped by module): on the GPU, on
the processor next to it with all its cores, and other code on the same GPU. A turn ends when the GPU is done. Required,
as on a processor: a projection has 0.9 of the speed of torch's float32 product, a photonic DFA step takes at most the
time of autograd's, a record-protected one is at least 1.8 times faster than Opacus's ghost clipping, and
release noise takes at most 3 times as long as a copy of as many bytes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from benchmarks.results_file import save_results
from benchmarks.speed.projections import N_INPUTS, N_OUTPUTS, ternary_batch
from benchmarks.speed.steps import (
    BATCH,
    autograd_step,
    batch_of,
    clipped,
    feedback_step,
    ghost_step,
    new_model,
    protected_step,
    ulr_step,
)
from benchmarks.timing import Step, interleaved
from benchmarks.ulr.resnet import BATCH as RESNET_BATCH
from benchmarks.ulr.resnet import resnet5
from opusim import open_device
from opusim.randomness.streams import noise_stream
from opusim.training.protections.clipping import Clipping
from opusim.training.ulr.estimator import Estimator, ModuleSequence
from opusim.training.ulr.trainer import PlainUpdate

MODULE, NAME = "benchmarks.speed.gpu", "gpu"
PROJECTION = f"projection {N_INPUTS} to {N_OUTPUTS}, batch {{}}, noise included"
PHOTONIC = "pdfa step 784-512-512-10, batch {}"
PROTECTED = "pdfa step, records protected, {} mode, batch {}"
REPEATS, STEPS, LARGE = 9, 10, 4096
COPIES, SIGMA = 10, 0.03
PARAMETERS = 124_000_000
NOISE = f"release noise, exactly rounded, for {PARAMETERS:,} parameters"
BARS = {"torch's product": 0.9, "autograd": 1.0, "Opacus, ghost clipping": 1.8, "a copy on the GPU": 1 / 3}
"""How many times as fast as other code on the same GPU our work has to be."""


def projection(x: torch.Tensor) -> Step:
    """A projection with its noise."""
    device = open_device("gaussian", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS, torch_device=x.device)
    return lambda: device.project(x)


def product(x: torch.Tensor) -> Step:
    """A product with a matrix of the same shape."""
    matrix = torch.randn(N_INPUTS, N_OUTPUTS, device=x.device)
    return lambda: x @ matrix


def likelihood_step(x: torch.Tensor, y: torch.Tensor) -> Step:
    """A step of likelihood ratio training of ResNet-5 with clipped records and central noise."""
    network = ModuleSequence(resnet5(0).to(x.device), n_inputs=x.shape[1])
    estimator = Estimator(copies=COPIES, reduction="antithetic", directions="orthogonal", matched=True)
    noise = noise_stream("experiment", 0, "output-noise")
    protection = clipped(len(x), clipping=Clipping(kind="per_layer"))
    update = PlainUpdate(network, estimator, sigma=SIGMA, noise=noise, protection=protection)
    return ulr_step(x, y, network, update)


def release_noise(place: str) -> Step:
    """The noise of one step of GPT-2 small in release mode."""
    stream, sums = noise_stream("release", None, "noise"), torch.zeros(PARAMETERS, device=place)
    return lambda: stream.add_rounded(sums, 1.0)


def copied(place: str) -> Step:
    """A copy of as many bytes."""
    source, target = (torch.zeros(PARAMETERS, device=place) for _ in range(2))
    return lambda: target.copy_(source)


def works(place: str) -> dict[str, Step]:
    """Return our work on a torch device, by name."""
    sizes = (BATCH, LARGE)
    found = {PROJECTION.format(size): projection(ternary_batch(size).to(place)) for size in sizes}
    for size in sizes:
        x, y = batch_of(size, 784, place)
        found[PHOTONIC.format(size)] = feedback_step(x, y, {"kind": "pdfa"})
        for mode in ("experiment", "release"):
            found[PROTECTED.format(mode, size)] = protected_step(x, y, mode, "pdfa")
    found[NOISE] = release_noise(place)
    x, y = batch_of(RESNET_BATCH, 3072, place)
    found[f"ulr step of ResNet-5, records protected, batch {RESNET_BATCH}"] = likelihood_step(x, y)
    return found


def rivals(place: str) -> dict[str, tuple[str, Step]]:
    """Return other code on a torch device, by the work that it is compared with, with its name."""
    product_, autograd, opacus, copy = BARS
    found: dict[str, tuple[str, Step]] = {NOISE: (copy, copied(place))}
    for size in (BATCH, LARGE):
        x, y = batch_of(size, 784, place)
        found[PROJECTION.format(size)] = (product_, product(ternary_batch(size).to(place)))
        found[PHOTONIC.format(size)] = (autograd, autograd_step(x, y))
        ghost = ghost_step(new_model().to(place), x, y)
        for mode in ("experiment", "release"):
            found[PROTECTED.format(mode, size)] = (opacus, ghost)
    return found


def finished(step: Step) -> Step:
    """Return some steps on the GPU, with the wait for their end."""

    def turn() -> None:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()

    return turn


def measure() -> list[dict[str, Any]]:
    """Return a row for each work; the processor's turns are fewer, since it is slower."""
    here, there, others = works("cpu"), works("cuda"), rivals("cuda")
    rows = []
    for name, step in there.items():
        rival, other = others.get(name, (None, None))
        turns = {name: finished(step)} | ({rival: finished(other)} if rival and other else {})
        seconds = interleaved(turns, repeats=REPEATS)
        processor = interleaved({name: here[name]}, repeats=3, warm_up=1)[name]
        row = {"work": name, "gpu_ms": 1e3 * seconds[name] / STEPS, "processor_ms": 1e3 * processor}
        row["times_faster"] = row["processor_ms"] / row["gpu_ms"]
        if rival:
            row |= {"rival": rival, "times_as_fast": seconds[rival] / seconds[name], "required": BARS[rival]}
        rows.append(row)
        print(row, flush=True)
    return rows


def table_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each work, as text."""
    ours = "{work} | {gpu_ms:.2f} | {processor_ms:.1f} | {times_faster:.1f} | "
    against = "{rival} | {times_as_fast:.2f} | {required:.2g}"
    return [((ours + (against if "rival" in row else " |  | ")).format_map(row),) for row in rows]


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.speed.gpu: needs an NVIDIA GPU, and torch sees none")
    warnings.filterwarnings("ignore", module="opacus")
    save_results(NAME, {"repeats": REPEATS, "steps_in_a_turn": STEPS, "rows": measure()})


if __name__ == "__main__":
    main()
