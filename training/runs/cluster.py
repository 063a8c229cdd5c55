"""A connection to a Dask cluster, whose errors are one clear line each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from opusim.training.errors import SweepStopped

if TYPE_CHECKING:
    from distributed import Client

PATIENCE_S = 10.0


@contextmanager
def connected(address: str, *, patience_s: float = PATIENCE_S) -> Iterator[Client]:
    """Yield a client of a Dask scheduler, whose workers see the same folders, once it answers.

    The address is such as tcp://host:8786, or tls://host:8786 with Dask's own settings of certificate and key. Raises
    SweepStopped if the extra `cluster` is not installed, the settings of encryption do not fit, no scheduler answers,
    or it died.
    """
    try:  # an extra that most installations lack
        from distributed import Client, Security
        from distributed.client import CancelledError
        from distributed.comm import CommClosedError
    except ModuleNotFoundError as error:
        raise SweepStopped("--cluster needs the extra 'cluster': pip install 'opusim[cluster]'") from error
    with ExitStack() as stack:
        logger = logging.getLogger("distributed.client")  # its tracebacks would hide our one line
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        # refuse an address that does not fit Dask's settings, before a client of it starts threads
        encrypted = address.startswith("tls:")
        try:
            found = Security().get_connection_args("client")
            reason = "they name no certificate" if encrypted and found.get("ssl_context") is None else ""
            if found.get("require_encryption") and not encrypted:
                reason = "they require it"
        except OSError as error:  # files that are missing or hold something else
            reason = " ".join(str(error).split())
        if reason:
            raise SweepStopped(
                f"{address} does not fit Dask's settings of encryption: {reason}; give certificate and key as "
                "docs/choosing-a-trainer.md says, and an address tls://..."
            )
        try:
            client = Client(address, timeout=patience_s)
        except (OSError, TimeoutError, ValueError) as error:
            raise SweepStopped(
                f"no Dask scheduler answers at {address}; check the address, or start one"
            ) from error
        try:
            with client:
                yield client
        except (CancelledError, CommClosedError, TimeoutError) as error:
            raise SweepStopped(
                f"the cluster at {address} was lost; finished runs are kept, and the same command resumes the sweep"
            ) from error
