"""Auditing a run folder: the membership game on the run as it is configured, next to its controls.

`applicable_attacks` says which attacks a run admits.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from opusim import checks
from opusim.accounting.anytime import (
    AnytimePlan,
    audit_anytime,
    games_needed,
    in_coin_order,
    power_within,
    smallest_ratio,
    strength_of,
)
from opusim.accounting.audit import AuditPlan, audit, epsilon_of, lower_bound
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee, NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.one_run import Law, OneRunPlan, audit_one_run
from opusim.files import make_private_folder, quoted, require_writable_folder
from opusim.progress import Progress, Show
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.base import Attack
from opusim.training.attacks.findings import SYSTEM_NOISE, Audit, Finding, Origin, Played, Role
from opusim.training.attacks.games import TwoWorlds, game_of, played
from opusim.training.attacks.replay import (
    AuditedRun,
    MembershipGame,
    NoiselessStep,
    coins,
    noiseless_steps,
    power_of,
    record_protected,
    replayed_step,
    with_half_the_noise,
    without_noise,
)
from opusim.training.attacks.update_attacks import CovarianceAttack, DifferenceAttack, RowSpaceAttack
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Arrays
from opusim.training.engine.plan import RunPlan
from opusim.training.engine.steps import torch_threads
from opusim.training.errors import RunFolderError
from opusim.training.networks.clipping import ActivationClipping
from opusim.training.networks.network import LayerShape
from opusim.training.protections.clipping import RELEASED_COUNTS
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import require_kind

ROOM = 16
"""Directions that a batch's inputs must leave free for the row space to tell anything."""


def applicable_attacks(
    run: AuditedRun, plan: RunPlan, noiseless: NoiselessStep[Any] | None, *, batch_size: float
) -> list[Attack]:
    """Return the attacks on a run's updates as it is played, the one that needs least knowledge first.

    `batch_size` is the expected number of rows in a batch: its records, or k of each of its users.
    """
    algorithm, protected = plan.algorithm, plan.protects != "nothing"
    layers = [LayerShape(**layer) for layer in run.network_facts.get("layers", [])]
    attacks: list[Attack] = []
    spans = False  # whether a batch's inputs span the rows of the first layer's gradient and leave room for others
    if layers:
        first, depth = layers[0], len(layers)
        fan_in = int(run.network_facts["n_inputs"]) + first.bias
        spans = algorithm.layer_signals != "none" and (
            batch_size + ROOM <= fan_in and batch_size <= first.n_outputs
        )
        clipping = ActivationClipping(**algorithm.options.update_clipping)
        if spans:
            attacks.append(RowSpaceAttack(clipping, width=first.n_outputs, depth=depth, bias=first.bias))
        elif algorithm.noises_signals and noiseless is not None and not protected:
            through_clip = algorithm.options.through_clip
            attacks.append(
                CovarianceAttack(noiseless, clipping, through_clip=through_clip, depth=depth, bias=first.bias)
            )
    if noiseless is not None and (protected or not spans):
        # groups of parameters with one noise each: the layers of a feedback or of ulr; without protection only the last
        # layer, whose signal a published feedback leaves without noise
        buffers = plan.network.buffers  # no step of the optimizer moves them
        groups = [[name for name in plan.network.tensors if name not in buffers]]
        if algorithm.layer_signals != "none":
            groups = [list(names) for _, names in groupby(groups[0], lambda name: name.partition(".")[0])]
        if algorithm.layer_signals == "exact" and not protected:
            groups = groups[-1:]
        if plan.protection.clipping.kind == "adaptive":
            groups.append([RELEASED_COUNTS])
        attacks.append(DifferenceAttack(noiseless, groups=groups))
    return attacks


GAME_TRIALS = 20_000
"""Trials of a game by default; its controls take as many."""
FEWEST_TRIALS = 40
_STEP_TRIALS, _MOST_TRIALS, _CONTROL_TRIALS = 400, 2000, 100
"""Trials of a step if nothing finite is claimed, the most that are chosen by power, and those of a control."""
_LEARNING = 1.2
"""Games over those of an attacker who knows the law of its scores from the start."""
_REHEARSALS = 16
_CONTROL_NOISE, _QUIET_CONTROL, _FEW = 4.0, 8.0, 80
"""Noise multiplier of the controls: its epsilon of 0.93 at delta 1e-5 is below 1.84, which 100 trials can show.

Fewer than 80 trials take twice the noise (0.43), since 40 can show 0.6.
"""


def audit_run(
    path: str | Path,
    *,
    data: Arrays | Dataset | None = None,
    model: nn.Module | None = None,
    trust_code: bool = False,
    out: str | Path | None = None,
    trials: int | None = None,
    seed: int | None = None,
    delta: float | None = None,
    on_forecast: Callable[[str], None] = lambda text: None,
    progress: Show = True,
) -> Audit:
    """Attack a run, and keep what was found as `audit.json`.

    A run whose guarantee is about labels or its last model plays the game of `opusim.training.attacks.games` with its
    own protection's code, on records that the auditor crafted. Any other run plays its own steps.

    The run itself is not changed. Its trainer is built as training builds it, set back to its newest checkpoint, and
    plays one step a trial on records that the auditor knows, with noise of its own. A release run's noise comes from
    the system, except for trainers that draw more than that noise (zo, ulr). The attacker is to know their public
    draws, so they are audited with the noise of experiment mode.

    Args:
        path: The run folder.
        data: The records, if the run was trained on user-supplied ones.
        model: A module like the run's, if its folder cannot describe that one.
        trust_code: Whether to execute the user-supplied code that the run names by import path.
        out: The folder for `audit.json`, or None for the run's own. A release run needs one that only its owner may
            enter: no guarantee covers what an attack finds about private records.
        trials: Trials of the game on the run, at least 40. By default as many as find half of the noise with
            probability 0.9, at most 2,000, or 400 if nothing finite is claimed, and its controls take up to 100 each;
            of a game on labels or the last model 20,000, and its controls as many each.
        seed: Repeats the audit, in [0, 2^63), unless its noise comes from the system; None draws one, which the result
            keeps.
        delta: Of the bounds; None takes the run's.
        on_forecast: Told in words, before the first trial, what so many trials can find.
        progress: Whether to show a bar of the trials; see `opusim.train`.

    Raises:
        RunFolderError: There is no run or no checkpoint, the data are others, or the run names user-supplied code and
            `trust_code` is False; or `out` is missing, or holds something else.
        NoGuarantee: No attack applies.
        ConfigError: Data are missing.
        ValueError: A number out of range.
    """
    if trials is not None:
        checks.integer(trials=trials, minimum=FEWEST_TRIALS)
    seed = drawn_seed(seed)
    folder = RunFolder(path)
    place = audit_place(folder, out)
    run = read_run(folder, data, model, trust_code=trust_code)
    stated = folder.read_ledger().guarantees(delta=delta)
    delta = run.plan.protection.options.delta if delta is None else delta
    game = game_of(run.plan)
    if game is None:
        games = _plan_of_step(run, delta)
        trials = trials or _planned_trials(games)
        tossed = coins(derive_seed(seed, "audit", Role.RUN.value), trials)[:, 0]
        on_forecast(forecast(games, tossed))
    else:
        trials = trials or GAME_TRIALS
    control_trials = min(trials, _CONTROL_TRIALS) if game is None else trials
    with torch_threads(run.plan.algorithm.config.threads), Progress("audit", "trials", show=progress) as bar:
        bar.start(trials + 2 * control_trials)
        if game is not None:
            findings = _of_game(game, stated, trials=trials, seed=seed, delta=delta, on_trials=bar.advance)
        else:
            noise = _CONTROL_NOISE if control_trials >= _FEW else _QUIET_CONTROL
            findings, control = [], record_protected(run.plan, noise)
            for role, plan in ((Role.PROTECTED, control), (Role.BROKEN, control), (Role.RUN, run.plan)):
                count = trials if role is Role.RUN else control_trials
                own: dict[str, Any] = {"trials": count, "seed": derive_seed(seed, "audit", role.value)}
                findings += _of_step(run, plan, role, stated, **own, delta=delta, on_trial=bar.advance)
    release = (run.plan if game is not None else _as_played(run.plan, seed)).mode == "release"
    found = Audit(
        findings=tuple(sorted(findings, key=lambda finding: list(Role).index(finding.role))),
        guarantees=tuple(stated),
        played=Played.STEP if game is None else Played.PROTECTION,
        trials=trials,
        control_trials=control_trials,
        seed=seed,
        steps=run.checkpoint.step,
        game=""
        if game is None
        else f"the run's own code for {game.title}, on records that the auditor crafted",
        note=SYSTEM_NOISE if release else "",
    )
    return keep(found, place, folder)


def drawn_seed(seed: int | None) -> int:
    """Return the seed of an audit, or draw one for None; raise ValueError outside [0, 2^63)."""
    seed = secrets.randbits(63) if seed is None else seed
    checks.integer(seed=seed, minimum=0, maximum=2**63 - 1)
    return seed


def keep(found: Audit, place: Path, folder: RunFolder) -> Audit:
    """Write what was found, with the run that was audited; of a release run where only its owner may enter."""
    found = replace(found, origin=Origin.of(folder.path))
    if found.origin is not None and found.origin.mode == "release":
        make_private_folder(place)
    found.keep(place)
    return found


def audit_place(folder: RunFolder, out: str | Path | None, mode: str | None = None) -> Path:
    """Return the folder that keeps the audit of a run, or of a private loop of this mode.

    Raises RunFolderError for a release without a folder outside it, or for a folder of other work, and ConfigError if
    it cannot be written to.
    """
    out = None if out is None else Path(out)
    if (mode or folder.read_config().mode) == "release":
        outside = out is not None and not out.resolve().is_relative_to(folder.path.resolve())
        if not outside:
            raise RunFolderError(
                f"folder {folder.path} is for release, and its audit is not; name a folder outside it "
                f"with out (--out {quoted(folder.path.name)}-audit)"
            )
    if out is None or out.resolve() == folder.path.resolve():
        out = folder.path
    else:
        require_kind(out, "audit")
    require_writable_folder(out)
    return out


def read_run(
    folder: RunFolder,
    data: Arrays | Dataset | None,
    model: nn.Module | None = None,
    *,
    trust_code: bool = False,
) -> AuditedRun:
    """Return the run in a folder, ready to be audited; see `audit_run` for the errors."""
    facts = folder.read_facts()
    folder.require_sealed()
    checkpoints = list_checkpoints(folder.checkpoints)
    if not checkpoints:
        raise RunFolderError(f"run folder {folder.path} has no checkpoint left; train it anew")
    plan = RunPlan.stored(folder, data, model, trust_code=trust_code)
    checkpoint = read_checkpoint(checkpoints[-1])
    return AuditedRun(
        plan=plan,
        network_facts=facts["network"],
        model=plan.network.model,
        checkpoint=checkpoint,
        checkpoint_file=checkpoints[-1],
        progress=checkpoint.step / plan.total_steps,
    )


def _of_step(
    run: AuditedRun,
    plan: RunPlan,
    role: Role,
    stated: Sequence[Guarantee],
    *,
    trials: int,
    seed: int,
    delta: float,
    on_trial: Callable[[], None],
) -> list[Finding]:
    """Play the membership game on the step of a run or of a control, and bound what its attacks found."""
    meant = _as_played(plan, seed)
    known, claim = _claim_of_step(meant, delta)
    adjacency = stated[0].adjacency if claim is None else claim.adjacency
    played = meant
    if role is Role.BROKEN:  # a device's noise hides records too, and is not what the control is about
        played = (without_noise(meant) or meant).with_silent_device()
    # the attacker does not know that the broken run is broken
    with _attacks_on(run, meant) as attacks, replayed_step(run, played) as step:
        if not attacks:
            raise NoGuarantee(
                f"{role.value}: no attack applies: the batch of {_rows(meant):g} exceeds the first layer's fan-in or "
                "width, and the device is no simulation whose matrix an attacker could know; audit it with smaller "
                "batches"
            )
        game = MembershipGame(step, adjacency=adjacency, seed=seed)
        tossed = coins(seed, trials)[:, 0]
        scores = game.scores(
            attacks,
            trials=trials,
            rehearsals=_REHEARSALS,
            strangers=role is Role.RUN,
            on_trial=on_trial,
        )
    found = []
    weaker = with_half_the_noise(known, delta) if role is Role.RUN and claim is not None else []
    law = Law.ANY if claim is None else _law_of_step(known, claim)
    for attack, (candidates, strangers) in zip(attacks, scores, strict=True):
        plan_of_audit = AuditPlan(
            threat_model=f"sees {step.released}, knows {attack.knows}",
            pair=game.pair,
            delta=delta,
            confidence=1 - role.error / len(attacks),
            seed=derive_seed(seed, "halves") >> 1,
        )
        subjects = [(role, candidates, claim)]
        if role is Role.RUN:
            subjects.append((Role.NULL, strangers, None))
        for subject, seen, claimed in subjects:
            plan_of_subject = replace(plan_of_audit, confidence=1 - subject.error / len(attacks))
            result = audit(*seen, plan_of_subject)
            power = power_of(result, claimed, weaker)
            shown: dict[str, Any] = {"figure": attack.figure, "claim": claimed, "power": power}
            if subject is Role.RUN:
                ordered = np.empty(trials)
                ordered[tossed], ordered[~tossed] = seen
                plan_of_games = _plan_of_games(claim, law, len(attacks), delta, attack.centre)
                shown |= read_as_games(ordered, tossed, plan_of_games, power)
            found.append(Finding.of(subject, attack.name, seen, result, **shown))
    return found


def _as_played(plan: RunPlan, seed: int) -> RunPlan:
    """Return a run with noise of its own, and public draws that the attacker can repeat."""
    mode = "experiment" if plan.algorithm.uses_public_randomness else plan.mode
    return plan.unchecked(seed=derive_seed(seed, "noise") >> 1, mode=mode)


def _rows(plan: RunPlan) -> float:
    """Return the expected number of rows in a batch, k of each user."""
    return plan.sampler.expected_batch_size * plan.algorithm.config.group


@contextmanager
def _attacks_on(run: AuditedRun, plan: RunPlan) -> Iterator[list[Attack]]:
    """Yield the attacks on the step of a run as it is played; none if no attack applies."""
    with noiseless_steps(run, plan) as noiseless:
        yield applicable_attacks(run, plan, noiseless, batch_size=_rows(plan))


def _claim_of_step(plan: RunPlan, delta: float) -> tuple[list[Mechanism], Guarantee | None]:
    """Return one step whose batch is known (q = 1), and what is proven of it; nothing if no records are protected."""
    if plan.protects != "records":
        return [], None
    known = [mechanism.known_batch() for mechanism in plan.mechanisms]
    return known, guarantees(known, delta=delta)[0]


def _plan_of_step(run: AuditedRun, delta: float) -> AnytimePlan:
    """Return how the scores of each attack on a run's step are read game by game."""
    known, claim = _claim_of_step(run.plan, delta)
    law = Law.ANY if claim is None else _law_of_step(known, claim)
    with _attacks_on(run, _as_played(run.plan, 0)) as attacks:
        return _plan_of_games(claim, law, max(len(attacks), 1), delta)


def _planned_trials(plan: AnytimePlan) -> int:
    """Return as many trials as find half of the noise with probability 0.9, or the most."""
    if plan.claimed is None:
        return _STEP_TRIALS
    needed = _LEARNING * games_needed(plan, 2.0, most=_MOST_TRIALS)
    return max(_CONTROL_TRIALS, min(math.ceil(needed), _MOST_TRIALS))


def forecast(plan: AnytimePlan, tossed: np.ndarray) -> str:
    """Return in words what trials of a step, of these worlds, can find: by the e-value, and by errors alone."""
    trials, inside = len(tossed), int(tossed.sum())
    # as `audit` splits the scores of each world: the smaller half chooses the threshold
    used = (inside + 1) // 2, (trials - inside + 1) // 2
    bounds = AuditPlan(threat_model="", pair="", delta=plan.delta, confidence=plan.confidence)
    most = f"by errors alone a perfect attack shows epsilon {lower_bound(0, 0, *used, bounds):.2f}"
    if plan.claimed is None:
        return f"Forecast: nothing finite is claimed of a step, and {trials:,} trials find what they find; {most}."
    ratio = smallest_ratio(plan, _learnt(trials))
    found = "not even a sixteenth of the noise"
    if ratio is not None:
        actual = ratio * plan.claimed
        if plan.law is Law.GAUSSIAN:
            actual = epsilon_of(ratio * strength_of(plan.law, plan.claimed, plan.delta), plan.delta)
        found = f"an epsilon {actual / plan.claimed:.1f} times the proven {plan.claimed:.2f} of a step"
        found += f" (noise {ratio:.1f} times too small)" if plan.law is Law.GAUSSIAN else ""
    return (
        f"Forecast: {trials:,} trials find {found} with probability 0.9 by the e-value, if the attack is the best one; "
        f"{most}."
    )


def _learnt(trials: int) -> int:
    """Return how many games an attacker who knows the law of its scores would need in place of so many."""
    return max(1, round(trials / _LEARNING))


def _law_of_step(known: Sequence[Mechanism], claim: Guarantee) -> Law:
    """Return the law of a step whose batch is known: Gaussian if it is Gaussian noise on a sum of all records."""
    if claim.delta == 0 or not claim.is_proven or not math.isfinite(claim.epsilon):
        return Law.ANY
    try:
        sums = [one.as_noise() for one in known]
    except NoGuarantee:
        return Law.ANY
    return Law.GAUSSIAN if all((one.law, one.probability) == ("gaussian", 1.0) for one in sums) else Law.ANY


def _plan_of_games(
    claim: Guarantee | None, law: Law, attacks: int, delta: float, centre: float | None = None
) -> AnytimePlan:
    """Return how the scores of one of some attacks are read game by game."""
    claimed = claim.epsilon if claim is not None and 0 < claim.epsilon < math.inf else None
    confidence = 1 - Role.RUN.error / attacks
    return AnytimePlan(delta=delta, claimed=claimed, law=law, confidence=confidence, centre=centre)


def read_as_games(
    scores: np.ndarray, coins: np.ndarray, plan: AnytimePlan, power: float | None
) -> dict[str, Any]:
    """Return what scores say game by game and as those of canaries, and the power with which one of them refutes.

    `power` is that of the fixed bound at half of the noise.
    """
    read = OneRunPlan(
        adversary="", canaries=len(scores), delta=plan.delta, claimed=plan.claimed, law=plan.law
    )
    if plan.claimed is not None and plan.law is Law.GAUSSIAN:
        power = max(power or 0.0, power_within(plan, 2.0, _learnt(len(scores))))
    enough = 2 <= coins.sum() <= len(coins) - 2
    return {
        "anytime": audit_anytime(scores, coins, plan),
        "beside": audit_one_run(scores, coins, read) if enough else None,
        "power": power,
    }


def _of_game(
    game: TwoWorlds,
    stated: Sequence[Guarantee],
    *,
    trials: int,
    seed: int,
    delta: float,
    on_trials: Callable[[int], None],
) -> list[Finding]:
    """Play a run's game, the same with nothing to find, and the same with much less noise.

    The first of the run's guarantees that is proven is put to the test.
    """
    claim = next((guarantee for guarantee in stated if guarantee.is_proven), None)
    weaker = with_half_the_noise([game.mechanism], delta)
    found = []
    for role, subject, null in (
        (Role.RUN, game, False),
        (Role.NULL, game, True),
        (Role.BROKEN, game.weakened(), False),
    ):
        own = derive_seed(seed, "audit", role.value) >> 1
        results = played(subject, trials=trials, seed=own, delta=delta, null=null, on_trials=on_trials)
        actual = subject.true_epsilon(delta) if role is Role.BROKEN else math.inf
        for one in results:
            facts: dict[str, Any] = {
                "claim": None if null else claim,
                "scope": "run",
                "actual": actual if math.isfinite(actual) else None,
                "estimate": one.estimate,
            }
            if role is Role.RUN:
                plan = _plan_of_games(claim, one.law, len(results), delta)
                games = in_coin_order(one.first, one.second, seed=derive_seed(own, "games"))
                facts |= read_as_games(*games, plan, power_of(one.best, claim, weaker))
            found.append(Finding.of(role, one.adversary.name, (one.first, one.second), one.best, **facts))
    return found
