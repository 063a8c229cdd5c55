"""Auditing a run folder: the membership game on the run as it is configured, next to its controls.

`applicable_attacks` says which attacks a run admits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from accounting.audit import AuditPlan, audit
from accounting.composition import guarantees
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee
from opusim import checks
from opusim.files import make_private_folder, quoted, require_writable_folder
from opusim.randomness.streams import derive_seed
from training.attacks.base import Attack, Scores, play
from training.attacks.controls import power_of, record_protected, with_half_the_noise, without_noise
from training.attacks.findings import SCHEMA_VERSION, Curve, Finding, Role, RunAudit
from training.attacks.games.base import TwoWorlds
from training.attacks.games.of_run import GAME_TRIALS, findings_of, game_of
from training.attacks.replay import (
    AuditedRun,
    MembershipGame,
    NoiselessStep,
    noiseless_steps,
    replayed_step,
)
from training.attacks.update_attacks import CovarianceAttack, DifferenceAttack, RowSpaceAttack
from training.data import Dataset
from training.engine.algorithm import Arrays
from training.engine.plan import RunPlan
from training.engine.steps import torch_threads
from training.errors import RunFolderError
from training.feedback.config import FeedbackConfig, PdfaConfig
from training.networks.clipping import ActivationClipping
from training.networks.network import LayerShape
from training.runs.checkpoints import list_checkpoints, read_checkpoint
from training.runs.folder import AUDIT_FILE, RunFolder
from training.runs.storage import require_kind, write_record
from training.ulr.config import UlrConfig

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
    options, protected = plan.config.trainer, plan.config.protection.protects != "nothing"
    layers = [LayerShape(**layer) for layer in run.network_facts.get("layers", [])]
    attacks: list[Attack] = []
    spans = _spans(run, options, layers, batch_size)
    if spans:
        first = layers[0]
        clipping = update_clipping(options)
        attacks.append(RowSpaceAttack(clipping, width=first.n_outputs, depth=len(layers), bias=first.bias))
    elif layers and noiseless is not None and not protected and _noised_readings(options):
        attacks.append(_covariance(options, layers, noiseless))
    if noiseless is not None and (protected or not spans):
        groups = parameter_groups(list(plan.network.tensors), plan)
        attacks.append(DifferenceAttack(noiseless, groups=groups))
    return attacks


def parameter_groups(names: Sequence[str], plan: RunPlan) -> list[list[str]]:
    """Return the parameters that the difference attack looks at, in groups of one noise each.

    A group is a layer of a feedback or of ulr. Without protection it is only the last layer, whose signal a published
    feedback leaves without noise. All parameters of other trainers form one group.

    Args:
        names: Of the parameters, "layer1.weight", ... for networks of layers.
        plan: The run.
    """
    options = plan.config.trainer
    if not isinstance(options, FeedbackConfig | UlrConfig):
        return [list(names)]
    layers = dict.fromkeys(name.partition(".")[0] for name in names)
    groups = [[name for name in names if name.partition(".")[0] == layer] for layer in layers]
    published = isinstance(options, FeedbackConfig) and plan.config.protection.protects == "nothing"
    return groups[-1:] if published else groups


def update_clipping(options: object) -> ActivationClipping:
    """Return what an update does to the activations that enter it."""
    if not isinstance(options, FeedbackConfig):
        return ActivationClipping()
    return ActivationClipping(
        tau_h_max=options.tau_h_max,
        tau_h_min=options.tau_h_min,
        layers=options.clipped_layers,
        width=options.clip_width,
    )


def _spans(run: AuditedRun, options: object, layers: Sequence[LayerShape], batch_size: float) -> bool:
    """Return whether a batch's inputs span the rows of the first layer's gradient and leave room for others."""
    if not layers or not isinstance(options, FeedbackConfig | UlrConfig):
        return False
    fan_in, width = int(run.network_facts["n_inputs"]) + layers[0].bias, layers[0].n_outputs
    return batch_size + ROOM <= fan_in and batch_size <= width


def _noised_readings(options: object) -> bool:
    """Return whether every hidden layer's signal has noise of one standard deviation, before the slope."""
    if not isinstance(options, FeedbackConfig):
        return False
    if isinstance(options, PdfaConfig):
        return options.encoding == "ternary"
    return options.feedback_matrix and options.digital_sigma > 0


def _covariance(
    options: object, layers: Sequence[LayerShape], noiseless: NoiselessStep[Any]
) -> CovarianceAttack:
    through_clip = isinstance(options, FeedbackConfig) and options.through_clip
    return CovarianceAttack(
        noiseless,
        update_clipping(options),
        through_clip=through_clip,
        depth=len(layers),
        bias=layers[0].bias,
    )


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
) -> RunAudit:
    """Attack a run, and keep what was found as `audit.json`.

    A run whose guarantee is about labels or its last model plays the game of `training.attacks.games` with its own
    protection's code, on records that the auditor crafted. Any other run plays its own steps.

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
    seed = secrets.randbits(63) if seed is None else seed
    checks.integer(seed=seed, minimum=0, maximum=2**63 - 1)
    folder = RunFolder(path)
    place = audit_place(folder, None if out is None else Path(out))
    run = read_run(folder, data, model, trust_code=trust_code)
    config = run.plan.config
    stated = folder.read_ledger().guarantees(delta=delta)
    delta = config.protection.delta if delta is None else delta
    game = game_of(run.plan)
    if game is not None:
        found = _played_game(
            run, game, stated, trials=trials, seed=seed, delta=delta, on_start=on_start, on_trial=on_trial
        )
        return _kept(found, place, private=config.mode == "release")
    trials = _STEP_TRIALS if trials is None else trials
    control = record_protected(run.plan, _CONTROL_NOISE)
    subjects = [(Role.RUN, run.plan), (Role.PROTECTED, control), (Role.BROKEN, control)]
    control_trials = min(trials, _CONTROL_TRIALS)
    on_start(trials + 2 * control_trials)
    done = count(1)
    findings: list[Finding] = []
    with torch_threads(config.threads):
        for role, plan in subjects:
            findings += _findings(
                run,
                plan,
                role,
                stated,
                trials=trials if role is Role.RUN else control_trials,
                seed=derive_seed(seed, "audit", role.value),
                delta=delta,
                on_trial=lambda: on_trial(next(done)),
            )
    found = RunAudit(
        findings=tuple(sorted(findings, key=lambda finding: list(Role).index(finding.role))),
        guarantees=tuple(stated),
        trials=trials,
        control_trials=control_trials,
        seed=seed,
        step=run.checkpoint.step,
        release=MembershipGame.released,
    )
    return _kept(found, place, private=config.mode == "release")


def _played_game(
    run: AuditedRun,
    game: TwoWorlds,
    stated: Sequence[Guarantee],
    *,
    trials: int | None,
    seed: int,
    delta: float,
    on_start: Callable[[int], None],
    on_trial: Callable[[int], None],
) -> RunAudit:
    """Audit a run by a game of two worlds."""
    trials = GAME_TRIALS if trials is None else trials
    on_start(3 * trials)

    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        on_trial(done)

    with torch_threads(run.plan.config.threads):
        findings = findings_of(game, stated, trials=trials, seed=seed, delta=delta, on_trials=advance)
    release = run.plan.config.mode == "release"
    return RunAudit(
        findings=tuple(findings),
        guarantees=tuple(stated),
        trials=trials,
        control_trials=trials,
        seed=seed,
        step=run.checkpoint.step,
        release=game.adversaries[0].sees,
        game=f"the run's own code for {game.title}, on records that the auditor crafted",
        note="The randomness comes from the system, as in the run, so no seed repeats this audit."
        if release
        else "",
    )


def _kept(found: RunAudit, place: Path, *, private: bool) -> RunAudit:
    """Write the findings; those of a release run where only their owner may enter."""
    if private:
        make_private_folder(place)
    write_record(place / AUDIT_FILE, found, SCHEMA_VERSION)
    return found


def audit_place(folder: RunFolder, out: Path | None) -> Path:
    """Return the folder that keeps the audit of a run.

    Raises:
        RunFolderError: A release run, and no folder outside it; or the folder holds other work.
        ConfigError: The folder cannot be written to.
    """
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
    checkpoint = read_checkpoint(checkpoints[-1])
    return AuditedRun(
        plan=plan,
        network_facts=facts["network"],
        model=plan.network.model,
        checkpoint=checkpoint,
        checkpoint_file=checkpoints[-1],
        progress=checkpoint.step / plan.total_steps,
    )


def game_claim(plan: RunPlan, delta: float) -> Guarantee | None:
    """Return what is proven of one game on a record-protected run: one step, whose batch is known (q = 1).

    Args:
        plan: The run as it is meant to be played.
        delta: In (0, 1).

    Raises:
        NoGuarantee: A mechanism does not say what is proven if the batch is known.
    """
    if plan.config.protection.protects != "records":
        return None
    return guarantees([mechanism.known_batch() for mechanism in plan.mechanisms], delta=delta)[0]


def _findings(
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
    """Play one game and bound what its attacks found."""
    meant = _as_played(plan, derive_seed(seed, "noise") >> 1)
    claim = game_claim(meant, delta)
    adjacency = stated[0].adjacency if claim is None else claim.adjacency
    played = (without_noise(meant) if role is Role.BROKEN else None) or meant
    with _attacks(run, meant, role) as attacks, replayed_step(run, played) as step:
        game = MembershipGame(step, adjacency=adjacency, seed=seed)
        scores = play(
            game,
            attacks,
            trials=trials,
            seed=seed,
            rehearsals=_REHEARSALS,
            strangers=role is Role.RUN,
            on_trial=on_trial,
        )
    found = []
    weaker = _with_half_the_noise(meant, delta) if role is Role.RUN and claim is not None else []
    for attack, own in zip(attacks, scores, strict=True):
        plan_of_audit = AuditPlan(
            threat_model=f"sees {MembershipGame.released}, knows {attack.knows}",
            pair=game.pair,
            delta=delta,
            confidence=1 - _ERROR / len(attacks),
            seed=derive_seed(seed, "halves") >> 1,
        )
        one = _finding(role, attack, own.candidates, plan_of_audit, claim)
        found.append(replace(one, power=power_of(one.result, claim, weaker)))
        if role is Role.RUN:
            found.append(_finding(Role.NULL, attack, own.strangers, plan_of_audit, None))
    return found


def _with_half_the_noise(plan: RunPlan, delta: float) -> list[tuple[float, float]]:
    """Return what is proven of one step whose batch is known, with half of its noise."""
    return with_half_the_noise([mechanism.known_batch() for mechanism in plan.mechanisms], delta)


def _as_played(plan: RunPlan, seed: int) -> RunPlan:
    """Return the run with noise of its own, and with public draws that the attacker can repeat."""
    mode = "experiment" if plan.algorithm.uses_public_randomness else plan.config.mode
    return plan.unchecked(seed=seed, mode=mode)


@contextmanager
def _attacks(run: AuditedRun, plan: RunPlan, role: Role) -> Iterator[list[Attack]]:
    """Yield the attacks on a run as it is meant to be; the attacker does not know that the broken one is broken."""
    batch = plan.sampler.expected_batch_size
    with noiseless_steps(run, plan) as noiseless:
        attacks = applicable_attacks(run, plan, noiseless, batch_size=batch)
        if not attacks:
            raise NoGuarantee(
                f"{role.value}: no attack applies: the batch of {batch:g} exceeds the first layer's fan-in or width, "
                "and the device is no simulation whose matrix an attacker could know; audit it with smaller batches"
            )
        yield attacks


def _finding(role: Role, attack: Attack, scores: Scores, plan: AuditPlan, claim: Guarantee | None) -> Finding:
    return Finding(
        role=role,
        attack=attack.name,
        members=attack.figure(float(np.median(scores.first))),
        others=attack.figure(float(np.median(scores.second))),
        auc=scores.auc,
        result=audit(scores.first, scores.second, plan),
        claim=claim,
        curve=Curve.of(scores.first, scores.second),
    )
