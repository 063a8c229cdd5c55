"""A private search: K ~ Poisson(m) trials of a last-iterate run, and the best of them with its score.

Each trial is mu-GDP in its model and its score together: the model because its last iterate is (training records), the
score because it is the accuracy on n held-out records plus N(0, (1 / (n mu))^2), which a held-out record moves by 1 / n
(held-out records; a record is one or the other). accounting.selection.mechanisms prices the choice.

**Every search is paid for before its number of trials is drawn.** A search that was stopped resumes without a second
payment as long as its `tuning.json` is there: the draw stands, finished trials keep their scores, and a trial that was
cut short goes on from its own checkpoint, so that one result comes out. Without that file the draw is lost, and what
begins is a second search: it is refused if the first one left trials or a result, and paid for again otherwise.

The folder holds `tuning.json` (what was drawn and found so far), the ledger, a run folder for each trial, and in the
end `best/` with `result.json`. In release mode only the best trial and the score are kept: the number of trials and the
other trials are not covered, and are removed.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accounting import numerics
from accounting.calibration import calibrate
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee
from accounting.ledger.ledger import LEDGER_FILE, Ledger
from accounting.selection.mechanisms import PrivateSelection
from opusim.errors import ConfigError
from opusim.files import make_folder
from opusim.randomness.streams import derive_seed, noise_stream
from training.config.reading import load_config
from training.config.run import RunConfig
from training.engine.algorithm import family_of
from training.engine.assembly import configured_sampler, load_data
from training.engine.session import train
from training.errors import RunFolderError
from training.runs.checkpoints import adopt_ledger
from training.runs.folder import RunFolder
from training.runs.locking import LOCK_FILE, only_writer, require_kind
from training.runs.run import Run, evaluate_split, load_run
from training.runs.storage import write_file, write_json
from training.tuning.grid import Draw, draw_trials
from training.tuning.state import STATE_FILE, SearchState

OnTrial = Callable[[int, int], None]
_PAYMENT = "search"
"""What a ledger calls the payment of a search."""
_LEDGER_FILES = (LEDGER_FILE, "ledger.head")
_BEFORE_THE_DRAW = {*_LEDGER_FILES, "ledger.head.partial", f".{STATE_FILE}.partial", LOCK_FILE}
"""What a search that was killed before it drew anything leaves."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search gives.

    Attributes:
        run: The best trial; None if no trial was drawn.
        score: Its accuracy on held-out records, noised.
        settings: Its lines key=value.
        guarantee: Of everything that was searched in this folder.
        searches: How many searches that is.
        trials: How many trials were drawn; None in release mode, whose guarantee does not cover the number.
    """

    run: Run | None
    score: float | None
    settings: tuple[str, ...]
    guarantee: Guarantee
    searches: int
    trials: int | None


class Search:
    """A search in its folder, begun or resumed by `run`.

    Args:
        config: What all trials share; protection.kind = "last-iterate", protection.epsilon for the whole search.
        choices: Values to choose from, by key.
        mean: m, expected number of trials.
        folder: Where it is written; one that holds the same search is resumed.

    Raises:
        ConfigError: The configuration is not one of a last iterate, holds no record out, or a choice is wrong.
        NoGuarantee: No trial is private enough for epsilon, or no theorem covers one of the choices.
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
        self._selection = selection_within(config, mean)
        self._config = _base(config, self._selection.mu)
        self._require_trainable(choices)

    def run(self, on_trial: OnTrial | None = None) -> Found:
        """Pay for the search and draw it, or resume it; train what is left, then keep the best.

        Args:
            on_trial: Told how many trials are done, of how many, at first 0: not for release.

        Raises:
            FolderBusy: Another process searches here.
            RunFolderError: The folder holds other work, another search, or one that was changed.
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
        return Found(
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
                f"search folder {self._folder} holds another search; choose an empty folder, or ask for the same"
            )

    def _paid(self) -> tuple[SearchState, Guarantee, int]:
        """The search to run or to resume, which is paid for; the guarantee of all searches here, and their number."""
        state = SearchState.read(self._folder)
        self._check_asked(state)
        if state is None:
            self._require_empty()
        else:
            self._require_newest(state)
        with self._ledger() as ledger:
            if any(payment.name != _PAYMENT for payment in ledger.content.payments):
                raise RunFolderError(
                    f"search folder {self._folder} holds the ledger of a run; choose an empty folder"
                )
            if state is None:
                ledger.pay_once(_PAYMENT, self._selection)  # in release mode a new one each time
                state = self._drawn(payment=len(ledger.content.payments))
            searches = len(ledger.content.payments)
            if state.payment > searches:
                raise RunFolderError(
                    f"{self._folder / LEDGER_FILE} does not hold the payment of this search; restore it from a copy"
                )
            return state, ledger.guarantees()[0], searches

    def _require_empty(self) -> None:
        """Refuse to begin a search among what an earlier one, or something else, left."""
        others = sorted(path.name for path in self._folder.iterdir() if path.name not in _BEFORE_THE_DRAW)
        if any(name.startswith("trial-") or name in ("best", "result.json") for name in others):
            raise RunFolderError(
                f"search folder {self._folder} holds what a search found, but its {STATE_FILE} is missing; restore "
                "that file, or choose an empty folder: searching again is a second search and costs again"
            )
        if others:
            raise RunFolderError(
                f"search folder {self._folder} holds other files ({', '.join(others[:3])}); choose an empty folder"
            )

    def _require_newest(self, state: SearchState) -> None:
        """Refuse an old state put back behind a result: its trials would be trained and scored a second time."""
        for name in ("best", "result.json"):
            if (self._folder / name).exists() and state.scores.keys() != set(range(len(state.draw.trials))):
                raise RunFolderError(
                    f"{self._folder / STATE_FILE} is older than {name}: it lacks scores of that search; restore "
                    "the newest one, or choose an empty folder: searching again is a second search and costs again"
                )

    def _drawn(self, *, payment: int) -> SearchState:
        seed = self._config.seed if self._config.mode == "experiment" else None
        draw = draw_trials(self._choices, self._selection.mean, seed=seed)
        state = SearchState(asked=self._asked, payment=payment, draw=draw, started=[], scores={})
        state.write(self._folder)
        return state

    def _require_trainable(self, choices: Mapping[str, Sequence[str]]) -> None:
        """Refuse a choice that no trial could be trained with, before the search is drawn and paid for."""
        dataset, keys = load_data(self._config, None), list(choices)
        for values in itertools.product(*choices.values()):
            lines = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
            trial = load_config(self._config, lines)
            family_of(trial.trainer.kind).require_covered(trial, dataset, configured_sampler(trial, dataset))

    def _score(self, state: SearchState, number: int) -> float:
        """Train a trial, or resume it, and score it."""
        folder = RunFolder(self._folder / f"trial-{number}")
        if number in state.started and not folder.path.exists():
            raise RunFolderError(
                f"{folder.path} is missing, though its training was begun; restore it, or choose an empty folder: "
                "training it again is a second search and costs again"
            )
        make_folder(folder.path)
        if number not in state.started:
            state.started.append(number)
            state.write(self._folder)
        run = self._trained(state, number, folder)
        held_out = load_data(run.config, None).validation
        accuracy = evaluate_split(run.model, held_out, run.config.loss)["accuracy"]
        std = 1 / (len(held_out) * self._selection.mu)
        stream = noise_stream(run.config.mode, _seed(state.draw, number), "score-noise")
        return accuracy + std * float(stream.normal((1,))[0])

    def _trained(self, state: SearchState, number: int, folder: RunFolder) -> Run:
        if folder.finished:
            return load_run(folder.path)
        if folder.started:
            return train(folder=folder.path, resume=True)
        config = load_config(self._config, state.draw.trials[number])
        return train(config.model_copy(update={"seed": _seed(state.draw, number)}), folder=folder.path)

    def _keep_best(self, state: SearchState) -> tuple[Run | None, float | None, tuple[str, ...]]:
        """The best trial under `best`, with the ledger of the search: its own epsilon forgets the choice."""
        result_file, best = self._folder / "result.json", self._folder / "best"
        if not state.scores:
            write_json(result_file, {"schema_version": 1, "score": None, "settings": []})
            return None, None, ()
        winner = max(state.scores, key=lambda number: state.scores[number])
        if not best.exists():
            self._copy_best(winner, best)
        score, settings = state.scores[winner], state.draw.trials[winner]
        write_json(result_file, {"schema_version": 1, "score": score, "settings": list(settings)})
        if self._config.mode == "release":
            for number in state.scores:
                shutil.rmtree(self._folder / f"trial-{number}", ignore_errors=True)
            state.draw, state.started = Draw(trials=(settings,), seed=None), [0]
            state.scores = {0: score}
            state.write(self._folder)
        return load_run(best), score, settings

    def _copy_best(self, winner: int, best: Path) -> None:
        """The best trial, whole or not at all."""
        partial, trial = self._folder / "best.partial", self._folder / f"trial-{winner}"
        if not trial.is_dir():
            raise RunFolderError(
                f"{best} and {trial} are missing; restore one of them, or choose an empty folder: "
                "searching again is a second search and costs again"
            )
        shutil.rmtree(partial, ignore_errors=True)
        for path in sorted(trial.rglob("*")):
            if path.is_file() and path.name not in (*_LEDGER_FILES, LOCK_FILE):
                write_file(partial / path.relative_to(trial), path.read_bytes())
        adopt_ledger(RunFolder(partial), self._folder / LEDGER_FILE)
        partial.rename(best)

    def _ledger(self) -> Ledger:
        return Ledger(
            self._folder / LEDGER_FILE,
            mode=self._config.mode,
            delta=self._config.protection.delta,
            enforced=True,
        )


def _seed(draw: Draw, number: int) -> int:
    """Seed of a trial; 0 in release mode, where nothing is seeded."""
    return 0 if draw.seed is None else derive_seed(draw.seed, "trial", number) >> 1


def selection_within(config: RunConfig, mean: float) -> PrivateSelection:
    """The selection whose trials are as little private as the whole search's epsilon allows.

    Raises:
        NoGuarantee: None is.
    """
    options = config.protection
    start = PrivateSelection(mean=mean, mu=0.5, device_noise=options.noise == "device")
    found, _ = calibrate(start, target_epsilon=options.epsilon or math.nan, delta=options.delta)
    return found


def _base(config: RunConfig, mu: float) -> RunConfig:
    """The configuration of a trial: its epsilon is that of mu-GDP."""
    bounds = numerics.gaussian_bounds(mu * (1 - 1e-6), config.protection.delta)
    if not bounds.lower > 0:
        raise NoGuarantee(
            f"epsilon = {config.protection.epsilon}: leaves nothing for a trial; allow more or fewer trials"
        )
    protection = config.protection.model_copy(update={"epsilon": bounds.lower})
    return config.model_copy(update={"protection": protection})


def _require_searchable(config: RunConfig) -> None:
    problems = {
        "protection.kind": (config.protection.kind != "last-iterate", "must be 'last-iterate' for a search"),
        "protection.epsilon": (
            config.protection.epsilon is None,
            "is missing; it is that of the whole search",
        ),
        "protection.noise_multiplier": (
            config.protection.noise_multiplier is not None,
            "is computed by a search; leave it out",
        ),
        "data.validation_fraction": (
            config.data.validation_fraction == 0,
            "must be above 0: trials are scored on held-out records",
        ),
    }
    for key, (is_wrong, reason) in problems.items():
        if is_wrong:
            raise ConfigError("configuration", key, reason)
