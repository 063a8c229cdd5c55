"""Per-record clipping in closed form with central Gaussian noise: DP-SGD on feedback-alignment updates.

Record i contributes the outer product delta_i h_i^T to layer l, and delta_i to its bias. The norm of this contribution
over all layers is known without forming it:

    ||g_i||^2 = sum_l ||delta_(l,i)||^2 (||h_(l-1,i)||^2 + 1),

with the 1 for a bias (other uses of parameters measure themselves: `Contributions.squared_norms`). One factor
min(1, C / ||g_i||) scales all of a record's deltas, or another rule of `opusim.training.protections.clipping` does. One
matrix product per layer sums the records. N(0, (z C)^2) is added to every entry of the sum, and a constant divides it.
On the processor, and in release mode on a card of CUDA, a sum with its noise is one exactly rounded number
(`NoiseStream.add_rounded`), unless the noise is a device's or correlated.

With protection.bands = b above 1 the noise of b steps in a row is correlated, and batches come from b subsets of the
records in turn (theorem `opusim.accounting.mechanisms.records.BANDED_RECORDS`). Everything that a step does with the
noisy sum (learning rates, momentum, averages) is post-processing, but the clip must be the same at every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.ledger import Ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import require_bands, share_of_sum
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.plugins import Deferred
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import CorrelatedStream, NoiseStream, SystemUniforms, derive_seed
from opusim.training.config.run import RunConfig
from opusim.training.config.sections import OptimizerConfig
from opusim.training.data.samplers import PhysicalBatches, PoissonSampler
from opusim.training.networks.clipping import (
    MOST_RECORDS,
    SUM_ERROR,
    Clip,
    CountedSums,
)
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.optimizers import rate_share
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.protections.base import (
    CalibratedProtection,
    PoissonProtection,
    PrivateGradients,
    counts_sums,
    noise_std,
    rounds_exactly,
)
from opusim.training.protections.clipping import FLAT, RELEASED_COUNTS, Clipping, MovingBound
from opusim.training.runs.folder import RunFolder

signal, optimize = Deferred("scipy.signal"), Deferred("scipy.optimize")

NEW_NOISE = "correlated noise begun anew"
"""What a ledger calls the price of resuming a release run of correlated noise without its earlier noise and coins."""
_GRID = 2.0**-20
"""Coefficients are multiples of this, which float32 holds exactly."""
_ITERATES, _ENTRIES = 32, 1_000_000
"""Iterates whose noise the coefficients minimise, and the largest number of weights of gradients in them."""
LAST_ITERATE = "last iterate"
"""What a ledger calls the one model that a run of the last iterate releases."""


class RecordProtection(PoissonProtection):
    """Whole records: clipped contributions, central Gaussian noise, secret Poisson batches.

    The algorithm says what a step releases, since the clip and the noised quantity are its own.
    """

    needs = frozenset({"gradients", "own noise"})
    shared = True

    @cached_property
    @override
    def correlation(self) -> tuple[float, ...]:
        section = self.options
        if section.bands == 1:
            return (1.0,)
        if section.correlation is not None:  # as float32, in which the noise is computed
            return tuple(float(np.float32(value)) for value in section.correlation)
        return banded_coefficients(section.bands, self.plan.total_steps, self.config.optimizer)

    @cached_property
    @override
    def clipping(self) -> Clipping:
        if self.algorithm.clips_by_layer:
            return Clipping(kind="per_layer")
        return Clipping(**self.options.clipping_rule)

    @cached_property
    def physical_batches(self) -> PhysicalBatches:
        """How the records of a step run, from public numbers (`protection.fixed_batches`)."""
        if not self.algorithm.fills_batches:
            return PhysicalBatches()
        on_card = self.config.torch_device != "cpu"
        return PhysicalBatches.of_steps(**self._drawn, on_card=on_card, fixed=self.options.fixed_batches)

    @property
    def _drawn(self) -> dict[str, Any]:
        """Public numbers of a step's records, for `PhysicalBatches`."""
        config, sampler = self.config, self.plan.sampler
        if not config.counts_are_public:
            return {"expected": config.sampler.batch_size, "records": None, "processes": Ranks().world}
        expected, records = sampler.expected_batch_size, sampler.n_records
        return {"expected": expected, "records": records, "processes": Ranks().world}

    @cached_property
    @override
    def counted_sums(self) -> CountedSums | None:
        if not self.rounds_exactly or not counts_sums(self.config):
            return None
        drawn = self._drawn
        return CountedSums.of(self.physical_batches.most(**drawn), processes=drawn["processes"])

    @property
    def rounds_exactly(self) -> bool:
        """See Protection.rounds_exactly; correlated noise is not."""
        return rounds_exactly(self.config) and self.options.bands == 1

    def require_covered(self) -> None:
        """See Protection.require_covered; correlated noise needs its own batches and the writer of `gradients`."""
        bands, sampler = self.options.bands, self.plan.sampler
        if bands > 1 and "gradients" not in self.algorithm.applies:
            kind = self.config.trainer.kind
            reason = f"{bands} is for trainers whose gradients the protection writes, and {kind!r} adds its own noise"
            raise ConfigError("configuration", "protection.bands", f"{reason}; leave it out")
        is_cyclic = isinstance(sampler, CyclicPoissonSampler) and sampler.subsets == bands
        if bands > 1 and not is_cyclic:
            raise NoGuarantee(
                f"sampler.scheme = {sampler.scheme!r}: noise that is correlated over {bands} steps needs batches of "
                f"{bands} subsets in turn, which each record joins by a random draw of its own; leave the sampler out"
            )
        kind, options = self.config.trainer.kind, self.options
        other = "take trainer.clip = 'module'" if kind == "ulr" else "leave it out"
        # a key, whether the run asks for it, its value, and a remedy
        keys: tuple[tuple[str, object, object, str], ...] = (
            ("fixed_batches", options.fixed_batches, True, "leave it out"),
            ("clipping", options.clipping != "flat", options.clipping, other),
            ("unit", self.config.of_users, "user", "take 'record'"),
        )
        for key, is_asked, value, remedy in keys:
            if is_asked and not self.algorithm.fills_batches:
                reason = f"{value!r} is for bp, dfa, tdfa and pdfa, not for trainer.kind = {kind!r}; {remedy}"
                raise ConfigError("configuration", f"protection.{key}", reason)
        super().require_covered()

    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """See PoissonProtection.mechanism; raise NoGuarantee if an own mechanism does not state correlated noise."""
        found = self.algorithm.mechanism(noise_multiplier)
        if self.options.bands > 1 and getattr(found, "correlation", None) != self.correlation:
            raise NoGuarantee(
                f"mechanism {found.kind!r}: does not state noise that is correlated over {self.options.bands} steps; "
                "leave protection.bands out"
            )
        return found

    @override
    def resolved(self) -> dict[str, Any]:
        found = super().resolved()
        return dict(found) if self.options.bands == 1 else {**found, "correlation": self.correlation}

    def pay_upfront(self, ledger: Ledger, device: NoisyDevice | None, folder: RunFolder) -> None:
        """Pay for correlated noise that begins anew: a release keeps neither noise nor coins, so its parts compose."""
        content = ledger.content
        if self.options.bands > 1 and content.mode == "release" and content.payments:
            step = self.mechanism(self.noise_multiplier)
            ledger.pay_once(NEW_NOISE, step.repeated(self.options.bands - 1))

    @override
    def gradients(self, device: NoisyDevice | None) -> RecordGradients:
        ranks = Ranks()
        return RecordGradients(
            clip_norm=self.options.clip,
            noise_multiplier=self.noise_multiplier,
            divisor=self.config.divisor,
            noise=self._noise(device) if ranks.is_first else self.central_noise(device),
            clipping=self.clipping,
            ranks=ranks,
            counted=self.counted_sums,
        )

    def _noise(self, device: NoisyDevice | None) -> NoiseStream:
        fresh, config = self.central_noise(device), self.config
        if self.options.bands == 1:
            return fresh
        return CorrelatedStream(
            fresh,
            self.correlation,
            size=sum(parameter.numel() for parameter in self.plan.network.parameters),
            stored=config.mode == "experiment",
            device=config.torch_device,
        )

    def work_of_step(self, records: float, n_outputs: int) -> DeviceWork:
        """See Protection.work_of_step; every parameter's gradient has noise."""
        sizes = [parameter.numel() for parameter in self.plan.network.parameters]
        return self.noise_work(sizes, n_outputs)


class LastIterateProtection(CalibratedProtection):
    """Whole records, of which only the final model is published; the algorithm states its mechanism."""

    needs = frozenset({"own noise"})

    @override
    def whole_run(self) -> Mechanism:
        return self.algorithm.mechanism(self.algorithm.noise_guess)

    def pay_upfront(self, ledger: Ledger, device: NoisyDevice | None, folder: RunFolder) -> None:
        """Pay for the last iterate, once: a run that was killed and resumes still releases only one."""
        if all(payment.name != LAST_ITERATE for payment in ledger.content.payments):
            ledger.pay_once(LAST_ITERATE, self.algorithm.mechanism(self.noise_multiplier))


@dataclass(frozen=True)
class CyclicPoissonSampler(PoissonSampler):
    """Draw the batch of step t from subset t mod b: each record of it enters with probability b q, independently.

    A record's subset is a uniform coin of its own, so that one more record changes no other's subset; subsets of fixed
    sizes would. Averaged over this coin a record enters a batch with probability q. Between two batches of a
    record there are at least b - 1 without it, which noise that is correlated over b steps requires.

    Attributes:
        sampling_probability: q, above 0 and at most 1 / b.
        subsets: b, at least 2. The coins come from the seed; without one, from the system's generator, once for each
            sampler.
    """

    subsets: int

    scheme: ClassVar[str] = "cyclic-poisson"
    _coins: list[np.ndarray] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, config: RunConfig, n_records: int) -> Self:
        """Return the sampler of a run; raise ConfigError if b q exceeds 1."""
        options, bands = config.sampler, config.protection.bands
        probability = options.sampling_probability or min(options.batch_size / n_records, 1.0)
        try:
            require_bands(bands, probability)
        except ValueError as error:
            raise ConfigError("configuration", "protection", str(error)) from error
        return cls(
            n_records, sampling_probability=probability, subsets=bands, seed=config.seed_for("sampler")
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_bands(self.subsets, self.sampling_probability)

    def _draw(self, step: int) -> np.ndarray:
        uniforms = self._uniforms(self._generator(step))
        due = self.subset_of_records == step % self.subsets
        return np.flatnonzero(due & (uniforms < self.subsets * self.sampling_probability))

    @property
    def subset_of_records(self) -> np.ndarray:
        """The subset of each record, 0 to b - 1, shape (n_records,)."""
        if not self._coins:
            seed = None if self.seed is None else derive_seed(self.seed, "sampler-subsets")
            source = SystemUniforms() if seed is None else np.random.default_rng(seed)
            self._coins.append((source.random(self.n_records) * self.subsets).astype(np.int64))
        return self._coins[0]


@lru_cache(maxsize=32)
def banded_coefficients(bands: int, steps: int, optimizer: OptimizerConfig) -> tuple[float, ...]:
    """Return the coefficients c of noise inverse(C) Z that disturbs a run's parameters least.

    Without curvature the parameters after step t are minus the sum over s of A_ts times the noisy sum of step s, where
    A_ts is the sum over u from s to t of rate_u momentum^(u - s). The coefficients minimise the squared error ||A
    inverse(C)||_F^2 at |c| = 1, the sensitivity, among those that do not increase, c_0 >= c_1 >= ... >= 0; iterates t
    are up to 32, equally spaced. |c| lies in (1 - 2^-20 b, 1], in multiples of 2^-20. Source: McKenna 2024, "Scaling up
    the Banded Matrix Factorization Mechanism", section 3.
    """
    weights = weights_of_gradients(steps, optimizer)

    def loss(ratios: np.ndarray) -> tuple[float, np.ndarray]:
        return _log_error(weights, ratios)

    options = {"method": "L-BFGS-B", "bounds": [(1e-6, 1.0)] * (bands - 1), "options": {"ftol": 1e-7}}
    start = np.full(bands - 1, 0.97)
    found = optimize.minimize(loss, start, jac=True, **options).x if bands > 1 else start
    c = np.cumprod([1.0, *found])
    return tuple((np.floor(c / np.linalg.norm(c) / _GRID) * _GRID).tolist())


def weights_of_gradients(steps: int, optimizer: OptimizerConfig) -> np.ndarray:
    """Return A of `banded_coefficients`: the weight of each step's noisy sum in up to 32 iterates, (iterates, steps).

    The iterates are equally spaced, and the last of them is the final one.
    """
    rates = np.array([rate_share(optimizer, step / steps) for step in range(steps)])
    count = max(1, min(steps, _ITERATES, _ENTRIES // steps))
    ends = np.arange(1, count + 1) * steps // count - 1
    momentum = optimizer.momentum if optimizer.name == "sgd" else optimizer.beta1
    used = np.where(np.arange(steps) <= ends[:, None], rates, 0.0)
    weights: np.ndarray = signal.lfilter([1.0], [1.0, -momentum], used[:, ::-1], axis=1)[:, ::-1]
    return weights


def _log_error(weights: np.ndarray, ratios: np.ndarray) -> tuple[float, np.ndarray]:
    """Return log(||A inverse(C)||^2 |c|^2) and its gradient for c_0 = 1, c_k = c_(k-1) r_k.

    With B = A inverse(C) and U = B inverse(C)^T the derivative of ||B||^2 by c_k is -2 sum over s of U_s B_(s+k).
    """
    c = np.cumprod([1.0, *ratios])
    b = signal.lfilter([1.0], c, weights[:, ::-1], axis=1)[:, ::-1]
    u = signal.lfilter([1.0], c, b, axis=1)
    error, norm = float(np.vdot(b, b)), float(c @ c)
    steps = b.shape[1]
    by_c = np.array([-2 * np.vdot(u[:, : max(steps - k, 0)], b[:, k:]) for k in range(1, len(c))])
    by_c = by_c / error + 2 * c[1:] / norm
    by_ratio = np.cumsum((by_c * c[1:])[::-1])[::-1] / ratios
    return math.log(error * norm), by_ratio


def require_counted_sums(tape: RecordTape, expected: float, *, processes: int, name: str) -> None:
    """Refuse (ValueError) batches too large for `SUM_ERROR` to bound the rounding of sums over uses of a weight.

    The bound holds for twice the expected number of records; `name` is the argument or key that sets it.
    """
    most = MOST_RECORDS // (2 * processes)
    if tape.several_uses and expected > most:
        raise ValueError(
            f"{name} = {expected:g}: a parameter of the module is used several times, and the rounding of such sums is "
            f"counted for batches of at most {most} records; take smaller batches"
        )


class RecordGradients(PrivateGradients):
    """Writes clipped, noised gradients of parameters.

    Guarantees, for every batch whatever it holds:
        - a record's contribution, as float32 arithmetic forms it, has norm at most C (1 + 1e-6), whatever finite
          numbers the record holds (opusim.training.networks.clipping) and whatever the rule; so adding or removing a
          record changes the sum of contributions by at most that, up to the rounding of the sum itself;
        - under adaptive clipping C is C_t, a function of what was released before. A step also releases how many more
          norms lie within C_t than beyond, halved, with noise of r z: an exact sum, exactly rounded with its noise;
        - with `counted`, on the CPU, the noise covers that rounding, too: it is (1 + counted.error) z C;
        - if a module uses a parameter several times, the noise always covers the rounding of such sums: `SUM_ERROR`
          more;
        - a record whose contribution is not finite counts as zero, and nothing about it is reported;
        - an empty batch takes the same noisy step.

    With several processes the contributions of all are added on the first one, which draws the noise and sends
    the noisy sum to the others. The noise is then one draw of N(0, (z C)^2), as accounted, whatever their number, and
    no other process holds the whole sum without it.

    Args:
        clip_norm: C, in [1e-12, 1e12].
        noise_multiplier: z >= 0; the noise has standard deviation z C in every entry of the sum.
        divisor: The constant that the noisy sum is divided by, in [1e-12, 1e12]; never the realised batch size.
        noise: Source of independent N(0, 1), apart from every other stream of the run.
        clipping: How a contribution is brought within C; C is the first bound if it is adaptive.
        ranks: The processes that share each batch; None for one.
        counted: How sums are added so that the noise covers their rounding; None does not cover it, nor does a graphics
            card.

    Raises:
        ValueError: float32 cannot hold such a clip or such noise; see opusim.training.protections.base.noise_std.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        divisor: float,
        noise: NoiseStream,
        clipping: Clipping = FLAT,
        ranks: Ranks | None = None,
        counted: CountedSums | None = None,
    ) -> None:
        super().__init__(noise)
        self._counted = counted
        self._ranks = ranks or Ranks.one()
        self._clipping, self._clip_norm, self._divisor = clipping, clip_norm, divisor
        self._moving: MovingBound | None = None
        self._count_std = 0.0
        if clipping.count_noise is not None:  # adaptive
            self._moving = MovingBound(clipping, clip_norm)
            self._count_std = noise_multiplier * clipping.count_noise
            noise_multiplier /= share_of_sum(clipping.count_noise)
        self._multiplier = noise_multiplier
        self._noise_std = noise_std(clip_norm=clip_norm, noise_multiplier=noise_multiplier, divisor=divisor)

    @property
    def state(self) -> dict[str, Tensor]:
        """See PrivateGradients.state: that of correlated noise, or what moved the bound."""
        return self._noise.state if self._moving is None else {RELEASED_COUNTS: self._moving.released}

    def clips(self, found: Contributions) -> list[Clip]:
        """Return the factor of each record in each layer."""
        squares = found.squared_norms()
        return Clip.of_layers(self._factors(squares), squares)

    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See PrivateGradients._write. The clipped sums of all parts are added, and the noise is added once.

        Raises:
            ValueError: There is no part.
        """
        flat: Tensor | None = None
        count: Tensor | None = None
        if self._moving is not None:
            self._clip_norm = self._moving.value
            self._noise_std = noise_std(
                clip_norm=self._clip_norm, noise_multiplier=self._multiplier, divisor=self._divisor
            )
        several, parameters, sizes = False, list[nn.Parameter](), list[int]()
        counted, block, rows = self._counted, None, 0
        for part in parts:
            parameters = part.parameters
            if counted is not None and parameters[0].device.type != "cpu":
                counted = None
            if counted is not None:
                rows += part.records
                block = counted.block if rows <= counted.records else 0
            sizes = [parameter.numel() for parameter in parameters]
            kind = torch.float64 if block == 0 else torch.float32
            own = torch.empty(sum(sizes), device=parameters[0].device, dtype=kind)
            into = {id(p): place.view_as(p) for place, p in zip(own.split(sizes), parameters, strict=True)}
            found = part.totals(self._factors(part.squared_norms()), into if block != 0 else {}, block)
            if self._moving is not None:
                within = self._clipping.within(part.squared_norms(), self._clip_norm)
                count = within if count is None else count + within
            formed = [(into[id(p)], total) for p, total in found if total is not into[id(p)]]
            if formed:
                torch._foreach_copy_([place for place, _ in formed], [total for _, total in formed])
            flat = own if flat is None else flat.double().add_(own)  # across parts in float64
            several = several or part.several_uses
        if flat is None:
            raise ValueError("parts: is empty; an empty batch is one part, recorded by tape.recording(0)")
        exact = counted is not None and (block == 0 or self._ranks.world > 1)
        total = flat.double() if exact else flat.float()
        rounding = SUM_ERROR * several + (0.0 if counted is None else counted.error)
        self._finish(total, error=rounding, count=count)
        for parameter, gradient in zip(parameters, total.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter).float()
        if self._moving is not None and count is not None:  # last, as a step that failed may be taken again
            self._moving.move(float(count) / self._divisor)

    def _finish(self, total: Tensor, *, error: float, count: Tensor | None = None) -> None:
        """Turn sums into private gradients, the same in each process: add all processes' sums, add noise, divide.

        Noise is added to the sum and rounded with it to a public grid, of which float32 holds the 2^24 steps next to 0:
        some 8,000 standard deviations. Rounding a larger number again, and the division, are post-processing.

        Args:
            total: Sum of this process's records, of all parameters, float32, or float64 where float32 would round it
                by more than `error`; changed in place.
            error: Change that one record may make in the rounding of the sum, over C; the noise is raised to cover it.
            count: The count that is released with the sum, float64, shape (1,); changed in place.
        """
        ranks = self._ranks
        both = [total] if count is None else [total, count]
        if ranks.world > 1:
            ranks.sum_on_first(both)
        if ranks.rank == 0:
            if self._noise_std:
                self._noise.add_rounded(total, self._noise_std * (1 + error))
            total.div_(self._divisor)
            if count is not None and self._count_std:
                count.copy_(self._noise.rounded(1, self._count_std).added_to(count.cpu()))
        if ranks.world > 1:
            ranks.broadcast_tensors(both)

    def _factors(self, squares: Tensor) -> Tensor:
        """Return the factor of each layer of each record, float64, shape (layers, batch)."""
        return self._clipping.factors(squares, self._clip_norm)
