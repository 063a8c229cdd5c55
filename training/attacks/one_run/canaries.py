"""Canaries with crafted gradients: which are in, where each one pushes, and the writer that plants them.

A canary is a record whose gradient the adversary chooses at every step, the strongest choice that a theorem about
clipped sums allows (Nasr et al. 2023; Cebere et al. 2024). Canary i has one entry of its own in the weights of every
layer, and its gradient is far longer than the clip: after the run's own clip it is C / sqrt(L) in each of its L
entries. So canaries are orthogonal, and a clip that bounds layers separately lets sqrt(L) C pass.

The crafted signals enter where the signals of all records enter the writer of private gradients. The sampler, the
clip, the noise, the divisor, the optimizer and the ledger are the run's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.errors import ConfigError
from opusim.randomness.streams import derive_seed
from training.networks.any_module import AnyModule
from training.networks.base import Network
from training.networks.layers import LayeredNetwork
from training.networks.record_gradients.tape import RecordTape
from training.protections.base import PrivateGradients, WrappedGradients

_EXCESS = 2.0**10
"""Norm of a crafted gradient before the clip, in units of C."""
_MODULE_EXCESS = 2.0**20
"""The same in a module, whose blank records add gradients of their own, so that they change its direction little."""
_STEEPNESS = 2.0**10
"""Input of a canary at its own entry; the bias, whose input is 1, receives that much less than the weight."""


@dataclass(frozen=True, kw_only=True)
class LayerEntries:
    """The entries of the canaries in one layer.

    Attributes:
        name: Name of the layer's weight among the network's tensors.
        layer: Number of the layer, from 0.
        rows: Output of each canary's entry, shape (m,).
        columns: Input of each canary's entry, shape (m,).
        width: Inputs of the layer.
        height: Its outputs.
    """

    name: str
    layer: int
    rows: Tensor
    columns: Tensor
    width: int
    height: int

    @property
    def flat(self) -> Tensor:
        """Positions in the flattened weight, shape (m,)."""
        return self.rows * self.width + self.columns


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Planted records with crafted gradients.

    Attributes:
        inside: The coins, bool, shape (m,).
        entries: Their entries, layer by layer.
        first: Number of the first canary among the training records.
        replaces: Whether a canary that is out pushes the other way, instead of being left out.
    """

    inside: Tensor
    entries: tuple[LayerEntries, ...]
    first: int
    replaces: bool

    @property
    def planted(self) -> Tensor:
        """Numbers of the canaries that are among the training records, in their order, shape (n,)."""
        return torch.arange(len(self.inside)) if self.replaces else torch.nonzero(self.inside).flatten()

    @property
    def signs(self) -> Tensor:
        """Direction in which each canary pushes if it is in a batch, +1 or -1, shape (m,)."""
        return torch.where(self.inside | (not self.replaces), 1.0, -1.0)

    @classmethod
    def drawn(cls, network: Network, count: int, *, n_records: int, replaces: bool, seed: int) -> Canaries:
        """Draw coins and entries.

        Args:
            network: What is trained, a network of layers.
            count: m, at most the entries of the largest layer.
            n_records: Training records without canaries.
            replaces: Whether the audited relation replaces a record.
            seed: Of coins and entries, in [0, 2^64).

        Raises:
            ConfigError: No layer has so many weights.
        """
        checks.integer(minimum=1, count=count, n_records=n_records)
        generator = np.random.default_rng(derive_seed(seed, "canaries"))
        inside = torch.from_numpy(generator.random(count) < 0.5)
        shapes = weight_layers(network)
        largest = max((rows * columns for _, _, rows, columns in shapes), default=0)
        if largest < count:
            raise ConfigError(
                "audit",
                "canaries",
                f"{count} exceeds the {largest} weights of the largest weight matrix, and each canary needs "
                "an entry of its own; take fewer",
            )
        entries = tuple(_entries(shape, count, generator) for shape in shapes if shape[2] * shape[3] >= count)
        return cls(inside=inside, entries=entries, first=n_records, replaces=replaces)


def weight_layers(network: Network) -> list[tuple[int, str, int, int]]:
    """Return number, name of the weight, outputs and inputs of every layer; of a module those of every matrix."""
    if isinstance(network, AnyModule):
        named = [(name, p) for name, p in network.model.named_parameters() if p.requires_grad and p.ndim == 2]
        return [(number, name, *p.shape) for number, (name, p) in enumerate(named)]
    if not isinstance(network, LayeredNetwork):
        return []
    names = {tensor.data_ptr(): name for name, tensor in network.tensors.items()}
    found = []
    for layer in range(network.depth):
        weight = network.layer_parameters(layer)[0]
        if weight.ndim == 2:
            found.append((layer, names[weight.data_ptr()], weight.shape[0], weight.shape[1]))
    return found


def _entries(shape: tuple[int, str, int, int], count: int, generator: np.random.Generator) -> LayerEntries:
    layer, name, rows, columns = shape
    places = torch.from_numpy(generator.choice(rows * columns, count, replace=False))
    return LayerEntries(
        name=name,
        layer=layer,
        rows=places // columns,
        columns=places % columns,
        width=columns,
        height=rows,
    )


class CraftedGradients(WrappedGradients):
    """Replaces the canaries' signals by crafted ones, and notes what the other records contribute to the entries.

    The adversary of a theorem knows all other records and which batches they are in. What it would compute from that,
    their clipped sum at the canaries' entries, is noted here at every step, with a clip of this file's own.

    Args:
        writer: The run's own writer.
        canaries: The canaries.
        clip_norm: C.
        by_layer: Whether each layer's contribution is clipped to C / sqrt(layers).
    """

    def __init__(
        self, writer: PrivateGradients, canaries: Canaries, *, clip_norm: float, by_layer: bool
    ) -> None:
        super().__init__(writer)
        self._canaries = canaries
        self._clip_norm, self._by_layer = clip_norm, by_layer
        self._planted = canaries.planted
        self.others = np.zeros(len(canaries.inside))
        """What other records contributed along each canary's direction in the last step, in units of C, shape (m,)."""
        self.drawn = np.zeros(len(canaries.inside))
        """What each canary contributed in the last step if the clip is sound: its sign or 0, shape (m,)."""

    def _write(
        self,
        network: Any,
        deltas: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See PrivateGradients._write."""
        if records is None:
            raise ValueError(
                "records is missing: the trainer must tell its writer which records a batch holds"
            )
        crafted = torch.nonzero(records >= self._canaries.first).flatten()
        self.others = self._others(deltas, inputs, records < self._canaries.first)
        numbers = self._planted[records[crafted].cpu() - self._canaries.first]
        self.drawn = np.zeros(len(self.others))
        self.drawn[numbers.numpy()] = self._canaries.signs[numbers].numpy()
        if len(crafted):
            deltas, inputs = self._crafted(deltas, inputs, crafted, numbers)
        self._writer.set_gradients(network, deltas, inputs, records=records, public_inputs=public_inputs)

    def set_recorded_gradients(self, tape: RecordTape, *, records: Tensor | None = None) -> None:
        """See WrappedGradients: plants the canaries' gradients in what a tape recorded of a module.

        What the other records contribute is a clipped sum without noise, in which canaries have the factor 0.
        """
        records = torch.zeros(0, dtype=torch.int64) if records is None else records
        rows = torch.nonzero(records >= self._canaries.first).flatten()
        numbers = self._planted[records[rows].cpu() - self._canaries.first]
        self.drawn = np.zeros(len(self._canaries.inside))
        self.drawn[numbers.numpy()] = self._canaries.signs[numbers].numpy()
        if len(rows):
            self._plant(tape, len(records), rows, numbers)
        squares = tape.squared_norms()
        norms = squares.sum(dim=0).sqrt()
        factors = (self._clip_norm / norms.clamp_min(1e-300)).clamp(max=1.0)
        factors = torch.where(torch.isfinite(norms), factors, 0.0)
        factors[rows] = 0.0
        tape.set_gradients(factors.expand(len(squares), -1))
        self.others = self._along_canaries(tape) / self._clip_norm
        for parameter in (parameter for layer in tape.layers for parameter in layer):
            parameter.grad = None
        super().set_recorded_gradients(tape, records=records)
        self.batches_written += 1

    def _plant(self, tape: RecordTape, count: int, rows: Tensor, numbers: Tensor) -> None:
        """Add the gradients of the canaries of these numbers, rows of a recorded batch of `count` records."""
        share = _MODULE_EXCESS * self._clip_norm / _STEEPNESS / math.sqrt(len(self._canaries.entries))
        for entry in self._canaries.entries:
            signals = torch.zeros(count, entry.height, device=rows.device)
            inputs = torch.zeros(count, entry.width, device=rows.device)
            signals[rows, entry.rows[numbers].to(rows.device)] = (
                (share * self._canaries.signs[numbers]).float().to(rows.device)
            )
            inputs[rows, entry.columns[numbers].to(rows.device)] = _STEEPNESS
            tape.plant(entry.name, signals, inputs)

    def _along_canaries(self, tape: RecordTape) -> np.ndarray:
        """Return the written gradients along each canary's direction, shape (m,)."""
        written = {
            name: parameter
            for names, layer in zip(tape.names, tape.layers, strict=True)
            for name, parameter in zip(names, layer, strict=True)
        }
        total = torch.zeros(len(self._canaries.inside), dtype=torch.float64)
        for entry in self._canaries.entries:
            gradient = written[entry.name].grad
            if gradient is not None:  # always, after set_gradients
                total += gradient.flatten()[entry.flat.to(gradient.device)].double().cpu()
        return (total / math.sqrt(len(self._canaries.entries))).numpy()

    def _crafted(
        self, deltas: Sequence[Tensor], inputs: Sequence[Tensor], rows: Tensor, numbers: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the signals with the rows of the canaries of these numbers replaced."""
        signals, sources = [delta.clone() for delta in deltas], [h.clone() for h in inputs]
        for part in (*signals, *sources):
            part[rows] = 0.0
        share = _EXCESS * self._clip_norm / _STEEPNESS / math.sqrt(len(self._canaries.entries))
        signs = self._canaries.signs[numbers]
        for entry in self._canaries.entries:
            delta, h = signals[entry.layer], sources[entry.layer]
            delta[rows, entry.rows[numbers].to(rows.device)] = (share * signs).to(delta)
            h[rows, entry.columns[numbers].to(rows.device)] = _STEEPNESS
        return signals, sources

    def _others(self, deltas: Sequence[Tensor], inputs: Sequence[Tensor], others: Tensor) -> np.ndarray:
        """Return the clipped sum of the other records along each canary's direction, in units of C."""
        parts = [(d[others].double(), h[others].double()) for d, h in zip(deltas, inputs, strict=True)]
        if not len(parts[0][0]):
            return np.zeros(len(self._canaries.inside))
        norms = torch.stack([_norms(delta, h) for delta, h in parts])
        if self._by_layer:
            factors = self._clip_norm / math.sqrt(len(norms)) / norms.clamp_min(1e-300)
        else:
            factors = (self._clip_norm / norms.square().sum(dim=0).sqrt().clamp_min(1e-300)).expand_as(norms)
        total = torch.zeros(len(self._canaries.inside), dtype=torch.float64)
        for entry in self._canaries.entries:
            delta, h = parts[entry.layer]
            scaled = delta * factors[entry.layer].clamp(max=1.0)[:, None]
            columns, rows = entry.columns.to(h.device), entry.rows.to(h.device)
            total += (scaled[:, rows] * h[:, columns]).sum(dim=0).cpu()
        return (total / math.sqrt(len(self._canaries.entries)) / self._clip_norm).numpy()


def _norms(delta: Tensor, h: Tensor) -> Tensor:
    """Return the norm of each record's contribution to a layer with a bias, shape (batch,)."""
    flat = h.flatten(1).square().sum(dim=1) + 1.0
    return (delta.flatten(1).square().sum(dim=1) * flat).sqrt()
