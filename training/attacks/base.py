"""What an attacker sees of a step of the membership game, what it knows, and its score.

The auditor owns the data. A trial flips a coin between two neighbouring worlds, lets the run's own trainer release
something, and shows it to attacks, each of which answers with a score, higher where it takes the first world for the
one that was played. Trials are independent: fresh batches, fresh noise, the same starting point.

What consecutive weights tell: the gradients behind an update, with momentum and weight decay undone. Optimizers of the
Adam family keep a running mean of the gradients in every checkpoint, and two means in a row tell the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from opusim.accounting.one_run import Law, Method
from opusim.training.config.sections import OptimizerConfig
from opusim.training.data.dataset import Dataset, Split, Standardisation
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.base import WrappedGradients, linear_uses, with_constant
from opusim.training.protections.clipping import RELEASED_COUNTS
from opusim.training.protections.record import RecordGradients

_NESTEROV_STEPS = 40
WEIGHTS_AND_STATE = "the weights and the optimizer's state after every step"
"""What an attacker sees if the weights alone do not tell the gradients: the state is made of the same noisy sums."""


def steps_needed(options: OptimizerConfig) -> int:
    """Steps before the attacked one that the attacker must see to know the momentum.

    Plain momentum is the last change of the weights. Nesterov's is known through a recursion that forgets its start
    by the factor mu / (1 + mu) < 1/2 a step. An optimizer of the Adam family has its mean after one step.
    """
    if options.name != "sgd":
        return 1
    if options.momentum == 0:
        return 0
    return _NESTEROV_STEPS if options.nesterov else 1


class Descent:
    """Undoes plain, heavy-ball or Nesterov descent on some weights, step by step.

    torch's SGD: b_t = mu b_(t-1) + g_t + wd W_t; W_(t+1) = W_t - rate b_t, with Nesterov's
    W_(t+1) = W_t - rate (g_t + wd W_t + mu b_t). So g_t = s (W_t - W_(t+1)) / rate - c with s = 1, or
    1 / (1 + mu) for Nesterov, and a c that W_t and the weights before it tell.

    Args:
        options: The optimizer, SGD, whose constants are public.
    """

    def __init__(self, options: OptimizerConfig) -> None:
        self._options, self._momentum = options, torch.zeros((), dtype=torch.float64)
        self.scale = 1 / (1 + options.momentum) if options.nesterov else 1.0
        """s."""

    def others(self, before: Tensor) -> Tensor:
        """Return c of the next step, float64, from the weights before it."""
        mu = self._options.momentum
        share = mu * mu * self.scale if self._options.nesterov else mu
        return self._momentum * share + before.double() * self._options.weight_decay

    def gradient(self, before: Tensor, after: Tensor, rate: float) -> Tensor:
        """Return g_t, float64, from the weights around a step of this rate; take the step for the last one."""
        change, mu = (before.double() - after.double()) / rate, self._options.momentum
        found = change * self.scale - self.others(before)
        self._momentum = (change + mu * self._momentum) * self.scale if self._options.nesterov else change
        return found


class EarlierSteps:
    """What the steps before an update tell of it: g_t = f (S_t - S_(t+1)) - c, with f and c the same for all updates.

    The state S is the weights under descent, and the running mean of the gradients under the Adam family.
    """

    def __init__(self, before: Mapping[str, Tensor], others: Mapping[str, Tensor], factor: float) -> None:
        self._before, self._others, self._factor = before, others, factor
        self._others_rounded = {name: others[name].to(tensor) for name, tensor in before.items()}
        self._constants = {
            name: tensor.double().mul(factor).sub_(others[name]) for name, tensor in before.items()
        }

    @classmethod
    def of_weights(
        cls, weights: Sequence[Mapping[str, Tensor]], options: OptimizerConfig, rate: float
    ) -> Self:
        """Return momentum and weight decay from consecutive weights W_0 .. W_t, t >= `steps_needed`, of one rate."""
        others = {}
        for name, last in weights[-1].items():
            descent = Descent(options)
            for before, after in pairwise(weights):
                descent.gradient(before[name], after[name], rate)
            others[name] = descent.others(last)
        return cls(weights[-1], others, Descent(options).scale / rate)

    @classmethod
    def of_means(
        cls, means: Mapping[str, Tensor], weights: Mapping[str, Tensor], options: OptimizerConfig
    ) -> Self:
        """Return what the means m of the Adam family tell: m' = beta_1 m + (1 - beta_1) (g + wd W).

        The decay of adamw does not pass its mean.
        """
        decay = 0.0 if options.name == "adamw" else options.weight_decay
        others = {name: weights[name].double() * decay - mean.double() for name, mean in means.items()}
        return cls(means, others, -1 / (1 - options.beta1))

    def gradient(self, name: str, after: Tensor) -> Tensor:
        """Return g_t of a parameter, float64, from S_(t+1)."""
        return torch.sub(self._constants[name], after, alpha=self._factor)

    def rounded_gradient(self, name: str, after: Tensor) -> Tensor:
        """Return g_t in the parameter's own type, in a third of the time.

        S_t - S_(t+1) is exact within a factor of two (Sterbenz), so that only g_t and c are rounded.
        """
        return torch.sub(self._before[name], after).mul_(self._factor).sub_(self._others_rounded[name])


def change_of_counts(before: Tensor, after: Tensor) -> Tensor:
    """Return the noisy count that a step released, with the sign of a gradient, shape (1,); see `MovingBound`."""
    return (before - after)[:1]


def layer_gradient(gradients: Mapping[str, Tensor], layer: int) -> Tensor:
    """The gradient of a layer (0 ..) as a matrix of shape (n_l, n_(l-1)), one column more for a bias."""
    names = (f"layer{layer + 1}.weight", f"layer{layer + 1}.bias")
    parts = [gradients[name] for name in names if name in gradients]
    return torch.cat([part.reshape(len(parts[0]), -1) for part in parts], dim=1)


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Who attacks.

    Attributes:
        name: In a word or two.
        sees: What is released to it.
        knows: What it knows besides.
        counts: Whether its scores of canaries are small whole numbers. No normal law fits them, so that they are read
            by one bound, the strongest that the mechanism's law allows.
    """

    name: str
    sees: str
    knows: str
    counts: bool = False

    @property
    def threat_model(self) -> str:
        """What it sees and knows, as reports say it."""
        return f"sees {self.sees}, knows {self.knows}"

    def readings(self, law: Law) -> tuple[Method, ...]:
        """Return how its scores of canaries are read under a law of the noise, fixed before there are any."""
        if not self.counts:
            return law.methods
        return (Method.GAUSSIAN_TRADE_OFF if law is Law.GAUSSIAN else Method.ANY_MECHANISM,)


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records that the attacker knows, or those that a step takes of some users, k rows for each.

    Attributes:
        x: Features as the network takes them, shape (n, d).
        y: Class numbers, shape (n,).
        numbers: Of the records in the training set, int64, shape (n,); None if they have none.
        filled: Which rows only fill those that a user lacks, bool, shape (n,); None of records.
    """

    x: Tensor
    y: Tensor
    numbers: Tensor | None = None
    filled: Tensor | None = None

    def __getitem__(self, positions: Tensor) -> Records:
        """Return the records at some positions."""
        numbers = None if self.numbers is None else self.numbers[positions]
        return Records(x=self.x[positions], y=self.y[positions], numbers=numbers)

    def followed_by(self, others: Records) -> Records:
        """These records and then others of the same kind."""
        joined: dict[str, Any] = {}
        for name, own in vars(self).items():
            joined[name] = None if own is None else torch.cat([own, getattr(others, name)])
        return Records(**joined)

    @property
    def filling(self) -> dict[str, Tensor]:
        """What a trainer's step is told of the rows of users."""
        return {} if self.filled is None else {"filled": self.filled}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the attacker sees and knows in a trial.

    Attributes:
        before: The parameters before the last step, by name ("layer1.weight", ...).
        after: What the step's gradients are read from (`EarlierSteps`) after it, until the next trial: the parameters,
            or the optimizer's running means.
        earlier: What the steps before it tell.
        step: Its number, which keys what is public of its randomness.
        others: The records that are in the last step's batch in both worlds.
        batch_size: Records in that batch.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    earlier: EarlierSteps
    step: int
    others: Records
    batch_size: int

    def gradients(self, prefix: str = "") -> dict[str, Tensor]:
        """The last step's gradients, float64, of the parameters whose names begin so, and its released count."""
        return {
            name: change_of_counts(self.before[name], after)
            if name == RELEASED_COUNTS
            else self.earlier.gradient(name, after)
            for name, after in self.after.items()
            if name.startswith(prefix)
        }

    def rounded_gradients(self) -> dict[str, Tensor]:
        """The last step's gradients in the parameters' own type."""
        return {name: self.earlier.rounded_gradient(name, after) for name, after in self.after.items()}

    def gradient(self, layer: int) -> Tensor:
        """The last step's gradient of a layer (0 ..); see `layer_gradient`."""
        return layer_gradient(self.gradients(f"layer{layer + 1}."), layer)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """A record in the batch of the first world, and the one in its place in the second, None if left out there."""

    member: Records
    replacement: Records | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is seen in a trial, the pair that the coin was about, and a pair in no batch of either world."""

    observation: Observation
    candidates: Candidates
    strangers: Candidates


def crafted(x: Tensor, y: Tensor, *, n_classes: int, vocabulary: int | None = None) -> Dataset:
    """Return a data set of the auditor's own records, features (n, d) or tokens (n, T), all of them protected."""
    empty = Split(x[:0], y[:0])
    return Dataset(
        name="arrays",
        n_classes=n_classes,
        train=Split(x, y),
        validation=empty,
        test=None,
        standardisation=Standardisation.identity(),
        vocabulary=vocabulary,
    )


class Attack(ABC):
    """Turns what is seen into a score, from what the attacker knows besides; `centre` favours neither world."""

    name: str
    knows: str
    centre: float | None = None
    _seen: tuple[Observation, dict[str, Any]] | None = None

    @abstractmethod
    def score(self, observation: Observation, candidates: Candidates) -> float:
        """Return a finite score of the pair in question, higher if the first world looks likelier."""

    def learn(self, trial: Trial) -> None:  # noqa: B027  # optional hook
        """Look at a trial of the second world that the attacker simulated before the game; it counts for nothing."""

    def figure(self, score: float) -> str:
        """A score in words."""
        return f"{score:.3g}"

    def once(self, observation: Observation, name: str, make: Callable[[], Any]) -> Any:
        """Return what is computed once per trial, for candidates and strangers."""
        if self._seen is None or self._seen[0] is not observation:
            self._seen = observation, {}
        kept = self._seen[1]
        if name not in kept:
            kept[name] = make()
        return kept[name]


# What single records contribute to an update without noise, kept between the trials of a game. Under record protection,
# the update of a fully connected layer is a sum of outer products, one for each record:
#
#     G_l = sum_i a_(l,i) b_(l,i)^T,    a_(l,i) = f_i delta_(l,i) / divisor,    b_(l,i) = (h_(l-1,i), 1),
#
# with the clip factor f_i. All trials of a game start from the same weights, so a and b of a record are the same in
# each. Inner products of such sums need no matrix: <G, a b^T> = a^T G b, and <a b^T, c d^T> = (a^T c) (b^T d).

_MOST_NUMBERS = 6e7
"""Numbers kept, 240 MB."""


@dataclass(frozen=True, kw_only=True)
class OuterProducts:
    """sum_i a_i b_i^T of signals a_i, (n, n_l), and inputs b_i, (n, n_(l-1)), one column more if there is a bias."""

    signals: Tensor
    inputs: Tensor

    def with_products(self, other: OuterProducts, sign: float = 1.0) -> OuterProducts:
        """Return this sum plus or minus another."""
        return OuterProducts(
            signals=torch.cat([self.signals, sign * other.signals]),
            inputs=torch.cat([self.inputs, other.inputs]),
        )

    def dot(self, other: OuterProducts) -> float:
        """Return the inner product with another sum."""
        signals, inputs = self.signals @ other.signals.t(), self.inputs @ other.inputs.t()
        return float((signals.double() * inputs.double()).sum())

    def dot_parts(self, parts: Sequence[Tensor]) -> float:
        """Return the inner product with a layer's gradient, of weights and bias as vectors, in their type."""
        signals, inputs = self.signals.to(parts[0]), self.inputs.to(parts[0])
        weight = parts[0].view(signals.shape[1], -1)
        width = weight.shape[1]
        total = ((signals @ weight) * inputs[:, :width]).sum(dtype=torch.float64)
        for bias in parts[1:]:
            total = total + (signals @ bias * inputs[:, width]).sum(dtype=torch.float64)
        return float(total)

    def parts(self, *, bias: bool) -> list[Tensor]:
        """Return the sum as float64 vectors: the weights' and, if there is one, the bias's."""
        whole = (self.signals.t() @ self.inputs).double()
        return [whole[:, :-1].flatten(), whole[:, -1]] if bias else [whole.flatten()]


class NotedTerms(WrappedGradients):
    """Notes the outer products of a batch's records, by the writer's clip factors; writes gradients if asked to."""

    def __init__(self, writer: RecordGradients, divisor: float) -> None:
        super().__init__(writer)
        self._writer: RecordGradients = writer
        self._divisor = divisor
        self.writes = True
        """Whether gradients are written."""
        self.noted: list[OuterProducts] = []
        """Those of the last batch that was not written, layer by layer, a row for each record."""

    @override
    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        if self.writes:
            self._writer.set_gradients(parts, records=records, public_inputs=public_inputs)
            return
        (found,) = parts
        uses = linear_uses(found)
        self.noted = [
            OuterProducts(
                signals=(
                    clip.finite(use.delta[:, 0]).double() * (clip.factors / self._divisor)[:, None]
                ).float(),
                inputs=with_constant(clip.finite(use.h[:, 0]), bias=use.bias is not None),
            )
            for use, clip in zip(uses, self._writer.clips(found), strict=True)
        ]


class KeptTerms:
    """The outer products of training records at some weights of a network, by the records' numbers."""

    def __init__(self, weights: Mapping[str, Tensor], network: FullyConnected, n_records: int) -> None:
        self.weights = weights
        shapes = [
            (linear.out_features, linear.in_features + (linear.bias is not None))
            for linear in network.linears
        ]
        place = network.linears[0].weight.device
        self._rows = min(n_records, max(int(_MOST_NUMBERS / sum(map(sum, shapes))), 1))
        self._used = 0
        self._slots = torch.full((n_records,), -1, device=place)
        self._layers = [
            OuterProducts(
                signals=torch.empty(self._rows, outputs, device=place),
                inputs=torch.empty(self._rows, inputs, device=place),
            )
            for outputs, inputs in shapes
        ]

    def missing(self, numbers: Tensor) -> Tensor | None:
        """Return the positions in a batch of the records that are not kept; None if the batch does not fit.

        All rows are forgotten if those that the batch lacks do not fit.
        """
        if len(numbers) > self._rows:
            return None
        found = torch.nonzero(self._slots[numbers] < 0).flatten()
        if self._used + len(found) <= self._rows:
            return found
        self._slots.fill_(-1)
        self._used = 0
        return torch.arange(len(numbers), device=self._slots.device)

    def add(self, numbers: Tensor, noted: Sequence[OuterProducts]) -> None:
        """Keep the rows of records; rows that fill a batch up to a fixed number follow them, and are left out."""
        rows = torch.arange(self._used, self._used + len(numbers), device=self._slots.device)
        for layer, new in zip(self._layers, noted, strict=True):
            layer.signals[rows] = new.signals[: len(numbers)]
            layer.inputs[rows] = new.inputs[: len(numbers)]
        self._slots[numbers] = rows
        self._used += len(numbers)

    def of(self, numbers: Tensor) -> list[OuterProducts]:
        """Return the rows of a batch, layer by layer; its records must be kept."""
        slots = self._slots[numbers]
        return [
            OuterProducts(
                signals=layer.signals.index_select(0, slots), inputs=layer.inputs.index_select(0, slots)
            )
            for layer in self._layers
        ]
