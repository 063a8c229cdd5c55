"""What a served device does with matrices: tell, write and multiply them as `opusim.devices.kinds` says."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from opusim import checks
from opusim.crossbar.converter import Converter
from opusim.devices.base import NoisyDevice
from opusim.devices.inputs import Array, like_input, real_batch
from opusim.errors import DeviceFault
from opusim.noise import NoiseModel
from opusim.serving.messages import Message
from opusim.serving.views import unpacked_law


class RemoteProducts(NoisyDevice):
    """The part of a remote device that works with matrices.

    `program` and `wait` of a simulation change the client's own device. A device that clients share is changed by a
    client that has it to itself; the others must open it again. If the server is restarted, what was programmed is
    lost, and readings fail until it is programmed again.
    """

    def __init__(self, *arguments: Any, **window: Any) -> None:
        super().__init__(*arguments, **window)
        self._law: NoiseModel | None = None
        self._converter = Converter()
        self._saturated: torch.Tensor | None = None
        self._is_changed = False

    @property
    def converter(self) -> Converter:
        """Bits and bounds of inputs and outputs, as the server states them; exact if it states none."""
        return self._converter

    @property
    def saturated(self) -> torch.Tensor | None:
        """Which rows of the last `multiply` met a converter's bound, shape (batch,); None if the server tells nothing.

        Clients that share a device are told of all its outputs.
        """
        return self._saturated

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """Return the served device's matrix, float32; one of its capabilities.

        Raises:
            CapabilityMissing: the server does not offer it.
            ValueError: it exceeds what the server sends.
        """
        self._require_open()
        self.require("matrix")
        return self._tensor(self._call("matrix"))

    def program(self, matrix: torch.Tensor) -> torch.Tensor:
        """See `Programmable.program`.

        Raises:
            TypeError, ValueError: another shape, or an entry that is not a number in [-1, 1].
            CapabilityMissing: the device cannot, or is shared and not reserved.
        """
        self._require_open()
        self.require("program")
        written = self._checked(matrix)
        checks.in_range(-1, 1, matrix=written, remedy="divide by the largest magnitude")
        return self._changed("program", written)

    def programming_std(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the standard deviation of what `program` realises about a matrix, of its shape, as the server says."""
        self._require_open()
        self.require("program")
        return self._tensor(self._call("programming_std", self._checked(matrix)))

    def multiply(self, x: Array) -> Array:  # (batch, n_inputs) -> (batch, n_outputs)
        """See `Multiplies.multiply`."""
        return self._product("multiply", x, self.n_inputs, self.n_outputs)

    def multiply_transposed(self, x: Array) -> Array:  # (batch, n_outputs) -> (batch, n_inputs)
        """See `MultipliesTransposed.multiply_transposed`."""
        return self._product("multiply_transposed", x, self.n_outputs, self.n_inputs)

    def wait(self, seconds: float) -> torch.Tensor:
        """See `Waits.wait`.

        Raises:
            CapabilityMissing: the device does not drift, or is shared and not reserved.
            ValueError: a number below 0, or none.
        """
        self._require_open()
        self.require("wait")
        checks.non_negative(seconds=seconds)
        return self._changed("wait", seconds=float(seconds))

    @abstractmethod
    def _call(self, act: str, array: np.ndarray | None = None, **values: Any) -> Message:
        """Make a call and return its answer."""

    def _product(self, act: Any, x: Array, width: int, outputs: int) -> Array:
        self._require_open()
        self.require(act)
        batch = real_batch(x, width, torch.device("cpu"))
        shape = (len(batch), outputs)

        def read() -> torch.Tensor:
            answer = self._call(act, batch.numpy())
            if act == "multiply":
                self._saturated = _told_rows(answer, len(batch))
            return self._tensor(answer)

        return like_input(self._read(read, shape, readings=len(batch)), x)

    def _checked(self, matrix: torch.Tensor) -> np.ndarray:
        checks.instance(torch.Tensor, matrix=matrix)
        checks.shape(
            (self.n_outputs, self.n_inputs), matrix=matrix, remedy="pad it with zeros, or open another window"
        )
        found: np.ndarray = matrix.detach().to("cpu", torch.float32).numpy()
        return found

    def _changed(self, act: str, array: np.ndarray | None = None, **values: Any) -> torch.Tensor:
        """Make a call that changes what the device holds; its answer tells the law from then on."""
        answer = self._call(act, array, **values)
        self._is_changed = True
        self._take_law(answer, arrays_before=1)
        return self._tensor(answer)

    def _take_law(self, answer: Message, *, arrays_before: int) -> None:
        """Take the law that an answer tells, whose arrays stand behind others."""
        self._law = unpacked_law(answer.value("law", (dict, type(None))), answer.arrays[arrays_before:])

    def _tensor(self, answer: Message) -> torch.Tensor:
        """Return the reading of an answer, its first array."""
        if not answer.arrays:
            raise DeviceFault(f"device {self.name!r}: its server answered without a reading; restart it")
        found = np.asarray(answer.arrays[0], dtype=np.float32)
        if not (found.flags.writeable and found.flags.aligned):  # else the message's own memory serves
            found = found.copy()
        return torch.from_numpy(found).to(self._torch_device)


def _told_rows(answer: Message, rows: int) -> torch.Tensor | None:
    """Return which rows an answer, behind its reading, tells to be saturated, or None."""
    if len(answer.arrays) < 2 or answer.arrays[1].shape != (rows,):
        return None
    return torch.from_numpy(answer.arrays[1] != 0)
