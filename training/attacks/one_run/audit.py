"""Audit a run in one training: plant canaries, train as the run was trained, and bound epsilon from their scores."""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting import numerics
from accounting.audit import Law, OneRunPlan, audit_one_run, gaussian_mu
from accounting.composition import guarantees as composed
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Guarantee, Unit
from accounting.ledger.content import LedgerContent
from accounting.ledger.ledger import read_ledger
from accounting.mechanisms import Mechanism
from accounting.mechanisms.records import ClippedRecords
from opusim import checks
from opusim.randomness.streams import derive_seed
from training.attacks.findings import Audit, Finding, Played, Role
from training.attacks.one_run.canaries import Canaries, CraftedGradients, weight_layers
from training.attacks.one_run.observers import (
    EntryObserver,
    FirstLayerObserver,
    Observer,
    Sight,
)
from training.attacks.replay import AuditedRun
from training.attacks.run_audit import ROOM, audit_place, drawn_seed, keep, read_run, update_clipping
from training.data import Dataset, Split
from training.engine.algorithm import Arrays
from training.engine.plan import RunPlan
from training.engine.session import train_planned
from training.feedback.config import FeedbackConfig
from training.networks.network import FullyConnected, LayeredNetwork
from training.protections.base import PrivateGradients
from training.runs.folder import RunFolder
from training.ulr.config import UlrConfig

DEFAULT_CANARIES = 1000
CONFIDENCE = 0.95
"""Of all bounds of an audit together: each of n bounds is made at 1 - (1 - 0.95) / n (Bonferroni).

n counts the bounds that are reported, no others: seven under a Gaussian law, since the counts of the consecutive
updates are read by one bound (`Sight.readings`).
"""
_WIDER = (1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.3)
"""Deltas at which a claim must be at most that of the Gaussian mechanism; see `Claim.of`."""
_WRITERS = (
    "its updates do not pass the writer of private gradients; play the game of single steps: opusim audit RUN"
)


def audit_one_training(
    path: str | Path,
    *,
    data: Arrays | Dataset | None = None,
    model: nn.Module | None = None,
    trust_code: bool = False,
    out: str | Path | None = None,
    canaries: int = DEFAULT_CANARIES,
    seed: int | None = None,
    delta: float | None = None,
    on_start: Callable[[int], None] = lambda total: None,
    on_step: Callable[[], None] = lambda: None,
) -> Audit:
    """Train once as a run was trained, with canaries, bound epsilon from their scores, and keep it as `one-run.json`.

    An independent fair coin puts each canary in or leaves it out. Sampler, clip, noise, optimizer and ledger are the
    run's own, and so is the number of steps; the run itself is not changed. Under record protection a canary has a
    crafted gradient at every step. Without protection it is a crafted record, and the first layer's updates are
    searched for it: their row space, or under published likelihood ratio training the directions with little noise.

    Args:
        path: The run folder.
        data: The records, if the run was trained on user-supplied ones.
        model: A module like the run's, if its folder cannot describe that one.
        trust_code: Whether to execute the user-supplied code that the run names by import path.
        out: The folder for `one-run.json`, or None for the run's own. A release run needs one outside its folder.
        canaries: m, at least 20.
        seed: Repeats the audit, in [0, 2^63), unless its noise comes from the system; None draws one, which the result
            keeps.
        delta: Of the bounds; None takes the run's.
        on_start: Told how many steps there will be.
        on_step: Called after each.

    Raises:
        RunFolderError: There is no run or no checkpoint, the data are others, or the run names user-supplied code and
            `trust_code` is False; or `out` is missing, or holds something else.
        NoGuarantee: The run protects labels, releases its last model only, or its trainer cannot carry canaries.
        ConfigError: The optimizer cannot be undone, data are missing, or there are more canaries than weights.
        ValueError: A number out of range.
    """
    checks.integer(canaries=canaries, minimum=20)
    seed = drawn_seed(seed)
    folder = RunFolder(path)
    place = audit_place(folder, out)
    run = read_run(folder, data, model, trust_code=trust_code)
    found = play_one_run(
        started_again(run, seed), canaries, seed=seed, delta=delta, on_start=on_start, on_step=on_step
    )
    keep(found, place, run)
    return found


def started_again(run: AuditedRun, seed: int) -> RunPlan:
    """Return the run on a network as new, with seeds of its own; a user-supplied module starts as it was trained."""
    plan = run.plan
    if plan.config.mode == "experiment":
        plan = plan.unchecked(seed=derive_seed(seed, "one run") >> 1)
    if "layers" not in run.network_facts:
        return run.on_own_network(plan)
    built = type(plan.algorithm).build_network(plan.config, plan.dataset, None)
    return plan.on_network(built) if built.facts == run.network_facts else run.on_own_network(plan)


@dataclass(frozen=True, kw_only=True)
class Game:
    """A run that is ready to be trained with its canaries.

    Attributes:
        plan: The run with the canaries among its records.
        observer: Watches it.
        inside: The coins, bool, shape (m,).
        relation: The data sets of which a coin chooses one.
    """

    plan: RunPlan
    observer: Observer
    inside: np.ndarray
    relation: Adjacency


def play_one_run(
    plan: RunPlan,
    canaries: int,
    *,
    seed: int,
    delta: float | None = None,
    on_start: Callable[[int], None] = lambda total: None,
    on_step: Callable[[], None] = lambda: None,
) -> Audit:
    """Train a resolved run once with canaries, in a folder that is deleted afterwards; see `audit_one_training`.

    Args:
        plan: The run; its network is trained.
        canaries: m.
        seed: Of coins and canaries, in [0, 2^63).
        delta: Of the bounds; None takes the run's.
        on_start: Told how many steps there will be.
        on_step: Called after each.

    Raises:
        NoGuarantee: The run protects labels, or its trainer cannot carry canaries.
    """
    protects = plan.config.protection.protects
    if protects not in ("records", "nothing"):
        raise NoGuarantee(
            f"protection.kind = {plan.config.protection.kind!r} protects {protects}, and this audit plants records; "
            "play the game of single steps: opusim audit RUN"
        )
    protected = protects == "records"
    game = (_crafted if protected else _planted)(plan, canaries, seed)
    delta = plan.config.protection.delta if delta is None else delta
    on_start(game.plan.total_steps)
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="opusim-audit-") as scratch:
        folder = RunFolder(Path(scratch) / "run")
        game.observer.after_step = on_step
        train_planned(game.plan, folder, watcher=game.observer)
        ledger = read_ledger(folder.ledger_file)
    spent = time.process_time() - started
    return read_canaries(
        game.observer,
        game.inside,
        game.relation,
        ledger,
        seed=seed,
        delta=delta,
        crafted="gradients" if protected else "records",
        cpu_s=spent,
    )


def read_canaries(
    observer: Observer,
    inside: np.ndarray,
    relation: Adjacency,
    ledger: LedgerContent,
    *,
    seed: int,
    delta: float,
    crafted: str,
    cpu_s: float,
) -> Audit:
    """Return what the scores of a training's canaries say.

    Args:
        observer: Watched the training.
        inside: The coins, bool, shape (m,).
        relation: The data sets of which a coin chooses one.
        ledger: What the training paid for.
        seed: Of coins and canaries.
        delta: Of the bounds.
        crafted: "gradients" or "records".
        cpu_s: Processor seconds of the training.
    """
    guarantees, mechanism = ledger.guarantees(delta=delta), ledger.mechanisms[0]
    claim = Claim.of(ledger.mechanisms, guarantees, relation, delta)
    scores, weaker = observer.scores(mechanism), observer.with_half_the_noise(mechanism)
    canaries = len(inside)
    null, proven = null_coins(seed, canaries), next((one for one in guarantees if one.is_proven), None)
    plans = claim.plans(list(scores), canaries)
    return Audit(
        findings=tuple(
            finding_of_scores(role, sight.name, own, coins, plans[sight], proven)
            for role, found, coins in (
                (Role.RUN, scores, inside),
                (Role.NULL, scores, null),
                (Role.BROKEN, weaker, inside),
            )
            for sight, own in found.items()
        ),
        guarantees=tuple(guarantees),
        played=Played.TRAINING,
        game=mechanism.describe(),
        trials=canaries,
        crafted=crafted,
        steps=observer.steps,
        seed=seed,
        cpu_s=cpu_s,
    )


def finding_of_scores(
    role: Role,
    attack: str,
    scores: np.ndarray,
    inside: np.ndarray,
    plan: OneRunPlan,
    proven: Guarantee | None,
) -> Finding:
    """Return what an adversary's scores of the canaries say.

    Args:
        role: The subject.
        attack: Its name.
        scores: One for each canary, shape (m,).
        inside: The coins, bool, shape (m,).
        plan: How the scores are read.
        proven: What a theorem says of the training, or None.
    """
    result = audit_one_run(scores, inside, plan)
    return Finding.of(role, attack, (scores[inside], scores[~inside]), result, scope="run", claim=proven)


def claimed_epsilon(guarantees: Sequence[Guarantee], relation: Adjacency) -> float | None:
    """Return the smallest epsilon that is proven, or else that of a paper's formula; None if none is finite.

    Args:
        guarantees: Of one training.
        relation: That of the game; a claim about other neighbours is not what it tests.
    """
    fitting = [g for g in guarantees if g.adjacency == relation and g.unit is Unit.RECORD]
    proven = [guarantee.epsilon for guarantee in fitting if guarantee.is_proven]
    formulas = [g.formula_value for g in fitting if g.formula_value is not None]
    finite = [value for value in proven or formulas if math.isfinite(value)]
    return max(min(finite), 1e-6) if finite else None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What an audit puts to the test.

    Attributes:
        epsilon: The smallest epsilon that is proven at delta, or else that of a formula; None if none is finite.
        delta: Of the bounds.
        law: Gaussian if the claim is nowhere above that of the Gaussian mechanism with the same epsilon at delta.
        elsewhere: The claim at other deltas, as (delta, epsilon).
        weaker_mu: mu of ideal scores with half of the noise, or None.
    """

    epsilon: float | None
    delta: float
    law: Law = Law.ANY
    elsewhere: tuple[tuple[float, float], ...] = ()
    weaker_mu: float | None = None

    @classmethod
    def of(
        cls,
        mechanisms: Sequence[Mechanism],
        stated: Sequence[Guarantee],
        relation: Adjacency,
        delta: float,
    ) -> Claim:
        """Return what is claimed of one training, and the law that its noise has.

        Sampled steps are not Gaussian. Whoever refutes the Gaussian mechanism with the claimed epsilon at delta refutes
        the claim only if what is claimed at the deltas that bound frequent errors implies that mechanism: epsilon(d) <=
        epsilon_mu(d) for d from 1e-5 to 0.3, up to 1 % of numerical error.

        Args:
            mechanisms: What the audited training released.
            stated: Its guarantees at delta.
            relation: That of the game.
            delta: Of the bounds.
        """
        epsilon = claimed_epsilon(stated, relation)
        if not isinstance(mechanisms[0], ClippedRecords) or delta == 0:
            return cls(epsilon=epsilon, delta=delta)
        at_wider = _at_wider(tuple(mechanisms), relation)
        mu = math.inf if epsilon is None else gaussian_mu(epsilon, delta)
        implied = epsilon is None or all(
            found is not None and found <= 1.01 * numerics.gaussian_bounds(mu, wider).upper + 1e-3
            for wider, found in at_wider
        )
        if not implied:
            return cls(epsilon=epsilon, delta=delta)
        halved = tuple(one.with_noise(one.noise / 2) for one in mechanisms)
        weaker = [
            gaussian_mu(found, wider)
            for wider, found in _at_wider(halved, relation, (delta, _WIDER[-1]))
            if found
        ]
        return cls(
            epsilon=epsilon,
            delta=delta,
            law=Law.GAUSSIAN,
            elsewhere=tuple((wider, found) for wider, found in at_wider if found and wider != delta),
            weaker_mu=min(weaker, default=None),
        )

    def plans(self, sights: Sequence[Sight], canaries: int) -> dict[Sight, OneRunPlan]:
        """Return how the scores of each adversary are read; all bounds together hold with `CONFIDENCE`."""
        bounds = sum(method.is_bound for sight in sights for method in sight.readings(self.law))
        return {
            sight: OneRunPlan(
                adversary=f"sees {sight.sees}, knows {sight.knows}",
                canaries=canaries,
                delta=self.delta,
                claimed=self.epsilon,
                confidence=1 - (1 - CONFIDENCE) / bounds,
                law=self.law,
                readings=sight.readings(self.law),
                elsewhere=self.elsewhere,
                weaker_mu=self.weaker_mu,
            )
            for sight in sights
        }


@functools.lru_cache(maxsize=32)
def _at_wider(
    mechanisms: tuple[Mechanism, ...], relation: Adjacency, deltas: tuple[float, ...] = _WIDER
) -> tuple[tuple[float, float | None], ...]:
    """Return what is claimed at other deltas; kept, since the audits of a table share their mechanism."""
    return tuple((d, claimed_epsilon(composed(mechanisms, delta=d), relation)) for d in deltas)


def null_coins(seed: int, count: int) -> np.ndarray:
    """Return coins that no training followed, for the null control, bool, shape (count,).

    Args:
        seed: Of the audit.
        count: How many.
    """
    return np.random.default_rng(derive_seed(seed, "null")).random(count) < 0.5


def _crafted(plan: RunPlan, count: int, seed: int) -> Game:
    """Plant canaries with crafted gradients in a run under record protection.

    Raises:
        NoGuarantee: Its updates do not pass the writer of private gradients.
    """
    config, algorithm = plan.config, plan.algorithm
    if "gradients" not in algorithm.applies or not weight_layers(plan.network):
        if "gradients" in algorithm.applies:
            raise NoGuarantee(
                "the model has no weight matrix whose entries could carry crafted gradients; play the game of single "
                "steps: opusim audit RUN"
            )
        raise NoGuarantee(
            f"trainer.kind = {config.trainer.kind!r} cannot carry crafted gradients: {_WRITERS}"
        )
    canaries = Canaries.drawn(
        plan.network,
        count,
        n_records=len(plan.dataset.train),
        replaces=config.relation is Adjacency.REPLACE_ONE,
        seed=seed,
    )
    clip = algorithm.clip_norm(config, plan.dataset.n_classes)
    shape = (len(canaries.planted), *plan.dataset.train.x.shape[1:])
    blank = torch.zeros(shape, dtype=plan.dataset.train.x.dtype)
    labels = torch.zeros(len(blank), *plan.dataset.train.y.shape[1:], dtype=plan.dataset.train.y.dtype)
    joined = with_records(plan, blank, labels)
    observer = EntryObserver(
        plan.network, canaries, config.optimizer, scale=config.divisor / clip, sampler=joined.sampler
    )

    def wrap(writer: PrivateGradients) -> PrivateGradients:
        observer.writer = CraftedGradients(
            writer, joined.network, canaries, clip_norm=clip, by_layer=algorithm.clips_by_layer
        )
        return observer.writer

    return Game(
        plan=replace(joined, wrap_writer=wrap),
        observer=observer,
        inside=canaries.inside.numpy(),
        relation=config.relation or Adjacency.REPLACE_ONE,
    )


def _planted(plan: RunPlan, count: int, seed: int) -> Game:
    """Plant crafted records in an unprotected run: features of the data's mean and spread, labels at random.

    The claim of photonic DFA is about replacement: in the place of a canary that is out stands another record of the
    same law. That of likelihood ratio training is about adding a record, and a canary that is out is left out.

    Raises:
        NoGuarantee: No attack finds records in one training of this kind.
    """
    train = plan.dataset.train
    generator = np.random.default_rng(derive_seed(seed, "canaries"))
    inside = generator.random(count) < 0.5
    mean, spread = float(train.x.mean()), float(train.x.std())
    drawn = mean + spread * generator.standard_normal((2, count, plan.network.n_inputs))
    x, stand_ins = torch.from_numpy(drawn).to(train.x.dtype)
    y = torch.from_numpy(generator.integers(plan.dataset.n_classes, size=count)).to(train.y.dtype)
    observer, replaces = _first_layer_observer(plan, x)
    coins = torch.from_numpy(inside)
    chosen = torch.where(coins[:, None], x, stand_ins) if replaces else x[coins]
    return Game(
        plan=with_records(plan, chosen.view(-1, *train.x.shape[1:]), y if replaces else y[coins]),
        observer=observer,
        inside=inside,
        relation=Adjacency.REPLACE_ONE if replaces else Adjacency.ADD_OR_REMOVE_ONE,
    )


def _first_layer_observer(plan: RunPlan, x: Tensor) -> tuple[Observer, bool]:
    """Return what watches an unprotected run for canaries of these features, and whether its claim replaces records.

    Raises:
        NoGuarantee: A batch's inputs do not span the rows of the first layer's update, or fill them; or the trainer is
            another one.
    """
    network, options, batch = plan.network, plan.config.trainer, plan.sampler.expected_batch_size
    quiet = isinstance(options, UlrConfig) and (options.form, options.remedy) == ("published", "extra-noise")
    spans = isinstance(options, FeedbackConfig) and isinstance(network, FullyConnected)
    first = weight_layers(network)[:1]
    if not isinstance(network, LayeredNetwork) or not first or first[0][0] or not (quiet or spans):
        raise NoGuarantee(
            f"trainer.kind = {options.kind!r} without protection: the attack on one training needs a fully connected "
            "first layer, of a network under bp, dfa, tdfa or pdfa, or of ulr as published with trainer.remedy = "
            "'extra-noise'; play the game of single steps: opusim audit RUN"
        )
    _, weight, n_outputs, fan_in = first[0]
    others = [tensor.data_ptr() for tensor in network.layer_parameters(0)[1:]]
    bias = next((name for name, tensor in network.tensors.items() if tensor.data_ptr() in others), None)
    fan_in += bias is not None
    most = fan_in - ROOM if quiet else min(fan_in - ROOM, n_outputs)
    if batch > most:
        raise NoGuarantee(
            f"sampler.batch_size = {batch:g}: the first layer ({n_outputs} x {fan_in}) tells nothing of batches above "
            f"{most}; play the game of single steps: opusim audit RUN"
        )
    layer: dict[str, Any] = {"weight": weight, "bias": bias, "options": plan.config.optimizer}
    if quiet:
        return FirstLayerObserver(network, x, **layer, most_steps=plan.total_steps), False
    inputs = update_clipping(options)(x, layer=0, depth=network.depth, n_layer=n_outputs)
    epoch = -(-(len(plan.dataset.train) + len(x)) // max(int(batch), 1))
    return FirstLayerObserver(network, inputs, **layer, batch_size=math.ceil(batch), most_steps=epoch), True


def with_records(plan: RunPlan, x: Tensor, y: Tensor) -> RunPlan:
    """Return the plan with more training records, at the same sampling probability and batch size."""
    train = plan.dataset.train
    joined = Split(torch.cat([train.x, x.to(train.x.device)]), torch.cat([train.y, y.to(train.y.device)]))
    sampler = replace(plan.sampler, n_records=len(joined))
    return replace(plan, dataset=replace(plan.dataset, train=joined), sampler=sampler)
