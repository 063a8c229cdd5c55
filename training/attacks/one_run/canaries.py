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
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.errors import ConfigError
from opusim.randomness.streams import derive_seed
from training.networks.any_module import AnyModule
from training.networks.base import Network
from training.networks.contributions.sums import Contributions
from training.networks.contributions.uses import ConvolutionUse, LinearUse, Use
from training.networks.network import LayeredNetwork, ModuleUse
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
        rows: Output of each canary's entry, shape (m,).
        columns: Input of each canary's entry, shape (m,).
        width: Inputs of the layer.
        height: Its outputs.
    """

    name: str
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
        entries = []
        for _, name, rows, columns in shapes:
            if rows * columns >= count:
                places = torch.from_numpy(generator.choice(rows * columns, count, replace=False))
                own = {"rows": places // columns, "columns": places % columns}
                entries.append(LayerEntries(name=name, width=columns, height=rows, **own))
        return cls(inside=inside, entries=tuple(entries), first=n_records, replaces=replaces)


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


class CraftedGradients(WrappedGradients):
    """Replaces the canaries' signals by crafted ones, and notes what the other records contribute to the entries.

    The adversary of a theorem knows all other records and which batches they are in. What it would compute from that,
    their clipped sum at the canaries' entries, is noted here at every step, with a clip of this file's own.

    Args:
        writer: The run's own writer.
        network: What is trained.
        canaries: The canaries.
        clip_norm: C.
        by_layer: Whether each layer's contribution is clipped to C / sqrt(layers).
    """

    def __init__(
        self,
        writer: PrivateGradients,
        network: Network,
        canaries: Canaries,
        *,
        clip_norm: float,
        by_layer: bool,
    ) -> None:
        super().__init__(writer)
        self._network, self._canaries = network, canaries
        self._clip_norm, self._by_layer = clip_norm, by_layer
        self._planted = canaries.planted
        self.others = np.zeros(len(canaries.inside))
        """What other records contributed along each canary's direction in the last step, in units of C, shape (m,)."""
        self.drawn = np.zeros(len(canaries.inside))
        """What each canary contributed in the last step if the clip is sound: its sign or 0, shape (m,)."""

    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See PrivateGradients._write."""
        if records is None:
            raise ValueError(
                "records is missing: the trainer must tell its writer which records a batch holds"
            )
        whole = list(parts)
        if len(whole) != 1:
            raise ValueError(
                f"batch: was recorded in {len(whole)} parts, and canaries need one; leave max_physical_batch_size out"
            )
        (found,) = whole
        rows = torch.nonzero(records >= self._canaries.first).flatten()
        numbers = self._planted[records[rows].cpu() - self._canaries.first]
        self.drawn = np.zeros(len(self.others))
        self.drawn[numbers.numpy()] = self._canaries.signs[numbers].numpy()
        if len(rows):
            found = self._planting(found, rows, numbers)
        self.others = self._others(found, rows)
        self._writer.set_gradients([found], records=records, public_inputs=public_inputs)

    def _planting(self, found: Contributions, rows: Tensor, numbers: Tensor) -> Contributions:
        """Return what a batch contributes if the canaries of these numbers stand in some rows.

        Their gradients replace those of the rows where each layer has one use, a linear map at the canaries' entries.
        Elsewhere they are added to those of the blank records.
        """
        names = {tensor.data_ptr(): name for name, tensor in self._network.tensors.items()}
        layers = [(parameters, list(uses)) for parameters, uses in found.layers]
        at = {names[p.data_ptr()]: (p, uses) for parameters, uses in layers for p in parameters}
        entries = self._canaries.entries
        replaces = all(len(uses) == 1 and isinstance(uses[0], _REPLACED) for _, uses in layers)
        replaces = replaces and all(isinstance(at[entry.name][1][0], LinearUse) for entry in entries)
        if replaces:
            for _, uses in layers:
                uses[0] = _without(uses[0], rows)
        excess = _EXCESS if replaces else _MODULE_EXCESS
        share = excess * self._clip_norm / _STEEPNESS / math.sqrt(len(entries))
        pushes = (share * self._canaries.signs[numbers]).float().to(rows.device)
        for entry in entries:
            weight, uses = at[entry.name]
            signals, inputs = (
                torch.zeros(found.records, n, device=rows.device) for n in (entry.height, entry.width)
            )
            use = LinearUse(signals, inputs, weight)
            if replaces and isinstance(uses[0], LinearUse):
                use = uses[0]
            else:
                uses.append(use)
            use.delta[rows, 0, entry.rows[numbers].to(rows.device)] = pushes
            use.h[rows, 0, entry.columns[numbers].to(rows.device)] = _STEEPNESS
        planted = Contributions(layers, found.records, several_uses=found.several_uses)
        if found.padding is not None:
            planted.leave_out(found.padding)
        return planted

    def _others(self, found: Contributions, canaries: Tensor) -> np.ndarray:
        """Return the clipped sum of the other records along each canary's direction, in units of C, shape (m,)."""
        squares = found.squared_norms()
        norms, bound = squares.sum(dim=0).sqrt().repeat(len(squares), 1), self._clip_norm
        if self._by_layer:
            norms, bound = squares.sqrt(), bound / math.sqrt(len(squares))
        factors = (bound / norms.clamp_min(1e-300)).clamp(max=1.0)
        factors = torch.where(torch.isfinite(norms), factors, 0.0)
        factors[:, canaries] = 0.0
        sums = {parameter.data_ptr(): total for parameter, total in found.totals(factors)}
        along = torch.zeros(len(self._canaries.inside), dtype=torch.float64)
        for entry in self._canaries.entries:
            total = sums[self._network.tensors[entry.name].data_ptr()].flatten()
            along += total[entry.flat.to(total.device)].double().cpu()
        return (along / math.sqrt(len(self._canaries.entries)) / self._clip_norm).numpy()


_REPLACED = (LinearUse, ConvolutionUse, ModuleUse)
"""Uses that keep nothing of the records but their signals and inputs."""


def _without(use: Use, records: Tensor) -> Use:
    """Return a use of `_REPLACED` with zeros for some records."""
    found, shared = copy(use), {id(tensor) for tensor in use.wrt}
    for name, value in vars(use).items():
        if isinstance(value, Tensor) and id(value) not in shared:
            kept = value.clone()
            kept[records] = 0.0
            setattr(found, name, kept)
    return found
