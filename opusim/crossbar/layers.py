"""Layers whose product runs on a programmable device.

A layer y = W x + b keeps its parameters in digital memory. Row i of W is programmed divided by s_i = max_j |W_ij|, an
input is shown divided by r = max_j |x_j|, and the reading is multiplied by s_i r; biases are added digitally. The
backward pass is straight-through: gradients are those of the digital W, at the inputs that were given.

An input whose product meets the bound of a converter is shown again at half its size, up to six times, and its reading
is multiplied by as much: the bound management of aihwkit (Gokmen, Rasch and Haensch, IEDM 2019).

Drift lowers all conductances by about the same factor. Each layer therefore reads a few fixed vectors v after
programming and after each wait, and multiplies its outputs by the g that makes g <y, W v> equal <W v, W v>, y the
readings. This is the global drift compensation of Joshi et al., Nature Communications 2020, by least squares; sums of
magnitudes, which they take, grow with the noise.

`DeviceModel.compensate` corrects single outputs too, from inputs of the user: y_i <- a_i y_i + b_i, by least squares
against the digital product with the inputs that reach the layer. If inputs have a mean other than 0, as after a ReLU,
the errors of a row add up to an offset. Joshi et al. adapt the statistics of batch normalization to the same end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opusim import checks
from opusim.crossbar.programmable import ProgrammableDevice
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError

_REFERENCE_VECTORS = 64
_MOST_HALVINGS = 6
LEAST_SCALE = 1e-30
"""Smallest scale of a row or of an input."""


class DeviceLinear(nn.Module):
    """A linear layer on a programmable device.

    Args:
        linear: the digital layer, whose parameters are shared.
        device: open, with the capabilities `program` and `multiply`, and a window of the layer's size.
        compensate_drift: whether outputs are divided by the measured loss of the conductances.
        programming_step: largest change of an entry of W / s without programming again before the next product or wait,
            in training and in evaluation mode; None programs only when `program` is called.

    Raises:
        CapabilityMissing: the device cannot be programmed, or cannot multiply.
        ConfigError: its window has another size.
        ValueError: programming_step is below 0.
    """

    def __init__(
        self,
        linear: nn.Linear,
        device: NoisyDevice,
        *,
        compensate_drift: bool = True,
        programming_step: float | None = None,
    ) -> None:
        super().__init__()
        size = (linear.out_features, linear.in_features)
        if (device.n_outputs, device.n_inputs) != size:
            raise ConfigError(
                device.name,
                "n_inputs",
                f"the window has {device.n_inputs} inputs and {device.n_outputs} outputs, the layer {size[1]} and "
                f"{size[0]}; open the device with the layer's size",
            )
        if programming_step is not None:
            checks.non_negative(programming_step=programming_step)
        self.weight, self.bias = linear.weight, linear.bias
        self.device = device
        self._programmable, self._multiplies = device.require("program"), device.require("multiply")
        self._compensate, self._step = compensate_drift, programming_step
        generator = torch.Generator().manual_seed(1)
        self._reference = torch.randint(-1, 2, (_REFERENCE_VECTORS, size[1]), generator=generator).float()
        self._gain = 1.0
        self._compensating = False
        self.program()

    def program(self) -> None:
        """Write the present weights to the device; drift starts again.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        with torch.no_grad():
            weight = self.weight.detach().float()
            if not bool(weight.isfinite().all()):
                raise ValueError(
                    f"weight of {self}: holds NaN or infinite numbers; take the weights from before training diverged"
                )
            self._row_scale = weight.abs().amax(dim=1).clamp_min(LEAST_SCALE)
            self._wanted = weight / self._row_scale[:, None]
            self._programmable.program(self._wanted)
        self._begin_corrections()

    def wait(self, seconds: float) -> None:
        """Let time pass on the device, then measure the compensation of drift again.

        Raises:
            CapabilityMissing: the device does not drift.
        """
        drifting = self.device.require("wait")
        self._follow()
        drifting.wait(seconds)
        self._measure_gain()

    @torch._disable_dynamo
    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b as the device gives it; torch.compile compiles what lies between devices.

        Args:
            x: shape (..., in_features), finite.

        Returns:
            Shape (..., out_features), of x's dtype.
        """
        self._follow()
        y: Tensor = _StraightThrough.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias

    def read(self, x: Tensor) -> Tensor:
        """Return the device's product with the rows of x, without gradient, float32, shape (..., out_features)."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_min(LEAST_SCALE)
        product = self._within_bound((rows / largest).clamp_(-1, 1))
        product = product.mul_(largest).mul_(self._row_scale.to(product.device) * self._gain)
        if self._compensating:
            checks.integer(minimum=1, remedy="give records of the training set", inputs=len(rows))
            # a and b of every output: least squares of the exact product against a read + b, over rows of inputs
            exact = rows @ self.weight.detach().T.float()
            about, wanted = product - product.mean(dim=0), exact - exact.mean(dim=0)
            power = about.square().sum(dim=0)
            self._row_gain = torch.where(power > 0, (about * wanted).sum(dim=0) / power, 1.0)
            self._row_offset = exact.mean(dim=0) - self._row_gain * product.mean(dim=0)
        product = product.mul_(self._row_gain.to(product.device)).add_(self._row_offset.to(product.device))
        return product.reshape(*x.shape[:-1], product.shape[1])

    @contextmanager
    def compensating(self) -> Iterator[None]:
        """Fit gain and offset of every output to the inputs of each forward pass; see `DeviceModel.compensate`."""
        self._compensating = True
        try:
            yield
        finally:
            self._compensating = False

    def _within_bound(self, rows: Tensor) -> Tensor:
        """Return the product; rows that meet a converter's bound are shown again at half, a quarter, ... of their size.

        Such repeats are counted as frames. A device that does not tell which rows those are reads each row once.
        """
        product = self._multiplies.multiply(rows)
        repeated = torch.arange(len(rows), device=rows.device)
        for halvings in range(1, _MOST_HALVINGS + 1):
            met = getattr(self.device, "saturated", None)
            if met is None or not bool(met.any()):
                break
            repeated = repeated[met.to(repeated.device)]
            product[repeated] = self._multiplies.multiply(rows[repeated] / 2**halvings) * 2**halvings
        return product

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return what a state_dict holds besides the parameters: scales, corrections, and what the device holds."""
        identity = " ".join(self.device.identity).encode()
        state = {
            "wanted": self._wanted,
            "rows": torch.stack(
                [each.cpu().double() for each in (self._row_scale, self._row_gain, self._row_offset)]
            ),
            "gain": torch.tensor(self._gain, dtype=torch.float64),
            "identity": torch.tensor(list(identity), dtype=torch.uint8),
        }
        if isinstance(self.device, ProgrammableDevice):
            state |= {f"device.{name}": value for name, value in self.device.held_state().items()}
        return state

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Let layer and device hold what they held when `get_extra_state` was called.

        A crossbar continues to the bit, in ``release`` with fresh noise of products. A device of another kind, such as
        a served one, is programmed again with the matrix that it held: the compensation of drift is measured again, and
        corrections by `DeviceModel.compensate` end.

        Raises:
            ConfigError: the state is another chip's.
        """
        identity = bytes(state["identity"].tolist()).decode()
        if identity != " ".join(self.device.identity):
            raise ConfigError(
                self.device.name,
                "medium.seed",
                "is that of another chip than the layer was saved with; convert the network with the same device and "
                "seed, or leave out the keys of the state that end in _extra_state",
            )
        self._wanted = state["wanted"].to(self.weight.device, torch.float32)
        rows = state["rows"].to(self.weight.device)
        self._row_scale, self._row_gain, self._row_offset = rows.float().unbind()
        self._gain = float(state["gain"])
        if isinstance(self.device, ProgrammableDevice):
            named = {name.removeprefix("device."): value for name, value in state.items()}
            is_same = self.device.restore(self._wanted, named)
        else:
            self._programmable.program(self._wanted)
            is_same = False
        if not is_same:
            self._begin_corrections()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        *rest: Any,
    ) -> None:
        """Load parameters and state; without a state (digital layers have none) the device keeps its own."""
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        missing[:] = [key for key in missing if key != f"{prefix}_extra_state"]

    def extra_repr(self) -> str:
        """Return size and device."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, device={self.device.name}"

    def _follow(self) -> None:
        """Program the present weights if one has moved by more than the programming step, in its row's scale."""
        if self._step is None:
            return
        with torch.no_grad():
            moved = float((self.weight / self._row_scale[:, None] - self._wanted).abs().max())
        if moved > self._step:
            self.program()

    def _begin_corrections(self) -> None:
        """Drop the corrections of outputs, which were fitted to other conductances, and measure the gain."""
        rows = len(self._wanted)
        self._row_gain, self._row_offset = torch.ones(rows), torch.zeros(rows)
        self._measure_gain()

    def _measure_gain(self) -> None:
        """Measure the compensation of drift from readings of the reference vectors."""
        self._gain = 1.0
        if self._compensate:
            expected = self._reference @ self._wanted.T
            found = float((self._within_bound(self._reference) * expected).sum())
            self._gain = float(expected.square().sum()) / found if found > 0 else 1.0


class _StraightThrough(torch.autograd.Function):
    """The device's product forward, the digital weights backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: DeviceLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        return layer.read(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (signal,) = signals
        rows, inputs = (each.reshape(-1, each.shape[-1]).to(weight.dtype) for each in (signal, x))
        return (rows @ weight).reshape(x.shape).to(x.dtype), rows.T @ inputs, None


class _AroundProduct(nn.Module):
    """A layer whose matrix is another form of the digital layer's weight.

    `product` holds the matrix. A state dict has the digital layer's keys and shapes; keys of `product` are read too.
    Device and options are as for `DeviceLinear`.
    """

    def __init__(self, layer: nn.Module, device: NoisyDevice, **options: Any) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_with_digital_keys)
        matrix = self._matrix(layer.weight)  # type: ignore[arg-type]
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(matrix.detach().clone(memory_format=torch.contiguous_format))
        linear.register_parameter("bias", dict(layer.named_parameters()).get("bias"))
        self.product = DeviceLinear(linear, device, **options)

    def _matrix(self, weight: Tensor) -> Tensor:
        """Return the matrix (outputs, inputs) of a digital layer's weight."""
        raise NotImplementedError

    def _weight(self, matrix: Tensor) -> Tensor:
        """Return the digital layer's weight of a matrix."""
        raise NotImplementedError

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}product.weight"] = self._matrix(state.pop(f"{prefix}weight"))
        if f"{prefix}bias" in state:
            state[f"{prefix}product.bias"] = state.pop(f"{prefix}bias")
        super()._load_from_state_dict(state, prefix, *rest)


def _with_digital_keys(module: _AroundProduct, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Name the parameters of a state dict, and shape them, as the digital layer does."""
    for key in ("weight", "bias"):
        if (value := state.pop(f"{prefix}product.{key}", None)) is not None:
            state[f"{prefix}{key}"] = module._weight(value) if key == "weight" else value


class DeviceTransposedLinear(_AroundProduct):
    """A layer y = x W + b with W of shape (inputs, outputs), as transformers' Conv1D, on a programmable device."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b as the device gives it, shape (..., outputs)."""
        y: Tensor = self.product(x)
        return y

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.T

    def _weight(self, matrix: Tensor) -> Tensor:
        return matrix.T


class DeviceConv2d(_AroundProduct):
    """A two-dimensional convolution as a product with unfolded patches on a programmable device.

    Args:
        convolution: the digital layer, with one group and zero padding given in numbers.
        device: as for `DeviceLinear`, with in_channels * kernel height * width inputs and out_channels outputs.
        **options: those of `DeviceLinear`.

    Raises:
        ValueError: groups, or another padding.
    """

    def __init__(self, convolution: nn.Conv2d, device: NoisyDevice, **options: Any) -> None:
        padding = zero_padding(convolution)
        super().__init__(convolution, device, **options)
        self._shape = convolution.kernel_size, convolution.dilation, padding, convolution.stride
        self._unfold = nn.Unfold(*self._shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution as the device gives it, shape (batch, out_channels, height, width)."""
        y = self.product(self.patches(x)).transpose(1, 2)
        sizes = [
            (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for length, kernel, dilation, padding, stride in zip(x.shape[2:], *self._shape, strict=True)
        ]
        return y.reshape(len(x), y.shape[1], *sizes)

    def patches(self, x: Tensor) -> Tensor:
        """Return what the device multiplies, shape (batch, positions, in_channels * kernel height * width)."""
        patches: Tensor = self._unfold(x).transpose(1, 2)
        return patches

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def _weight(self, matrix: Tensor) -> Tensor:
        return matrix.unflatten(1, (-1, *self._shape[0]))


def has_groups(convolution: nn.Conv2d) -> bool:
    """Return whether a convolution is no product with zero-padded patches: it has groups, or another padding."""
    padded = convolution.padding_mode != "zeros" or isinstance(convolution.padding, str)
    return convolution.groups != 1 or padded


def zero_padding(convolution: nn.Conv2d) -> tuple[int, ...]:
    """Return the zeros that a convolution adds on either side of each axis; ValueError for groups or other padding."""
    padding: Any = convolution.padding
    if has_groups(convolution):
        raise ValueError(
            f"{convolution}: a device takes one group and zero padding given in numbers; keep this layer digital by "
            "giving its name in digital=[...]"
        )
    return tuple(padding)
