"""Ports for servers that tests start, or start again, a moment later."""

import os
import socket
from itertools import count

_FIRST, _COUNT = 20_000, 12_000
"""Below the ports that the kernel gives to connections, one of which could take a port before its server does."""
_NUMBERS = count(os.getpid() * 97)


def free_port() -> int:
    """Return a port on which nothing listens, each time another one; other test processes begin elsewhere."""
    for number in _NUMBERS:
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", _FIRST + number % _COUNT))
            except OSError:
                continue
        return _FIRST + number % _COUNT
    raise AssertionError("no number is the last")
