"""Train a digital network to tolerate a device: noise on weights and outputs in training mode only.

Each forward pass in training mode computes y = (W + E) x + b + e. For a number q, E_ij ~ N(0, (q s_i)^2) with
s_i = max_j |W_ij|, and e = 0. For a device, (W + E)_ij = c s_i (m_ij + d_ij z_ij), z_ij ~ N(0, 1), with the mean m and
the spread d that the device states for W_ij / s_i at a time (`ProgrammableDevice.weight_moments`), and with the c of
the layer that makes <c s m, W> equal <W, W>, in units of the rows' scales, as the compensation of drift does. Small
conductances drift more than large ones, so that a network has to learn with the weights that are left. A chip of light,
whose errors spread over the whole matrix, has m = W_ij / s_i and the same d everywhere (`spread_error`).
e_i ~ N(0, (s_i r)^2 k (v + step^2 / 12)) with r = max_j |x_j|, k the conversions of an output, v the least variance of
a conversion's noise, and step that of the converter. What grows with the input in the noise of products is left out.

The gradient treats E / s as a constant and s as a function of the weights: noise grows with the largest weight of a
row, and training lowers that weight if it costs more than it helps. A limit of some standard deviations of their row,
in training and in evaluation, does the same by force (Joshi et al., Nature Communications 2020, take 2 to 2.5). The
gradient passes the limit as if it were not there.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from opusim import checks
from opusim.crossbar.conversion import convertible_layers
from opusim.crossbar.layers import LEAST_SCALE, zero_padding
from opusim.crossbar.programmable import ProgrammableDevice
from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.noise import ConverterLatticeNoise, SignalGaussianNoise
from opusim.randomness.streams import SeededStream

_POINTS = 2048
"""Points of the table of a device's moments, on each side of 0."""


def noise_aware(
    model: nn.Module,
    noise: float | str | Path,
    *,
    after_s: float = 0.0,
    clip: float | None = None,
    seed: int = 0,
    digital: Collection[str] = (),
) -> nn.Module:
    """Inject noise into a network in training mode, so that it learns to tolerate a device's.

    Each forward pass in training mode draws fresh noise for each nn.Linear and nn.Conv2d that `convert` puts on a
    device; in evaluation mode the network is as it is. Gradients are those at the noisy weights.
    A forward pass that torch.utils.checkpoint repeats draws other noise, and its gradients are wrong.

    Args:
        model: the network, changed in place.
        noise: standard deviation of weights relative to the largest weight of each output's row, at least 0; or a
            device, by name or path: its errors of weights and its noise of outputs.
        after_s: seconds since programming that the network is to tolerate, at least 0; only for a device.
        clip: limit of weights, standard deviations of their row, above 0; None sets no limit.
        seed: seed of the noise, in [0, 2^64).
        digital: names of layers that get no noise, because `convert` will leave them digital.

    Returns:
        The model itself. `convert` takes it as it is, with limited weights.

    Raises:
        ValueError: a number is below 0, after_s goes with a number, or the network has no such layer, has a weight
            matrix that `convert` refuses, is noise-aware already, or has a convolution that `convert` refuses, if noise
            names a device.
        ConfigError: the device states no programming noise.
    """
    layers = convertible_layers(model, digital)
    checks.non_negative(after_s=after_s)
    if clip is not None:
        checks.positive(clip=clip)
    named = isinstance(noise, (str, Path))
    if not named:
        checks.non_negative(noise=noise)
        if after_s:
            raise ValueError(f"after_s = {after_s:g}: a number does not change with time; name a device")
    for name, module in layers:
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            raise ValueError(
                f"model: layer {name!r} is a {type(module).__name__}, whose columns are outputs; replace it by "
                f"nn.Linear, or leave it without noise by digital=[{name!r}]"
            )
        if parametrize.is_parametrized(module, "weight") and any(
            isinstance(each, _WeightNoise)
            for each in module.parametrizations["weight"]  # type: ignore[index]
        ):
            raise ValueError(f"model: layer {name!r} is noise-aware already; take the network from before")
        if module._parameters.get("weight") is None and not parametrize.is_parametrized(module, "weight"):
            raise ValueError(
                f"model: a hook computes the weight of layer {name!r}, as pruning and the older weight_norm do; take "
                "it off, as by torch.nn.utils.prune.remove(layer, 'weight')"
            )
        if named and isinstance(module, nn.Conv2d):
            zero_padding(module)
    for name, module in layers:
        stream = SeededStream(seed, f"weight noise of layer {name}")
        law: Any = noise
        if named:
            weight: Any = module.weight
            n_outputs, n_inputs = weight.flatten(1).shape
            law = open_device(law, n_inputs=n_inputs, n_outputs=n_outputs)
            if not isinstance(law, ProgrammableDevice):
                reason = f"{law.kind!r} tells no programming noise; give a number instead"
                raise ConfigError(str(noise), "kind", reason)
            outputs = SeededStream(seed, f"output noise of layer {name}")
            module.register_forward_hook(partial(_with_output_noise, _least_std(law), outputs))
        if clip is not None:
            parametrize.register_parametrization(module, "weight", _Limited(clip))
        parametrize.register_parametrization(module, "weight", _WeightNoise(law, stream, after_s))
    return model


class _Limited(nn.Module):
    """Limit weights to some standard deviations of their row; gradients pass unchanged.

    A row whose weights are all equal, such as a row of one weight, has no limit.
    """

    def __init__(self, clip: float) -> None:
        super().__init__()
        self._clip = clip

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            rows = weight.flatten(1)
            std, rounding = (
                rows.std(dim=1, correction=0),
                torch.finfo(rows.dtype).eps * rows.abs().amax(dim=1),
            )
            most = (self._clip * std).masked_fill_(std <= rounding, torch.inf)
            most = most.reshape(-1, *(1,) * (weight.dim() - 1))
            change = weight.clamp(-most, most) - weight
        return weight + change


class _WeightNoise(nn.Module):
    """Replace a weight in training mode by a draw of what a device holds, or add relative noise to it.

    The draw relative to the row's scale is a constant of the backward pass; the scale is not.
    """

    def __init__(self, law: float | ProgrammableDevice, stream: SeededStream, after_s: float) -> None:
        super().__init__()
        self._stream = stream
        self._relative, self._spread = None if isinstance(law, ProgrammableDevice) else law, None
        if isinstance(law, ProgrammableDevice):
            self._spread = law.spread_error()
        if isinstance(law, ProgrammableDevice) and self._spread is None:
            points = torch.linspace(-1, 1, 2 * _POINTS + 1)
            mean, self._std = (row[0] for row in law.weight_moments(points[None], after_s))
            self._shift = mean - points

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return weight
        rows = weight.flatten(1)
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(LEAST_SCALE)
        with torch.no_grad():
            change = self._stream.normal(rows.shape, device=weight.device)
            if self._relative is not None:
                change.mul_(self._relative)
            elif self._spread is not None:
                change.mul_(self._spread * (rows / scale).square().mean().sqrt())
            else:  # a draw of what the device holds minus the weights, from the table of its moments
                relative = rows / scale
                # NaN stays one by `add_`
                index = relative.float().add(1).mul_(_POINTS).round_().nan_to_num_().long()
                mean = self._shift.to(weight.device)[index].add_(relative)
                # <w, mean> becomes <w, w> over the layer, as `DeviceLinear` compensates drift
                factor = relative.square().sum() / (relative * mean).sum().clamp_min(LEAST_SCALE)
                drawn = mean.addcmul_(self._std.to(weight.device)[index], change)
                change = drawn.mul_(factor).sub_(relative)
        return weight + (scale * change.to(weight.dtype)).reshape(weight.shape)


def _with_output_noise(
    std: float, stream: SeededStream, module: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Add noise to a layer's outputs in training, `std` for weights and inputs in [-1, 1]: a forward hook."""
    if not module.training:
        return output
    with torch.no_grad():
        chain: Any = module.parametrizations["weight"]  # type: ignore[index]
        weight: Tensor = chain.original
        for parametrization in list(chain)[:-1]:  # the last one is the noise
            weight = parametrization(weight)
        rows = weight.detach().flatten(1).abs().amax(dim=1)
        if isinstance(module, nn.Conv2d):  # the largest magnitude of each patch
            sizes: Any = (module.kernel_size, module.dilation, module.padding, module.stride)
            patches = functional.unfold(inputs[0].abs().amax(dim=1, keepdim=True), *sizes)
            largest = patches.amax(dim=1).reshape(len(output), 1, *output.shape[2:])
            rows = rows[:, None, None]
        else:
            largest = inputs[0].abs().amax(dim=-1, keepdim=True)
        noise = stream.normal(output.shape, device=output.device)
        noise = noise.mul_(std).mul_(rows).mul_(largest)
    return output + noise.to(output.dtype)


def _least_std(device: ProgrammableDevice) -> float:
    """Return the standard deviation of a reading of small inputs, rounding included, in units of w x."""
    with device:
        law, scale = device.described_noise, device.reading_scale
    if isinstance(law, ConverterLatticeNoise):
        return float((law.conversions * (law.std_low**2 + law.step**2 / 12)) ** 0.5 / scale)
    return float(law.std_low / scale) if isinstance(law, SignalGaussianNoise) else 0.0
