"""Whose turn it is: clients take turns batch by batch, and one of them may have the device to itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Client = TypeVar("Client", bound=Hashable)
Batch = TypeVar("Batch")


class FairQueue(Generic[Client, Batch]):
    """Batches of several clients, given out round robin over the clients.

    A client with many batches waiting delays another one by at most one batch. While a client holds the queue, only its
    batches are given out. Safe for threads.
    """

    def __init__(self) -> None:
        self._waiting: dict[Client, deque[Batch]] = {}
        """Batches by client; the order of the keys is the order of turns."""
        self._holder: Client | None = None
        self._changed = threading.Condition()
        self._closed = False

    def put(self, client: Client, batch: Batch) -> None:
        """Add a batch behind the client's others."""
        with self._changed:
            self._waiting.setdefault(client, deque()).append(batch)
            self._changed.notify_all()

    def take(self) -> tuple[Client, Batch] | None:
        """Wait for the next batch and return it with its client, who goes to the end of the turns; None if closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                client = self._next()
                if client is not None:
                    break
                self._changed.wait()
            batches = self._waiting.pop(client)
            batch = batches.popleft()
            if batches:
                self._waiting[client] = batches  # behind all others
            return client, batch

    def position(self, client: Client) -> int | None:
        """Return how many clients have their turn before this one; None if it has no batch waiting."""
        with self._changed:
            if client not in self._waiting:
                return None
            held = self._holder is not None and self._holder != client
            return list(self._waiting).index(client) + int(held and self._holder not in self._waiting)

    def hold(self, client: Client) -> None:
        """Give out this client's batches only, until `release` or `drop`."""
        with self._changed:
            self._holder = client
            self._changed.notify_all()

    def drop(self, client: Client) -> list[Batch]:
        """Forget a client; returns its batches that were not given out."""
        with self._changed:
            if self._holder == client:
                self._holder = None
            found = list(self._waiting.pop(client, ()))
            self._changed.notify_all()
            return found

    @property
    def holder(self) -> Client | None:
        """The client that has the device to itself."""
        return self._holder

    def close(self) -> None:
        """Let `take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> Client | None:
        if self._holder is not None:
            return self._holder if self._holder in self._waiting else None
        return next(iter(self._waiting), None)
