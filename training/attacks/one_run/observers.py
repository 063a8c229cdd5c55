"""What an attacker learns of the canaries from one training: observers that watch it and score at its end.

Every step of descent is undone from the weights after each step: W' = W - rate b_t, so that momentum, weight decay and
the schedule, which are public, leave the noisy sum G of clipped contributions. What the other records contribute is
known to the strongest attacker and subtracted. Along canary i, in units of C, a step then shows

    y_t = s_i B_t + z N(0, 1),    B_t ~ Bernoulli(q) if the canary is in,

with z and q as the ledger accounts for them. Noise that is correlated over b steps is z inverse(C) Z for a public C
with bands c. A canary of subset j is drawn at steps t = j mod b only, and what one draw tells is

    <c, rows t .. t + b - 1 of C y> / |c|^2 = s_i B_t + z / |c| N(0, 1),    B_t ~ Bernoulli(b q),

in which the noises of different draws are independent (theorem banded-records).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opusim.accounting.audit import Law, Method
from opusim.training.attacks.base import Descent
from opusim.training.attacks.one_run.observers import Canaries, CraftedGradients
from opusim.training.attacks.update_attacks import row_space
from opusim.training.config.sections import OptimizerConfig
from opusim.training.data.samplers import Sampler
from opusim.training.engine.callbacks import Callback
from opusim.training.networks.base import Network
from opusim.training.networks.optimizers import make_optimizer, set_learning_rate
from opusim.training.protections.base import with_constant
from opusim.training.protections.record import CyclicPoissonSampler

_SPIKE = 0.05
"""Two steps whose noise is the same differ by -1, 0 or 1 up to far less than this, in units of C."""
_TINY = 1e-15


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one adversary sees and knows.

    Attributes:
        name: In a word or two.
        sees: What is released to it.
        knows: What it knows besides.
        counts: Whether its scores are small whole numbers. No normal law fits them, so that they are read by one
            bound, the strongest that the mechanism's law allows.
    """

    name: str
    sees: str
    knows: str
    counts: bool = False

    def readings(self, law: Law) -> tuple[Method, ...]:
        """Return how its scores are read, fixed before there are any.

        Args:
            law: What is known of the mechanism's noise.
        """
        if not self.counts:
            return law.methods
        return (Method.GAUSSIAN_TRADE_OFF if law is Law.GAUSSIAN else Method.ANY_MECHANISM,)


ALL_UPDATES = Sight(
    name="all updates",
    sees="the weights after every step",
    knows="the canaries' crafted gradients, and all other records with their batches",
)
CONSECUTIVE = Sight(
    name="consecutive updates",
    sees="the weights after every step, of which it compares each two in a row",
    knows=ALL_UPDATES.knows,
    counts=True,
)
FINAL_MODEL = Sight(
    name="final model",
    sees="only the final model",
    knows="the initial weights and the canaries' crafted gradients, no other record",
)
ROW_SPACE = Sight(
    name="row space",
    sees="the first layer's weights after every step of the first epoch",
    knows="the canaries' features and the expected batch size, but no other record, neither the device nor its noise",
)
QUIET_ROWS = Sight(
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
    def scores(self, mechanism: Any) -> dict[Sight, np.ndarray]:
        """Return each adversary's scores, shape (m,).

        Args:
            mechanism: What the ledger says that one step released.
        """

    def with_half_the_noise(self, mechanism: Any) -> dict[Sight, np.ndarray]:
        """Return the scores that half of the noise would have given; none if it cannot be told from the rest.

        Args:
            mechanism: What the ledger says that one step released.
        """
        return {}

    @abstractmethod
    def look(self, step: int) -> None:
        """Look at the weights after so many steps."""

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Callback."""
        self.total_steps = total_steps
        self.look(0)

    def on_step(self, *, step: int) -> None:
        """See Callback."""
        self.steps = step
        self.look(step)
        self.after_step()


class Steps:
    """Undoes descent from the first step on, at the learning rates of its schedule; see `Descent`.

    Args:
        options: The optimizer.

    Raises:
        ConfigError: It is not SGD.
    """

    def __init__(self, options: OptimizerConfig) -> None:
        self._descent, self._options = Descent(options), options
        self._rates = make_optimizer([nn.Parameter(torch.zeros(1))], options)

    def gradient(self, before: Tensor, after: Tensor, progress: float) -> Tensor:
        """Return the gradient of the next step, float64.

        Args:
            before: Weights before it.
            after: Weights after it.
            progress: Share of the run's steps done before it.
        """
        set_learning_rate(self._rates, self._options, progress)
        return self._descent.gradient(before, after, float(self._rates.param_groups[0]["lr"]))


class EntryObserver(Observer):
    """Watches the canaries' own entries in a run under record protection.

    Args:
        network: What is trained.
        canaries: The canaries.
        options: The optimizer.
        scale: divisor / C, by which a gradient is multiplied.
        sampler: The run's, which knows the subset of each record if batches are cyclic.
    """

    def __init__(
        self,
        network: Network,
        canaries: Canaries,
        options: OptimizerConfig,
        *,
        scale: float,
        sampler: Sampler,
    ) -> None:
        super().__init__()
        self._network, self._canaries, self._scale, self._sampler = network, canaries, scale, sampler
        self._descent = Steps(options)
        self._averaged = options.averaged_tail > 0
        self.writer: CraftedGradients | None = None
        self._readings: list[np.ndarray] = []
        self._drawn: list[np.ndarray] = []
        self._first = self._before = torch.zeros(0)

    def look(self, step: int) -> None:
        """See Observer.look."""
        now = self._along()
        if step == 0:
            self._first = now
        elif not (self._averaged and step == self.total_steps):  # the mean of the tail is no update
            if self.writer is None:
                raise ValueError("writer is missing: the trainer asked for no writer of private gradients")
            sums = self._gradient(now, step).numpy() * self._scale
            self._readings.append(sums - self.writer.others)
            self._drawn.append(self.writer.drawn)
        self._before = now

    def _gradient(self, now: Tensor, step: int) -> Tensor:
        """Return the released gradient of a step along the canaries, undone from the weights after it."""
        return self._descent.gradient(self._before, now, (step - 1) / self.total_steps)

    def scores(self, mechanism: Any) -> dict[Sight, np.ndarray]:
        """See Observer.scores."""
        y = np.array(self._readings)
        jumps = np.abs(np.abs(np.diff(y, axis=0)) - 1) < _SPIKE
        return {
            ALL_UPDATES: self._log_ratios(y, mechanism),
            CONSECUTIVE: jumps.sum(axis=0).astype(float),
            FINAL_MODEL: (self._first - self._before).numpy(),
        }

    def with_half_the_noise(self, mechanism: Any) -> dict[Sight, np.ndarray]:
        """See Observer; the auditor knows the coins and the batches, so it can tell a canary's draws from the noise."""
        drawn = np.array(self._drawn)
        return {ALL_UPDATES: self._log_ratios((np.array(self._readings) + drawn) / 2, mechanism)}

    def _log_ratios(self, y: np.ndarray, mechanism: Any) -> np.ndarray:
        """Return each canary's log-likelihood ratio over all steps, shape (m,).

        Args:
            y: Readings in units of C, shape (steps, m).
            mechanism: What the ledger says that one step released.
        """
        q, z = float(mechanism.sampling_probability), float(mechanism.noise_multiplier)
        replaces = self._canaries.replaces
        if mechanism.bands == 1:
            return log_ratio(y, q=q, z=z, replaces=replaces).sum(axis=0)
        found = np.zeros(y.shape[1])
        subsets, c = self._subsets(mechanism.bands), np.array(mechanism.correlation)
        independent = sum(c[k] * shifted(y, k) for k in range(len(c)))  # C y, whose noise is independent
        for start in range(len(y)):
            due = subsets == start % mechanism.bands
            block, own = independent[start : start + len(c), due], c[: len(y) - start]
            read, spread = own @ block / (own @ own), z / math.sqrt(own @ own)
            found[due] += log_ratio(read, q=mechanism.bands * q, z=spread, replaces=replaces)
        return found

    def _subsets(self, bands: int) -> np.ndarray:
        """Return the subset of each canary's coin, 0 to bands - 1, shape (m,); the theorem takes it for known.

        A canary that is out has such a coin as well, of which nothing depends.
        """
        canaries = self._canaries
        if not isinstance(self._sampler, CyclicPoissonSampler):
            raise TypeError(
                f"sampler: {self._sampler.scheme!r} has no subsets, and the ledger says that it has {bands}"
            )
        found = np.random.default_rng(canaries.first).integers(bands, size=len(canaries.inside))
        found[canaries.planted.numpy()] = self._sampler.subset_of_records[canaries.first :]
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

    def _gradient(self, now: Tensor, step: int) -> Tensor:
        """See EntryObserver; the loop's writer has just written it."""
        named = self._network.model.named_parameters()
        return self._along({name: p.grad for name, p in named if p.grad is not None})

    def finish(self) -> None:
        """Look at the final model."""
        self._before = self._along()


def shifted(y: np.ndarray, steps: int) -> np.ndarray:
    """Return the rows some steps later, after rows of zeros, shape (n, m)."""
    return y if steps == 0 else np.concatenate([np.zeros_like(y[:steps]), y[:-steps]])[: len(y)]


def log_ratio(y: np.ndarray, *, q: float, z: float, replaces: bool) -> np.ndarray:
    """Return each reading's log-likelihood ratio of a canary that is in and one that is out.

    log((1 - q) + q e^((2 y - 1) / (2 z^2))), minus the same at -y if the canary that is out pushes the other way.

    Args:
        y: Readings in units of C.
        q: Sampling probability.
        z: Noise multiplier.
        replaces: Whether the audited relation replaces a record.
    """

    def one(values: np.ndarray) -> np.ndarray:
        exponent = (2 * values - 1) / (2 * z * z)
        off = -math.inf if q == 1 else math.log1p(-q)
        return np.asarray(np.logaddexp(off, math.log(q) + exponent))

    return one(y) - one(-y) if replaces else one(y)


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
        self._descent, self._most = Steps(options), most_steps
        self._before = torch.zeros(0)
        self._found = np.full(len(inputs), -math.inf)

    def look(self, step: int) -> None:
        """See Observer.look."""
        if step > self._most:
            return
        tensors, (weight, bias) = self._network.tensors, self._names
        parts = [tensors[weight].detach()] + ([] if bias is None else [tensors[bias].detach()[:, None]])
        now = torch.cat(parts, dim=1).double().cpu()
        if step:
            gradient = self._descent.gradient(self._before, now, (step - 1) / self.total_steps)
            score = self._quiet_rows if self._batch_size is None else self._row_space
            self._found = np.maximum(self._found, -score(gradient).clamp_min(_TINY).log10().numpy())
        self._before = now

    def scores(self, mechanism: Any) -> dict[Sight, np.ndarray]:
        """See Observer.scores."""
        return {QUIET_ROWS if self._batch_size is None else ROW_SPACE: self._found}

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
