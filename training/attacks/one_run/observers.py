"""Canaries with crafted gradients, the writer that plants them, and observers that score them from one training.

A canary is a record whose gradient the adversary chooses at every step, the strongest choice that a theorem about
clipped sums allows (Nasr et al. 2023; Cebere et al. 2024). Canary i has one entry of its own in the weights of every
layer, and its gradient is far longer than the clip: after the run's own clip it is C / sqrt(L) in each of its L
entries. So canaries are orthogonal, and a clip that bounds layers separately lets sqrt(L) C pass.

The crafted signals enter where the signals of all records enter the writer of private gradients. The sampler, the
clip, the noise, the divisor, the optimizer and the ledger are the run's own.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanisms.records import ClippedRecords
from opusim.errors import ConfigError
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.base import WEIGHTS_AND_STATE, Adversary, Descent
from opusim.training.attacks.findings import Arrival
from opusim.training.attacks.update_attacks import row_space
from opusim.training.config.sections import OptimizerConfig
from opusim.training.data.samplers import Sampler
from opusim.training.engine.callbacks import Callback
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.base import Network
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import ConvolutionUse, LinearUse
from opusim.training.networks.network import LayeredNetwork, ModuleUse
from opusim.training.networks.optimizers import make_optimizer, set_learning_rate
from opusim.training.protections.base import PrivateGradients, WrappedGradients, with_constant
from opusim.training.protections.clipping import Clipping
from opusim.training.protections.record import CyclicPoissonSampler

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
    """Planted records, or users of several records, with crafted gradients.

    Attributes:
        inside: The coins, bool, shape (m,).
        entries: Their entries, layer by layer.
        first: Number of the first canary's first record among the training records.
        replaces: Whether a canary that is out pushes the other way, instead of being left out.
        records: Records of each canary.
    """

    inside: Tensor
    entries: tuple[LayerEntries, ...]
    first: int
    replaces: bool
    records: int = 1

    @property
    def planted(self) -> Tensor:
        """Numbers of the canaries that are among the training records, in their order, shape (n,)."""
        return torch.arange(len(self.inside)) if self.replaces else torch.nonzero(self.inside).flatten()

    @property
    def signs(self) -> Tensor:
        """Direction in which each canary pushes if it is in a batch, +1 or -1, shape (m,)."""
        return torch.where(self.inside | (not self.replaces), 1.0, -1.0)

    @classmethod
    def drawn(
        cls, network: Network, count: int, *, n_records: int, replaces: bool, seed: int, records: int = 1
    ) -> Canaries:
        """Draw coins and entries of m canaries of some records each, from a seed in [0, 2^64).

        The training has `n_records` others. Raises ConfigError if no layer has so many weights.
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
                "an entry of its own; take fewer, or audit a wider network",
            )
        entries = []
        for _, name, rows, columns in shapes:
            if rows * columns >= count:
                places = torch.from_numpy(generator.choice(rows * columns, count, replace=False))
                own = {"rows": places // columns, "columns": places % columns}
                entries.append(LayerEntries(name=name, width=columns, height=rows, **own))
        return cls(inside=inside, entries=tuple(entries), first=n_records, replaces=replaces, records=records)


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


def require_fixed_bound(clipping: Clipping) -> None:
    """Refuse (NoGuarantee) a bound that moves: canaries of one training are read in units of one clip."""
    if clipping.kind == "adaptive":
        raise NoGuarantee(
            "clipping = 'adaptive': canaries of one training are read in units of one clip, and the bound moves; "
            "train a run with this clipping and play the game of single steps: opusim audit RUN"
        )


class CraftedGradients(WrappedGradients):
    """Replaces the canaries' signals by crafted ones, and notes what the other records contribute to the entries.

    The adversary of a theorem knows all other records and which batches they are in. What it would compute from that,
    their clipped sum at the canaries' entries, is noted here at every step, with a clip of this file's own.

    Args:
        writer: The run's own writer.
        network: What is trained.
        canaries: The canaries.
        clip_norm: C.
        clipping: How contributions are brought within C.
        rows: Returns how many rows run for some that are drawn; None if they are as many.

    Raises:
        NoGuarantee: The bound moves.
    """

    def __init__(
        self,
        writer: PrivateGradients,
        network: Network,
        canaries: Canaries,
        *,
        clip_norm: float,
        clipping: Clipping,
        rows: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(writer)
        require_fixed_bound(clipping)
        self._network, self._canaries, self._rows_of = network, canaries, rows or (lambda drawn: drawn)
        self._clip_norm, self._clipping = clip_norm, clipping
        self._planted = canaries.planted
        self.others = np.zeros(len(canaries.inside))
        """What other records contributed along each canary's direction in the last step, in units of C, shape (m,)."""
        self.drawn = np.zeros(len(canaries.inside))
        """What each canary contributed in the last step if the clip is sound: its sign or 0, shape (m,)."""
        self.reach = 1.0
        """What a sound clip leaves of it, in units of C: less if layers without canaries have bounds of their own."""

    @override
    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
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
        places = (records - self._canaries.first).div(self._canaries.records, rounding_mode="floor")
        rows = torch.nonzero((places >= 0) & (places < len(self._planted))).flatten()
        numbers = self._planted[places[rows].cpu()]
        self.drawn = np.zeros(len(self.others))
        self.drawn[numbers.numpy()] = self._canaries.signs[numbers].numpy()
        if len(rows):
            group = max(1, self._rows_of(len(records)) // found.records)
            found = self._planting(found, rows, numbers, group)
            rows = rows.div(group, rounding_mode="floor")
        self.reach = self._reach_in(found)
        self.others = self._others(found, rows)
        self._writer.set_gradients([found], records=records, public_inputs=public_inputs)

    def _planting(self, found: Contributions, rows: Tensor, numbers: Tensor, group: int) -> Contributions:
        """Return what a batch contributes if the canaries of these numbers stand in some rows.

        Their gradients replace those of the rows where each layer has one use, a linear map at the canaries' entries.
        Elsewhere they are added to those of the blank records. A `group` of rows is clipped as one.
        """
        rows, places = rows.div(group, rounding_mode="floor"), rows % group
        names = {tensor.data_ptr(): name for name, tensor in self._network.tensors.items()}
        layers = [(parameters, list(uses)) for parameters, uses in found.layers]
        at = {names[p.data_ptr()]: (p, uses) for parameters, uses in layers for p in parameters}
        entries = self._canaries.entries
        replaces = all(len(uses) == 1 and isinstance(uses[0], _REPLACED) for _, uses in layers)
        replaces = replaces and all(isinstance(at[entry.name][1][0], LinearUse) for entry in entries)
        for _, uses in layers if replaces else ():  # zeros in place of what some records contribute
            shared, empty = {id(tensor) for tensor in uses[0].wrt}, copy(uses[0])
            for name, value in vars(uses[0]).items():
                if isinstance(value, Tensor) and id(value) not in shared:
                    kept = value.clone()
                    kept[rows] = 0.0
                    setattr(empty, name, kept)
            uses[0] = empty
        excess = _EXCESS if replaces else _MODULE_EXCESS
        share = excess * self._clip_norm / _STEEPNESS / math.sqrt(len(entries))
        pushes = (share * self._canaries.signs[numbers]).float().to(rows.device)
        for entry in entries:
            weight, uses = at[entry.name]
            signals, inputs = (
                torch.zeros(found.records, group, n, device=rows.device) for n in (entry.height, entry.width)
            )
            use = LinearUse(signals, inputs, weight)
            if replaces and isinstance(uses[0], LinearUse):
                use = uses[0]
            else:
                uses.append(use)
            position = places * (use.positions // group)
            use.delta[rows, position, entry.rows[numbers].to(rows.device)] = pushes
            use.h[rows, position, entry.columns[numbers].to(rows.device)] = _STEEPNESS
        planted = Contributions(layers, found.records, several_uses=found.several_uses)
        if found.padding is not None:
            planted.leave_out(found.padding)
        return planted

    def _reach_in(self, found: Contributions) -> float:
        if self._clipping.kind != "per_layer":
            return 1.0
        owners = {p.data_ptr(): n for n, (parameters, _) in enumerate(found.layers) for p in parameters}
        norms = self._clipping.layer_norms or [self._clip_norm / math.sqrt(len(found.layers))] * len(
            found.layers
        )
        entries = self._canaries.entries
        own = [norms[owners[self._network.tensors[entry.name].data_ptr()]] for entry in entries]
        return sum(own) / math.sqrt(len(entries)) / self._clip_norm

    def _others(self, found: Contributions, canaries: Tensor) -> np.ndarray:
        """Return the clipped sum of the other records along each canary's direction, in units of C, shape (m,)."""
        squares = found.squared_norms()
        norms, bound = squares.sum(dim=0).sqrt().repeat(len(squares), 1), squares.new_tensor(self._clip_norm)
        if self._clipping.kind == "per_layer":
            equal = [self._clip_norm / math.sqrt(len(squares))] * len(squares)
            norms, bound = squares.sqrt(), squares.new_tensor(self._clipping.layer_norms or equal)[:, None]
        if self._clipping.kind == "automatic":
            factors = bound / (norms + self._clipping.stability)
        else:
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


# What an attacker learns of the canaries from one training. Every step of descent is undone from the weights after each
# step: W' = W - rate b_t, so that momentum, weight decay and the schedule, which are public, leave the noisy sum G of
# clipped contributions. What the other records contribute is known to the strongest attacker and subtracted. Along
# canary i, in units of C, a step then shows
#
#     y_t = s_i B_t + z N(0, 1),    B_t ~ Bernoulli(q) if the canary is in,
#
# with z and q as the ledger accounts for them. Noise that is correlated over b steps is z inverse(C) Z for a public C
# with bands c. A canary of subset j is drawn at steps t = j mod b only, and what one draw tells is
#
#     <c, rows t .. t + b - 1 of C y> / |c|^2 = s_i B_t + z / |c| N(0, 1),    B_t ~ Bernoulli(b q),
#
# in which the noises of different draws are independent (theorem banded-records).

_SPIKE = 0.05
"""Two steps whose noise is the same differ by -1, 0 or 1 up to far less than this, in units of C."""
_TINY = 1e-15
_GRID = 2**15
"""Points of the law of a score."""


ALL_UPDATES = Adversary(
    name="all updates",
    sees="the weights after every step",
    knows="the canaries' crafted gradients, and all other records with their batches",
)
CONSECUTIVE = Adversary(
    name="consecutive updates",
    sees="the weights after every step, of which it compares each two in a row",
    knows=ALL_UPDATES.knows,
    counts=True,
)
FINAL_MODEL = Adversary(
    name="final model",
    sees="only the final model",
    knows="the initial weights and the canaries' crafted gradients, no other record",
)
ROW_SPACE = Adversary(
    name="row space",
    sees="the first layer's weights after every step of the first epoch",
    knows="the canaries' features and the expected batch size, but no other record, neither the device nor its noise",
)
QUIET_ROWS = Adversary(
    name="quiet rows",
    sees="the first layer's weights after every step",
    knows="the canaries' features, but no other record and no noise",
)


class Observer(Callback, ABC):
    """A watcher of the training that scores the canaries at its end."""

    def __init__(self) -> None:
        self.steps = 0
        self.after_step: Callable[[], None] = lambda: None
        """Called after each step."""

    @abstractmethod
    def scores(self, mechanism: Any) -> dict[Adversary, np.ndarray]:
        """Return each adversary's scores, shape (m,), from what the ledger says that one step released."""

    def with_half_the_noise(self, mechanism: Any) -> dict[Adversary, np.ndarray]:
        """Return the scores that half of the noise would have given; none if it cannot be told from the rest."""
        return {}

    def arrival(self, mechanism: Any) -> Arrival | None:
        """Return whether crafted gradients reached the sums; None if none were crafted."""
        return None

    @abstractmethod
    def look(self, step: int) -> None:
        """Look at the weights after so many steps."""

    @override
    def on_start(self, *, step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self.look(0)

    @override
    def on_step(self, *, step: int) -> None:
        self.steps = step
        self.look(step)
        self.after_step()


class Steps(Descent):
    """Undoes descent from the first step on, at the learning rates of its schedule.

    Args:
        options: The optimizer, SGD.
    """

    def __init__(self, options: OptimizerConfig) -> None:
        super().__init__(options)
        self._rates = make_optimizer([nn.Parameter(torch.zeros(1))], options)

    def gradient_at(self, before: Tensor, after: Tensor, progress: float) -> Tensor:
        """Return `gradient` at a share of the run's steps done before it."""
        set_learning_rate(self._rates, self._options, progress)
        return self.gradient(before, after, float(self._rates.param_groups[0]["lr"]))


def steps_of(options: OptimizerConfig | None) -> Steps | None:
    """Return what undoes the steps of an optimizer from the weights; None if it is not SGD."""
    return None if options is None or options.name != "sgd" else Steps(options)


def written(network: Network) -> dict[str, Tensor]:
    """Return the gradients that a step has just written, which any optimizer only processes, by tensor."""
    found = {p.data_ptr(): p.grad for p in network.model.parameters()}
    gradients = {name: found.get(tensor.data_ptr()) for name, tensor in network.tensors.items()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


class EntryObserver(Observer):
    """Watches the canaries' own entries in a run under record protection.

    Args:
        network: What is trained.
        canaries: The canaries.
        options: The optimizer. SGD is undone from the weights; of any other, or None, the written gradients are read.
        scale: divisor / C, by which a gradient is multiplied.
        sampler: The run's, which knows the subset of each record if batches are cyclic.
    """

    def __init__(
        self,
        network: Network,
        canaries: Canaries,
        options: OptimizerConfig | None,
        *,
        scale: float,
        sampler: Sampler,
    ) -> None:
        super().__init__()
        self._network, self._canaries, self._scale, self._sampler = network, canaries, scale, sampler
        self._descent = steps_of(options)
        self._averaged = options is not None and options.averaged_tail > 0
        self.writer: CraftedGradients | None = None
        self._readings: list[np.ndarray] = []
        self._drawn: list[np.ndarray] = []
        self._first = self._before = torch.zeros(0)

    @override
    def look(self, step: int) -> None:
        now = self._along()
        if step == 0:
            self._first = now
        elif not (self._averaged and step == self.total_steps):  # the mean of the tail is no update
            if self.writer is None:
                raise ValueError("writer is missing: the trainer asked for no writer of private gradients")
            if self._descent is None:
                gradient = self._along(written(self._network))
            else:
                gradient = self._descent.gradient_at(self._before, now, (step - 1) / self.total_steps)
            sums = gradient.numpy() * self._scale
            self._readings.append(sums - self.writer.others)
            self._drawn.append(self.writer.drawn)
        self._before = now

    @override
    def scores(self, mechanism: Any) -> dict[Adversary, np.ndarray]:
        y = np.array(self._readings)
        jumps = np.abs(np.abs(np.diff(y, axis=0)) - 1) < _SPIKE
        return {
            self._seeing(ALL_UPDATES): self._log_ratios(y, mechanism),
            self._seeing(CONSECUTIVE): jumps.sum(axis=0).astype(float),
            FINAL_MODEL: (self._first - self._before).numpy(),
        }

    @override
    def arrival(self, mechanism: Any) -> Arrival:
        y, drawn = np.array(self._readings), np.array(self._drawn)
        count, reach = int(np.count_nonzero(drawn)), 1.0 if self.writer is None else self.writer.reach
        mean = float((y * drawn).sum()) / count if count else 0.0
        spread = (
            float((y - mean * drawn).std()) if count else 0.0
        )  # of the noise, also if all canaries are drawn
        return Arrival(
            share=mean / reach,
            error=spread / math.sqrt(max(count, 1)) / reach,
            draws=count,
            expected=float(len(self._canaries.planted) * len(y) * mechanism.sampling_probability),
        )

    @override
    def with_half_the_noise(self, mechanism: Any) -> dict[Adversary, np.ndarray]:
        # the auditor knows the coins and the batches, so it can tell a canary's draws from the noise
        drawn = np.array(self._drawn)
        return {
            self._seeing(ALL_UPDATES): self._log_ratios((np.array(self._readings) + drawn) / 2, mechanism)
        }

    def _seeing(self, adversary: Adversary) -> Adversary:
        """Return an adversary with what it must see to know every step's sum."""
        return adversary if self._descent is not None else replace(adversary, sees=WEIGHTS_AND_STATE)

    def _log_ratios(self, y: np.ndarray, mechanism: Any) -> np.ndarray:
        """Return each canary's log-likelihood ratio, shape (m,), of all steps' readings (steps, m) in units of C."""
        q, z = float(mechanism.sampling_probability), float(mechanism.noise_multiplier)
        replaces = self._canaries.replaces
        if mechanism.bands == 1:
            return log_ratio(y, q=q, z=z, replaces=replaces).sum(axis=0)
        canaries, bands = self._canaries, mechanism.bands
        if not isinstance(self._sampler, CyclicPoissonSampler):
            raise TypeError(
                f"sampler: {self._sampler.scheme!r} has no subsets, and the ledger says that it has {bands}"
            )
        # the subset of each canary's coin, which the theorem takes for known; a canary that is out has such a coin as
        # well, of which nothing depends
        subsets = np.random.default_rng(canaries.first).integers(bands, size=len(canaries.inside))
        subsets[canaries.planted.numpy()] = self._sampler.subset_of_records[canaries.first :]
        c, independent, found = np.array(mechanism.correlation), np.zeros_like(y), np.zeros(y.shape[1])
        for k in range(len(c)):  # C y, whose noise is independent
            independent[k:] += c[k] * y[: len(y) - k]
        for start in range(len(y)):
            due = subsets == start % mechanism.bands
            block, own = independent[start : start + len(c), due], c[: len(y) - start]
            read, spread = own @ block / (own @ own), z / math.sqrt(own @ own)
            found[due] += log_ratio(read, q=mechanism.bands * q, z=spread, replaces=replaces)
        return found

    def _along(self, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the weights, or other tensors of their names, along each canary's direction, float64, shape (m,)."""
        tensors = self._network.tensors if tensors is None else tensors
        total = torch.zeros(len(self._canaries.inside), dtype=torch.float64)
        for entry in self._canaries.entries:
            values = tensors[entry.name].detach().flatten()
            total += values[entry.flat.to(values.device)].double().cpu()
        return total / math.sqrt(len(self._canaries.entries))


class GradientObserver(EntryObserver):
    """Watches the canaries' entries of the gradients that a private loop releases, whatever optimizer takes them."""

    def finish(self) -> None:
        """Look at the final model."""
        self._before = self._along()


def log_ratio(y: np.ndarray, *, q: float, z: float, replaces: bool) -> np.ndarray:
    """Return the log-likelihood ratio, in against out, of readings y in units of C; q and z are rate and multiplier.

    log((1 - q) + q e^((2 y - 1) / (2 z^2))), minus the same at -y if the relation replaces a record.
    """

    def one(values: np.ndarray) -> np.ndarray:
        exponent = (2 * values - 1) / (2 * z * z)
        off = -math.inf if q == 1 else math.log1p(-q)
        return np.asarray(np.logaddexp(off, math.log(q) + exponent))

    return one(y) - one(-y) if replaces else one(y)


@dataclass(frozen=True, kw_only=True)
class ScoreLaw:
    """Law of a canary's score, its log-likelihood ratio over all steps, at less noise than the attacker assumes.

    Attributes:
        draws: q T, how often a canary is expected to be drawn.
        values: Scores, ascending, shape (n,).
        inside: Probability of each for a canary that is in, shape (n,).
        outside: The same for one that is out.
    """

    draws: float
    values: np.ndarray
    inside: np.ndarray
    outside: np.ndarray

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, mechanism: ClippedRecords, steps: int, *, replaces: bool, ratio: float) -> ScoreLaw:
        """Return the law of T independent steps, whose characteristic functions multiply; noise is `ratio` too low."""
        bands = mechanism.bands
        q, count = min(bands * mechanism.sampling_probability, 1.0), max(1, round(steps / bands))
        z = mechanism.noise_multiplier / math.hypot(*mechanism.correlation)
        noise = np.linspace(-9.0, 9.0, 2001)
        share = np.exp(-noise * noise / 2)
        share /= share.sum()

        def step(push: float) -> tuple[np.ndarray, np.ndarray]:
            means = (0.0, push)
            terms = [log_ratio(mean + z / ratio * noise, q=q, z=z, replaces=replaces) for mean in means]
            return np.concatenate(terms), np.concatenate([(1 - q) * share, q * share])

        worlds = step(1.0), step(-1.0 if replaces else 0.0)
        means = [float(terms @ masses) for terms, masses in worlds]
        spread = max(
            float((terms - mean) ** 2 @ masses) for (terms, masses), mean in zip(worlds, means, strict=True)
        )
        # a grid that holds the sums up to 15 standard deviations; a term is shared by the two points next to it
        low, high = (
            count * end + 15 * side * math.sqrt(count * spread)
            for end, side in ((min(means), -1), (max(means), 1))
        )
        width = (high - low) / _GRID
        found = []
        for terms, masses in worlds:
            points = np.floor(terms / width)
            upper = terms / width - points
            places = np.concatenate([points, points + 1]).astype(np.int64) % _GRID
            law = np.bincount(places, np.concatenate([masses * (1 - upper), masses * upper]), _GRID)
            found.append(np.fft.irfft(np.fft.rfft(law) ** count, _GRID).clip(0.0))
        values = low + (width * np.arange(_GRID) - low) % (width * _GRID)
        order = np.argsort(values)
        inside, outside = (law[order] / law.sum() for law in found)
        return cls(draws=q * count, values=values[order], inside=inside, outside=outside)

    @property
    def mu(self) -> float:
        """Difference of the means over the pooled standard deviation, at least 1e-9."""
        means = [float(self.values @ law) for law in (self.inside, self.outside)]
        squares = [float(self.values**2 @ law) for law in (self.inside, self.outside)]
        spread = math.sqrt((sum(squares) - means[0] ** 2 - means[1] ** 2) / 2)
        return max((means[0] - means[1]) / spread, 1e-9)

    def right(self, share: float) -> float:
        """Return the share of right guesses if the highest and lowest scores, `share` of all, are guessed."""
        found = []
        for own, other in ((self.outside, self.inside), (self.inside[::-1], self.outside[::-1])):
            guessed = np.cumsum(own + other) / 2
            found.append(float(np.interp(share / 2, guessed, np.cumsum(own) / 2)) / (share / 2))
        return min(sum(found) / 2, 1.0)

    def normality(self, canaries: int) -> float:
        """Return the p-value of normality of scores with these moments, half of m in; see `OneRunResult`.

        m (skewness^2 / 6 + excess^2 / 24) is taken for chi-squared with two degrees of freedom, as under normality.
        """
        moments = []
        for law in (self.inside, self.outside):
            centred = self.values - self.values @ law
            moments.append([float(centred**power @ law) for power in (2, 3, 4)])
        second, third, fourth = np.mean(moments, axis=0)
        if min(moments[0][0], moments[1][0]) <= 0:
            return 0.0
        excess = fourth / second**2 - 3
        shape = math.exp(-canaries * (third**2 / second**3 / 6 + excess**2 / 24) / 2)
        degrees = max(canaries // 2 - 1, 1)
        ratio = numerics.variance_ratio_p_value(moments[0][0] / moments[1][0], degrees, degrees)
        return min(1.0, 2 * min(shape, ratio))


class FirstLayerObserver(Observer):
    """Looks at the first layer's updates; a canary's score is the largest over the steps that are looked at.

    Args:
        network: A fully connected network.
        inputs: The canaries' inputs as the first layer's update takes them, shape (m, n_0).
        weight: Name of the first layer's weight.
        bias: Name of its bias, or None if it has none.
        options: The optimizer.
        most_steps: Steps that are looked at, from the first on.
        batch_size: Expected number of records in a batch, for `ROW_SPACE`; None for `QUIET_ROWS`.
    """

    def __init__(
        self,
        network: Network,
        inputs: Tensor,
        *,
        weight: str,
        bias: str | None,
        options: OptimizerConfig,
        most_steps: int,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self._network, self._names, self._batch_size = network, (weight, bias), batch_size
        self._inputs = with_constant(inputs, bias=bias is not None).double()
        self._descent, self._most = steps_of(options), most_steps
        self._before = torch.zeros(0)
        self._found = np.full(len(inputs), -math.inf)

    @override
    def look(self, step: int) -> None:
        if step > self._most:
            return
        now = self._matrix(self._network.tensors)
        if step:
            if self._descent is None:
                gradient = self._matrix(written(self._network))
            else:
                gradient = self._descent.gradient_at(self._before, now, (step - 1) / self.total_steps)
            score = self._quiet_rows if self._batch_size is None else self._row_space
            self._found = np.maximum(self._found, -score(gradient).clamp_min(_TINY).log10().numpy())
        self._before = now

    @override
    def scores(self, mechanism: Any) -> dict[Adversary, np.ndarray]:
        return {QUIET_ROWS if self._batch_size is None else ROW_SPACE: self._found}

    def _matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the first layer's part of some tensors, float64, one column more for a bias."""
        weight, bias = self._names
        parts = [tensors[weight].detach()] + ([] if bias is None else [tensors[bias].detach()[:, None]])
        return torch.cat(parts, dim=1).double().cpu()

    def _row_space(self, gradient: Tensor) -> Tensor:
        """Return the part of each canary's input outside the row space of an update, shape (m,); see `RowSpaceAttack`.

        The first epoch is looked at, in which shuffled epochs use every record once.
        """
        basis = row_space(gradient, self._batch_size or 0)
        outside = self._inputs - (self._inputs @ basis) @ basis.t()
        return outside.norm(dim=1) / self._inputs.norm(dim=1).clamp_min(_TINY)

    def _quiet_rows(self, gradient: Tensor) -> Tensor:
        """Return |G h|^2 / |h|^2 over the mean square of G's entries, for an update G and each canary's input h.

        Published likelihood ratio training completes the noise of a batch to sigma_0 C in every direction, by the
        covariance that its estimates have before they are clipped. Along a batch's inputs nothing is added, and the
        clipped estimates have far less than that.
        """
        along = (self._inputs @ gradient.t()).square().sum(dim=1)
        return along / (self._inputs.square().sum(dim=1) * gradient.square().mean()).clamp_min(_TINY)
