"""A private search: K ~ Poisson(m) trials of a last-iterate run, and the best of them with its score.

Each trial is mu-GDP in its model and its score together: the model because its last iterate is (training records), the
score because it is the accuracy on n held-out records plus N(0, (1 / (n mu))^2), which a held-out record moves by 1 / n
(held-out records; a record is one or the other). accounting.private_selection prices the choice.

The folder holds `tuning.json` (what was drawn and found so far), a run folder for each trial, and in the end
`best/` with `result.json`. In release mode only the best trial and the score are kept: the number of trials and the
other trials are not covered, and are removed.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accounting.calibration import calibrate
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee
from accounting.ledger import LEDGER_FILE, Ledger
from accounting.selection_mechanism import PrivateSelection
from accounting.standard import gaussian_bounds
from opusim.errors import ConfigError
from opusim.randomness import derive_seed, noise_stream
from training.assembly import configured_sampler, load_data
from training.config.reading import load_config
from training.config.run import RunConfig
from training.errors import RunFolderError
from training.family import family_of
from training.runs.adopted_ledger import adopt_ledger
from training.runs.evaluation import evaluate_split
from training.runs.folder import RunFolder
from training.runs.run import Run, load_run
from training.runs.storage import read_json, write_json
from training.session import train
from training.tuning.choices import Draw, draw_from_json, draw_to_json, draw_trials

OnTrial = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search gives.

    Attributes:
        run: The best trial; None where no trial was drawn.
        score: Its accuracy on held-out records, noised.
        settings: Its lines key=value.
        guarantee: Of the whole search.
    """

    run: Run | None
    score: float | None
    settings: tuple[str, ...]
    guarantee: Guarantee


class Search:
    """A search in its folder, begun anew or gone on with.

    Args:
        config: What all trials share; protection.kind = "last-iterate", protection.epsilon for the whole search.
        choices: Values to choose from, by key.
        mean: m, expected number of trials.
        folder: Where it is written; one that holds the same search is gone on with.

    Raises:
        ConfigError: The configuration is not one of a last iterate, holds no record out, or a choice is wrong.
        NoGuarantee: No trial is private enough for epsilon, or no theorem covers one of the choices.
        RunFolderError: The folder holds another search.
    """

    def __init__(
        self, config: RunConfig, choices: Mapping[str, Sequence[str]], *, mean: float, folder: Path
    ) -> None:
        _require_searchable(config)
        self._folder, self._file = folder, folder / "tuning.json"
        self._selection = selection_within(config, mean)
        self._config = _base(config, self._selection.mu)
        wanted = {
            "config": config.digest(),
            "choices": {k: list(v) for k, v in choices.items()},
            "mean": mean,
        }
        if not self._file.exists():
            self._require_trainable(choices)
            seed = config.seed if config.mode == "experiment" else None
            draw = draw_to_json(draw_trials(choices, mean, seed=seed))
            write_json(self._file, {"schema_version": 1, "asked": wanted, "draw": draw, "scores": {}})
        self._state: dict[str, Any] = read_json(self._file)
        if self._state["asked"] != wanted:
            raise RunFolderError(
                f"{folder} holds another search; choose an empty folder, or ask for the same"
            )
        self._draw = draw_from_json(self._state["draw"])

    @property
    def trials(self) -> int:
        """How many were drawn: not for release."""
        return len(self._draw.trials)

    def run(self, on_trial: OnTrial | None = None) -> Found:
        """Train what is left, then keep the best.

        Args:
            on_trial: Told how many trials are done, of how many.
        """
        with self._ledger() as ledger:
            if not ledger.content.payments:
                ledger.pay_once("search", self._selection)
            guarantee = ledger.guarantees()[0]
        for number in range(self.trials):
            if str(number) not in self._state["scores"]:
                self._state["scores"][str(number)] = self._score(number)
                write_json(self._file, self._state)
            if on_trial is not None:
                on_trial(number + 1, self.trials)
        return self._keep_best(guarantee)

    def _require_trainable(self, choices: Mapping[str, Sequence[str]]) -> None:
        """Refuse a choice that no trial could be trained with, before the search is drawn and paid for."""
        dataset, keys = load_data(self._config, None), list(choices)
        for values in itertools.product(*choices.values()):
            lines = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
            trial = load_config(self._config, lines)
            family_of(trial.trainer.kind).require_covered(trial, dataset, configured_sampler(trial, dataset))

    def _score(self, number: int) -> float:
        """Train a trial, or go on with it, and score it."""
        path, folder = self._folder / f"trial-{number}", RunFolder(self._folder / f"trial-{number}")
        if folder.finished:
            run = load_run(path)
        elif folder.started:
            run = train(folder=path, resume=True)
        else:
            run = train(self._trial(number), folder=path)
        held_out = load_data(run.config, None).validation
        accuracy = evaluate_split(run.model, held_out, run.config.loss)["accuracy"]
        std = 1 / (len(held_out) * self._selection.mu)
        stream = noise_stream(run.config.mode, self._seed(number), "score-noise")
        return accuracy + std * float(stream.normal((1,))[0])

    def _trial(self, number: int) -> RunConfig:
        config = load_config(self._config, self._draw.trials[number])
        return config.model_copy(update={"seed": self._seed(number)})

    def _seed(self, number: int) -> int:
        return 0 if self._draw.seed is None else derive_seed(self._draw.seed, "trial", number) >> 1

    def _keep_best(self, guarantee: Guarantee) -> Found:
        """The best trial under `best`, with the ledger of the search: its own epsilon forgets the choice."""
        scores = {int(number): float(score) for number, score in self._state["scores"].items()}
        result_file, best = self._folder / "result.json", self._folder / "best"
        if not scores:
            write_json(result_file, {"schema_version": 1, "score": None, "settings": []})
            return Found(run=None, score=None, settings=(), guarantee=guarantee)
        winner = max(scores, key=lambda number: scores[number])
        if not best.exists():
            partial = self._folder / "best.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self._folder / f"trial-{winner}", partial)
            adopt_ledger(RunFolder(partial), self._folder / LEDGER_FILE)
            partial.rename(best)
        settings = self._draw.trials[winner]
        write_json(result_file, {"schema_version": 1, "score": scores[winner], "settings": list(settings)})
        if self._config.mode == "release":
            for number in scores:
                shutil.rmtree(self._folder / f"trial-{number}", ignore_errors=True)
            only = {
                "draw": draw_to_json(Draw(trials=(settings,), seed=None)),
                "scores": {"0": scores[winner]},
            }
            write_json(self._file, {**self._state, **only})
        return Found(run=load_run(best), score=scores[winner], settings=settings, guarantee=guarantee)

    def _ledger(self) -> Ledger:
        return Ledger(
            self._folder / LEDGER_FILE,
            mode=self._config.mode,
            delta=self._config.protection.delta,
            enforced=True,
        )


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
    bounds = gaussian_bounds(mu * (1 - 1e-6), config.protection.delta)
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
