"""Auditing a run folder: the membership game on the run as it is configured, beside its controls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from accounting.audit import AuditPlan, audit
from accounting.composition import guarantees
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee
from opusim import checks
from opusim.description.loading import parse_description
from opusim.files import make_private_folder
from opusim.randomness.streams import derive_seed
from training.attacks.applicable import fitting_attacks
from training.attacks.base import Attack, Scores, play
from training.attacks.findings import Finding, Role, RunAudit
from training.attacks.membership import MembershipGame
from training.attacks.replay import RunParts, shadowed, staged
from training.config.run import RunConfig
from training.data import Dataset
from training.engine.algorithm import family_of
from training.engine.assembly import (
    Arrays,
    check_torch_device,
    configured_sampler,
    fingerprint,
    in_components,
    load_data,
    moved,
    torch_threads,
)
from training.errors import RunFolderError
from training.runs.checkpoints import list_checkpoints, read_checkpoint
from training.runs.folder import AUDIT_FILE, RunFolder
from training.runs.locking import require_kind
from training.runs.storage import write_json

FEWEST_TRIALS = 40
_CONTROL_TRIALS = 200
_REHEARSALS = 16
_ERROR = 0.05
"""Probability that any bound on the run is too high, shared by its attacks."""
_CONTROL_NOISE = 4.0
"""Noise multiplier of the controls: its epsilon of 0.93 at delta 1e-5 is low enough for 200 trials to refute it."""


def audit_run(
    path: str | Path,
    *,
    data: Arrays | Dataset | None = None,
    model: nn.Module | None = None,
    out: str | Path | None = None,
    trials: int = 400,
    seed: int | None = None,
    delta: float | None = None,
    on_start: Callable[[int], None] = lambda total: None,
    on_trial: Callable[[], None] = lambda: None,
) -> RunAudit:
    """Attack a run's records, and keep what was found as `audit.json`.

    The run itself is not changed. Its trainer is built as training builds it, set back to its newest checkpoint, and
    plays one step a trial on records that the auditor knows, with noise of its own. A release run's noise comes from
    the system, but for trainers that draw more than that noise (zo, ulr): the attacker is to know what they draw in
    public, so theirs is that of experiment mode.

    Args:
        path: The run folder.
        data: The records, if the run was trained on user-supplied ones.
        model: A module like the run's, where the run was given one that its folder cannot describe.
        out: The folder for `audit.json`; None for the run's own. A release run needs one, which only its owner may
            enter: what an attack finds of private records is covered by no guarantee, and not for release.
        trials: Trials of the game on the run, at least 40; the controls take up to 200 each.
        seed: Repeats the audit, in [0, 2^63), where the noise does not come from the system; None draws one, which is
            kept in the result.
        delta: Of the bounds; None takes the run's.
        on_start: Told how many trials there will be.
        on_trial: Called after each.

    Raises:
        RunFolderError: There is no run or no checkpoint, or the data are others; or `out` is missing, or holds
            something else.
        NoGuarantee: The run protects labels, or releases its last model only, and this game is about records and
            steps.
        ConfigError: The optimizer cannot be undone, or data are missing.
        ValueError: A number out of range.
    """
    checks.integer(trials=trials, minimum=FEWEST_TRIALS)
    seed = secrets.randbits(63) if seed is None else seed
    checks.integer(seed=seed, minimum=0, maximum=2**63 - 1)
    folder = RunFolder(path)
    audit_file = _audit_file(folder, None if out is None else Path(out))
    parts = read_parts(folder, data, model)
    stated = folder.read_ledger().guarantees(delta=delta)
    wanted = parts.config.protection.delta if delta is None else delta
    control = parts.family.record_protected(parts.config, _CONTROL_NOISE)
    subjects = [(Role.RUN, parts.config), (Role.PROTECTED, control), (Role.BROKEN, control)]
    control_trials = min(trials, _CONTROL_TRIALS)
    on_start(trials + 2 * control_trials)
    findings: list[Finding] = []
    with torch_threads(parts.config.threads):
        for role, config in subjects:
            findings += _findings(
                parts,
                config,
                role,
                stated,
                trials=trials if role is Role.RUN else control_trials,
                seed=derive_seed(seed, "audit", role.value),
                delta=wanted,
                on_trial=on_trial,
            )
    found = RunAudit(
        findings=tuple(sorted(findings, key=lambda finding: list(Role).index(finding.role))),
        guarantees=tuple(stated),
        trials=trials,
        control_trials=control_trials,
        seed=seed,
        step=parts.checkpoint.step,
        release=MembershipGame.released,
    )
    if parts.config.mode == "release":
        make_private_folder(audit_file.parent)
    write_json(audit_file, found.to_json())
    return found


def _audit_file(folder: RunFolder, out: Path | None) -> Path:
    """Where the audit of a run is kept.

    Raises:
        RunFolderError: A release run, and no folder outside it; or the folder holds other work.
    """
    if folder.read_config().mode == "release":
        outside = out is not None and not out.resolve().is_relative_to(folder.path.resolve())
        if not outside:
            raise RunFolderError(
                f"run folder {folder.path} is for release, and an audit's figures of private records are not; name a "
                "folder outside it with out (--out FOLDER)"
            )
    if out is None or out.resolve() == folder.path.resolve():
        return folder.audit_file
    require_kind(out, "audit")
    return out / AUDIT_FILE


def read_parts(folder: RunFolder, data: Arrays | Dataset | None, model: nn.Module | None = None) -> RunParts:
    """What a run folder says of its run; see `audit_run` for the errors."""
    facts = folder.read_facts()
    folder.require_sealed()
    config = folder.read_config()
    if config.protection.kind.startswith("label"):
        raise NoGuarantee(
            f"protection.kind = {config.protection.kind!r} protects labels and takes the features for public; this "
            "audit plays for whole records: audit a run without protection or with protection.kind=record"
        )
    if config.protection.kind == "last-iterate":
        raise NoGuarantee(
            "protection.kind = 'last-iterate' is about the last model alone, and this audit shows its attacker every "
            "step: audit a run with --method poisson, whose steps are the same but for the noise"
        )
    if data is None and model is None:
        config, data, model = family_of(config.trainer.kind).own_parts(config)
    check_torch_device(config.torch_device)
    checkpoints = list_checkpoints(folder.checkpoints)
    if not checkpoints:
        raise RunFolderError(f"run folder {folder.path} has no checkpoint left; train it anew")
    dataset = in_components(config, load_data(config, data), folder)
    split = facts["data"].get("split", dataset.split)
    if split != dataset.split:
        raise RunFolderError(
            f"run folder {folder.path} held records out by {split}, and these are held out by {dataset.split}; give "
            "the same data in the same form"
        )
    kept = facts["data"].get("fingerprint")
    if kept is not None and kept != fingerprint(dataset.train):
        raise RunFolderError(f"run folder {folder.path} was trained on other data; give the same again")
    checkpoint = read_checkpoint(checkpoints[-1])
    total = config.epochs * configured_sampler(config, dataset).steps_per_epoch
    description = facts["device"]
    return RunParts(
        config=config,
        dataset=moved(dataset, config.torch_device),
        description=None if description is None else parse_description(str(folder.config_file), description),
        network_facts=facts["network"],
        model=model,
        checkpoint=checkpoint,
        checkpoint_file=checkpoints[-1],
        progress=checkpoint.step / total,
    )


def game_claim(parts: RunParts, config: RunConfig, delta: float) -> Guarantee | None:
    """What is proven of one game on a record-protected run: one step, the record's turn being known (q = 1).

    Args:
        parts: The run.
        config: Its configuration as it is meant to be played.
        delta: In (0, 1).
    """
    if config.protection.kind != "record":
        return None
    sampler = configured_sampler(config, parts.dataset)
    step = parts.family.step_mechanisms(config, parts.network(), sampler, None)
    turn: dict[str, Any] = {"sampling_probability": 1.0}
    known = [replace(mechanism, **turn) for mechanism in step]
    return guarantees(known, delta=delta)[0]


def _findings(
    parts: RunParts,
    config: RunConfig,
    role: Role,
    stated: Sequence[Guarantee],
    *,
    trials: int,
    seed: int,
    delta: float,
    on_trial: Callable[[], None],
) -> list[Finding]:
    """Play one game and bound what its attacks found."""
    meant = _as_played(parts, config, derive_seed(seed, "noise") >> 1)
    claim = game_claim(parts, meant, delta)
    adjacency = stated[0].adjacency if claim is None else claim.adjacency
    played_config = parts.family.without_noise(meant) if role is Role.BROKEN else meant
    with _attacks(parts, meant, role) as attacks, staged(parts, played_config or meant) as stage:
        game = MembershipGame(stage, adjacency=adjacency, seed=seed)
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
    for attack, played in zip(attacks, scores, strict=True):
        plan = AuditPlan(
            threat_model=f"sees {MembershipGame.released}, knows {attack.knows}",
            pair=game.pair,
            delta=delta,
            confidence=1 - _ERROR / len(attacks),
            seed=derive_seed(seed, "halves") >> 1,
        )
        found.append(_finding(role, attack, played.candidates, plan, claim))
        if role is Role.RUN:
            found.append(_finding(Role.NULL, attack, played.strangers, plan, None))
    return found


def _as_played(parts: RunParts, config: RunConfig, seed: int) -> RunConfig:
    """The configuration with noise of its own, and with public draws that the attacker can repeat."""
    mode = "experiment" if parts.family.draws_in_public else config.mode
    return config.model_copy(update={"seed": seed, "mode": mode})


@contextmanager
def _attacks(parts: RunParts, config: RunConfig, role: Role) -> Iterator[list[Attack]]:
    """The attacks on a run as it is meant to be; the attacker of the broken one does not know that it is broken."""
    batch = configured_sampler(config, parts.dataset).expected_batch_size
    with shadowed(parts, config) as shadow:
        attacks = fitting_attacks(parts, config, shadow, batch_size=batch)
        if not attacks:
            raise NoGuarantee(
                f"{role.value}: no attack fits: the batch of {batch:g} exceeds the first layer's fan-in or width, and "
                "the device is no simulation whose matrix an attacker could know; audit it with smaller batches"
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
    )
