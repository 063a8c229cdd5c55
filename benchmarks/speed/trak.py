"""How well does a device project the gradients of TRAK, and how fast is its simulation next to TRAK's own projector?

Random gradients of 100,000 entries that share a direction, to 1,024 numbers, on one thread. The error is that of their
normalised inner products over four matrices; its root mean square for exact products with normal entries is sqrt((1 +
c^2) / 1,024) at a cosine of c. TRAK's BasicProjector draws its matrix anew in each call; its CudaProjector (fast_jl)
needs a card. `pip install traker` first.
"""

from __future__ import annotations

import runpy
import statistics
import time
from pathlib import Path

import torch

from benchmarks.results_file import save_results
from benchmarks.timing import interleaved

MODULE, NAME = "benchmarks.speed.trak", "trak"
GRADIENTS, ENTRIES, NUMBERS, SHARED, MATRICES = 32, 100_000, 1024, 0.3, 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "trak_projector.py"


def gradients() -> torch.Tensor:
    """Return gradients with the cosine SHARED^2 to each other, shape (GRADIENTS, ENTRIES)."""
    generator = torch.Generator().manual_seed(0)
    common, own = (torch.randn(rows, ENTRIES, generator=generator) for rows in (1, GRADIENTS))
    return SHARED * common + (1 - SHARED**2) ** 0.5 * own


def error(projected: torch.Tensor, given: torch.Tensor) -> tuple[float, float]:
    """Return the root mean square error of inner products over norms, and that which is expected of exact ones."""
    first, second = torch.triu_indices(GRADIENTS, GRADIENTS, offset=1)
    norms = given.double().norm(dim=1)
    norms = norms[first] * norms[second]
    found, true = (
        (rows.double() @ rows.double().T)[first, second] / norms / size
        for rows, size in ((projected, NUMBERS), (given, 1))
    )
    return float((found - true).square().mean().sqrt()), float(((1 + true.square()) / NUMBERS).mean().sqrt())


def main() -> None:
    """Measure and save."""
    from trak.projectors import BasicProjector

    torch.set_num_threads(1)
    optical, given = runpy.run_path(str(EXAMPLE))["OpticalProjector"], gradients()
    projectors = {
        "TRAK's BasicProjector": BasicProjector(ENTRIES, NUMBERS, 0, "normal", "cpu"),
        "device without noise": optical(ENTRIES, NUMBERS, optics="ideal"),
        "device, noise of 0.1": optical(ENTRIES, NUMBERS),
    }
    errors = {}
    for name, each in projectors.items():
        found, exact = zip(
            *(error(each.project(given, number), given) for number in range(MATRICES)), strict=True
        )
        errors[name] = statistics.fmean(one**2 for one in found) ** 0.5, exact[0]
    work = {name: lambda each=each: each.project(given, 0) for name, each in projectors.items()}
    seconds = interleaved(work, repeats=3, warm_up=0, clock=time.process_time)
    rows = [
        {"projector": name, "error": errors[name][0], "exact": errors[name][1], "seconds": seconds[name]}
        for name in work
    ]
    shape = {"gradients": GRADIENTS, "entries": ENTRIES, "numbers": NUMBERS, "matrices": MATRICES}
    save_results(NAME, {**shape, "rows": rows})


if __name__ == "__main__":
    main()
