"""Auditing a run folder: the membership game on the run as it is configured, beside its controls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from accounting.audit import AuditPlan, audit
from accounting.composition import guarantees
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Guarantee
from accounting.ledger import read_ledger
from accounting.record_mechanisms import RecordCentral
from opusim import checks
from opusim.description import parse_description
from opusim.randomness import derive_seed
from training.assembly import (
    Arrays,
    check_torch_device,
    configured_sampler,
    fingerprint,
    in_components,
    load_data,
    moved,
    torch_threads,
)
from training.attacks.base import Attack, Scores, play
from training.attacks.choice import fitting_attacks
from training.attacks.findings import Finding, Role, RunAudit
from training.attacks.membership import MembershipGame
from training.attacks.stage import RunParts, shadowed, staged, without_noise
from training.config.feedback import FeedbackConfig
from training.config.run import RunConfig
from training.data import Dataset
from training.errors import RunFolderError
from training.networks.network import LayerShape
from training.protections.plan import divisor_of
from training.runs.checkpoints import list_checkpoints, read_checkpoint
from training.runs.folder import RunFolder
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
    trials: int = 400,
    seed: int | None = None,
    delta: float | None = None,
    on_start: Callable[[int], None] = lambda total: None,
    on_trial: Callable[[], None] = lambda: None,
) -> RunAudit:
    """Attack a run's records, and keep what was found as `audit.json` in its folder.

    The run itself is not changed. Its trainer is built as training builds it, set back to its newest checkpoint, and
    plays one step a trial on records that the auditor knows, with noise of its own.

    Args:
        path: The run folder.
        data: The records, where the run was trained on a person's own.
        trials: Trials of the game on the run, at least 40; the controls take up to 200 each.
        seed: Repeats the audit, in [0, 2^63) (in experiment mode; a release run's noise comes from the system); None
            draws one, which is kept in the result.
        delta: Of the bounds; None takes the run's.
        on_start: Told how many trials there will be.
        on_trial: Called after each.

    Raises:
        RunFolderError: There is no run or no checkpoint, or the data are others.
        NoGuarantee: The run protects labels, and this game is about records.
        ConfigError: The optimizer cannot be undone, or data are missing.
        ValueError: A number out of range.
    """
    checks.integer(trials=trials, minimum=FEWEST_TRIALS)
    seed = secrets.randbits(63) if seed is None else seed
    checks.integer(seed=seed, minimum=0, maximum=2**63 - 1)
    folder = RunFolder(path)
    parts = read_parts(folder, data)
    stated = read_ledger(folder.ledger_file).guarantees(delta=delta)
    wanted = parts.config.protection.delta if delta is None else delta
    control = protected_config(parts.config)
    subjects = [(Role.RUN, parts.config), (Role.PROTECTED, control), (Role.BROKEN, without_noise(control))]
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
    write_json(folder.audit_file, found.to_json())
    return found


def read_parts(folder: RunFolder, data: Arrays | Dataset | None) -> RunParts:
    """What a run folder says of its run; see `audit_run` for the errors."""
    facts, config = folder.read_facts(), folder.read_config()
    if config.protection.kind.startswith("label"):
        raise NoGuarantee(
            f"protection.kind = {config.protection.kind!r} protects labels and takes the features for public; this "
            "audit plays for whole records: audit a run without protection or with protection.kind=record"
        )
    if not isinstance(config.trainer, FeedbackConfig):
        raise NoGuarantee(
            f"trainer.kind = {config.trainer.kind!r}: this audit plays steps of bp, dfa, tdfa and pdfa alone"
        )
    check_torch_device(config.torch_device)
    checkpoints = list_checkpoints(folder.checkpoints)
    if not checkpoints:
        raise RunFolderError(f"run folder {folder.path} has no checkpoint left; train it anew")
    dataset = in_components(config, load_data(config, data), folder)
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
        n_inputs=facts["network"]["n_inputs"],
        layers=[LayerShape(**layer) for layer in facts["network"]["layers"]],
        checkpoint=checkpoint,
        checkpoint_file=checkpoints[-1],
        progress=checkpoint.step / total,
    )


def protected_config(config: RunConfig) -> RunConfig:
    """The run with records protected by a known noise: what the attacks must not break."""
    options = config.protection
    protection = options.model_copy(
        update={
            "kind": "record",
            "noise_multiplier": _CONTROL_NOISE,
            "epsilon": None,
            "noise": "digital",
            "clip_norm": options.clip,
            "divisor": divisor_of(config),
        }
    )
    return config.model_copy(update={"protection": protection})


def game_claim(config: RunConfig, delta: float) -> Guarantee | None:
    """What is proven of one game on a record-protected run: one step, the record's turn being known (q = 1).

    Args:
        config: The run as it is meant to be played.
        delta: In (0, 1).
    """
    options = config.protection
    if options.kind != "record" or options.noise_multiplier is None:
        return None
    step = RecordCentral(
        noise_multiplier=options.noise_multiplier,
        sampling_probability=1.0,
        clip_norm=options.clip,
        divisor=divisor_of(config),
        device_noise=options.noise == "device",
    )
    return guarantees([step], delta=delta)[0]


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
    meant = protected_config(parts.config) if role is Role.BROKEN else config
    claim = game_claim(meant, delta)
    adjacency = Adjacency.ADD_OR_REMOVE_ONE if claim is not None else stated[0].adjacency
    with _attacks(parts, meant, role) as attacks:
        played_config = config.model_copy(update={"seed": derive_seed(seed, "noise") >> 1})
        with staged(parts, played_config) as stage:
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
            pair = game.pair
    found = []
    for attack, played in zip(attacks, scores, strict=True):
        plan = AuditPlan(
            threat_model=f"sees {MembershipGame.released}, knows {attack.knows}",
            pair=pair,
            delta=delta,
            confidence=1 - _ERROR / len(attacks),
            seed=derive_seed(seed, "halves") >> 1,
        )
        found.append(_finding(role, attack, played.candidates, plan, claim))
        if role is Role.RUN:
            found.append(_finding(Role.NULL, attack, played.strangers, plan, None))
    return found


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
