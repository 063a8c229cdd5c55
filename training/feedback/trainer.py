"""Train by backpropagation or by direct feedback alignment, digital or photonic.

One step: forward pass (eq. 2 of the PDFA paper), error, feedback, then for each layer
dW_l = (1/m) sum_i delta_(l,i) clip_c(offset_nu(h_(l-1,i)))^T (eq. 8), and the optimizer's update.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice
from opusim.devices.usage import Usage
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import NoiseStream
from training.config.run import LossName
from training.engine.trainer import StepRecord, Trainer
from training.errors import TrainingDiverged
from training.feedback.config import (
    BpConfig,
    DfaConfig,
    EncodedConfig,
    FeedbackConfig,
    PdfaConfig,
    TdfaConfig,
)
from training.feedback.projection import (
    AbsoluteTernary,
    BitPlanes,
    DeviceProjection,
    Encoding,
    Projection,
)
from training.feedback.rules import Alignment, Backpropagation, Deltas, Draw, Feedback, Scale
from training.feedback.structured import digital_projection
from training.networks.clipping import ActivationClipping, ball_factors, sphere_factors
from training.networks.functions import LOSSES
from training.networks.network import ForwardPass, FullyConnected
from training.protections.base import PrivateGradients, SoftLabels


class FeedbackTrainer(Trainer):
    """Trains a fully connected network with one of the four feedbacks.

    Args:
        network: The network; its parameters are updated in place.
        optimizer: Any torch optimizer over the network's parameters.
        config: Feedback, order of noise, clips.
        loss: "cross-entropy" or "squared-error".
        device: An open device; required by pdfa, ignored by the others.
        noise: Digital noise; required where config.sigma > 0.
        protection: Clips and noises the records' contributions; None averages over the batch.
        labels: What training knows of the labels in their place; None if it sees the labels themselves.
        ranks: The processes that share each batch; None for one.

    Raises:
        ValueError: pdfa without a device, a device of other widths, or sigma without a noise stream.
    """

    def __init__(
        self,
        network: FullyConnected,
        optimizer: torch.optim.Optimizer,
        config: FeedbackConfig,
        *,
        loss: LossName = "cross-entropy",
        device: NoisyDevice | None = None,
        noise: NoiseStream | None = None,
        protection: PrivateGradients | None = None,
        labels: SoftLabels | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.kind = config.kind
        self.model = network.model
        self.optimizer = optimizer
        self._network = network
        self._loss = LOSSES[loss]
        self._device = device if config.kind == "pdfa" else None
        self._noise = noise
        self._protection = protection
        self._labels = labels
        self._ranks = ranks or Ranks.one()
        self._before = 0  # records of the batch that processes of lower rank have
        self._clipping = ActivationClipping(
            tau_h_max=config.tau_h_max,
            tau_h_min=config.tau_h_min,
            layers=config.clipped_layers,
            width=config.clip_width,
        )
        self._feedback = self._make_feedback(config)

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are alignment, signal_norm and noise_norm per layer."""
        for source in (self._device, self._noise, self._protection):
            if source is not None:
                source.seek(step)
        counts = [found for (found,) in self._ranks.rows([len(x)])]
        self._before = sum(counts[: self._ranks.rank])
        forward = self._network.forward(x)
        value = self._loss(forward.output, self._targets(forward.output, y, records, step))
        derivative = self._network.derivative(forward, self._network.depth - 1, through_clip=True)
        error = value.output_gradient if derivative is None else value.output_gradient * derivative
        loss_sum = value.per_record.sum(dtype=torch.float64)
        if self._protection is None:
            _require_finite(error, loss_sum, step)
        else:
            error = _finite_rows(error)  # stopping at a record's NaN would reveal that record
        deltas = (
            self._feedback.deltas(self._network, forward, error, observe=observe)
            if sum(counts)  # with a shared device, a process without records takes part in the reading
            else _no_deltas(forward)
        )
        self._set_gradients(forward, deltas, records, batch_size=sum(counts))
        diagnostics = self._diagnostics(forward, error, deltas) if observe and len(x) else {}
        self.optimizer.step()
        return StepRecord(
            loss_sum=loss_sum,
            n_correct=(forward.output.argmax(dim=1) == y).sum(),
            n_records=len(x),
            diagnostics=diagnostics,
        )

    def start_from_feedback(self) -> None:
        """Set the output layer's weights to the feedback of the last hidden layer, and its bias to zero.

        Raises:
            ValueError: The feedback has no matrix, or there is no hidden layer.
        """
        if not isinstance(self._feedback, Alignment) or self._network.depth == 1:
            raise ValueError(
                "model.initial_output = 'feedback' needs a feedback matrix and a hidden layer, but trainer.kind = "
                f"{self.kind!r} with {self._network.depth - 1} hidden layers has none; use 'random'"
            )
        output = self._network.linears[-1]
        with torch.no_grad():
            output.weight.copy_(self._feedback.output_weights(self._network))
            if output.bias is not None:
                output.bias.zero_()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """See Network.tensors."""
        return self._network.tensors

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: that of the protection."""
        return {} if self._protection is None else self._protection.state

    @property
    def usage(self) -> Usage:
        """See Trainer.usage."""
        return self._device.usage if self._device is not None else Usage()

    def _targets(self, output: Tensor, y: Tensor, records: Tensor | None, step: int) -> Tensor:
        """What the loss compares the output with: class numbers, or soft labels."""
        if self._labels is None:
            return y
        if records is None:
            raise ValueError("records is missing; noisy labels are looked up by the records' numbers")
        return self._labels.targets(output, records, step)

    def _set_gradients(
        self, forward: ForwardPass, deltas: Deltas, records: Tensor | None, *, batch_size: int
    ) -> None:
        network, protection = self._network, self._protection
        inputs = self._update_inputs(forward)
        if protection is not None:
            reference = protection.reference
            public = None if reference is None else self._update_inputs(network.forward(reference))
            found = network.contributions(deltas.with_gains(), inputs)
            protection.set_gradients([found], records=records, public_inputs=public)
            return
        for layer, (delta, gain, h) in enumerate(zip(deltas.layers, deltas.gains, inputs, strict=True)):
            network.set_gradient(layer, delta, h, max(batch_size, 1) / gain)
        if self._ranks.world > 1:
            self._ranks.sum(self._ranks.gradients(network.model.parameters()))

    def _update_inputs(self, forward: ForwardPass) -> list[Tensor]:
        """Return h_(l-1) for each layer's update, clipped as configured."""
        network = self._network
        return [
            self._clipping(h, layer=layer, depth=network.depth, n_layer=network.widths[layer])
            for layer, h in enumerate(forward.inputs)
        ]

    def _diagnostics(self, forward: ForwardPass, error: Tensor, deltas: Deltas) -> dict[str, list[float]]:
        """Return norms, and the cosine of each layer's update with its backpropagation gradient (Figure 2, right)."""
        network = self._network
        updates = [network.gradients(layer) for layer in range(network.depth)]
        reference = Backpropagation().deltas(network, forward, error, observe=False)
        cosines = []
        for layer, update in enumerate(updates):
            gradient = reference.layers[layer].t() @ forward.inputs[layer]
            flat = [gradient.flatten()]
            if network.linears[layer].bias is not None:
                flat.append(reference.layers[layer].sum(dim=0))
            cosines.append(float(torch.cosine_similarity(update, torch.cat(flat), dim=0)))
        return {"alignment": cosines, "signal_norm": deltas.signal_norms, "noise_norm": deltas.noise_norms}

    def _make_feedback(self, config: FeedbackConfig) -> Feedback:
        draw = self._digital_draw(config)
        if isinstance(config, BpConfig):
            return Backpropagation(scale=_scale(config), draw=draw, signal_gain=config.signal_gain)
        if isinstance(config, PdfaConfig):
            return self._photonic(config)
        if not isinstance(config, DfaConfig | TdfaConfig):
            raise TypeError(f"trainer.kind = {config.kind!r} is no feedback; take bp, dfa, tdfa or pdfa")
        widths = self._network.widths
        projection = digital_projection(
            config.projection,
            widths[-1],
            max(sum(widths[:-1]), 1),
            config.feedback_seed,
            place=self._network.linears[0].weight.device,
            encoding=closed_form_encoding(config) if isinstance(config, TdfaConfig) else None,
        )
        return _alignment(projection, config, draw, gain=1.0 if config.gain is None else config.gain)

    def _photonic(self, config: PdfaConfig) -> Feedback:
        device = self._device
        if device is None:
            raise ValueError(
                "device is missing; trainer.kind = 'pdfa' projects through one (opusim.open_device)"
            )
        widths = self._network.widths
        wanted = (widths[-1], sum(widths[:-1]))
        if (device.n_inputs, device.n_outputs) != wanted:
            raise ValueError(
                f"device {device.name!r} is open with {device.n_inputs} inputs and {device.n_outputs} outputs, the "
                f"network needs {wanted[0]} and {wanted[1]}; open it with n_inputs={wanted[0]}, n_outputs={wanted[1]}"
            )
        projection = DeviceProjection(device, encoding=closed_form_encoding(config))
        draw = device.draw if config.order == "published" else None
        return _alignment(projection, config, draw, gain=1.0 if config.gain is None else config.gain)

    def _digital_draw(self, config: FeedbackConfig) -> Draw | None:
        sigma = config.digital_sigma
        if not sigma:
            return None
        stream = self._noise
        if stream is None:
            raise ValueError(f"noise is missing; trainer.sigma = {sigma} draws from a NoiseStream")
        place = self._network.linears[0].weight.device

        def draw(shape: tuple[int, int]) -> Tensor:
            rows, width = shape  # a record's noise is the same whichever process has it
            return stream.normal((self._before + rows, width), device=place)[self._before :].mul_(sigma)

        return draw


def closed_form_encoding(config: EncodedConfig) -> Encoding:
    """Return how the error of a fully connected network is shown.

    Raises:
        ValueError: trainer.encoding is for other modules.
    """
    if config.encoding not in ("ternary", "planes"):
        raise ValueError(
            f"trainer.encoding = {config.encoding!r} has no closed form; use 'ternary' or 'planes'"
        )
    return BitPlanes(config.planes) if config.encoding == "planes" else AbsoluteTernary(config.threshold)


def _alignment(
    projection: Projection, config: FeedbackConfig, draw: Draw | None, *, gain: float
) -> Alignment:
    return Alignment(
        projection,
        gain=gain,
        signal_gain=config.signal_gain,
        scale=_scale(config),
        draw=draw,
        through_clip=config.through_clip,
    )


def _scale(config: FeedbackConfig) -> Scale | None:
    """Return the factors that bring a signal to tau_B, or None if there is no tau_B."""
    tau_b = config.tau_b
    if tau_b is None:
        return None
    operator = ball_factors if config.scale == "ball" else sphere_factors
    return partial(operator, radius=tau_b)


def _require_finite(error: Tensor, loss_sum: Tensor, step: int) -> None:
    if not math.isfinite(float(loss_sum) + float(error.sum())):  # one NaN or infinity makes the sum so
        raise TrainingDiverged(
            f"step {step}: training diverged, because the error or the loss is NaN or infinite; "
            "start a new run with a lower optimizer.lr or less noise, or check the inputs"
        )


def _finite_rows(error: Tensor) -> Tensor:
    """Return the error with zeros for every record whose error is not finite."""
    finite = torch.isfinite(error).all(dim=1, keepdim=True)
    return torch.where(finite, error, 0.0)


def _no_deltas(forward: ForwardPass) -> Deltas:
    """Return the deltas of an empty batch, which has no gradient; momentum still moves the weights."""
    layers = [torch.zeros_like(z) for z in forward.pre_activations]
    return Deltas(layers=layers, gains=[1.0] * len(layers))
