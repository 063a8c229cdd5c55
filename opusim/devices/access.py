"""Patience with a device that may fail: a time-out for each call, reconnection with growing waits, and one holder."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from opusim.access_schema import AccessSettings
from opusim.errors import DeviceBusy, DeviceTimeout, DeviceUnavailable
from opusim.exclusive import ExclusiveUse

Result = TypeVar("Result")
TRANSIENT = (DeviceTimeout, DeviceUnavailable, DeviceBusy)
"""Failures after which it is worth to try again; a fault (impossible readings, weak noise) is reported at once."""


class Access:
    """Calls a device with patience.

    Args:
        settings: how much of it.
        name: the device's name, for messages and the lock.
        reconnect: closes the device, whatever state it is in, and opens it again.
    """

    def __init__(self, settings: AccessSettings, name: str, reconnect: Callable[[], None]) -> None:
        self._settings = settings
        self._name = name
        self._reconnect = reconnect
        self._caller: _Caller | None = None
        self._use = ExclusiveUse(name)

    def acquire(self) -> None:
        """Takes the device for this process, if its description wants one holder; errors as `ExclusiveUse.acquire`."""
        if self._settings.exclusive:
            self._use.acquire()

    def release(self) -> None:
        """Gives the device back."""
        if self._caller is not None:
            self._caller.stop()
            self._caller = None
        self._use.release()

    def call(self, act: Callable[[], Result]) -> Result:
        """The result of a call, tried again after a failure that may pass.

        Raises:
            DeviceTimeout, DeviceUnavailable, DeviceBusy: the last failure, when every try failed.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                if attempt > 1:
                    time.sleep(self._settings.backoff_s * 2 ** (attempt - 2))
                    self._reconnect()
                return self.once(act)
            except TRANSIENT as error:
                if attempt >= self._settings.attempts:
                    tries = f" (tried {attempt} times)" if attempt > 1 else ""
                    raise type(error)(f"{error}{tries}") from error

    def once(self, act: Callable[[], Result]) -> Result:
        """The result of one call.

        Raises:
            DeviceTimeout: it took longer than `timeout_s`; the call is left to itself.
        """
        timeout = self._settings.timeout_s
        if timeout is None:
            return act()
        if self._caller is None:
            self._caller = _Caller()
        try:
            result: Result = self._caller.call(act, timeout)
        except queue.Empty:
            self._caller.stop()  # its thread hangs in the call; a new one takes the next
            self._caller = None
            raise DeviceTimeout(
                f"device {self._name!r} did not answer within {timeout:g} s; check its cables and power"
            ) from None
        return result


class _Caller:
    """A thread that makes calls one by one, so that the caller can stop waiting for one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="opusim-device").start()

    def call(self, act: Callable[[], Any], timeout_s: float) -> Any:
        """The call's result, or its error; queue.Empty when the time is over."""
        self._calls.put(act)
        result, error = self._answers.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """Lets the thread end behind its last call."""
        self._calls.put(None)

    def _work(self) -> None:
        while (act := self._calls.get()) is not None:
            try:
                self._answers.put((act(), None))
            except BaseException as error:  # handed to the caller, whatever it is
                self._answers.put((None, error))
