"""Whose turn it is: clients take turns batch by batch, a long call gives way, and one client may have the device alone.

`FairQueue` gives batches out; `Owner` has the threads that do them, one at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from opusim.processes import Abandoned, pausing
from opusim.serving.sessions import TURN_S, Work


class FairQueue:
    """Batches of work of several clients, by name, given out round robin over the clients.

    A client with many batches waiting delays another one by at most one batch. While a client holds the queue, only its
    batches are given out. Safe for threads.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Work]] = {}
        """Batches by client; the order of the keys is the order of turns."""
        self._holder: str | None = None
        self._changed = threading.Condition()
        self._closed = False

    def put(self, client: str, batch: Work) -> bool:
        """Add a batch behind the client's others, and return whether the queue took it, which a closed one does not."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.setdefault(client, deque()).append(batch)
            self._changed.notify_all()
            return True

    def take(self) -> tuple[str, Work] | None:
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

    def position(self, client: str) -> int | None:
        """Return how many clients have their turn before this one; None if it has no batch waiting."""
        with self._changed:
            if client not in self._waiting:
                return None
            held = self._holder is not None and self._holder != client
            return list(self._waiting).index(client) + int(held and self._holder not in self._waiting)

    def hold(self, client: str) -> None:
        """Give out this client's batches only, until `release` or `drop`."""
        with self._changed:
            self._holder = client
            self._changed.notify_all()

    def drop(self, client: str) -> list[Work]:
        """Forget a client; returns its batches that were not given out."""
        with self._changed:
            if self._holder == client:
                self._holder = None
            found = list(self._waiting.pop(client, ()))
            self._changed.notify_all()
            return found

    @property
    def holder(self) -> str | None:
        """The client that has the device to itself."""
        return self._holder

    @property
    def has_next(self) -> bool:
        """Whether `take` would return a batch at once."""
        with self._changed:
            return not self._closed and self._next() is not None

    def close(self) -> list[Work]:
        """Let `take` return None from now on; returns the batches that were not given out."""
        with self._changed:
            self._closed = True
            left = [batch for batches in self._waiting.values() for batch in batches]
            self._waiting.clear()
            self._changed.notify_all()
            return left

    def _next(self) -> str | None:
        if self._holder is not None:
            return self._holder if self._holder in self._waiting else None
        return next(iter(self._waiting), None)


class Owner:
    """Does the work of all clients, a batch at a time, in the order that a queue gives it out.

    A client's own simulation cannot be read in batches, because its noise belongs to the call as a whole. Such a call
    is suspended at a pause of its computation (`opusim.processes.pause`) once its turn is over and another client
    waits: it goes back into the queue, its thread waits, and a new thread takes the next batch. The thread that takes a
    suspended call from the queue ends, and the call's own thread continues. So exactly one thread works at any time.

    Args:
        queue: gives out batches of work; closed by `stop`.
        act: does a batch, and returns None if more of the call is left.
        bell: called in each thread for a context manager, on whose value ``send(b"")`` tells that work is done.

    Attributes:
        done: work that is done, with its result or error; another thread takes it from there.
        working: what is being done, or None.
    """

    def __init__(self, queue: FairQueue, act: Callable[[Work], Any], bell: Callable[[], Any]) -> None:
        self._queue, self._act, self._bell = queue, act, bell
        self._threads: list[threading.Thread] = []
        self._is_stopping = False
        self.done: deque[tuple[Work, Any]] = deque()
        self.working: Work | None = None

    def start(self) -> None:
        """Let a new thread work."""
        thread = threading.Thread(target=self._run, name="opusim-instrument", daemon=True)
        thread.start()
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def stop(self, most_s: float) -> bool:
        """End all threads, at their next pause or behind their batch, and return whether they did in time.

        Args:
            most_s: seconds to wait for them.
        """
        self._is_stopping = True
        for work in self._queue.close():
            work.resume()
        until = time.monotonic() + most_s
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            if time.monotonic() > until:
                return False
            alive[0].join(until - time.monotonic())
        return True

    def _run(self) -> None:
        """Do batch after batch until the queue is closed, or a suspended call continues in its own thread."""
        with self._bell() as bell:
            while (taken := self._queue.take()) is not None:
                client, work = taken
                if work.is_suspended:
                    work.resume()
                    return
                found = self._result(client, work)
                if found is None and not work.dropped and self._queue.put(client, work):
                    continue
                self.done.append((work, found))
                bell.send(b"")

    def _result(self, client: str, work: Work) -> Any:
        """Return what a batch results in, or its error; counts the time that it took."""
        if work.dropped:
            return None
        self._begin_turn(work)
        try:
            with pausing(lambda: self._pause(client, work)):
                return self._act(work)
        except BaseException as error:  # handed to the client
            return error
        finally:
            self._end_turn(work)

    def _begin_turn(self, work: Work) -> None:
        self.working, work.turn_began = work, time.perf_counter()

    def _end_turn(self, work: Work) -> None:
        work.session.busy_s += time.perf_counter() - work.turn_began
        self.working = None

    def _pause(self, client: str, work: Work) -> None:
        """Abandon a call whose client has left; let another client have its turn if this one's is over.

        Raises:
            Abandoned: The server stops, or the client is gone.
        """
        if self._is_stopping or work.dropped:
            raise Abandoned
        if time.perf_counter() - work.turn_began < TURN_S or not self._queue.has_next:
            return
        self._end_turn(work)
        work.suspend()
        if self._queue.put(client, work):
            self.start()
            work.wait()
        self._begin_turn(work)
        if self._is_stopping or work.dropped:
            raise Abandoned
