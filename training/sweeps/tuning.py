"""A private search: train K ~ Poisson(m) trials of a protected run, and keep the best with its score.

A trial's model protects the training records by the guarantee of its run. Its score protects the held-out records: it
is the number of them that the model classifies rightly, which one record changes by at most 1, plus N(0, 1 / mu^2),
exactly rounded, over a public number. No record is in both sets. `opusim.accounting.mechanisms.selection` prices the
choice, and gives trials and scores the least noise that keeps the whole search within its epsilon.

**Every search is paid for before its number of trials is drawn.** A stopped search resumes without a second payment as
long as its `tuning.json` exists: the draw stands, finished trials keep their scores, and an unfinished trial resumes
from its own checkpoint, so that the search has one result. Without that file the draw is lost, and the next search is a
second one. It is refused if the first one left trials or a result, and paid for otherwise.

The folder holds `tuning.json` (the trials drawn and their scores so far), the ledger, a run folder for each trial, and
finally `best/` and `result.json`. In release mode only the best trial and its score are kept. The guarantee does not
cover the number of trials or the other trials, so they are removed.

Each trial is a draw from the grid of `--choose`, made before any data are read.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opusim.accounting.guarantee import BudgetExceeded, Guarantee, LedgerCorrupt
from opusim.accounting.ledger import LEDGER_FILE, Ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.selection import PrivateSelection, priced_search
from opusim.description.section import flat, parse_setting
from opusim.errors import ConfigError
from opusim.files import make_folder, write_file
from opusim.randomness.streams import derive_seed, noise_stream
from opusim.training.config.run import RunConfig, load_config
from opusim.training.data import Dataset
from opusim.training.engine.plan import RunPlan, default_inputs, for_this_machine, load_data, with_maps
from opusim.training.engine.session import train
from opusim.training.errors import RunFolderError
from opusim.training.runs.checkpoints import adopt_ledger
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import Run, evaluate_split, load_run
from opusim.training.runs.storage import (
    LOCK_FILE,
    only_writer,
    read_record,
    require_kind,
    sealed,
    write_json,
    write_record,
)

STATE_FILE = "tuning.json"
SCHEMA_VERSION = 2
OnTrial = Callable[[int, int], None]
_TUNABLE = ("trainer", "model", "optimizer", "sampler", "protection", "epochs")
_FIXED = (
    "trainer.kind",
    *(f"protection.{key}" for key in ("kind", "epsilon", "delta", "noise_multiplier", "relation", "noise")),
)
"""Keys that all trials of a search share."""
_PAYMENT = "search"
"""Name of a search's payment in the ledger."""
_LEDGER_FILES = (LEDGER_FILE, "ledger.head")
_LEFT_BY_KILLED_START = {*_LEDGER_FILES, ".ledger.head.partial", f".{STATE_FILE}.partial", LOCK_FILE}
"""Files that a search leaves if it is killed before it draws any trial."""
_SECOND_SEARCH = "searching again is a second search and costs again"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Settings "key=value" of a search's trials, maybe none; their seeds' source, None in release mode."""

    trials: tuple[tuple[str, ...], ...]
    seed: int | None


def parse_choices(lines: Sequence[str]) -> dict[str, list[str]]:
    """Turn lines such as "trainer.clip=0.35,0.5" into values by key; raise ConfigError for other lines."""
    choices: dict[str, list[str]] = {}
    for line in lines:
        key, _, text = line.partition("=")
        key, values = key.strip(), [value.strip() for value in text.split(",") if value.strip()]
        if not key or not values or key in choices:
            raise ConfigError("--choose", line, "must be KEY=VALUE,VALUE,... with each key once")
        if key.split(".")[0] not in _TUNABLE or key in _FIXED:
            raise ConfigError(
                "--choose",
                key,
                f"cannot be chosen by a search; choose keys of {', '.join(_TUNABLE)}, except {', '.join(_FIXED)}",
            )
        for value in values:
            if list(flat(parse_setting(f"{key}={value}"))) != [key]:
                raise ConfigError(
                    "--choose", key, "is a section, not one key; choose among values of its keys"
                )
        choices[key] = values
    return choices


def draw_trials(choices: Mapping[str, Sequence[str]], mean: float, *, seed: int | None) -> Draw:
    """Draw K ~ Poisson(mean) trials, each with every key's value drawn uniformly and independently."""
    generator = np.random.default_rng(None if seed is None else derive_seed(seed, "tuning"))
    count = int(generator.poisson(mean))
    trials = tuple(
        tuple(f"{key}={values[int(generator.integers(len(values)))]}" for key, values in choices.items())
        for _ in range(count)
    )
    return Draw(trials=trials, seed=seed)


def best_of(scores: Mapping[int, float]) -> int:
    """Return the number of the trial with the highest score.

    Scores on a grid may tie. Trials are independent and have one law, so the first of equal ones has the law of one
    chosen among them at random: that of a continuous score, which the theorem requires.
    """
    return max(scores, key=lambda number: scores[number])


def noisy_score(right: int, n_records: float, mu: float, *, mode: str, seed: int) -> float:
    """Return (right + N(0, 1 / mu^2)) / n, the noisy number exactly rounded: mu-GDP in the held-out records.

    `right` held-out records are classified rightly; one record changes it by at most 1. n is public.
    """
    noise = noise_stream(mode, seed, "score-noise").rounded(1, 1 / mu)
    return float(noise.added_to(torch.tensor([float(right)]))) / n_records


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        run: The best trial; None if no trial was drawn.
        score: Its noised accuracy on held-out records.
        settings: Its settings, "key=value" each.
        guarantee: Guarantee of all searches in this folder.
        searches: Number of these searches.
        trials: Number of trials; None in release mode, whose guarantee does not cover the number.
    """

    run: Run | None
    score: float | None
    settings: tuple[str, ...]
    guarantee: Guarantee
    searches: int
    trials: int | None


@dataclass(kw_only=True)
class SearchState:
    """Progress of a search; the fields are the keys of its JSON file.

    Attributes:
        asked: Digest of the configuration, choices and mean number of trials.
        payment: Number of the ledger's payment that this search rests on, from 1.
        draw: The trials, drawn after that payment.
        started: Numbers of the trials whose training was started.
        scores: Noised score of each finished trial, by number.
    """

    asked: Mapping[str, Any]
    payment: int
    draw: Draw
    started: list[int]
    scores: dict[int, float]

    def write(self, folder: Path) -> None:
        """Replace the state in a search folder."""
        write_record(folder / STATE_FILE, self, SCHEMA_VERSION)

    @classmethod
    def read(cls, folder: Path) -> SearchState | None:
        """Read the state in a search folder, or return None; raise RunFolderError if it was changed."""
        file = folder / STATE_FILE
        if not file.exists():
            return None
        remedy = "restore it from a copy, or finish the search with the opusim that started it"
        return read_record(file, SearchState, SCHEMA_VERSION, what="the state of a search", remedy=remedy)


class Search:
    """A search in its folder, started or resumed by `run`.

    Args:
        config: Configuration of all trials, with a protection and the protection.epsilon of the whole search.
        choices: Values to choose from, by key.
        mean: Expected number of trials m, above 0.
        folder: The folder of the search; if it holds the same search, that search is resumed.

    Raises:
        ConfigError: The configuration protects nothing, predicts no classes or holds no records out, or a choice is
            wrong.
        NoGuarantee: No trial can be private enough for epsilon, or no theorem covers one of the choices.
        RunFolderError: The folder holds other work, or another search.
    """

    def __init__(
        self, config: RunConfig, choices: Mapping[str, Sequence[str]], *, mean: float, folder: Path
    ) -> None:
        _require_searchable(config)
        self._folder, self._choices = folder, {key: list(values) for key, values in choices.items()}
        self._asked = {"config": config.digest(), "choices": self._choices, "mean": mean}
        require_kind(folder, "search")
        self._check_asked(SearchState.read(folder))
        self._config = config
        self._selection, self._trials = priced_trials(config, self._choices, mean)

    def run(self, on_trial: OnTrial | None = None) -> SearchResult:
        """Pay for the search and draw its trials, or resume it; train the missing trials and keep the best.

        `on_trial` is called with the number of finished trials and of all trials, first with 0, which are not for
        release. Raises FolderBusy if another process is searching in this folder, and RunFolderError if it holds other
        work, another search, or one that was changed.
        """
        release = self._config.mode == "release"
        with only_writer(self._folder, "search folder", private=release):
            require_kind(self._folder, "search")
            state, guarantee, searches = self._paid()
            trials = len(state.draw.trials)
            if on_trial is not None:
                on_trial(0, trials)
            for number in range(trials):
                if number not in state.scores:
                    state.scores[number] = self._score(state, number)
                    state.write(self._folder)
                if on_trial is not None:
                    on_trial(number + 1, trials)
            run, score, settings = self._keep_best(state)
        return SearchResult(
            run=run,
            score=score,
            settings=settings,
            guarantee=guarantee,
            searches=searches,
            trials=None if release else trials,
        )

    def _check_asked(self, state: SearchState | None) -> None:
        if state is not None and state.asked != self._asked:
            raise RunFolderError(
                f"search folder {self._folder} holds another search; choose an empty folder, or repeat its options"
            )

    def _paid(self) -> tuple[SearchState, Guarantee, int]:
        """Return the search to run or resume, paid for, with the guarantee of all searches here and their number."""
        state = SearchState.read(self._folder)
        self._check_asked(state)
        if state is None:  # no earlier search, and no other files
            others = sorted({path.name for path in self._folder.iterdir()} - _LEFT_BY_KILLED_START)
            if any(name.startswith("trial-") or name in ("best", "result.json") for name in others):
                raise RunFolderError(
                    f"search folder {self._folder} holds the results of a search, but its {STATE_FILE} is missing; "
                    f"restore that file, or choose an empty folder: {_SECOND_SEARCH}"
                )
            if others:
                raise RunFolderError(
                    f"search folder {self._folder} holds other files ({', '.join(others[:3])}); choose an empty folder"
                )
        else:  # a state older than the result would train and score trials a second time
            for name in ("best", "result.json"):
                lacks = state.scores.keys() != set(range(len(state.draw.trials)))
                if (self._folder / name).exists() and lacks:
                    raise RunFolderError(
                        f"{self._folder / STATE_FILE} is older than {name}: it lacks scores of that search; restore "
                        f"the newest one, or choose an empty folder: {_SECOND_SEARCH}"
                    )
        mode, delta = self._config.mode, self._config.protection.delta
        with Ledger(self._folder / LEDGER_FILE, mode=mode, delta=delta, enforced=True) as ledger:
            if any(payment.name != _PAYMENT for payment in ledger.content.payments):
                raise RunFolderError(
                    f"search folder {self._folder} holds the ledger of a run; choose an empty folder"
                )
            if state is None:
                ledger.pay_once(_PAYMENT, self._selection)  # release mode: a new payment each time
                seed = self._config.seed if mode == "experiment" else None
                payment = len(ledger.content.payments)
                draw = draw_trials(self._choices, self._selection.mean, seed=seed)
                state = SearchState(asked=self._asked, payment=payment, draw=draw, started=[], scores={})
                state.write(self._folder)
            searches = len(ledger.content.payments)
            if state.payment > searches:
                raise RunFolderError(
                    f"{self._folder / LEDGER_FILE} does not hold the payment of this search; restore it from a copy"
                )
            if ledger.content.payments[state.payment - 1].mechanisms != (self._selection,):
                raise RunFolderError(
                    f"search folder {self._folder} was paid for at another price than this opusim asks; finish it with "
                    "the opusim that started it"
                )
            return state, ledger.guarantees()[0], searches

    def _score(self, state: SearchState, number: int) -> float:
        """Train or resume a trial, and score it."""
        folder = RunFolder(self._folder / f"trial-{number}")
        if number in state.started and not folder.path.exists():
            raise RunFolderError(
                f"{folder.path} is missing, although its training was started; restore it, or choose an empty folder: "
                f"{_SECOND_SEARCH}"
            )
        make_folder(folder.path)
        if number not in state.started:
            state.started.append(number)
            state.write(self._folder)
        trial = self._trials[state.draw.trials[number]]
        source = state.draw.seed  # None in release mode, where nothing is seeded
        seed = 0 if source is None else derive_seed(source, "trial", number) >> 1
        if not folder.started:
            run = train(trial.config.replaced(seed=seed), folder=folder.path)
        else:
            if not folder.finished:
                try:
                    train(folder=folder.path, resume=True)
                except BudgetExceeded:  # before its last step, after a kill: the trial has the model so far
                    if not folder.finished:
                        raise
            run = load_run(folder.path)
        _require_within(run, trial.whole)
        held_out = with_maps(run.config, _records(run.config), folder).validation
        right = 0
        if len(held_out):
            right = round(len(held_out) * evaluate_split(run.model, held_out, run.config.loss)["accuracy"])
        return noisy_score(right, trial.held_out, self._selection.mu, mode=run.config.mode, seed=seed)

    def _keep_best(self, state: SearchState) -> tuple[Run | None, float | None, tuple[str, ...]]:
        """Copy the best trial to `best` with the ledger of the search, since its own epsilon ignores the choice."""
        result_file, best = self._folder / "result.json", self._folder / "best"
        if not state.scores:
            write_json(result_file, sealed({"schema_version": 1, "score": None, "settings": []}))
            return None, None, ()
        winner = best_of(state.scores)
        if not best.exists():  # copy it, completely or not at all
            partial, trial = self._folder / "best.partial", self._folder / f"trial-{winner}"
            if not trial.is_dir():
                raise RunFolderError(
                    f"{best} and {trial} are missing; restore one of them, or choose an empty folder: "
                    f"{_SECOND_SEARCH}"
                )
            shutil.rmtree(partial, ignore_errors=True)
            for path in sorted(trial.rglob("*")):
                if path.is_file() and path.name not in (*_LEDGER_FILES, LOCK_FILE):
                    write_file(partial / path.relative_to(trial), path.read_bytes())
            adopt_ledger(RunFolder(partial), self._folder / LEDGER_FILE)
            partial.rename(best)
        score, settings = state.scores[winner], state.draw.trials[winner]
        write_json(result_file, sealed({"schema_version": 1, "score": score, "settings": list(settings)}))
        if self._config.mode == "release":
            for number in state.scores:
                shutil.rmtree(self._folder / f"trial-{number}", ignore_errors=True)
            state.draw, state.started = Draw(trials=(settings,), seed=None), [0]
            state.scores = {0: score}
            state.write(self._folder)
        return load_run(best), score, settings


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial's run before it is seeded.

    Attributes:
        config: Its configuration, with the noise or the epsilon that the search leaves it.
        whole: The mechanism that bounds its whole training.
        held_out: The public number that its score is divided by: the number of held-out records, or an estimate if the
            relation hides the number of records.
    """

    config: RunConfig
    whole: Mechanism
    held_out: float


def priced_trials(
    config: RunConfig, choices: Mapping[str, Sequence[str]], mean: float
) -> tuple[PrivateSelection, dict[tuple[str, ...], Trial]]:
    """Return the search within its epsilon, and the trial of each choice; nothing is trained, drawn or paid for.

    Raises ConfigError if a choice cannot be trained, and NoGuarantee if no theorem covers it, or no noise is enough.
    """
    dataset, keys = _records(config), list(choices)
    plan = RunPlan.checked(config, dataset)
    grid = [
        tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        for values in itertools.product(*choices.values())
    ]
    plans = {lines: plan.varied(for_this_machine(load_config(config, lines))) for lines in grid}
    options = config.protection
    priced = priced_search(
        [each.protection.whole_run() for each in plans.values()],
        mean=mean,
        epsilon=options.epsilon or math.nan,
        delta=options.delta,
        device_noise=options.noise != "digital",
    )
    trials = {}
    for (lines, each), whole in zip(plans.items(), priced.trials, strict=True):
        # the number that a score is divided by: that of held-out records, or an estimate from public constants
        own, held_out = each.config, float(len(dataset.validation))
        if not own.counts_are_public:
            share = own.data.validation_fraction
            held_out = max(1.0, own.divisor / each.sampling_probability * share / (1 - share))
        protected = own.replaced(protection=each.protection.keys_of(whole))
        trials[lines] = Trial(config=protected, whole=whole, held_out=held_out)
    return priced.selection, trials


def _records(config: RunConfig) -> Dataset:
    """Return the records that a configuration names."""
    stated, data, model = default_inputs(config, None, None)
    if model is not None:
        reason = "is not for a search yet; search settings of another model, or leave it out"
        raise ConfigError("configuration", "trainer.language.model", reason)
    dataset = load_data(stated, data)
    if dataset.target != "class":
        raise ConfigError(
            "configuration",
            "data.target",
            f"{dataset.target!r} has no number of right answers, which scores a trial; take records with classes",
        )
    return dataset


def _require_within(run: Run, whole: Mechanism) -> None:
    """Refuse (LedgerCorrupt) a trial with more steps, or less noise, than the search paid for."""
    paid = whole.as_noise()
    for mechanism in run.folder.read_ledger().mechanisms:
        spent = mechanism.as_noise()
        if not (
            spent.law == paid.law
            and spent.scale >= paid.scale * (1 - 1e-9)
            and spent.probability <= paid.probability
            and spent.steps <= paid.steps
        ):
            raise LedgerCorrupt(
                f"{run.folder.ledger_file}: {mechanism.describe()} is more than the search paid for "
                f"({whole.describe()}); restore the folder from a copy, or start another search"
            )


def _require_searchable(config: RunConfig) -> None:
    protection, key, reason = config.protection, "", ""
    if config.device.certificate is not None:
        key = "device.certificate"
        reason = "is not for a search yet, whose trials a device's alarm would stop one by one; leave it out"
    elif protection.protects == "nothing":
        key = "protection.kind"
        reason = (
            f"{protection.kind!r} has no guarantee that a search could keep; set --protect or protection.kind"
        )
    elif config.of_users:
        key = "protection.unit"
        reason = "= 'user' is not for a search yet: its score counts records, and a user may hold many; take 'record'"
    elif protection.epsilon is None:
        key, reason = "protection.epsilon", "is missing; give the epsilon of the whole search"
    elif protection.noise_multiplier is not None:
        key, reason = "protection.noise_multiplier", "is computed by the search; leave it out"
    elif config.data.validation_fraction == 0:
        key, reason = "data.validation_fraction", "must be above 0: trials are scored on held-out records"
    if key:
        raise ConfigError("configuration", key, reason)
