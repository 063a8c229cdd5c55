"""Runs on a Dask cluster, through joblib; importing this needs the extra `cluster`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import joblib
from distributed import Client
from distributed.client import CancelledError
from distributed.comm import CommClosedError
from joblib._dask import DaskDistributedBackend

from training.errors import SweepStopped

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
