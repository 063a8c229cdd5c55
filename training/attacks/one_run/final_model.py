"""The game of the final model: many whole trainings, each with or without one crafted record.

The attacker sees only the last weights.

The crafted record is the strongest that the writer of gradients admits without crafted gradients: its features are
R u, where u is the direction in which all other records vary least. So nothing but its own contribution and the noise
moves the first layer's weights along u, and its gradient, which lies almost wholly there, keeps its direction from step
to step. It has a label of the auditor's choice. With worst-case initial weights the first layer is blind along u at the
start (W u = 0), so that the record cannot be learned before it is clipped.

The attacker trains twice itself, without noise, with the record and without it, and reads the released weights along
the difference D of its two models:

    score = <initial - final, D>,   D = (initial - final with) - (initial - final without).

A fair coin for each training makes the scores of all of them those of independent canaries, which `audit_one_run`
reads (theorem 5.2 of Steinke et al. 2023 holds for canaries in separate runs as well).
Sources: worst-case initial weights: Annamalai and De Cristofaro 2024; crafted records: arXiv 2412.01756.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
import torch
from torch import Tensor, nn

from opusim import checks
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, NoGuarantee, from_json
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.one_run import FEWEST_CANARIES
from opusim.files import make_private_folder
from opusim.progress import Progress, Show
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.base import Adversary
from opusim.training.attacks.findings import SYSTEM_NOISE, Audit, Played
from opusim.training.attacks.one_run.audit import CONFIDENCE, audit_of_scores, started_again, with_records
from opusim.training.attacks.run_audit import audit_place, drawn_seed, read_run
from opusim.training.attacks.run_audit import keep as keep_audit
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Arrays
from opusim.training.engine.plan import RunPlan
from opusim.training.engine.session import train_planned
from opusim.training.errors import RunFolderError
from opusim.training.networks.network import FullyConnected
from opusim.training.runs.cluster import connected
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import digest_of, read_json, require_unchanged, sealed, write_json

DEFAULT_TRAININGS = 400
SCORES_FILE = "final-model-scores.json"
"""The scores so far, from which a stopped audit resumes."""
_LENGTH = 32.0
"""R: so long that the first layer holds nearly all of the gradient, so short that its units stay in their range."""
_SHADOW_NOISE = 1e-3
"""Noise multiplier of the attacker's own trainings."""
_KNOWS = "the initial weights, all other records, the crafted record and every setting of the training"
DRAWN = Adversary(name="final model", sees="only the final model", knows=_KNOWS)
WORST_CASE = Adversary(
    name="final model, worst-case initial weights",
    sees="only the final model",
    knows=f"{_KNOWS}; it chose the initial weights",
)
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class FinalModelGame:
    """A run that is trained again and again, with a crafted record or without it.

    Attributes:
        present: The run with the record, from the game's initial weights.
        absent: The run without it, or with the opposite record if the audited relation replaces one.
        direction: D, by the name of the weight, float64.
        adversary: Who attacks.
        mechanisms: What one training releases.
        seed: Of coins and trainings, in [0, 2^63).
    """

    present: RunPlan
    absent: RunPlan
    direction: Weights
    adversary: Adversary
    mechanisms: tuple[Mechanism, ...]
    seed: int

    @classmethod
    def of(cls, plan: RunPlan, *, seed: int, worst_case: bool = True) -> FinalModelGame:
        """Craft the record, choose the initial weights and make the attacker's own two trainings.

        The plan's network holds the initial weights, which a `worst_case` attacker changes. Raises NoGuarantee if the
        run does not protect records, or its network is not fully connected.
        """
        network = plan.network
        if plan.protects != "records" or not isinstance(network, FullyConnected):
            raise NoGuarantee(
                f"trainer.kind = {plan.algorithm.options.kind!r}, protection.kind = "
                f"{plan.protection.options.kind!r}, {type(network).__name__}: the game of the final model plants a "
                "record in a fully connected network with a loss of opusim, under protection.kind = 'record'; play "
                "another: opusim audit RUN --one-run"
            )
        direction = quiet_direction(plan.dataset.train.x)
        own = deepcopy(network)
        if worst_case:
            weight = own.linears[0].weight
            with torch.no_grad():
                blind = direction.to(weight)
                weight -= torch.outer(weight @ blind, blind)
        plan = plan.on_network(own)
        shape = plan.dataset.train.x.shape[1:]
        record = (_LENGTH * direction).to(plan.dataset.train.x).view(1, *shape)
        label = torch.zeros(1, dtype=plan.dataset.train.y.dtype)
        replaces = plan.algorithm.config.relation is Adjacency.REPLACE_ONE
        nothing = torch.zeros(0, *shape)
        absent = with_records(plan, -record if replaces else nothing, label if replaces else label[:0])
        game = cls(
            present=with_records(plan, record, label),
            absent=absent,
            direction={},
            adversary=WORST_CASE if worst_case else DRAWN,
            mechanisms=tuple(mechanism.repeated(plan.total_steps) for mechanism in plan.mechanisms),
            seed=seed,
        )
        # the attacker's own two trainings, without noise
        silent = {"epsilon": None, "noise_multiplier": _SHADOW_NOISE, "noise": "digital"}
        with_it, without = (
            _trained(one.unchecked(protection=silent, mode="experiment").with_silent_device(), seed)
            for one in (game.present, game.absent)
        )
        return replace(game, direction={name: with_it[name] - without[name] for name in with_it})

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; a network travels as its facts and tensors."""
        absent: Any = None
        plans = {name: replace(getattr(self, name), network=absent) for name in ("present", "absent")}
        network = self.present.network
        return {**vars(self), **plans, "facts": network.facts, "tensors": dict(network.tensors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        facts, tensors = state.pop("facts"), state.pop("tensors")
        for name, value in state.items():
            if name in ("present", "absent"):
                network = FullyConnected.from_facts(facts)
                with torch.no_grad():
                    for own, tensor in network.tensors.items():
                        tensor.copy_(tensors[own])
                value = value.on_network(network)
            object.__setattr__(self, name, value)

    def coins(self, trainings: int) -> np.ndarray:
        """Return which trainings have the record, bool, shape (trainings,)."""
        return np.random.default_rng(derive_seed(self.seed, "coins")).random(trainings) < 0.5

    def score(self, number: int, *, inside: bool) -> float:
        """Train once, with the record or without it, and return the final model's score; the number keys the seed."""
        plan = self.present if inside else self.absent
        moved = _trained(plan, derive_seed(self.seed, "training", number) >> 1)
        return math.fsum(float((moved[name] * along).sum()) for name, along in self.direction.items())


def quiet_direction(x: Tensor) -> Tensor:
    """Return the unit direction in which records x, shape (n, ...), have the least mean square, float64, shape (d,)."""
    rows = x.flatten(1).double().cpu()
    return torch.linalg.eigh(rows.t() @ rows).eigenvectors[:, 0]


def _trained(plan: RunPlan, seed: int) -> Weights:
    """Train from the plan's initial weights; return initial less final weights, float64, on the CPU."""
    initial = plan.network.tensors
    own = plan.on_network(deepcopy(plan.network)).unchecked(seed=seed)
    with tempfile.TemporaryDirectory(prefix="opusim-audit-") as scratch:
        train_planned(own, RunFolder(Path(scratch) / "run"))
    final = own.network.tensors
    return {name: (initial[name] - final[name]).detach().double().cpu() for name in initial}


def audit_final_model(
    path: str | Path,
    *,
    data: Arrays | Dataset | None = None,
    model: nn.Module | None = None,
    trust_code: bool = False,
    out: str | Path | None = None,
    trainings: int = DEFAULT_TRAININGS,
    worst_case: bool = True,
    seed: int | None = None,
    delta: float | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    progress: Show = True,
) -> Audit:
    """Train many times as a run was trained, with a crafted record or without it, and attack the final models.

    The result is kept as `final-model.json`, the scores so far as `final-model-scores.json`: an audit that was stopped
    resumes if it is called again with the same options. If it is called with another number of trainings, or at
    another delta, after its outcome was read, it warns: an audit that is repeated until its outcome pleases errs more
    often than a bound tells. Each reading adds its own error, and the result's confidence counts them all
    (`Audit.looks`).

    Args:
        path: The run folder.
        data: The records, if the run was trained on user-supplied ones.
        model: A module like the run's, if its folder cannot describe that one.
        trust_code: Whether to execute the user-supplied code that the run names by import path.
        out: The folder for the files, or None for the run's own. A release run needs one outside its folder.
        trainings: At least 20.
        worst_case: Whether the attacker chooses the initial weights; otherwise they are drawn, and it knows them.
        seed: Repeats the audit, in [0, 2^63), unless its noise comes from the system. None takes that of the kept
            scores, or draws one, which the result keeps.
        delta: Of the bounds; None takes the run's.
        jobs: Trainings at a time, at least 1; each has one thread if there are several.
        cluster: Address of a Dask scheduler whose workers train; None trains on this machine.
        progress: Whether to show a bar of the trainings; see `opusim.train`.

    Raises:
        RunFolderError: There is no run or no checkpoint, the data are others, or the run names user-supplied code and
            `trust_code` is False; or `out` is missing, or holds something else.
        NoGuarantee: The run does not protect records, or its network is not fully connected.
        ConfigError: Data are missing.
        SweepStopped: The cluster cannot be reached or was lost.
        ValueError: A number out of range.
    """
    checks.integer(minimum=FEWEST_CANARIES, trainings=trainings)
    checks.integer(minimum=1, jobs=jobs)
    folder = RunFolder(path)
    place = audit_place(folder, out)
    run = read_run(folder, data, model, trust_code=trust_code)
    if run.plan.mode == "release":
        make_private_folder(place)
    own_delta = run.plan.protection.options.delta
    look = Look(trainings, own_delta if delta is None else delta)
    scores = _Scores(place / SCORES_FILE, worst_case=worst_case, seed=seed, folder=folder, delta=own_delta)
    game = FinalModelGame.of(started_again(run, scores.seed), seed=scores.seed, worst_case=worst_case)
    scores.warn_before(look)
    started = time.process_time()
    with Progress("audit of final models", "trainings", show=progress) as bar:
        bar.start(trainings, done=min(len(scores.found), trainings), at_once=True)

        def keep() -> None:
            scores.write()
            bar.advance(done=len(scores.found))

        play(game, trainings, scores.found, jobs=jobs, cluster=cluster, on_score=keep)
    found = read_scores(game, scores.found[:trainings], delta=look.delta, cpu_s=time.process_time() - started)
    note = SYSTEM_NOISE if run.plan.mode == "release" else ""
    return keep_audit(replace(found, looks=scores.looked(look), note=note), place, folder)


class Look(NamedTuple):
    """One reading of the scores."""

    trainings: int
    delta: float


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The file of scores: looks are numbers of trainings, as older versions kept them, or each with a delta."""

    seed: int
    asked: dict[str, Any]
    scores: list[float]
    looks: list[int | tuple[int, float]] = field(default_factory=list)


class _Scores:
    """The scores of an audit of a run that may have been stopped, in a file.

    A seed of None takes the file's, or draws one; readings that name no delta were made at the run's. Raises
    RunFolderError if the file holds those of another audit, or was changed.
    """

    def __init__(
        self, file: Path, *, worst_case: bool, seed: int | None, folder: RunFolder, delta: float
    ) -> None:
        self._file = file
        self._asked = {
            "worst_case": worst_case,
            "run": str(folder.path.resolve()),
            "configuration": digest_of(folder.config_file.read_bytes()),
        }
        self.found: list[float] = []
        self.looks: list[Look] = []
        """When the outcome was read, in order."""
        if not file.exists():
            self.seed = drawn_seed(seed)
            return
        content = read_json(file)
        try:
            kept = from_json(_Kept, content)
        except (TypeError, ValueError):  # something else
            kept = None
        if kept is None or kept.asked != self._asked or seed not in (None, kept.seed):
            other = (
                f", of seed {kept.seed} and not {seed}; take that seed"
                if kept and seed not in (None, kept.seed)
                else ""
            )
            raise RunFolderError(
                f"{file} holds the scores of another audit{other}; delete it, or choose another --out"
            )
        require_unchanged(file, content, remedy="restore it from a copy, or choose another --out")
        self.seed, self.found = kept.seed, kept.scores
        self.looks = [Look(one, delta) if isinstance(one, int) else Look(*one) for one in kept.looks]

    def warn_before(self, look: Look) -> None:
        """Warn if the scores were read before, but not like this."""
        if not self.looks or look in self.looks:
            return
        together = max(0.0, 1 - (1 - CONFIDENCE) * (len(self.looks) + 1))
        last = self.looks[-1]
        warnings.warn(
            f"{self._file}: the outcome of {last.trainings} trainings was read before, at delta {last.delta:g}; with "
            f"this reading the bounds hold together with confidence {together:.2f} only. For {CONFIDENCE} start anew "
            "in another folder (--out)",
            stacklevel=3,
        )

    def looked(self, look: Look) -> int:
        """Write that the outcome is read; returns how many different readings there are."""
        if look not in self.looks:
            self.looks.append(look)
            self.write()
        return len(self.looks)

    def write(self) -> None:
        """Replace the file of scores."""
        content = {"seed": self.seed, "asked": self._asked, "looks": self.looks, "scores": self.found}
        write_json(self._file, sealed(content), private=True)


def play(
    game: FinalModelGame,
    trainings: int,
    scores: list[float],
    *,
    jobs: int = 1,
    cluster: str | None = None,
    on_score: Callable[[], None] = lambda: None,
) -> None:
    """Append the scores of the trainings that are missing, in their order, on this machine or a Dask cluster."""
    coins = game.coins(trainings)
    missing = range(len(scores), trainings)
    tasks = [joblib.delayed(game.score)(number, inside=bool(coins[number])) for number in missing]
    options = {} if cluster is not None else {"n_jobs": jobs}
    with ExitStack() as stack:
        if cluster is not None:
            stack.enter_context(connected(cluster))
            stack.enter_context(joblib.parallel_config(backend="dask"))
        elif jobs > 1:
            stack.enter_context(joblib.parallel_config(backend="loky", inner_max_num_threads=1))
        for score in joblib.Parallel(batch_size=1, return_as="generator", **options)(tasks):
            scores.append(score)
            on_score()


def read_scores(game: FinalModelGame, scores: Sequence[float], *, delta: float, cpu_s: float = 0.0) -> Audit:
    """Return what the scores of the first trainings, at least 20, say."""
    return audit_of_scores(
        {game.adversary: np.array(scores)},
        {},
        game.coins(len(scores)),
        game.present.algorithm.config.relation or Adjacency.REPLACE_ONE,
        game.mechanisms,
        guarantees(list(game.mechanisms), delta=delta),
        delta=delta,
        seed=game.seed,
        played=Played.FINAL_MODELS,
        crafted="records",
        steps=game.present.total_steps,
        cpu_s=cpu_s,
    )
