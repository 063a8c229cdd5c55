"""Audit a run in one training: plant canaries, train as the run was trained, and bound epsilon from their scores."""

from __future__ import annotations

import bisect
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from typing_extensions import override

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.anytime import AnytimePlan, audit_anytime
from opusim.accounting.audit import gaussian_mu
from opusim.accounting.composition import guarantees as composed
from opusim.accounting.guarantee import Adjacency, Guarantee, NoGuarantee, Unit
from opusim.accounting.ledger import LEDGER_FILE, LedgerContent, read_ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import ClippedRecords
from opusim.accounting.one_run import FEWEST_CANARIES, Law, OneRunPlan, audit_one_run
from opusim.progress import Progress, Show
from opusim.randomness.streams import derive_seed
from opusim.tables import duration
from opusim.training.attacks.base import Adversary
from opusim.training.attacks.findings import (
    PLANNED_POWER,
    SYSTEM_NOISE,
    WEAK,
    WITHOUT_CANARIES,
    Audit,
    Finding,
    Origin,
    Played,
    Role,
)
from opusim.training.attacks.one_run.observers import (
    ALL_UPDATES,
    CONSECUTIVE,
    FINAL_MODEL,
    Canaries,
    CraftedGradients,
    EntryObserver,
    FirstLayerObserver,
    GradientObserver,
    Observer,
    ScoreLaw,
    require_fixed_bound,
    weight_layers,
)
from opusim.training.attacks.replay import AuditedRun
from opusim.training.attacks.run_audit import ROOM, audit_place, drawn_seed, keep, read_run
from opusim.training.data import Dataset, Split
from opusim.training.engine.algorithm import Arrays
from opusim.training.engine.plan import RunPlan
from opusim.training.engine.session import train_planned
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.base import preserved_modes
from opusim.training.networks.clipping import ActivationClipping
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.network import FullyConnected, LayeredNetwork
from opusim.training.private_loop.folder import TAKES_NO_GRADIENTS, PrivacySettings
from opusim.training.private_loop.session import PrivateTraining
from opusim.training.private_loop.start import make_private
from opusim.training.protections.base import PrivateGradients
from opusim.training.protections.record import RecordProtection
from opusim.training.runs.folder import RunFolder

DEFAULT_CANARIES = 1000
_COUNTS = (200, 500, 1000, 2000, 5000)
"""Numbers of canaries to choose from."""
CONFIDENCE = 0.95
"""Of all bounds of an audit together: each of n bounds is made at 1 - (1 - 0.95) / n (Bonferroni).

n counts the bounds that are reported, no others: seven under a Gaussian law, since the counts of the consecutive
updates are read by one bound (`Adversary.readings`).
"""
_WIDER = (1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.3)
"""Deltas at which a claim must be at most that of the Gaussian mechanism; see `reading_plans`."""
_REHEARSED = 4
"""Steps, without canaries, that tell how long an audit of a folder takes."""
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
    canaries: int | None = None,
    seed: int | None = None,
    delta: float | None = None,
    on_forecast: Callable[[str], None] = lambda text: None,
    progress: Show = True,
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
        canaries: m, at least 20. By default the fewest of 200, 500, 1,000, 2,000 and 5,000 that find half of the noise
            with probability 0.9, or else the likeliest of those that the model has weights for.
        seed: Repeats the audit, in [0, 2^63), unless its noise comes from the system; None draws one, which the result
            keeps.
        delta: Of the bounds; None takes the run's.
        on_forecast: Told in words, before training, what so many canaries can find.
        progress: Whether to show a bar of the steps; see `opusim.train`.

    Raises:
        RunFolderError: There is no run or no checkpoint, the data are others, or the run names user-supplied code and
            `trust_code` is False; or `out` is missing, or holds something else.
        NoGuarantee: The run protects labels, releases its last model only, or its trainer cannot carry canaries.
        ConfigError: Data are missing, or there are more canaries than weights.
        ValueError: A number out of range.
    """
    if canaries is not None:
        checks.integer(canaries=canaries, minimum=FEWEST_CANARIES)
    seed = drawn_seed(seed)
    folder = RunFolder(path)
    place = audit_place(folder, out)
    run = read_run(folder, data, model, trust_code=trust_code)
    plan = started_again(run, seed)
    if isinstance(plan.algorithm.protection, RecordProtection):
        require_fixed_bound(plan.algorithm.protection.clipping)
    canaries, text = planned_canaries(plan, canaries, delta=delta)
    on_forecast(text)
    found = play_one_run(plan, canaries, seed=seed, delta=delta, progress=progress)
    return keep(found, place, folder)


def started_again(run: AuditedRun, seed: int) -> RunPlan:
    """Return the run on a network as new, with seeds of its own; a user-supplied module starts as it was trained."""
    plan = run.plan
    if plan.mode == "experiment":
        plan = plan.unchecked(seed=derive_seed(seed, "one run") >> 1)
    if "layers" not in run.network_facts:
        return run.on_own_network(plan)
    built = plan.new_network()
    return plan.on_network(built) if built.facts == run.network_facts else run.on_own_network(plan)


def planned_canaries(plan: RunPlan, canaries: int | None, *, delta: float | None) -> tuple[int, str]:
    """Return how many canaries find half of the noise, or those asked for, and in words what they can find."""
    delta = plan.protection.options.delta if delta is None else delta
    if plan.protects != "records" or not plan.mechanisms or not weight_layers(plan.network):
        canaries = DEFAULT_CANARIES if canaries is None else canaries
        return canaries, f"Forecast: nothing is proven of records that {canaries:,} canaries could refute."
    mechanisms = tuple(one.repeated(plan.total_steps * one.steps) for one in plan.mechanisms)
    relation = plan.algorithm.config.relation or Adjacency.REPLACE_ONE
    room = max(rows * columns for _, _, rows, columns in weight_layers(plan.network))
    return _foretold(mechanisms, relation, canaries, room=room, delta=delta)


def _foretold(
    mechanisms: tuple[Mechanism, ...], relation: Adjacency, canaries: int | None, *, room: int, delta: float
) -> tuple[int, str]:
    """Return the same as `planned_canaries` for what one training releases; the model has room for so many."""
    stated = composed(mechanisms, delta=delta)
    adversaries = (ALL_UPDATES, CONSECUTIVE, FINAL_MODEL)

    @functools.cache
    def reading(count: int) -> tuple[OneRunPlan, float]:
        own = reading_plans(adversaries, count, mechanisms, stated, relation, delta)[ALL_UPDATES]
        own = by_draws(own, mechanisms, relation)
        return own, own.power_of_all or 0.0

    def likeliest() -> int:
        fitting = [count for count in _COUNTS if count <= room] or [max(room, FEWEST_CANARIES)]
        enough = [count for count in fitting if reading(count)[1] >= PLANNED_POWER]
        if enough:
            return enough[0]
        return max(fitting, key=lambda count: (round(reading(count)[1], 2), count == DEFAULT_CANARIES))

    canaries = likeliest() if canaries is None else canaries
    found, power = reading(canaries)
    if found.claimed is None or found.law is Law.ANY:
        return (
            canaries,
            f"Forecast: what {canaries:,} canaries can find is not known for a law that is not Gaussian.",
        )

    def finds(tenths: int) -> bool:
        power = by_draws(found, mechanisms, relation, tenths / 10).power_of_all
        return power is not None and power >= PLANNED_POWER

    # How many times too small the noise must be, in tenths: the least power of two that is found, then the least ratio
    # up to it.
    text, high = "not even a sixteenth of the noise", next(filter(finds, (20, 40, 80, 160)), None)
    if high is not None:
        low = max(11, high // 2)
        ratio = (low + bisect.bisect_left(range(low, high), True, key=finds)) / 10
        (_, weaker), _ = _with_less_noise(mechanisms, relation, delta, ratio)
        times = (weaker or math.inf) / found.claimed
        text = (
            f"an epsilon {times:.1f} times the proven {found.claimed:.2f} (noise {ratio:.1f} times too small)"
        )
    guessed = max(found.ceiling(method) for method in found.methods if method.guesses)
    text = (
        f"Forecast: a canary is drawn q T = {found.draws or 0:.3g} times. {canaries:,} canaries find half of the "
        f"noise with probability {power:.2f}, and {text} with probability 0.9; guesses of ideal scores typically show "
        f"epsilon {guessed:.2f}."
    )
    if power >= PLANNED_POWER:
        return canaries, text
    best, fails = likeliest(), f"fails by chance with probability {1 - power:.2f} (exit code 3)"
    if power < WEAK:
        fails = "passes or fails by chance, and the audit ends with exit code 3 unless it refutes the claim"
    remedy = f"Take {best:,} canaries." if reading(best)[1] > power + 0.01 else WITHOUT_CANARIES
    return canaries, f"{text} So the broken control, with half of the noise, {fails}. {remedy}"


def by_draws(
    plan: OneRunPlan, mechanisms: Sequence[Mechanism], relation: Adjacency, ratio: float = 2.0
) -> OneRunPlan:
    """Return how scores of canaries are read, with the power that the law of their scores gives.

    A canary that few steps draw has scores of no normal law: the fewer draws, the fewer canaries show it. The noise is
    `ratio` times too small.
    """
    first = mechanisms[0]
    if plan.law is not Law.GAUSSIAN or not isinstance(first, ClippedRecords):
        return plan
    steps, replaces = sum(one.steps for one in mechanisms), relation is Adjacency.REPLACE_ONE
    law = ScoreLaw.of(first.repeated(1), steps, replaces=replaces, ratio=ratio)
    shares = ((method, plan.guesses(method) / plan.canaries) for method in plan.methods if method.guesses)
    return replace(
        plan,
        draws=law.draws,
        weaker_mu=law.mu,
        weaker_normality=law.normality(plan.canaries),
        weaker_right=tuple((method, law.right(share)) for method, share in shares),
    )


Game: TypeAlias = tuple[RunPlan, Observer, np.ndarray, Adjacency]
"""The run with the canaries among its records, what watches it, the coins, bool, shape (m,), and the relation."""


def play_one_run(
    plan: RunPlan,
    canaries: int,
    *,
    seed: int,
    delta: float | None = None,
    progress: Show = False,
) -> Audit:
    """Train a resolved run once with canaries, in a folder that is deleted afterwards; see `audit_one_training`.

    Raises NoGuarantee if the run protects labels, or its trainer cannot carry canaries.
    """
    if plan.protects == "labels":
        raise NoGuarantee(
            f"protection.kind = {plan.protection.options.kind!r} protects labels, and this audit plants records; "
            "play the game of single steps: opusim audit RUN"
        )
    protected = plan.protects == "records"
    played, observer, inside, relation = (_crafted if protected else _planted)(plan, canaries, seed)
    delta = plan.protection.options.delta if delta is None else delta
    started = time.process_time()
    with (
        tempfile.TemporaryDirectory(prefix="opusim-audit-") as scratch,
        Progress("audit of one training", "steps", show=progress) as bar,
    ):
        bar.start(played.total_steps)
        folder = RunFolder(Path(scratch) / "run")
        observer.after_step = bar.advance
        train_planned(played, folder, watcher=observer)
        ledger = read_ledger(folder.ledger_file)
    spent = time.process_time() - started
    facts: dict[str, Any] = {"crafted": "gradients" if protected else "records", "cpu_s": spent}
    facts["note"] = SYSTEM_NOISE if plan.mode == "release" else ""
    return _of_training(observer, inside, relation, ledger, delta=delta, seed=seed, **facts)


def _of_training(
    observer: Observer,
    inside: np.ndarray,
    relation: Adjacency,
    ledger: LedgerContent,
    *,
    delta: float,
    **facts: Any,
) -> Audit:
    """Return what an observer saw in one training that paid in a ledger; see `audit_of_scores`."""
    mechanism, stated = ledger.mechanisms[0], ledger.guarantees(delta=delta)
    scores, weaker = observer.scores(mechanism), observer.with_half_the_noise(mechanism)
    facts |= {"played": Played.TRAINING, "steps": observer.steps, "arrival": observer.arrival(mechanism)}
    return audit_of_scores(scores, weaker, inside, relation, ledger.mechanisms, stated, delta=delta, **facts)


def audit_of_scores(
    scores: Mapping[Adversary, np.ndarray],
    weaker: Mapping[Adversary, np.ndarray],
    inside: np.ndarray,
    relation: Adjacency,
    mechanisms: Sequence[Mechanism],
    stated: Sequence[Guarantee],
    *,
    delta: float,
    seed: int,
    **facts: Any,
) -> Audit:
    """Return what each adversary's scores of canaries, or of trainings, say: one for each coin, shape (m,).

    `weaker` has the scores that half of the noise would have given, if they are known; the relation is that of the data
    sets of which a coin chooses one. One training released the mechanisms, whose guarantees at delta are stated. The
    facts are other attributes of the audit.
    """
    count = len(inside)
    # coins that no training followed, for the null control
    null = np.random.default_rng(derive_seed(seed, "null")).random(count) < 0.5
    proven = next((one for one in stated if one.is_proven), None)
    plans, findings = reading_plans(list(scores), count, mechanisms, stated, relation, delta), []
    if facts["played"] is Played.TRAINING:
        plans = {one: by_draws(plan, mechanisms, relation) for one, plan in plans.items()}
    for role, found, coins in (
        (Role.RUN, scores, inside),
        (Role.NULL, scores, null),
        (Role.BROKEN, weaker, inside),
    ):
        for adversary, own in found.items():
            plan = plans[adversary]
            shared = role.error / (1 - CONFIDENCE)
            result = audit_one_run(own, coins, replace(plan, confidence=1 - shared * (1 - plan.confidence)))
            parts = own[coins], own[~coins]
            shown: dict[str, Any] = {"scope": "run", "claim": proven}
            if role is Role.RUN and (delta == 0 or facts["played"] is Played.FINAL_MODELS):
                plan_of_games = AnytimePlan(
                    delta=delta,
                    claimed=plan.claimed,
                    law=plan.law,
                    confidence=1 - role.error / len(found),
                )
                shown["anytime"] = audit_anytime(own, coins, plan_of_games)
            findings.append(Finding.of(role, adversary.name, parts, result, **shown))
    game = mechanisms[0].describe()
    return Audit(
        findings=tuple(findings), guarantees=tuple(stated), game=game, trials=count, seed=seed, **facts
    )


def claimed_epsilon(guarantees: Sequence[Guarantee], relation: Adjacency) -> float | None:
    """Return the smallest proven epsilon under the relation, else that of a paper's formula; None if infinite."""
    fitting = [g for g in guarantees if g.adjacency == relation and g.unit is not Unit.LABEL]
    proven = [guarantee.epsilon for guarantee in fitting if guarantee.is_proven]
    formulas = [g.formula_value for g in fitting if g.formula_value is not None]
    finite = [value for value in proven or formulas if math.isfinite(value)]
    return max(min(finite), 1e-6) if finite else None


def reading_plans(
    adversaries: Sequence[Adversary],
    canaries: int,
    mechanisms: Sequence[Mechanism],
    stated: Sequence[Guarantee],
    relation: Adjacency,
    delta: float,
) -> dict[Adversary, OneRunPlan]:
    """Return how the scores of each adversary are read; all bounds together hold with `CONFIDENCE`.

    Sampled steps are not Gaussian. Whoever refutes the Gaussian mechanism with the claimed epsilon at delta refutes the
    claim only if what is claimed at the deltas that bound frequent errors implies that mechanism: epsilon(d) <=
    epsilon_mu(d) for d from 1e-5 to 0.3, up to 1 % of numerical error.
    """
    epsilon, law = claimed_epsilon(stated, relation), Law.ANY
    facts: dict[str, Any] = {}
    if isinstance(mechanisms[0], ClippedRecords) and delta != 0:
        at_wider = _at_wider(tuple(mechanisms), relation)
        mu = math.inf if epsilon is None else gaussian_mu(epsilon, delta)
        if epsilon is None or all(
            found is not None and found <= 1.01 * numerics.gaussian_bounds(mu, wider).upper + 1e-3
            for wider, found in at_wider
        ):
            law = Law.GAUSSIAN
            elsewhere = tuple((wider, found) for wider, found in at_wider if found and wider != delta)
            # the mu that half of the noise has at delta, or at a large one if that is less
            halved = _with_less_noise(mechanisms, relation, delta, 2.0)
            weaker = min((gaussian_mu(found, wider) for wider, found in halved if found), default=None)
            facts = {"elsewhere": elsewhere, "weaker_mu": weaker}
    bounds = sum(method.is_bound for one in adversaries for method in one.readings(law))
    return {
        one: OneRunPlan(
            adversary=one.threat_model,
            canaries=canaries,
            delta=delta,
            claimed=epsilon,
            confidence=1 - (1 - CONFIDENCE) / bounds,
            law=law,
            readings=one.readings(law),
            **facts,
        )
        for one in adversaries
    }


def _with_less_noise(
    mechanisms: Sequence[Mechanism], relation: Adjacency, delta: float, ratio: float
) -> tuple[tuple[float, float | None], ...]:
    """Return what is claimed with noise `ratio` times too small, at delta and at a large one, as (delta, epsilon)."""
    weaker = tuple(one.with_noise(one.noise / ratio) for one in mechanisms)
    return _at_wider(weaker, relation, (delta, _WIDER[-1]))


@functools.lru_cache(maxsize=32)
def _at_wider(
    mechanisms: tuple[Mechanism, ...], relation: Adjacency, deltas: tuple[float, ...] = _WIDER
) -> tuple[tuple[float, float | None], ...]:
    """Return what is claimed at other deltas; kept, since the audits of a table share their mechanism."""
    return tuple((d, claimed_epsilon(composed(mechanisms, delta=d), relation)) for d in deltas)


def _crafted(plan: RunPlan, count: int, seed: int) -> Game:
    """Plant canaries with crafted gradients in a run under record protection; refuse (NoGuarantee) other writers."""
    algorithm, config = plan.algorithm, plan.algorithm.config
    if "gradients" not in algorithm.applies or not weight_layers(plan.network):
        if "gradients" in algorithm.applies:
            raise NoGuarantee(
                "the model has no weight matrix whose entries could carry crafted gradients; play the game of single "
                "steps: opusim audit RUN"
            )
        raise NoGuarantee(
            f"trainer.kind = {algorithm.options.kind!r} cannot carry crafted gradients: {_WRITERS}"
        )
    each = 2 * config.group if config.of_users else 1  # a step must take k of a canary's 2 k records
    canaries = Canaries.drawn(
        plan.network,
        count,
        n_records=len(plan.dataset.train),
        replaces=config.relation is Adjacency.REPLACE_ONE,
        seed=seed,
        records=each,
    )
    clip = algorithm.own_clip
    shape = (each * len(canaries.planted), *plan.dataset.train.x.shape[1:])
    blank = torch.zeros(shape, dtype=plan.dataset.train.x.dtype)
    labels = torch.zeros(len(blank), *plan.dataset.train.y.shape[1:], dtype=plan.dataset.train.y.dtype)
    joined = with_records(plan, blank, labels, owners=canary_ids(each, len(blank)))
    observer = EntryObserver(
        plan.network, canaries, config.optimizer, scale=config.divisor / clip, sampler=joined.sampler
    )

    def wrap(writer: PrivateGradients) -> PrivateGradients:
        observer.writer = CraftedGradients(
            writer,
            joined.network,
            canaries,
            clip_norm=clip,
            clipping=algorithm.protection.clipping,
            rows=_rows_of(joined),
        )
        return observer.writer

    relation = config.relation or Adjacency.REPLACE_ONE
    return replace(joined, wrap_writer=wrap), observer, canaries.inside.numpy(), relation


def _planted(plan: RunPlan, count: int, seed: int) -> Game:
    """Plant crafted records in an unprotected run: features of the data's mean and spread, labels at random.

    The claim of photonic DFA is about replacement: in the place of a canary that is out stands another record of the
    same law. That of likelihood ratio training is about adding a record, and a canary that is out is left out.
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
    joined = with_records(plan, chosen.view(-1, *train.x.shape[1:]), y if replaces else y[coins])
    return joined, observer, inside, Adjacency.REPLACE_ONE if replaces else Adjacency.ADD_OR_REMOVE_ONE


def _first_layer_observer(plan: RunPlan, x: Tensor) -> tuple[Observer, bool]:
    """Return what watches an unprotected run for these canaries, and whether its claim replaces records.

    Raises NoGuarantee if a batch's inputs do not span the rows of the first layer's update, or fill them, or the
    trainer is another one.
    """
    network, algorithm, batch = plan.network, plan.algorithm, plan.sampler.expected_batch_size
    quiet = algorithm.leaves_directions
    spans = algorithm.layer_signals == "exact" and isinstance(network, FullyConnected)
    first = weight_layers(network)[:1]
    if not isinstance(network, LayeredNetwork) or not first or first[0][0] or not (quiet or spans):
        raise NoGuarantee(
            f"trainer.kind = {algorithm.options.kind!r} without protection: the attack on one training needs a fully "
            "connected first layer, of a network under bp, dfa, tdfa or pdfa, or of ulr as published with "
            "trainer.remedy = 'extra-noise'; play the game of single steps: opusim audit RUN"
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
    layer: dict[str, Any] = {"weight": weight, "bias": bias, "options": algorithm.config.optimizer}
    if quiet:
        return FirstLayerObserver(network, x, **layer, most_steps=plan.total_steps), False
    inputs = ActivationClipping(**algorithm.options.update_clipping)(
        x, layer=0, depth=network.depth, n_layer=n_outputs
    )
    epoch = -(-(len(plan.dataset.train) + len(x)) // max(int(batch), 1))
    return FirstLayerObserver(network, inputs, **layer, batch_size=math.ceil(batch), most_steps=epoch), True


def with_records(plan: RunPlan, x: Tensor, y: Tensor, owners: Sequence[str] = ()) -> RunPlan:
    """Return the plan with more training records, or users, at the same sampling probability and batch size."""
    train = plan.dataset.train
    joined = replace(
        plan.dataset,
        train=Split(torch.cat([train.x, x.to(train.x.device)]), torch.cat([train.y, y.to(train.y.device)])),
        owners=() if plan.users is None else (*plan.dataset.owners, *owners),
    )
    whole = replace(plan, dataset=joined)
    drawn = joined.train if whole.users is None else whole.users
    return replace(whole, sampler=replace(plan.sampler, n_records=len(drawn)))


def _rows_of(plan: RunPlan) -> Callable[[int], int] | None:
    """Return how many rows run for some that a step draws of users; None of records."""
    protection, group = plan.protection, plan.algorithm.config.group
    if plan.users is None or not isinstance(protection, RecordProtection):
        return None
    physical = protection.physical_batches
    return lambda drawn: drawn if physical.count is None else physical.rows(drawn // group) * group


def canary_ids(each: int, records: int) -> list[str]:
    """Return the IDs of canaries with some records each, one for each record."""
    return [f"canary {number // each}" for number in range(records)]


def audit_private_loop(
    build: Callable[[Callable[..., Any]], PrivateTraining],
    loop: Callable[[PrivateTraining], object],
    *,
    canaries: int | None = None,
    seed: int | None = None,
    delta: float | None = None,
    on_forecast: Callable[[str], None] = print,
    progress: Show = True,
) -> Audit:
    """Run a private loop once with canaries, bound epsilon from their scores, and keep it there as `one-run.json`.

    An independent fair coin puts each canary in or leaves it out. A canary has a crafted gradient at every step, far
    longer than the clip. Sampler, clip, noise and ledger are the loop's own. If `sample_rate` is left out,
    `make_private` computes it, and with it the noise for `target_epsilon`, from a number n of records or users that
    counts the canaries. The result then says in `differs` which numbers were audited; give `sample_rate` as in your
    loop to audit its own::

        def build(plant):
            loader = DataLoader(plant(records), batch_size=64)
            return opusim.make_private(module=model, data_loader=loader, folder="audited", ...)

        found = opusim.audit_private_loop(build, train)

    If users are protected, a canary is a user of 2 k records, of which a step must take k. `build` then calls
    `planted, ids = plant(records, user_ids, k)`, and its loader reads in this process (num_workers=0).

    Args:
        build: Makes module, optimizer, criterion, loader and private loop as for training, in experiment mode and in a
            new folder. It calls the function that it is given on the data set, once, and takes what this returns.
        loop: The user's own loop, to its end, on what `build` returned.
        canaries: m, at least 20; None plants 1,000 and takes as many of them as `audit_one_training` would, or all that
            fit if `make_private` was not given the number of epochs.
        seed: Of coins and canaries, in [0, 2^63); None draws one, which the result keeps.
        delta: Of the bounds; None takes the loop's.
        on_forecast: Told in words, before the loop, what so many canaries can find, if `make_private` was given the
            number of epochs, and which numbers are not those of the loop without canaries.
        progress: Whether to show a bar of the steps, if the loop stated how many it makes; see `opusim.train`.

    Raises:
        ConfigError: There are more canaries than weights.
        ValueError: A number out of range, a loop in release mode or in several parts or processes, or `build` did not
            plant the canaries.
    """
    if canaries is not None:
        checks.integer(canaries=canaries, minimum=FEWEST_CANARIES)
    seed, planned = drawn_seed(seed), canaries or DEFAULT_CANARIES
    # the same coins as `Canaries.drawn` draws
    inside = np.random.default_rng(derive_seed(seed, "canaries")).random(planned) < 0.5
    sizes: list[int] = []
    each = 1

    def plant(records: Any, user_ids: Sequence[Any] | None = None, records_per_user: int = 1) -> Any:
        """Return the records, then those of each canary that is in, blank; with IDs also those of the users."""
        nonlocal each
        each = 1 if user_ids is None else 2 * records_per_user
        sizes.append(len(records))
        blank = Subset(records, [0] * (each * int(inside.sum())))
        if user_ids is None:
            return ConcatDataset([records, blank])
        own = user_ids.tolist() if hasattr(user_ids, "tolist") else user_ids
        return _Noted([records, blank]), [*own, *canary_ids(each, len(blank))]

    private = build(plant)
    checks.instance(PrivateTraining, build=private)
    with private:
        planted: Any = private.data_loader.dataset
        if len(sizes) != 1 or len(planted) != sizes[0] + each * inside.sum():
            raise ValueError(
                "build: must call the function that it is given once, on the data set, and give what this returns to "
                "its loader"
            )
        settings = private.settings
        if settings.mode != "experiment":
            raise ValueError(
                "mode = 'release': an audit must know the batches, which come from the operating system; audit the "
                "loop in mode = 'experiment'"
            )
        if isinstance(planted, _Noted) != (private.data_loader.users is not None):
            raise ValueError(
                "build: must give the function that it is given the IDs of the users and k, if and only if it gives "
                "them to make_private"
            )
        if isinstance(planted, _Noted) and private.data_loader.workers:
            raise ValueError(
                f"num_workers = {private.data_loader.workers}: an audit of users must see which records are read, and "
                "other processes read them; give num_workers=0"
            )
        with preserved_modes(private.module):
            network = AnyModule(private.module, n_inputs=1, only_trained=True)
        room = max((rows * columns for _, _, rows, columns in weight_layers(network)), default=0)
        total, delta = settings.total_steps or 0, settings.target_delta if delta is None else delta
        differs = _computed_anew(
            settings, len(private.data_loader.users or planted), int(inside.sum()), total
        )
        forecast, room = "", room if canaries else max(min(planned, room), FEWEST_CANARIES)
        if total:
            mechanisms = (settings.mechanism.repeated(total),)
            canaries, forecast = _foretold(mechanisms, settings.relation, canaries, room=room, delta=delta)
        canaries = canaries or room
        inside = inside[:canaries]  # the records of other canaries stay blank
        drawn = Canaries.drawn(network, canaries, n_records=sizes[0], replaces=False, seed=seed, records=each)
        observer = GradientObserver(
            network,
            drawn,
            None,
            scale=settings.batch_size / settings.max_grad_norm,
            sampler=private.data_loader.sampler,
        )

        def wrap(writer: PrivateGradients) -> PrivateGradients:
            observer.writer = _Watched(writer, network, drawn, observer, private)
            return observer.writer

        private.wrap_writer(wrap)
        for text in (forecast, differs and f"This audits other numbers than those of your loop: {differs}."):
            if text:
                on_forecast(text)
        started = time.process_time()
        observer.on_start(step=0, total_steps=total)
        with Progress("audit of a private loop", "steps", show=progress if total else False) as bar:
            bar.start(total)
            observer.after_step = bar.advance
            loop(private)
        observer.finish()
        spent = time.process_time() - started
    ledger = read_ledger(private.folder / LEDGER_FILE)
    facts: dict[str, Any] = {"crafted": "gradients", "cpu_s": spent, "differs": differs}
    found = _of_training(observer, inside, settings.relation, ledger, delta=delta, seed=seed, **facts)
    found.keep(Path(private.folder))
    return found


def _computed_anew(settings: PrivacySettings, count: int, canaries: int, steps: int) -> str:
    """Return which numbers of an audited loop count its canaries, and the remedy; empty if none does.

    The calibrated noise depends on n, `count`, by the sampling probability only, so a loop that is given that has its
    own noise. `steps` is 0 if their number is not known.
    """
    if settings.sample_rate != settings.batch_size / count:
        return ""
    unit = "records" if settings.records_per_user is None else "users"
    noise = (
        "z is calibrated to target_epsilon, and all were"
        if settings.is_calibrated
        else "q and the steps were"
    )
    made = f"{steps} steps" if steps else "the steps"
    return (
        f"noise multiplier z = {settings.noise_multiplier:.4g}, q = {settings.sample_rate:.4g}, {made}, of "
        f"which {noise} computed anew for n = {count:,} {unit} with canaries; give sample_rate={settings.batch_size}/"
        f"{count - canaries}, as in your loop"
    )


_STAND_IN = (
    "Module, records and loop are stand-ins of the auditor; sampling, clip, noise, unit and number of steps are those "
    "of the folder that was audited. Your own module, criterion and loop are audited by opusim.audit_private_loop."
)


def audit_private_folder(
    path: str | Path,
    *,
    out: str | Path | None = None,
    canaries: int | None = None,
    seed: int | None = None,
    delta: float | None = None,
    on_forecast: Callable[[str], None] = lambda text: None,
    progress: Show = True,
) -> Audit:
    """Audit a private loop of the auditor's own with the constants of a folder that `make_private` wrote.

    The canaries are records, or users if the folder's loop protects users; see `audit_private_loop`.

    Args:
        path: The folder.
        out: The folder for `one-run.json`, or None for that of the loop. A release needs one outside its folder.
        canaries: m, at least 20; None chooses it as `audit_one_training` does.
        seed: Repeats the audit, in [0, 2^63); None draws one, which the result keeps.
        delta: Of the bounds; None takes the folder's.
        on_forecast: Told in words, before the loop, what so many canaries can find, and how long it takes.
        progress: See `audit_private_loop`.

    Raises:
        RunFolderError: The folder holds no private loop, or its settings were changed; or `out` is missing, or holds
            something else.
        NoGuarantee: No step was paid for yet, or the loop's clipping is adaptive.
        ValueError: A number out of range.
    """
    if canaries is not None:
        checks.integer(canaries=canaries, minimum=FEWEST_CANARIES)
    folder, settings = Path(path), PrivacySettings.stored(Path(path))
    place = audit_place(RunFolder(folder), out, settings.mode)
    content = read_ledger(folder / LEDGER_FILE)
    content.require_paid(f"folder {folder}")
    steps = sum(payment.steps for payment in content.payments)
    if settings.directions is not None:
        raise NoGuarantee(f"folder {folder}: {TAKES_NO_GRADIENTS}")
    require_fixed_bound(settings.clipping)
    canaries, text = _foretold(
        (settings.mechanism.repeated(steps),),
        settings.relation,
        canaries,
        room=max(_COUNTS),
        delta=settings.target_delta if delta is None else delta,
    )
    seed, each = drawn_seed(seed), settings.records_per_user
    own_seed, side = derive_seed(seed, "stand-in"), math.ceil(math.sqrt(canaries))
    count = max(round(settings.batch_size / settings.sample_rate), 2) * (each or 1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, side, generator=generator), torch.zeros(count, dtype=torch.int64)
    same = ("max_grad_norm", "target_delta", "noise_multiplier", "relation", "sample_rate")
    clipping = replace(settings.clipping, layer_norms=None)  # the stand-in has one layer, whose norm is C

    def build(plant: Callable[..., Any]) -> PrivateTraining:
        given, ids = TensorDataset(x, y), None
        if each is None:
            planted = plant(given)
        else:
            planted, ids = plant(given, np.arange(count) // each, each)
        module = nn.Linear(side, side)
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
        return make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(planted, batch_size=settings.batch_size),
            folder=tempfile.mkdtemp(dir=scratch),
            epochs=-(-steps // settings.steps_per_epoch),
            user_ids=ids,
            records_per_user=each,
            seed=own_seed,
            clipping=clipping,
            **{name: getattr(settings, name) for name in same},
        )

    def loop(private: PrivateTraining, steps: int = steps) -> None:
        while private.step < steps:
            for features, labels in private.data_loader:
                private.optimizer.zero_grad()
                private.criterion(private.module(features), labels).backward()
                private.optimizer.step()
                if private.step == steps:
                    break

    with tempfile.TemporaryDirectory(prefix="opusim-audit-") as scratch:
        with build(lambda records, *users: (records, *users[:1]) if users else records) as rehearsed:
            loop(rehearsed, 1)  # sets things up
            started = time.perf_counter()
            loop(rehearsed, 1 + _REHEARSED)
            spent = (time.perf_counter() - started) / _REHEARSED * steps
        on_forecast(f"{text} It takes {steps:,} steps, about {duration(spent)}.")
        found = audit_private_loop(
            build,
            loop,
            canaries=canaries,
            seed=seed,
            delta=delta,
            on_forecast=lambda text: None,
            progress=progress,
        )
    found = replace(found, note=_STAND_IN, stand_in=True, origin=Origin.of(folder))
    found.keep(place)
    return found


class _Noted(ConcatDataset[Any]):
    """Records one after the other, and the numbers of those that were read last, as the loader asked for them."""

    last: Sequence[int] = ()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.last = indices
        return [self[index] for index in indices]


class _Watched(CraftedGradients):
    """Plants the canaries in the batches of a private loop, and shows each written gradient to the observer."""

    def __init__(
        self,
        writer: PrivateGradients,
        network: AnyModule,
        canaries: Canaries,
        observer: GradientObserver,
        private: PrivateTraining,
    ) -> None:
        settings = private.settings
        super().__init__(
            writer, network, canaries, clip_norm=settings.max_grad_norm, clipping=settings.clipping
        )
        self._observer, self._private, self._step = observer, private, 0

    @override
    def seek(self, step: int) -> None:
        super().seek(step)
        self._step = step

    @override
    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        super()._write(parts, records=self._rows(), public_inputs=public_inputs)
        self._observer.on_step(step=self._step + 1)

    def _rows(self) -> Tensor:
        """Return the number of the record in each row of the batch at hand, -1 in rows that only fill it.

        Of users these are the records that the loader read, not those that it should have read.
        """
        loader, padding = self._private.data_loader, self._private.padding
        if not isinstance(loader.dataset, _Noted):
            return loader.sampler.indices(self._step)
        if padding is None:
            return torch.zeros(0, dtype=torch.int64)
        found, drawn = torch.full(padding.shape, -1), ~padding.cpu()
        if bool(drawn.any()):
            found[drawn] = torch.tensor(loader.dataset.last)
        return found
