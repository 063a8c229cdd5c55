"""Play a run's own step again and again: the reset trainer and the membership game.

The trainer is reset to the same checkpoint before every trial. The membership game asks whether a record is in the
batch of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from opusim.accounting.audit import AuditResult, detection_probability
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, Guarantee, NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.base import (
    WEIGHTS_AND_STATE,
    Attack,
    Candidates,
    EarlierSteps,
    KeptTerms,
    NotedTerms,
    Observation,
    OuterProducts,
    Records,
    Trial,
    change_of_counts,
    steps_needed,
)
from opusim.training.data import Split
from opusim.training.engine.algorithm import Trainer, require_applied
from opusim.training.engine.plan import RunPlan
from opusim.training.networks.base import Network
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import load_optimizer_tensors, optimizer_tensors, set_learning_rate
from opusim.training.protections.base import PrivateGradients
from opusim.training.protections.clipping import RELEASED_COUNTS
from opusim.training.protections.config import RecordConfig
from opusim.training.protections.record import RecordGradients
from opusim.training.runs.checkpoints import Checkpoint, copy_parameters

_FEW = 4096
"""Training records whose terms are all computed at once."""
NetworkT = TypeVar("NetworkT", bound=Network)
_LATEST_PROGRESS = 0.5
"""A schedule is followed to its middle only. The low learning rates at its end hide updates in the rounding of the
weights, which protects no record that was trained on before."""


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """A run in its folder, at the checkpoint that its audit starts from.

    Attributes:
        plan: The run, as it was resolved.
        network_facts: Its network, as the folder describes it.
        model: A user-supplied module that the folder cannot describe, or None if it can.
        checkpoint: Where the audit starts.
        checkpoint_file: Its file, for messages.
        progress: Share of the run's steps that were done there.
    """

    plan: RunPlan
    network_facts: dict[str, Any]
    model: nn.Module | None
    checkpoint: Checkpoint
    checkpoint_file: Path
    progress: float

    def on_own_network(self, plan: RunPlan) -> RunPlan:
        """Return a plan of this run, as it is to be played, with a new network of the checkpoint's parameters."""
        network = plan.algorithm.rebuild_network(self.network_facts, deepcopy(self.model))
        copy_parameters(self.checkpoint, network.tensors, self.checkpoint_file)
        return plan.on_network(network)


def released_counts(trainer: Trainer) -> dict[str, Tensor]:
    """Return what moves the bound of a trainer's clip, by name, if it moves; a step releases how it changed."""
    return {name: tensor.clone() for name, tensor in trainer.state.items() if name == RELEASED_COUNTS}


class ReplayedStep:
    """Repeats one step of an audited run: resets the trainer of its plan to the same state before each trial."""

    def __init__(self, run: AuditedRun, plan: RunPlan, trainer: Trainer) -> None:
        self.plan, self.dataset = plan, plan.dataset
        self._trainer = trainer
        options = plan.algorithm.config.optimizer
        set_learning_rate(trainer.optimizer, options, min(run.progress, _LATEST_PROGRESS))
        rate = float(trainer.optimizer.param_groups[0]["lr"])
        load_optimizer_tensors(trainer.optimizer, run.checkpoint.named("optimizer."))
        if RELEASED_COUNTS in trainer.state:  # the bound of the clip is that of the checkpoint
            trainer.state[RELEASED_COUNTS].copy_(run.checkpoint.named("state.")[RELEASED_COUNTS])
        self._earlier = steps_needed(options)
        history = [self._parameters()]
        for number in range(self._earlier):
            self._step(self.records(plan.sampler.indices(number), number), number)
            history.append(self._parameters())
        self.before = history[-1]
        """The parameters that every trial starts from."""
        self._reads_means = options.name != "sgd"
        if self._reads_means:
            means = {name: tensor.clone() for name, tensor in self._means().items()}
            self.earlier = EarlierSteps.of_means(means, self.before, options)
        else:
            self.earlier = EarlierSteps.of_weights(history, options, rate)
        self._state = {name: tensor.clone() for name, tensor in trainer.state.items()}
        self.before |= released_counts(trainer)
        self._optimizer_state = {k: t.clone() for k, t in optimizer_tensors(trainer.optimizer).items()}

    def records(self, index: Tensor, step: int) -> Records:
        """Return training records by number, or those that a step takes of users by number."""
        filled: Tensor | None = None
        if self.plan.users is not None:
            index, filled = self.plan.users.rows(index.tolist(), step)
        x, y = self.dataset.train.batch(index)
        return Records(x=x, y=y, numbers=index.to(y.device), filled=filled)

    def step_of(self, trial: int) -> int:
        """Return the number of a trial's step, which keys its noise: no two trials share any."""
        return self._earlier + trial

    @property
    def released(self) -> str:
        """What an attacker sees of a step."""
        return WEIGHTS_AND_STATE if self._reads_means else "the weights after every step"

    def state_after(self, batch: Records, trial: int) -> Mapping[str, Tensor]:
        """Return what `earlier` reads gradients from after a step on a batch, until the next step."""
        with torch.no_grad():  # reset to the state after the warm-up
            for name, tensor in self._trainer.tensors.items():
                tensor.copy_(self.before[name])
            for name, tensor in self._trainer.state.items():
                tensor.copy_(self._state[name])
            for name, tensor in optimizer_tensors(self._trainer.optimizer).items():
                tensor.copy_(self._optimizer_state[name])
        self._step(batch, self.step_of(trial))
        counts = released_counts(self._trainer)
        if self._reads_means:
            return self._means() | counts
        return {name: tensor.detach() for name, tensor in self._trainer.tensors.items()} | counts

    def _means(self) -> dict[str, Tensor]:
        """Return the running means of the gradients by the names of their tensors, 0 of those that are not trained."""
        optimizer, tensors = self._trainer.optimizer, self._trainer.tensors.items()
        means = {p.data_ptr(): state["exp_avg"] for p, state in optimizer.state.items()}
        return {name: means.get(tensor.data_ptr(), torch.zeros_like(tensor)) for name, tensor in tensors}

    def _step(self, batch: Records, number: int) -> None:
        own = {"records": batch.numbers, **batch.filling}
        self._trainer.step(batch.x, batch.y, step=number, observe=False, **own)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._trainer.tensors.items()}


@contextmanager
def replayed_step(run: AuditedRun, plan: RunPlan) -> Iterator[ReplayedStep]:
    """Open the device and make the trainer as training does, at the checkpoint's state; may raise DeviceError."""
    plan = run.on_own_network(plan)
    with plan.opened_device() as device:
        yield ReplayedStep(run, plan, plan.algorithm.trainer(device))


class NoiselessStep(Generic[NetworkT]):
    """The step as an attacker computes it who knows everything but the credited noise: the same trainer without it.

    Args:
        network: A network of its own.
        trainer: Makes steps on it, at learning rate 1 and without momentum.
        noted: The trainer's writer of gradients, if an update is a sum of outer products; None if it may be another.
        train: The training records, if there is such a writer.
    """

    def __init__(
        self,
        network: NetworkT,
        trainer: Trainer,
        noted: NotedTerms | None = None,
        train: Split | None = None,
    ) -> None:
        self._network, self._trainer = network, trainer
        self._noted, self._train = noted, train
        self._kept: KeptTerms | None = None

    def gradients(self, weights: Mapping[str, Tensor], records: Records, *, step: int) -> dict[str, Tensor]:
        """Return the gradients that a step from these weights takes on a batch, float64, by parameter."""
        self._step(weights, records, step)
        counts = released_counts(self._trainer)
        return {
            name: weights[name].to(torch.float64, copy=True).sub_(t.detach())
            for name, t in self._trainer.tensors.items()
        } | {name: change_of_counts(weights[name], after) for name, after in counts.items()}

    def terms(self, weights: Mapping[str, Tensor], records: Records) -> list[OuterProducts] | None:
        """Return what each record contributes to each layer's gradient, or None if it cannot be told.

        The rows of a record are kept until other weights are asked for.
        """
        train, numbers = self._train, records.numbers
        if train is None or numbers is None or not isinstance(self._network, FullyConnected):
            return None
        kept = self._kept
        if kept is None or kept.weights is not weights:
            kept = self._kept = KeptTerms(weights, self._network, len(train))
            if len(train) <= _FEW:  # one step on all is quicker than many on the few that a batch lacks
                x, y = train.batch(slice(None))
                self._keep(kept, Records(x=x, y=y, numbers=torch.arange(len(train), device=x.device)))
        return kept.of(numbers) if self._keep(kept, records) else None

    def _keep(self, kept: KeptTerms, records: Records) -> bool:
        """Keep the terms of those records that are not kept; returns whether all of them fit."""
        noted, numbers = self._noted, records.numbers
        missing = None if noted is None or numbers is None else kept.missing(numbers)
        if noted is None or numbers is None or missing is None:
            return False
        if len(missing):
            noted.writes = False
            try:
                self._step(kept.weights, records[missing], 0)
            finally:
                noted.writes = True
            kept.add(numbers[missing], noted.noted)
        return True

    def _step(self, weights: Mapping[str, Tensor], records: Records, step: int) -> None:
        self.network_at(weights)
        for name in released_counts(self._trainer):
            self._trainer.state[name].copy_(weights[name])
        index = torch.zeros(len(records.x), dtype=torch.int64, device=records.x.device)
        self._trainer.step(records.x, records.y, step=step, observe=False, records=index, **records.filling)

    def network_at(self, weights: Mapping[str, Tensor]) -> NetworkT:
        """Return the network with these parameters, until the next call."""
        with torch.no_grad():
            for name, tensor in self._network.tensors.items():
                tensor.copy_(weights[name])
        return self._network


@contextmanager
def noiseless_steps(run: AuditedRun, plan: RunPlan) -> Iterator[NoiselessStep[Any] | None]:
    """Yield the noiseless step of a run as it is played, or None if noise, or what else is random, cannot be known."""
    silent = without_noise(plan)
    if silent is None or (plan.description is not None and plan.description.kind not in _SIMULATED):
        yield None
        return
    silent = plain_descent(silent).with_silent_device()  # at learning rate 1 it shows the gradients
    if plan.algorithm.layer_signals == "exact" and isinstance(plan.network, FullyConnected):
        divisor = silent.algorithm.config.divisor

        def noting(writer: PrivateGradients) -> PrivateGradients:
            """Note outer products, if the writer writes clipped sums."""
            if type(writer) is not RecordGradients or plan.protection.clipping.kind == "adaptive":
                return writer
            return NotedTerms(writer, divisor)

        silent = replace(silent, wrap_writer=noting)
    silent = run.on_own_network(silent)
    with silent.opened_device() as device:
        trainer, writer = silent.algorithm.trainer(device), silent.algorithm.writer
        noted = writer if isinstance(writer, NotedTerms) else None
        train = None if noted is None else silent.dataset.train
        yield NoiselessStep(silent.network, trainer, noted, train)


Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
_FIRST_REHEARSAL = 2**24
"""Number of the first trial that the attacks learn from."""
_DRAWN = 4  # candidate, replacement, and two strangers


def coins(seed: int, trials: int) -> np.ndarray:
    """Return the coins of the candidates and of the strangers in a game of a seed, bool, shape (trials, 2)."""
    generator = np.random.default_rng(derive_seed(seed, "coins"))
    return np.asarray(generator.random((trials, 2)) < 0.5)


class MembershipGame:
    """One step of the run's trainer, with a record in its batch or without; with a user, if these are protected.

    Each trial draws four records, and a batch by the run's own sampling scheme. It takes the four out of the batch and
    puts the candidate in (first world), or the replacement or no record (second world). The run's trainer does the step
    from the same state, and the attacker sees consecutive weights.

    An attacker who sees every update learns from each step what this game tells, except whether the sampler drew the
    record. A run whose guarantee rests on secret batches promises more than this game's theorem does; no bound found
    here can refute that part.

    Args:
        step: The run's step.
        adjacency: Whether the candidate is replaced or left out in the second world.
        seed: Of batches and candidates, in [0, 2^64).

    Raises:
        ValueError: Fewer than six training records, or users.
    """

    def __init__(self, step: ReplayedStep, *, adjacency: Adjacency, seed: int) -> None:
        self._step, self._seed = step, seed
        self._replaces = adjacency is Adjacency.REPLACE_ONE
        users = step.plan.users
        unit, self._n = ("record", len(step.dataset.train)) if users is None else ("user", len(users))
        if self._n < _DRAWN + 2:
            raise ValueError(
                f"training {unit}s = {self._n}: the game needs at least {_DRAWN + 2}; audit more"
            )
        end = f"another {unit} in its place" if self._replaces else "the same batch without it"
        self.pair = f"a {unit} in the step's batch, against {end}"

    def scores(
        self,
        attacks: Sequence[Attack],
        *,
        trials: int,
        rehearsals: int = 0,
        strangers: bool = False,
        on_trial: Callable[[], None] = lambda: None,
    ) -> list[tuple[Pair, Pair]]:
        """Play against several attacks, a fair coin a trial; return for each its scores on candidates and strangers.

        Scores are those of trials of the first world and of the second, shapes (n,) and (m,). The attacks may first
        learn from rehearsals, trials of the second world with other batches and noise. Strangers, if asked about, have
        a coin of their own.
        """
        for number in range(rehearsals):  # before the trials, so that more of these begin with the same ones
            trial = self.play(_FIRST_REHEARSAL + number, first_world=False)
            for attack in attacks:
                attack.learn(trial)
        tossed = coins(self._seed, trials)
        seen = np.zeros((len(attacks), trials, 2))
        for number in range(trials):
            trial = self.play(number, first_world=bool(tossed[number, 0]))
            for found, attack in zip(seen, attacks, strict=True):
                found[number, 0] = attack.score(trial.observation, trial.candidates)
                if strangers:
                    found[number, 1] = attack.score(trial.observation, trial.strangers)
            on_trial()
        known, strange = tossed.T
        return [
            ((found[known, 0], found[~known, 0]), (found[strange, 1], found[~strange, 1])) for found in seen
        ]

    def play(self, trial: int, *, first_world: bool) -> Trial:
        """Play a trial, from 0, in one of the two worlds; other trials share neither batch nor noise with it."""
        seed = derive_seed(self._seed, "trial", trial)
        # the four records, or users, that the trial is about, and the others of the batch
        chosen = np.random.default_rng(seed).choice(self._n, _DRAWN, replace=False)
        sampler = replace(self._step.plan.sampler, seed=derive_seed(seed, "sampler"))
        sampled = sampler.indices(0).numpy()
        rest = sampled[~np.isin(sampled, chosen)]
        if sampler.sampling_probability is None:  # a batch of fixed size has room for the candidate
            rest = rest[: max(len(sampled) - 1, 0)]
        step, number = self._step, self._step.step_of(trial)
        others = step.records(torch.from_numpy(rest), number)
        candidates, strangers = (
            self._pair(torch.from_numpy(pair), number) for pair in np.split(chosen, _DRAWN // 2)
        )
        added = candidates.member if first_world else candidates.replacement
        batch = others if added is None else others.followed_by(added)
        return Trial(
            observation=Observation(
                before=step.before,
                after=step.state_after(batch, trial),
                earlier=step.earlier,
                step=number,
                others=others,
                batch_size=len(rest) + 1,
            ),
            candidates=candidates,
            strangers=strangers,
        )

    def _pair(self, drawn: Tensor, number: int) -> Candidates:
        return Candidates(
            member=self._step.records(drawn[:1], number),
            replacement=self._step.records(drawn[1:], number) if self._replaces else None,
        )


_SIMULATED = ("ideal", "gaussian")
"""Kinds of devices whose matrix an attacker could know."""


def record_protected(plan: RunPlan, noise_multiplier: float) -> RunPlan:
    """Return the run with whole records protected by a known digital noise z on Poisson batches.

    z is that of one Gaussian release a step. It is doubled if a record is replaced, which moves a sum twice as far as
    leaving the record out. Raises NoGuarantee if the algorithm protects no records.
    """
    algorithm, options = plan.algorithm, plan.protection.options
    multiplier = algorithm.equivalent_noise(noise_multiplier)
    sampler: dict[str, Any] = {"scheme": "poisson", "min_batch_size": None}
    if plan.sampler.scheme == "full-batch":  # which leaves its batch_size unused
        sampler["batch_size"] = plan.sampler.n_records
    protected = plan.unchecked(
        trainer=algorithm.record_options,
        sampler=sampler,
        protection=RecordConfig(
            relation=getattr(options, "relation", None),
            unit=getattr(options, "unit", "record"),
            records_per_user=getattr(options, "records_per_user", None),
            delta=options.delta,
            noise_multiplier=multiplier,
            clip_norm=algorithm.own_clip,
            divisor=algorithm.config.divisor,
        ),
    )
    if protected.algorithm.config.relation is Adjacency.REPLACE_ONE:
        protected = protected.unchecked(protection={"noise_multiplier": 2 * multiplier})
    require_applied(protected.algorithm)
    return protected


def without_noise(plan: RunPlan) -> RunPlan | None:
    """Return the run without the digital noise that its guarantee rests on, as if its user had forgotten the noise.

    None if the protective noise cannot be separated from the algorithm's own randomness.
    """
    own = plan.algorithm.noiseless
    if own is None:
        return None
    silent = plan.unchecked(trainer=own)
    if plan.protects == "nothing":
        return silent
    without, keys = {"noise_multiplier": 0.0, "noise": "digital"}, type(plan.protection.options).model_fields
    return silent.unchecked(protection={key: value for key, value in without.items() if key in keys})


_DELTAS = (1e-4, 1e-3, 1e-2, 0.1, 0.3)
"""Deltas at which a mechanism with half of its noise is stated, besides the audit's."""


def with_half_the_noise(mechanisms: Sequence[Mechanism], delta: float) -> list[tuple[float, float]]:
    """Return what is proven of mechanisms with half of their noise, as (delta, epsilon); empty if nothing is."""
    try:
        halved = [one.with_noise(one.noise / 2) for one in mechanisms]
        stated = [(d, guarantees(halved, delta=d)[0]) for d in (delta, *_DELTAS)]
    except (NoGuarantee, ValueError):  # it has no noise, or half of it has no price
        return []
    return [(d, one.epsilon) for d, one in stated if one.is_proven and math.isfinite(one.epsilon)]


def power_of(
    result: AuditResult, claim: Guarantee | None, weaker: Sequence[tuple[float, float]]
) -> float | None:
    """Return the probability that as many trials refute the claim at half of the noise; None if not known."""
    if claim is None or not weaker or not math.isfinite(claim.epsilon):
        return None
    return detection_probability(weaker, claim.epsilon, result.n_in, result.n_out, result.plan)


def plain_descent(plan: RunPlan) -> RunPlan:
    """Return the run with plain gradient descent at learning rate 1."""
    plain = {
        "name": "sgd",
        "lr": 1.0,
        "schedule": "constant",
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
    }
    return plan.unchecked(optimizer=plain)
