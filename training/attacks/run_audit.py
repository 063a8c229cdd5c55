"""Auditing a run folder: the membership game on the run as it is configured, next to its controls.

`applicable_attacks` says which attacks a run admits.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from opusim import checks
from opusim.accounting.audit import AuditPlan, audit
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee, NoGuarantee
from opusim.files import make_private_folder, quoted, require_writable_folder
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.base import Attack
from opusim.training.attacks.findings import Audit, Finding, Played, Role
from opusim.training.attacks.games import TwoWorlds, game_of, played
from opusim.training.attacks.replay import (
    AuditedRun,
    MembershipGame,
    NoiselessStep,
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
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import require_kind

ROOM = 16
"""Directions that a batch's inputs must leave free for the row space to tell anything."""


def applicable_attacks(
    run: AuditedRun, plan: RunPlan, noiseless: NoiselessStep[Any] | None, *, batch_size: float
) -> list[Attack]:
    """Return the attacks on a run's updates, the one that needs least knowledge first.

    Args:
        run: The audited run.
        plan: The run as it is played.
        noiseless: The noiseless step, or None if there is none.
        batch_size: Expected number of records in a batch.
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
        groups = [list(plan.network.tensors)]
        if algorithm.layer_signals != "none":
            groups = [list(names) for _, names in groupby(groups[0], lambda name: name.partition(".")[0])]
        if algorithm.layer_signals == "exact" and not protected:
            groups = groups[-1:]
        attacks.append(DifferenceAttack(noiseless, groups=groups))
    return attacks


GAME_TRIALS = 20_000
"""Trials of a game by default; its controls take as many."""
FEWEST_TRIALS = 40
_STEP_TRIALS, _CONTROL_TRIALS = 400, 100
_REHEARSALS = 16
_ERROR = 0.05
"""Probability that any bound on the run is too high, shared by its attacks."""
_CONTROL_NOISE = 4.0
"""Noise multiplier of the controls: its epsilon of 0.93 at delta 1e-5 is below 1.84, which 100 trials can show."""


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
    on_start: Callable[[int], None] = lambda total: None,
    on_trial: Callable[[int], None] = lambda done: None,
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
        trials: Trials of the game on the run, at least 40: by default 400, and its controls take up to 100 each; of a
            game on labels or the last model 20,000, and its controls as many each.
        seed: Repeats the audit, in [0, 2^63), unless its noise comes from the system; None draws one, which the result
            keeps.
        delta: Of the bounds; None takes the run's.
        on_start: Told how many trials there will be.
        on_trial: Called with the number of trials done so far, after each, or after some thousand of a game.

    Raises:
        RunFolderError: There is no run or no checkpoint, the data are others, or the run names user-supplied code and
            `trust_code` is False; or `out` is missing, or holds something else.
        NoGuarantee: No attack applies.
        ConfigError: The optimizer cannot be undone, or data are missing.
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
    trials = trials or (_STEP_TRIALS if game is None else GAME_TRIALS)
    control_trials = min(trials, _CONTROL_TRIALS) if game is None else trials
    on_start(trials + 2 * control_trials)
    done = 0

    def advance(more: int = 1) -> None:
        nonlocal done
        done += more
        on_trial(done)

    with torch_threads(run.plan.algorithm.config.threads):
        if game is not None:
            findings = _of_game(game, stated, trials=trials, seed=seed, delta=delta, on_trials=advance)
        else:
            findings, control = [], record_protected(run.plan, _CONTROL_NOISE)
            for role, plan in ((Role.RUN, run.plan), (Role.PROTECTED, control), (Role.BROKEN, control)):
                count = trials if role is Role.RUN else control_trials
                own: dict[str, Any] = {"trials": count, "seed": derive_seed(seed, "audit", role.value)}
                findings += _of_step(run, plan, role, stated, **own, delta=delta, on_trial=advance)
    release = game is not None and run.plan.mode == "release"
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
        note="The randomness comes from the system, as in the run, so no seed repeats this audit."
        if release
        else "",
    )
    keep(found, place, run)
    return found


def drawn_seed(seed: int | None) -> int:
    """Return the seed of an audit, or draw one for None.

    Raises:
        ValueError: It is not in [0, 2^63).
    """
    seed = secrets.randbits(63) if seed is None else seed
    checks.integer(seed=seed, minimum=0, maximum=2**63 - 1)
    return seed


def keep(found: Audit, place: Path, run: AuditedRun) -> None:
    """Write what was found; of a release run where only its owner may enter."""
    if run.plan.mode == "release":
        make_private_folder(place)
    found.keep(place)


def audit_place(folder: RunFolder, out: str | Path | None) -> Path:
    """Return the folder that keeps the audit of a run.

    Raises:
        RunFolderError: A release run, and no folder outside it; or the folder holds other work.
        ConfigError: The folder cannot be written to.
    """
    out = None if out is None else Path(out)
    if folder.read_config().mode == "release":
        outside = out is not None and not out.resolve().is_relative_to(folder.path.resolve())
        if not outside:
            raise RunFolderError(
                f"run folder {folder.path} is for release, and its audit is not; name a folder outside it "
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
    if plan.algorithm.config.of_users:
        raise NoGuarantee(
            "protection.unit = 'user': the audits of a run plant records; audit users in a private loop of the same "
            "model: opusim.audit_private_loop"
        )
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
    # noise of its own, and public draws that the attacker can repeat
    mode = "experiment" if plan.algorithm.uses_public_randomness else plan.mode
    meant = plan.unchecked(seed=derive_seed(seed, "noise") >> 1, mode=mode)
    # what is proven of one step whose batch is known (q = 1)
    protects = meant.protects == "records"
    known = [mechanism.known_batch() for mechanism in meant.mechanisms] if protects else []
    claim = guarantees(known, delta=delta)[0] if protects else None
    adjacency = stated[0].adjacency if claim is None else claim.adjacency
    played = (without_noise(meant) if role is Role.BROKEN else None) or meant
    batch = meant.sampler.expected_batch_size
    with noiseless_steps(run, meant) as noiseless, replayed_step(run, played) as step:
        # the attacker does not know that the broken run is broken
        attacks = applicable_attacks(run, meant, noiseless, batch_size=batch)
        if not attacks:
            raise NoGuarantee(
                f"{role.value}: no attack applies: the batch of {batch:g} exceeds the first layer's fan-in or width, "
                "and the device is no simulation whose matrix an attacker could know; audit it with smaller batches"
            )
        game = MembershipGame(step, adjacency=adjacency, seed=seed)
        scores = game.scores(
            attacks,
            trials=trials,
            rehearsals=_REHEARSALS,
            strangers=role is Role.RUN,
            on_trial=on_trial,
        )
    found = []
    weaker = with_half_the_noise(known, delta) if role is Role.RUN and claim is not None else []
    for attack, (candidates, strangers) in zip(attacks, scores, strict=True):
        plan_of_audit = AuditPlan(
            threat_model=f"sees {MembershipGame.released}, knows {attack.knows}",
            pair=game.pair,
            delta=delta,
            confidence=1 - _ERROR / len(attacks),
            seed=derive_seed(seed, "halves") >> 1,
        )
        subjects = [(role, candidates, claim)]
        if role is Role.RUN:
            subjects.append((Role.NULL, strangers, None))
        for subject, seen, claimed in subjects:
            result = audit(*seen, plan_of_audit)
            power = power_of(result, claimed, weaker)
            shown: dict[str, Any] = {"figure": attack.figure, "claim": claimed, "power": power}
            found.append(Finding.of(subject, attack.name, seen, result, **shown))
    return found


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
                "power": power_of(one.best, claim, weaker) if role is Role.RUN else None,
            }
            found.append(Finding.of(role, one.adversary.name, (one.first, one.second), one.best, **facts))
    return found
