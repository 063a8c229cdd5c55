"""Assign the mirrors of an array to inputs: blocks of mirrors at random places of a window.

The window, in the middle of the array, is cut into square blocks of mirrors that are switched together. Every input
gets the same number of blocks, and a share of the blocks is the reference, which carries no data. The places are
random, so that all inputs get the same mean light of an uneven beam, and the speckle grains of one input are as small
as those of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from opusim.errors import ConfigError
from opusim.tables import Shown

_SEED = 20261128
"""Seed of the order of blocks, so that equal arguments give equal layouts."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MirrorLayout(Shown):
    """Groups of mirrors: one for each input, and the reference after them.

    Attributes:
        owner: group of each block, int32, shape (block rows, block columns); -1: always off.
        macro_pixel: side of a block, mirrors.
        corner: row and column of the window's first mirror.
        shape: rows and columns of the array.
        n_inputs: groups that carry data.
    """

    owner: np.ndarray
    macro_pixel: int
    corner: tuple[int, int]
    shape: tuple[int, int]
    n_inputs: int

    def _shown(self) -> dict[str, object]:
        return {
            "inputs": self.n_inputs,
            "blocks": " x ".join(map(str, self.owner.shape)),
            "macro_pixel": self.macro_pixel,
            "corner": self.corner,
            "mirrors": " x ".join(map(str, self.shape)),
        }

    @property
    def groups(self) -> int:
        """Number of groups: the inputs and the reference."""
        return self.n_inputs + 1

    @cached_property
    def _blocks(self) -> np.ndarray:
        """Number of blocks of each group."""
        return np.bincount(self.owner[self.owner >= 0], minlength=self.groups)

    @property
    def mirrors_of_anchor(self) -> float:
        """Blocks of the anchor over the blocks of an input: M, the number of inputs that would make the anchor."""
        return float(self._blocks.sum() / self._blocks[0])

    def share_on(self, switches: np.ndarray) -> float:
        """Return the mean share of the anchor's blocks that are on in some patterns."""
        return float(np.mean(switches @ self._blocks) / self._blocks.sum())

    def mirrors(self, switches: np.ndarray) -> np.ndarray:
        """Return patterns of the whole array: uint8, shape (patterns, rows, columns).

        Args:
            switches: boolean, shape (patterns, groups).
        """
        padded = np.zeros((len(switches), self.groups + 1), dtype=np.uint8)
        padded[:, :-1] = switches
        blocks = padded[:, self.owner]  # -1 is the last column
        side = self.macro_pixel
        window = blocks.repeat(side, axis=1).repeat(side, axis=2)
        patterns = np.zeros((len(switches), *self.shape), dtype=np.uint8)
        (row, column), (rows, columns) = self.corner, window.shape[1:]
        patterns[:, row : row + rows, column : column + columns] = window
        return patterns

    def anchor(self) -> np.ndarray:
        """Return the switches of the anchor, every group on: shape (1, groups)."""
        return np.ones((1, self.groups), dtype=bool)

    def reference(self) -> np.ndarray:
        """Return the switches of the reference without data: shape (1, groups)."""
        return ~self.data(np.ones((1, self.n_inputs)))

    def data(self, x: np.ndarray) -> np.ndarray:
        """Return switches of binary vectors: shape (vectors, groups), the reference off.

        Args:
            x: entries 0 and 1, shape (vectors, n), n at most n_inputs.
        """
        switches = np.zeros((len(x), self.groups), dtype=bool)
        switches[:, : x.shape[1]] = x != 0
        return switches

    def ternary(self, x: np.ndarray, anchor: np.ndarray | None = None) -> np.ndarray:
        """Return switches of the four frames of each ternary vector x = p - n: p, a - p, n, a - n, vector by vector.

        Args:
            x: entries -1, 0 and 1, shape (vectors, n), n at most n_inputs.
            anchor: switches of a, shape (1, groups), with every input on; None: all groups on.
        """
        a = self.anchor() if anchor is None else anchor
        p, n = self.data(x > 0), self.data(x < 0)
        return np.stack([p, a & ~p, n, a & ~n], axis=1).reshape(-1, self.groups)

    def marked(self, switches: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
        """Return patterns with marks, a blank and an anchor, before every `every` of them and after the last.

        Returns:
            The switches, and which of them are marks.
        """
        mark = np.concatenate([np.zeros_like(self.anchor()), self.anchor()])
        parts, is_mark = [], []
        for start in range(0, len(switches), every):
            part = switches[start : start + every]
            parts += [mark, part]
            is_mark += [np.ones(len(mark), dtype=bool), np.zeros(len(part), dtype=bool)]
        parts.append(mark)
        is_mark.append(np.ones(len(mark), dtype=bool))
        return np.concatenate(parts), np.concatenate(is_mark)


def mirror_layout(
    shape: tuple[int, int],
    n_inputs: int,
    *,
    macro_pixel: int,
    reference_share: float,
    name: str,
    window: tuple[int | None, int | None] = (None, None),
) -> MirrorLayout:
    """Assign the blocks of a window in the middle of an array.

    Every input gets k = floor((1 - reference_share) blocks / n_inputs) blocks, at least 1; the reference gets
    k n_inputs reference_share / (1 - reference_share), at least 1; the other blocks stay off.

    Args:
        shape: rows and columns of the array.
        n_inputs: number of inputs.
        macro_pixel: side of a block, mirrors.
        reference_share: share of the blocks of the anchor that are the reference.
        name: of the device, for errors.
        window: rows and columns of mirrors that are used, None for all.

    Raises:
        ConfigError: the window is larger than the array, or has too few blocks.
    """
    used = []
    for length, wanted, key in zip(shape, window, ("window_rows", "window_columns"), strict=True):
        if wanted is not None and wanted > length:
            raise ConfigError(name, f"bench.{key}", f"is {wanted}, the array has {length}; make it smaller")
        used.append((length if wanted is None else wanted) // macro_pixel)
    blocks = used[0] * used[1]
    most_data = blocks - max(1, round(reference_share * blocks))
    each = most_data // n_inputs
    if each < 1:
        raise ConfigError(
            name,
            "bench.macro_pixel",
            f"is {macro_pixel}: the window has {blocks} blocks, {most_data} of them for data at bench.reference_share "
            f"= {reference_share:g}, and {n_inputs} inputs need one each; make it smaller, or open fewer inputs",
        )
    data = each * n_inputs
    reference = min(max(1, round(data * reference_share / (1 - reference_share))), blocks - data)
    groups = np.full(blocks, -1, dtype=np.int32)
    groups[:data] = np.arange(data) % n_inputs
    groups[data : data + reference] = n_inputs
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(_SEED)).numpy()
    owner = np.empty(blocks, dtype=np.int32)
    owner[order] = groups
    corner = [(length - macro_pixel * count) // 2 for length, count in zip(shape, used, strict=True)]
    return MirrorLayout(
        owner=owner.reshape(used[0], used[1]),
        macro_pixel=macro_pixel,
        corner=(corner[0], corner[1]),
        shape=(int(shape[0]), int(shape[1])),
        n_inputs=n_inputs,
    )
