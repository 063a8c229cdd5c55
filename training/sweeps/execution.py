"""Run the points of a sweep in parallel, on local processes (joblib) or on a Dask cluster.

`run_point` makes one run in whatever process it is called: it starts, resumes or finds the run, and never makes it
twice. `run_sweep` calls it for every point that has no row yet.
"""

from __future__ import annotations

import copy
import os
import socket
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import joblib
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError
from torch import nn
from torch.utils._pytree import tree_map_only

from opusim.accounting.guarantee import BudgetExceeded
from opusim.devices.usage import Usage
from opusim.plugins import FOREIGN_ERRORS
from opusim.progress import Progress, Show
from opusim.training.config.run import RunConfig
from opusim.training.config.sections import DataConfig, SplitRule, is_import_path
from opusim.training.data import Dataset
from opusim.training.data.tables import OwnData, OwnTest, as_arrays, is_frame
from opusim.training.engine.plan import Forecast, RunPlan, load_data, with_own_inputs
from opusim.training.engine.session import train_on
from opusim.training.errors import FolderBusy, RunInterrupted, SweepStopped
from opusim.training.networks.user_code import named_dataset, require_trusted
from opusim.training.runs.cluster import connected
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import load_run
from opusim.training.runs.storage import only_writer, require_kind
from opusim.training.sweeps.sweep import Point, Row, SweepFolder, failed_row, row_of, write_row

_MAX_DEATHS = 3
"""Worker processes that may die over one run before it counts as failed. If as many die before they start any run, the
sweep stops."""
_FORECAST_S = 20.0
"""Seconds after which the forecast of a sweep opens no further device."""
_POLL_S = 1.0
"""Seconds between two looks at a run folder that another process is writing."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """User-supplied data and model of all runs of a sweep, or None; see `opusim.train`. Each run trains a copy."""

    data: OwnData | Dataset | None = None
    test: OwnTest | None = None
    label: str | Sequence[str] | None = None
    model: nn.Module | None = None

    def applied(self, points: Sequence[Point]) -> list[Point]:
        """Return the points of runs on these inputs, which are part of a run's identity."""
        if self.data is None and self.model is None:
            return list(points)
        state = None if self.model is None else [*self.model.state_dict().values()]
        content = tree_map_only(
            torch.Tensor, lambda tensor: tensor.cpu().numpy(), [self.data, self.test, state]
        )
        digest = joblib.hash([*content, repr(self.model)])[:8]
        return [
            replace(
                point, config=with_own_inputs(point.config, self.data, self.label, self.model), inputs=digest
            )
            for point in points
        ]

    def dataset(self, config: RunConfig) -> Dataset:
        """Return the records of a run."""
        if self.data is None:
            return _dataset(config.data, config.split)
        return load_data(config, self.data, self.test)


_NAMED = Inputs()
"""No user-supplied inputs: each configuration names its data and model."""


@dataclass(frozen=True, kw_only=True)
class SweepForecast:
    """The expected device usage of a sweep's runs.

    Attributes:
        usage: The sum over the runs whose usage is known before they start. A run that resumes counts as a whole.
        runs: Number of these runs.
        is_mean: Whether it is a mean, because batch sizes are random.
        silent: Number of the other runs on a device: their usage is known only after a step, their data or device is
            not available here, they cannot run at all, or `_FORECAST_S` had passed.
    """

    usage: Usage
    runs: int
    is_mean: bool
    silent: int

    @classmethod
    def of(cls, points: Sequence[Point], inputs: Inputs, *, opens: bool) -> Self:
        """Return the forecast of some runs; it opens the device of each setting once, for all its seeds, if `opens`.

        Raises:
            ConfigError: The device of a run is too small for its network.
        """
        settings = {point.config.replaced(seed=0).digest(): point.config for point in points}
        counts = Counter(point.config.replaced(seed=0).digest() for point in points)
        usage, runs, is_mean, silent = Usage(), 0, False, 0
        latest = time.monotonic() + _FORECAST_S
        for setting, config in settings.items():
            if not config.uses_device:
                continue
            if time.monotonic() > latest:
                silent += counts[setting]
                continue
            found = each = plan = None
            with suppress(*FOREIGN_ERRORS):  # the run itself says why, in its row
                plan = RunPlan.checked(config, inputs.dataset(config), model=copy.deepcopy(inputs.model))
            if plan is not None:
                plan.require_window()
            try:
                if plan is not None and opens:
                    with plan.opened_device() as device:
                        found = Forecast.of(plan, device)
                        each = None if found is None else found.usage()
            except FOREIGN_ERRORS:
                found = each = None
            if found is None or each is None:
                silent += counts[setting]
                continue
            usage += each.times(counts[setting])
            runs += counts[setting]
            is_mean |= found.is_mean
        return cls(usage=usage, runs=runs, is_mean=is_mean, silent=silent)


def run_sweep(
    points: Sequence[Point],
    folder: SweepFolder,
    *,
    jobs: int,
    inputs: Inputs = _NAMED,
    cluster: str | None = None,
    retry_failed: bool = False,
    patience_s: float = 10.0,
    progress: Show = False,
    on_forecast: Callable[[SweepForecast], None] | None = None,
    on_row: Callable[[Row, float | None], None] = lambda row, left: None,
) -> dict[str, Row]:
    """Make the runs that are missing, on this machine or a Dask cluster, and return all rows by identity.

    Points with the same configuration share a run. `on_forecast` is called first, with the forecast of the missing runs
    (None opens no device), `on_row` with each new row and the estimated seconds left (None if unknown, as on a
    cluster). Raises FolderBusy if another process is running this sweep, RunFolderError if the folder holds other work,
    ConfigError if the device of a run is too small for its network, and SweepStopped if the
    cluster cannot be reached or was lost, or processes die before they start a run.
    """
    distinct = {point.identity: point for point in points}
    require_kind(folder.path, "sweep")
    with only_writer(folder.path, "sweep folder"):
        rows = folder.rows(list(distinct.values()))
        if retry_failed:
            rows = {identity: row for identity, row in rows.items() if row.status != "failed"}
        wanted = [point for key, point in distinct.items() if key not in rows]
        forecast = SweepForecast.of(wanted, inputs, opens=on_forecast is not None)
        if on_forecast is not None:
            on_forecast(forecast)
        with Progress("sweep", "runs", show=progress) as bar:
            bar.start(len(distinct), done=len(rows), at_once=True)
            deaths: Counter[str] = Counter()
            told: set[str | None] = set()
            idle = 0
            while missing := [point for identity, point in distinct.items() if identity not in rows]:
                before = len(rows), deaths.total()
                new = (
                    _on_cluster(missing, folder, inputs, cluster, patience_s)
                    if cluster
                    else _here(missing, folder, inputs, jobs)
                )
                try:
                    with closing(new):
                        for row in new:
                            rows[row.identity] = row
                            # a cluster has as many runs at once as workers, which come and go
                            left = None if cluster else _seconds_left(rows, distinct, jobs)
                            if row.status == "failed" and row.reason not in told:
                                told.add(row.reason)
                                bar.say(f"failed: {row.identity}: {row.reason}")
                            bar.advance(left_s=left)
                            on_row(row, left)
                except TerminatedWorkerError as error:
                    rows |= folder.rows(missing)
                    for (
                        point
                    ) in missing:  # fail runs over which processes died too often, usually out of memory
                        if point.identity in rows or not folder.run_path(point).exists():
                            continue
                        deaths[point.identity] += 1
                        if deaths[point.identity] >= _MAX_DEATHS:
                            reason = (
                                f"its process died {_MAX_DEATHS} times (out of memory?); try it with --jobs 1"
                            )
                            rows[point.identity] = row = failed_row(point.identity, reason)
                            write_row(folder.row_path(point), row)
                    idle = idle + 1 if (len(rows), deaths.total()) == before else 0
                    if idle == _MAX_DEATHS:
                        raise SweepStopped(
                            f"{idle} processes died before they started a run (out of memory?); finished runs are "
                            "kept, resume with fewer --jobs"
                        ) from error
    return rows


def run_point(
    config: RunConfig, run_path: Path, row_path: Path, inputs: Inputs = _NAMED, name: str = ""
) -> Row:
    """Make one run and write its row; a failed run gets a row too.

    If another process is still writing the run folder (it outlived its sweep), wait for it.

    Args:
        config: The point's configuration.
        run_path: Its run folder.
        row_path: The file of its row.
        inputs: User-supplied data and model.
        name: What its warnings call it.
    """
    folder, model = RunFolder(run_path), copy.deepcopy(inputs.model)
    started = time.perf_counter()
    try:
        # code that the sweep itself names is trusted
        named = (config.model.name, config.loss, config.data.factory or "")
        names_code = any(is_import_path(name) for name in named)
        run = None
        while run is None and not folder.finished:
            try:
                dataset = inputs.dataset(config)
                resume = folder.started
                if resume:
                    require_trusted(folder.read_facts(), trust_code=names_code)
                own = folder.read_config() if resume else config
                with _warnings_of(name or run_path.name):
                    run = train_on(own, dataset, folder, model=model, resume=resume)
            except FolderBusy:
                time.sleep(_POLL_S)
            except BudgetExceeded:
                break  # the folder is finished, and its summary holds the reason
        run = run or load_run(folder.path, model=model, trust_code=names_code)
        # the seconds of training in all processes that wrote the folder, at least those of this call
        written = sum(record["wall_s"] for record in folder.read_timing())
        test = inputs.test
        if test is not None:
            test = (test,) if is_frame(test) else as_arrays(test, "test")
        row = row_of(run, config, wall_s=max(time.perf_counter() - started, written), test=test)
    except RunInterrupted:
        raise
    except FOREIGN_ERRORS as error:  # one failed run must not stop the others
        row = failed_row(run_path.name, error)
    write_row(row_path, row)
    return row


def run_in(here: Path, *arguments: Any) -> Row:
    """Make one run on a worker of a cluster in the folder of the command, to which names of files are relative.

    The worker changes to that folder, `here`, and stays there; other arguments are those of `run_point`.

    Raises:
        SweepStopped: The worker does not see the folder.
    """
    try:
        os.chdir(here)
    except OSError as error:
        raise SweepStopped(
            f"a worker on {socket.gethostname()} cannot enter {here} ({error.strerror}), from which the sweep was "
            "started; start it in a folder that every worker sees"
        ) from error
    return run_point(*arguments)


@contextmanager
def _warnings_of(name: str) -> Iterator[None]:
    """Show a run's warnings when it ends, with its name in front."""
    found: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as found:
            yield
    finally:
        for one in found:
            warnings.warn_explicit(f"{name}: {one.message}", one.category, one.filename, one.lineno)


@lru_cache(maxsize=1)
def _dataset(options: DataConfig, split: SplitRule) -> Dataset:
    """Load a data set once per process for consecutive runs."""
    return named_dataset(options, split)


def _here(
    points: Sequence[Point], folder: SweepFolder, inputs: Inputs, jobs: int
) -> Generator[Row, None, None]:
    """Yield rows as local runs end. Each run has one thread, since runs share the machine."""
    tasks = [joblib.delayed(run_point)(*_arguments(point, folder, inputs)) for point in points]
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
        yield from joblib.Parallel(
            n_jobs=jobs, batch_size=1, max_nbytes=None, return_as="generator_unordered"
        )(tasks)


def _on_cluster(
    points: Sequence[Point], folder: SweepFolder, inputs: Inputs, address: str, patience_s: float
) -> Generator[Row, None, None]:
    """Yield rows as runs on a Dask cluster end; see `connected` for the errors."""
    with connected(address, patience_s=patience_s) as client:
        from distributed import as_completed  # an extra, which `connected` found

        here = Path.cwd()
        runs = [
            client.submit(run_in, here, *_arguments(point, folder, inputs), pure=False) for point in points
        ]
        for done in as_completed(runs):
            yield done.result()


def _arguments(
    point: Point, folder: SweepFolder, inputs: Inputs
) -> tuple[RunConfig, Path, Path, Inputs, str]:
    """Return the arguments of `run_point`."""
    name = ", ".join([point.series, *(f"{key} = {value}" for key, value in point.values.items())])
    return point.config, folder.run_path(point).absolute(), folder.row_path(point).absolute(), inputs, name


def _seconds_left(rows: dict[str, Row], distinct: dict[str, Point], jobs: int) -> float | None:
    """Estimate the seconds left from the mean of each series, or of all runs; None if no time is known."""
    times: dict[str, list[float]] = {}
    for identity, row in rows.items():
        if row.status != "failed" and row.wall_s is not None:
            times.setdefault(distinct[identity].series, []).append(row.wall_s)
    if not times:
        return None
    overall = statistics.fmean(seconds for found in times.values() for seconds in found)
    left = [point.series for identity, point in distinct.items() if identity not in rows]
    return sum(statistics.fmean(times.get(series, [overall])) for series in left) / jobs
