"""Per-record clipping in closed form with central Gaussian noise: DP-SGD on feedback-alignment updates.

Record i contributes the outer product delta_i h_i^T to layer l, and delta_i to its bias. The norm of this contribution
over all layers is known without forming it:

    ||g_i||^2 = sum_l ||delta_(l,i)||^2 (||h_(l-1,i)||^2 + 1),

with the 1 for a bias (other layers measure themselves: `LayeredNetwork.squared_norms`). One factor
min(1, C / ||g_i||) scales all of a record's deltas. One matrix product per layer sums the records. N(0, (z C)^2) is
added to every entry of the sum, and a constant divides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accounting.calibration import calibrate_noise
from accounting.ledger.ledger import Ledger
from accounting.mechanisms import Mechanism
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import NoiseStream
from training.networks.clipping import Clip, bounded_factors, finite_rows, full_precision
from training.networks.layers import LayeredNetwork
from training.networks.record_gradients.tape import RecordTape
from training.protections.base import (
    PoissonProtection,
    PrivateGradients,
    Protection,
    central_noise,
    noise_std,
    noise_work,
)
from training.runs.folder import RunFolder

LAST_ITERATE = "last iterate"
"""What a ledger calls the one model that a run of the last iterate releases."""


class RecordProtection(PoissonProtection):
    """Whole records: clipped contributions, central Gaussian noise, secret Poisson batches.

    The algorithm says what a step releases, since the clip and the noised quantity are its own.
    """

    needs = frozenset({"gradients", "own noise"})
    shared = True

    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """See PoissonProtection.mechanism."""
        return self._algorithm.mechanism(noise_multiplier)

    def gradients(self, device: NoisyDevice | None) -> RecordGradients:
        """See Protection.gradients; takes any layered network."""
        return RecordGradients(
            clip_norm=self.section.clip,
            noise_multiplier=self.noise_multiplier,
            divisor=self._plan.config.divisor,
            noise=central_noise(self._plan, device),
            by_layer=self._algorithm.updates.by_layer,
            ranks=Ranks(),
        )

    def work_of_step(self, records: float, n_outputs: int) -> DeviceWork:
        """See Protection.work_of_step; every parameter's gradient has noise."""
        sizes = [parameter.numel() for parameter in self._plan.network.parameters]
        return noise_work(self._plan, sizes, n_outputs)


class LastIterateProtection(Protection):
    """Whole records, of which only the final model is published; the algorithm states its mechanism."""

    needs = frozenset({"own noise"})

    def calibrated(self) -> float | None:
        """See Protection.calibrated."""
        options = self.section
        if options.noise_multiplier is not None or options.epsilon is None:
            return options.noise_multiplier
        found, _ = calibrate_noise(self.whole_run(), target_epsilon=options.epsilon, delta=options.delta)
        return found.noise

    def whole_run(self) -> Mechanism:
        """See Protection.whole_run."""
        return self._algorithm.mechanism(self._algorithm.noise_guess)

    def pay_upfront(self, ledger: Ledger, device: NoisyDevice | None, folder: RunFolder) -> None:
        """Pay for the last iterate, once: a run that was killed and resumes still releases only one."""
        if all(payment.name != LAST_ITERATE for payment in ledger.content.payments):
            ledger.pay_once(LAST_ITERATE, self._algorithm.mechanism(self.noise_multiplier))


def layer_norms(network: LayeredNetwork, deltas: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Return ||g_(l,i)|| of each layer and record, float64, shape (layers, batch).

    Args:
        network: Its layers turn signals into contributions.
        deltas: delta_l of each layer, shapes (batch, ...).
        inputs: What each layer's update takes for h_(l-1), shapes (batch, ...).
    """
    squares = [
        network.squared_norms(layer, delta, h)
        for layer, (delta, h) in enumerate(zip(deltas, inputs, strict=True))
    ]
    return torch.stack(squares).sqrt()


@dataclass(frozen=True, kw_only=True)
class ClippedSignals:
    """A batch's signals as they are summed: sum_i f_i J_i^T delta_i for each layer.

    Attributes:
        deltas: delta_l of each layer, 0 for a record whose contribution is not finite.
        inputs: h_(l-1) of each layer, 0 for such a record.
        clips: The factors f_i of each layer.
    """

    deltas: Sequence[Tensor]
    inputs: Sequence[Tensor]
    clips: Sequence[Clip]


class RecordGradients(PrivateGradients):
    """Writes clipped, noised gradients into a network.

    Guarantees, for every batch whatever it holds:
        - a record's contribution, as float32 arithmetic forms it, has norm at most C (1 + 1e-6), whatever finite
          numbers the record holds (training.networks.clipping); so adding or removing a record changes the sum of
          contributions by at most that, up to the rounding of the sum itself;
        - a record whose contribution is not finite counts as zero, and nothing about it is reported;
        - an empty batch takes the same noisy step.

    With several processes the contributions of all are added on the first one, which draws the noise and sends
    the noisy sum to the others. The noise is then one draw of N(0, (z C)^2), as accounted, whatever their number, and
    no other process holds the whole sum without it.

    Attributes:
        left_out: Number of contributions so far that were not finite. It depends on private records, so no file of a
            run holds it.

    Args:
        clip_norm: C, in [1e-12, 1e12].
        noise_multiplier: z >= 0; the noise has standard deviation z C in every entry of the sum.
        divisor: The constant that the noisy sum is divided by, in [1e-12, 1e12]; never the realised batch size.
        noise: Source of independent N(0, 1), apart from every other stream of the run.
        by_layer: Clip each layer's contribution to C / sqrt(layers), so that all together stay within C, instead of
            the whole contribution to C.
        ranks: The processes that share each batch; None for one.

    Raises:
        ValueError: float32 cannot hold such a clip or such noise; see training.protections.base.noise_std.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        divisor: float,
        noise: NoiseStream,
        by_layer: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(noise)
        self._ranks = ranks or Ranks.one()
        self._by_layer = by_layer
        self._clip_norm = clip_norm
        self._noise_std = noise_std(clip_norm=clip_norm, noise_multiplier=noise_multiplier, divisor=divisor)
        self._divisor = divisor
        self.left_out = 0

    def _write(
        self,
        network: LayeredNetwork,
        deltas: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See PrivateGradients._write; takes any layered network."""
        found = self.clipped(network, deltas, inputs)
        for layer, (delta, h, clip) in enumerate(zip(found.deltas, found.inputs, found.clips, strict=True)):
            with full_precision():
                network.set_gradient(layer, delta, h, self._divisor, clip)
        self._finish([p for layer in range(len(deltas)) for p in network.layer_parameters(layer)])

    def clipped(
        self, network: LayeredNetwork, deltas: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> ClippedSignals:
        """Return signals and inputs with the factor of each record in each layer; arguments as in `set_gradients`."""
        with full_precision():
            norms = layer_norms(network, deltas, inputs)
        finite = torch.isfinite(norms).all(dim=0)
        factors = self._factors(norms)
        if not bool(finite.all()):
            self.left_out += int((~finite).sum())
            deltas = [finite_rows(delta, finite) for delta in deltas]
            inputs = [finite_rows(h, finite) for h in inputs]
        clips = [Clip(factors=factor, norms=norm) for factor, norm in zip(factors, norms, strict=True)]
        return ClippedSignals(deltas=deltas, inputs=inputs, clips=clips)

    def set_recorded_gradients(self, tape: RecordTape) -> None:
        """Write the private gradient of every parameter of a module, from the batch that a tape has recorded.

        The same guarantees as for layered networks hold. A batch without records is recorded by `tape.recording(0)`.

        Args:
            tape: It recorded the forward and backward passes of the batch, of a loss that sums over records.
        """
        self.set_gradients_of_parts([tape])

    def set_gradients_of_parts(self, parts: Iterable[RecordTape]) -> None:
        """Write the private gradient of every parameter of a module, from a batch that a tape recorded in parts.

        The clipped sums of all parts are added, and the noise is added once. The same guarantees as above hold.

        Args:
            parts: The tape, once after each part that it recorded; at least once.

        Raises:
            ValueError: There is no part.
        """
        totals: dict[int, Tensor] = {}
        parameters: list[nn.Parameter] = []
        for tape in parts:
            squares = tape.squared_norms()
            norms = squares.sqrt()
            self.left_out += int((~torch.isfinite(norms).all(dim=0)).sum())
            tape.set_gradients(self._factors(norms), squares, self._divisor)
            parameters = [parameter for layer in tape.layers for parameter in layer]
            for parameter in parameters:
                part, parameter.grad = parameter.grad, None
                if part is not None:  # always, after set_gradients
                    earlier = totals.get(id(parameter))
                    totals[id(parameter)] = part if earlier is None else earlier.add_(part)
        if not parameters:
            raise ValueError("parts: is empty; an empty batch is one part, recorded by tape.recording(0)")
        for parameter in parameters:
            parameter.grad = totals[id(parameter)]
        self._finish(parameters)
        self.batches_written += 1

    def _finish(self, parameters: Sequence[Tensor]) -> None:
        """Add the sums of all processes, and noise to every entry; each process then has the same gradients."""
        ranks = self._ranks
        gradients = ranks.gradients(parameters)
        ranks.sum_on_first(gradients)
        if self._noise_std and ranks.is_first:
            for gradient in gradients:
                self._noise.add_to(gradient, self._noise_std / self._divisor)
        ranks.broadcast_tensors(gradients)

    def _factors(self, norms: Tensor) -> Tensor:
        """Return the factor of each layer of each record, float64, shape (layers, batch)."""
        whole = norms.square().sum(dim=0).sqrt()  # infinite if any layer's is, so that its factor is 0
        if not self._by_layer:
            return bounded_factors(whole, self._clip_norm).expand(len(norms), -1)
        factors = bounded_factors(norms, self._clip_norm / len(norms) ** 0.5)
        return torch.where(torch.isfinite(whole), factors, 0.0)
