"""Which way forms the gradients of single records of a convolution and of a group norm fastest?

Layers of `conv-small` on 64 records of 1x28x28 and the first one on 3x32x32, kernels of 3x3, one thread, processor
time, medians of interleaved repeats. Convolutions: one grouped convolution with a group for each record, which opusim
takes; patches and a batched product; three bands of patches, a product for each row of the kernel; a call for each
record. Group norms of four groups: from the statistics of the forward pass, which opusim takes; with the input
normalised again. The ways must agree within 1e-4 of the largest gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim.training.networks.clipping import full_precision

MODULE, NAME = "benchmarks.speed.convolution_rows", "convolution_rows"
RECORDS, REPEATS, GROUPS = 64, 9, 4
LAYERS = ((1, 16, 28), (16, 32, 14), (32, 32, 7), (3, 16, 32))
"""Channels in, channels out, side of the image."""


def grouped(h: Tensor, delta: Tensor) -> Tensor:
    (n, c), o = h.shape[:2], delta.shape[1]
    weight = conv2d_weight(
        h.flatten(0, 1)[None], [n * o, c, 3, 3], delta.flatten(0, 1)[None], padding=1, groups=n
    )
    return weight.view(n, o, c, 3, 3)


def patches(h: Tensor, delta: Tensor) -> Tensor:
    found = delta.flatten(2) @ functional.unfold(h, 3, padding=1).mT
    return found.view(len(h), delta.shape[1], h.shape[1], 3, 3)


def bands(h: Tensor, delta: Tensor) -> Tensor:
    (n, c, rows, columns), padded = h.shape, functional.pad(h, (1, 1, 1, 1))
    shifted = torch.stack([padded[..., j : j + columns] for j in range(3)], dim=2).view(n, 3 * c, -1)
    signals = delta.flatten(2)
    found = [signals @ shifted[..., i * columns : (i + rows) * columns].mT for i in range(3)]
    return torch.stack(found, dim=3).view(n, -1, c, 3, 3).mT


def loop(h: Tensor, delta: Tensor) -> Tensor:
    size = [delta.shape[1], h.shape[1], 3, 3]
    return torch.stack(
        [conv2d_weight(x, size, d, padding=1) for x, d in zip(h.split(1), delta.split(1), strict=True)]
    )


CONVOLUTIONS = {"grouped convolution": grouped, "patches": patches, "bands": bands, "loop": loop}


def group_norm_ways(h: Tensor, delta: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return functions that sum delta x of every record and channel."""
    n, c, side = h.shape[:3]
    _, mean, scale = torch.native_group_norm(h, None, None, n, c, side * side, GROUPS, 1e-5)
    ones = torch.ones(n * c)

    def kept() -> Tensor:
        found: Tensor = torch.ops.aten.native_group_norm_backward(
            *(values.view(1, n * c, -1) for values in (delta, h)),
            *(mean.view(1, -1), scale.view(1, -1), ones, 1, n * c, side * side, n * GROUPS),
            [False, True, True],
        )[1]
        return found.view(n, c)

    def again() -> Tensor:
        return (delta * functional.group_norm(h, GROUPS)).sum(dim=(2, 3))

    return {"kept statistics": kept, "normalised again": again}


def page_section() -> str:
    """Return the milliseconds of each way."""
    rows = [
        (row["work"], row["layer"], row["way"], f"{row['ms']:.2f}")
        for row in load_results(NAME).get("rows", [])
    ]
    text = f"Ways to form the gradients of {RECORDS} single records, {command(MODULE)}."
    return (
        section("Gradients of single records", text, markdown(("of", "layer", "way", "ms"), rows))
        if rows
        else ""
    )


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for c, o, side in LAYERS:
        generator = torch.Generator().manual_seed(0)
        h, delta, y = (torch.randn(RECORDS, n, side, side, generator=generator) for n in (c, o, o))
        works: dict[str, dict[str, Callable[[], Tensor]]] = {
            "convolution": {name: partial(way, h, delta) for name, way in CONVOLUTIONS.items()},
            "group norm": group_norm_ways(y, delta),
        }
        for work, ways in works.items():
            with full_precision():
                first, *others = (way() for way in ways.values())
                for other in others:
                    torch.testing.assert_close(other, first, rtol=0.0, atol=1e-4 * float(first.abs().max()))
                seconds = interleaved(ways, repeats=REPEATS, inner=5, clock=time.process_time)
            for way, taken in seconds.items():
                rows.append(
                    {"work": work, "layer": f"{c} to {o}, {side}x{side}", "way": way, "ms": 1e3 * taken}
                )
                print(*rows[-1].values())
    save_results(NAME, {"threads": 1, "repeats": REPEATS, "records": RECORDS, "rows": rows})


if __name__ == "__main__":
    main()
