"""Running the points of a sweep side by side: through joblib, on local processes or on a Dask cluster.

Runs on a Dask cluster, through joblib; importing this needs the extra `cluster`.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import joblib
from distributed import Client
from distributed.client import CancelledError
from distributed.comm import CommClosedError
from joblib._dask import DaskDistributedBackend
from joblib.externals.loky.process_executor import TerminatedWorkerError

from training.errors import SweepStopped
from training.runs.locking import only_writer, require_kind
from training.sweeps.points import Point
from training.sweeps.rows import Row, SweepFolder, failed_row, write_row
from training.sweeps.worker import run_point

_WORKERS_S = 30
"""Seconds to wait for the first worker."""


class _Cluster(DaskDistributedBackend):
    """joblib's own backend, which would run a cluster of one slot in the calling process instead of there."""

    def effective_n_jobs(self, n_jobs: int) -> int:
        """How many runs are sent at once, at least two."""
        return max(2, super().effective_n_jobs(n_jobs))


@contextmanager
def connected(address: str, patience_s: float) -> Iterator[None]:
    """Let joblib send its work to a scheduler.

    Args:
        address: Such as tcp://10.0.0.5:8786.
        patience_s: Seconds to wait for its answer.

    Raises:
        SweepStopped: Nobody answers there, or the scheduler died.
    """
    logger = logging.getLogger("distributed.client")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # its tracebacks would stand beside our one line
    try:
        with _client(address, patience_s) as client:
            backend = _Cluster(client=client, wait_for_workers_timeout=_WORKERS_S)
            with joblib.parallel_config(backend=backend):
                yield
    except (CancelledError, CommClosedError, TimeoutError) as error:
        raise SweepStopped(
            f"the cluster at {address} was lost; the runs so far are kept, and the same command goes on"
        ) from error
    finally:
        logger.setLevel(level)


def _client(address: str, patience_s: float) -> Client:
    try:
        return Client(address, timeout=patience_s)
    except (OSError, TimeoutError, ValueError) as error:
        raise SweepStopped(
            f"no Dask scheduler answers at {address}; check the address, or start one"
        ) from error


_MOST_DEATHS = 3
"""Processes that may die over one run before it counts as failed, and before any run is begun before all stop."""


def run_sweep(
    points: Sequence[Point],
    folder: SweepFolder,
    *,
    jobs: int,
    cluster: str | None = None,
    retry_failed: bool = False,
    patience_s: float = 10.0,
    on_start: Callable[[int, int], None] = lambda done, total: None,
    on_row: Callable[[Row, float | None], None] = lambda row, left: None,
) -> dict[str, Row]:
    """Make the runs that are not done yet, and return all rows by identity.

    Args:
        points: The sweep's points; those of one configuration share a run.
        folder: Where everything is kept; one process writes it.
        jobs: Runs side by side on this machine, at least 1.
        cluster: Address of a Dask scheduler whose workers see the same folder; None for local processes.
        retry_failed: Whether runs that failed before are tried again.
        patience_s: Seconds to wait for the scheduler's answer.
        on_start: Told how many runs are there already, and how many there will be.
        on_row: Told each new row, and the seconds that the rest will take.

    Raises:
        FolderBusy: Another process makes this sweep.
        RunFolderError: The folder holds other work.
        SweepStopped: The cluster cannot be reached, or was lost; or processes die before they begin a run.
    """
    distinct = {point.identity: point for point in points}
    require_kind(folder.path, "sweep")
    with only_writer(folder.path, "sweep folder"):
        rows = folder.rows(list(distinct.values()))
        if retry_failed:
            rows = {identity: row for identity, row in rows.items() if row.status != "failed"}
        on_start(len(rows), len(distinct))
        deaths: Counter[str] = Counter()
        idle = 0
        while missing := [point for identity, point in distinct.items() if identity not in rows]:
            before = len(rows), deaths.total()
            try:
                with _backend(cluster, patience_s):
                    for row in _finished_rows(missing, folder, jobs=-1 if cluster else jobs):
                        rows[row.identity] = row
                        on_row(row, _seconds_left(rows, distinct, jobs))
            except TerminatedWorkerError as error:
                rows |= folder.rows(missing)
                rows |= _given_up(missing, rows, folder, deaths)
                idle = idle + 1 if (len(rows), deaths.total()) == before else 0
                if idle == _MOST_DEATHS:
                    raise SweepStopped(
                        f"{idle} processes died before they began a run (out of memory?); the runs so far are kept, "
                        "go on with fewer --jobs"
                    ) from error
    return rows


def _finished_rows(points: Sequence[Point], folder: SweepFolder, *, jobs: int) -> Iterator[Row]:
    """Rows as their runs end."""
    tasks = [
        joblib.delayed(run_point)(
            point.config, folder.run_path(point).absolute(), folder.row_path(point).absolute()
        )
        for point in points
    ]
    yield from joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")(tasks)


@contextlib.contextmanager
def _backend(cluster: str | None, patience_s: float) -> Iterator[None]:
    """Where joblib sends the runs; each has one thread, since they run side by side."""
    if cluster is None:
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
            yield
        return
    try:
        from training.sweeps.execution import connected
    except ModuleNotFoundError as error:
        raise SweepStopped("--cluster needs the extra 'cluster': pip install 'opusim[cluster]'") from error
    with connected(cluster, patience_s):
        yield


def _given_up(
    points: Sequence[Point], rows: dict[str, Row], folder: SweepFolder, deaths: Counter[str]
) -> dict[str, Row]:
    """Rows of runs over which processes die again and again (out of memory, as a rule)."""
    given_up = {}
    for point in points:
        if point.identity in rows or not folder.run_path(point).exists():
            continue
        deaths[point.identity] += 1
        if deaths[point.identity] >= _MOST_DEATHS:
            reason = f"the process that made it died {_MOST_DEATHS} times (out of memory?); try it alone"
            row = failed_row(point.identity, reason)
            write_row(folder.row_path(point), row)
            given_up[point.identity] = row
    return given_up


def _seconds_left(rows: dict[str, Row], distinct: dict[str, Point], jobs: int) -> float | None:
    """What the rest will take, each run as long as its series or all of them have taken; None if none tells."""
    times: dict[str, list[float]] = {}
    for identity, row in rows.items():
        if row.status != "failed" and row.wall_s is not None:
            times.setdefault(distinct[identity].series, []).append(row.wall_s)
    if not times:
        return None
    overall = statistics.fmean(seconds for found in times.values() for seconds in found)
    left = [point.series for identity, point in distinct.items() if identity not in rows]
    return sum(statistics.fmean(times.get(series, [overall])) for series in left) / jobs
