"""Base classes of protections and of the writers of private gradients, and what both need of a run (`Plan`)."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from opusim import checks
from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.ledger import Ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelReadout
from opusim.accounting.theorems import require_poisson
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import Certificate
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.files import OwnProcess
from opusim.noise import GaussianNoise, NoiseModel
from opusim.randomness import streams
from opusim.randomness.streams import NoiseStream, noise_stream
from opusim.training.config.run import RunConfig, split_refusal
from opusim.training.data import Dataset
from opusim.training.data.public_maps import map_from_facts
from opusim.training.data.samplers import Sampler
from opusim.training.networks.clipping import CLIP_RANGE, CountedSums
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import LinearUse
from opusim.training.protections.clipping import FLAT, Clipping
from opusim.training.runs.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """What a run is made of, before it starts; `opusim.training.engine.plan.RunPlan` makes one.

    Attributes:
        config: The configuration, with every default and the noise multiplier that its epsilon asks for.
        dataset: The records, in principal components if the run trains on those.
        network: The network to train, a `opusim.training.networks.base.Network`.
        sampler: How records are drawn into batches.
        description: The device's description, or None if the run has no device.
        noise: The law of the device's noise, or None if it is unknown before the device is open.
        certificate: The certificate that the guarantee rests on, or None if it rests on none.
        wrap_writer: Wraps the writer of private gradients, for an audit that plants crafted ones; None for none.
    """

    config: RunConfig
    dataset: Dataset
    network: Any
    sampler: Sampler
    description: DeviceDescription | None
    noise: NoiseModel | None = None
    certificate: Certificate | None = None
    wrap_writer: Callable[[Any], Any] | None = None

    @property
    def mode(self) -> str:
        """Key `mode` of the run, experiment or release."""
        return self.config.mode

    @property
    def protects(self) -> Literal["nothing", "records", "labels"]:
        """What the run's guarantee protects."""
        return self.config.protection.protects

    @property
    def credit(self) -> Mapping[str, Any]:
        """Keywords `beta` and `certificate` of a mechanism that rests on the device's noise; empty without one."""
        if self.certificate is None or not self.config.protection.credits_device:
            return {}
        return {"beta": self.certificate.beta, "certificate": self.certificate.digest}

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.config.epochs * self.sampler.steps_per_epoch

    @property
    def sampling_probability(self) -> float:
        """q, the probability with which a record enters a batch; raise NoGuarantee if the scheme has none."""
        probability = self.sampler.sampling_probability
        if probability is None:
            raise NoGuarantee(
                f"sampler.scheme = {self.sampler.scheme!r} has no sampling probability; use 'poisson'"
            )
        return probability

    @abstractmethod
    def opened_device(self) -> AbstractContextManager[NoisyDevice | None]:
        """Open the device of the run; yields None if it has none."""


class ProtectedAlgorithm(ABC):
    """What a protection asks of the algorithm that it protects.

    `opusim.training.engine.algorithm.Algorithm` is one.

    Attributes:
        config: The run's configuration.
    """

    config: RunConfig
    applies: ClassVar[frozenset[str]] = frozenset()
    """How it carries out a protection (`opusim.training.protections.base.Applied`); nothing by default."""
    fills_batches: ClassVar[bool] = False
    """Whether its steps run a fixed number of rows, with rows of weight zero after the records."""

    @property
    def clips_by_layer(self) -> bool:
        """Whether each layer's contribution is clipped to C / sqrt(layers), instead of the whole one to C."""
        return False

    @property
    def noise_guess(self) -> float:
        """Where the search for the noise multiplier starts, above 0."""
        return 1.0

    @abstractmethod
    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """Return what a run releases of whole records with this noise, in one step or as its last iterate."""


def require_covered(config: RunConfig, dataset: Dataset, scheme: str) -> None:
    """Refuse (NoGuarantee) a protected run that no theorem covers, before anything is computed.

    The sampling scheme, the split, the standardisation, the features or the number of classes may leak what is
    protected.
    """
    options = config.protection
    by_position = () if config.relation is Adjacency.ADD_OR_REMOVE_ONE else ("tail",)
    if dataset.split not in ("given", *by_position, *config.fitting_splits):
        raise NoGuarantee(split_refusal(config, dataset.split))
    if options.poisson and options.bands == 1:  # else RecordProtection checks the sampler
        require_poisson(scheme, by=f"protection.kind = {options.kind!r}")
    if options.protects == "records" and not dataset.standardisation.public:
        raise NoGuarantee(
            "the features were standardised by statistics of the data, which no guarantee covers; "
            "use public constants (data.mean and data.std)"
        )
    if options.protects == "records" and not (dataset.components is None or dataset.components.public):
        raise NoGuarantee(
            f"data.components = {config.data.components}: principal components are computed from the private records, "
            "which no guarantee covers; leave it out, or take data.components_from = 'synthetic' for images"
        )
    added = options.protects == "records" and config.relation is Adjacency.ADD_OR_REMOVE_ONE
    read = None if dataset.public_map is None else map_from_facts(dataset.public_map)
    if options.protects == "records" and read is not None and read.joins_records:
        raise NoGuarantee(
            f"data.features = {config.data.features!r}: the device repeats frames (camera.transfer.repeated), so that "
            "the features of one record may be those of another; mend the transfer, or take another device"
        )
    if added and read is not None and read.depends_on_order:
        raise NoGuarantee(
            f"data.features = {config.data.features!r}: the device's noise has a fixed seed and depends on a record's "
            "place, so that one record more changes the features of all others; take protection.relation = 'zero_out', "
            "or a device without noise"
        )
    if config.data.is_own:
        _require_stated_numbers(config, dataset)


def _require_stated_numbers(config: RunConfig, dataset: Dataset) -> None:
    """Refuse (NoGuarantee) records whose classes or number of token values would be read from private data."""
    stated, target = config.data, dataset.target
    if dataset.classes and not stated.classes:
        raise NoGuarantee(
            "data.classes is missing: the names of the classes would be read off the private labels; state them, as in "
            '--set \'data.classes=["no", "yes"]\''
        )
    if target == "class" and stated.n_classes is None and not stated.classes:
        raise NoGuarantee(
            "data.n_classes is missing: the number of classes would be read off the private labels; state it, as in "
            "--set data.n_classes=10"
        )
    if (
        dataset.holds_tokens
        and stated.vocabulary is None
        and (target != "tokens" or stated.n_classes is None)
    ):
        raise NoGuarantee(
            "data.vocabulary is missing: the number of token values would be read off the private records; state it"
        )


def require_own_noise(device: NoisyDevice, law: GaussianNoise, distance: float, wanted: LabelReadout) -> None:
    """Refuse a device whose own noise, certified or described, is too little for a reading at the run's epsilon.

    `distance` is the largest of two labels' readings, projection units. ConfigError says how much is missing, and names
    every way of the description to more noise.
    """
    needed, own = distance / wanted.mu, law.min_std
    if own >= needed:
        return
    settings = device.description.noise
    ways, then = [], ", then calibrate again" if law.beta else ""
    if settings is not None and settings.temperature_law is None:
        ways.append(f"set device.noise.sigma = {needed:.4g}{then}")
    elif settings is not None and settings.temperature_law is not None:
        with suppress(ValueError):  # beyond its range
            warm = settings.temperature_law.law().temperature_c(needed)
            ways.append(f"set device.noise.temperature_law.temperature_c = {warm:.4g}{then}")
    ways.append("leave protection.top_up out, so that digital noise makes up the rest")
    raise ConfigError(
        "configuration",
        "protection.epsilon",
        f"needs noise of {needed:.4g} in each reading, and device {device.name!r} has {own:.4g}, {needed / own:.3g} "
        f"times too little; {', or '.join(ways)}",
    )


MechanismT = TypeVar("MechanismT", bound=Mechanism)
Applied = Literal["gradients", "soft labels", "own noise"]
"""How an algorithm carries a protection out. gradients: its updates go through the writer of `Algorithm.gradients`.
soft labels: it sees only the labels that `Algorithm.trainer` is given. own noise: it clips and noises what its own
`Algorithm.mechanism` describes."""


class SoftLabels(ABC):
    """Targets that replace the labels, from labels that were read or randomized once."""

    @abstractmethod
    def targets(self, output: Tensor, records: Tensor, step: int) -> Tensor:
        """Return soft labels of a batch, rows of sum 1, shape (batch, classes).

        Args:
            output: The network's logits, shape (batch, classes).
            records: Numbers of the batch's records, shape (batch,).
            step: The step's number.
        """


class Protection:
    """How a run protects its records or labels.

    A new protection is a subclass of this and of `ProtectionSection`, whose `implementation` names it. It overrides

    - `calibrated`: which noise multiplier reaches the section's epsilon;
    - `released`: the mechanisms that the ledger records for every step; or `pay_upfront`, if the run pays once;
    - `gradients`: the writer that clips and noises; or `soft_labels`, if training never sees the labels.

    `PoissonProtection` does the first two for steps on secret Poisson batches. Everything else has a default.

    Attributes:
        needs: What an algorithm must apply for the guarantee to hold; one of these is enough.
        plan: The run.
        config: Its configuration.
        options: Its section `protection`.
        dataset: Its records.
        algorithm: The training algorithm, which states the mechanism of a step on whole records.
    """

    needs: ClassVar[frozenset[Applied]] = frozenset({"gradients"})
    shared: ClassVar[bool] = False
    """Whether it holds if several processes share the steps of a run."""

    def __init__(self, plan: Plan, algorithm: ProtectedAlgorithm) -> None:
        self.plan, self.algorithm = plan, algorithm
        self.config, self.dataset = algorithm.config, plan.dataset
        self.options: Any = self.config.protection

    @property
    def correlation(self) -> tuple[float, ...]:
        """Coefficients of noise that is correlated over several steps (theorem banded-records), else (1,)."""
        return (1.0,)

    @property
    def clipping(self) -> Clipping:
        """How contributions are brought within C."""
        return FLAT

    @property
    def rounds_exactly(self) -> bool:
        """Whether noise that goes through `NoiseStream.add_rounded` releases exactly rounded numbers in this run."""
        return False

    @property
    def counted_sums(self) -> CountedSums | None:
        """How a release adds contributions so that its noise covers the sum's rounding; None if it does not."""
        return None

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier z of a resolved run.

        Raises:
            ValueError: The run is not resolved, and its section gives none.
        """
        multiplier: float | None = self.options.noise_multiplier
        if multiplier is None:
            raise ValueError(
                "protection.noise_multiplier is missing; resolve the run first (RunPlan.resolve)"
            )
        return multiplier

    def require_covered(self) -> None:
        """Refuse (NoGuarantee) a run that no theorem covers, before anything is computed."""
        require_covered(self.config, self.dataset, self.plan.sampler.scheme)

    def calibrated(self) -> float | None:
        """Return the noise multiplier of the section, or the least that reaches its epsilon; None for neither.

        Raises:
            NoGuarantee: No noise reaches epsilon.
        """
        return self.options.noise_multiplier

    def whole_run(self) -> Mechanism:
        """Return what the whole run releases, at some noise; `opusim tune` prices a choice between runs by it.

        Raises:
            NoGuarantee: The protection states no such mechanism.
        """
        raise NoGuarantee(
            f"protection.kind = {self.options.kind!r}: no theorem prices a choice between such runs; take another one"
        )

    def keys_of(self, whole: Mechanism) -> dict[str, Any]:
        """Return keys of the section with which the whole run releases at most `whole`.

        Args:
            whole: `whole_run` at the noise that the run must have.
        """
        stated = next(one for one in guarantees([whole], delta=self.options.delta) if one.is_proven)
        return {"epsilon": stated.epsilon if stated.epsilon_lower is None else stated.epsilon_lower}

    def resolved(self) -> Mapping[str, Any]:
        """Return the keys of the section that a resolved run states, however they were computed.

        Raises:
            NoGuarantee: No noise reaches epsilon.
        """
        multiplier = self.calibrated()
        return {"noise_multiplier": None if multiplier is None else float(multiplier)}

    def released(self) -> tuple[Mechanism, ...]:
        """Return what one step releases; nothing if the run pays for everything upfront."""
        return ()

    def pay_upfront(self, ledger: Ledger, device: NoisyDevice | None, folder: RunFolder) -> None:
        """Pay for the one-time release, such as label readings, then compute it; called at every start or resumption.

        Args:
            ledger: The run's ledger.
            device: The run's open device, or None without one.
            folder: The run folder, which keeps the release.

        Raises:
            BudgetExceeded: The release would cost more than the budget.
            LedgerCorrupt: The release exists and is not paid for.
        """

    def work_before(self) -> DeviceWork:
        """Return the device work of `pay_upfront` in a new run."""
        return DeviceWork()

    def work_of_step(self, records: float, n_outputs: int) -> DeviceWork:
        """Return the device work of the writer of `gradients` in one step.

        Args:
            records: Records of the batch; their mean, if it is random.
            n_outputs: Outputs of the open device.
        """
        return DeviceWork()

    def central_noise(self, device: NoisyDevice | None) -> NoiseStream:
        """Return the noise that is added to a batch's sum: the device's if it is credited, else a digital stream.

        Args:
            device: The run's open device, or None without one.

        Raises:
            ConfigError: The device's noise cannot be credited.
        """
        config = self.config
        if self.options.noise == "device" and device is not None:
            return DeviceNormals(device, credit=self.plan.credit)
        return noise_stream(config.mode, config.seed_for("central-noise"), "central-noise")

    def noise_work(self, sizes: Iterable[float], n_outputs: int) -> DeviceWork:
        """Return the device work of draws from `central_noise`: none, unless the noise is the device's.

        Args:
            sizes: The count of numbers of each draw.
            n_outputs: Outputs of the open device.
        """
        if self.options.noise != "device":
            return DeviceWork()
        return sum((DeviceWork.of_noise(size, n_outputs) for size in sizes), DeviceWork())

    def gradients(self, device: NoisyDevice | None) -> PrivateGradients | None:
        """Return the writer that clips and noises the updates, or None if there is none.

        Args:
            device: The run's open device, for noise that is the device's.

        Raises:
            ConfigError: The device's noise cannot be credited.
        """
        return None

    def soft_labels(self, device: NoisyDevice | None, folder: RunFolder) -> SoftLabels | None:
        """Return the noisy labels that replace the labels, or None if training sees the labels themselves.

        Args:
            device: The run's open device.
            folder: The run folder, which holds the release of `pay_upfront`.

        Raises:
            ConfigError: The device's noise cannot be credited.
        """
        return None


class NoProtection(Protection):
    """No protection: the trainer may add noise, and no guarantee is stated."""

    needs = frozenset()
    shared = True

    def require_covered(self) -> None:
        """Accept every run."""


def calibrated_once(mechanism: MechanismT, *, epsilon: float, delta: float) -> MechanismT:
    """Return a mechanism with the least noise that stays within a run's epsilon; may raise NoGuarantee.

    The search starts at the mechanism's noise; a run that asks again is not calibrated again.
    """
    found: MechanismT = _calibrated(mechanism, epsilon, delta)
    return found


@functools.lru_cache(maxsize=32)
def _calibrated(mechanism: Mechanism, epsilon: float, delta: float) -> Any:
    return calibrate_noise(mechanism, target_epsilon=epsilon, delta=delta)[0]


class CalibratedProtection(Protection):
    """A protection whose noise multiplier follows from its epsilon, by the cost of `whole_run`."""

    def calibrated(self) -> float | None:
        """See Protection.calibrated: the whole run stays within epsilon."""
        options = self.options
        if options.noise_multiplier is not None or options.epsilon is None:
            return options.noise_multiplier
        found, _ = calibrate_noise(self.whole_run(), target_epsilon=options.epsilon, delta=options.delta)
        return found.noise


class PoissonProtection(CalibratedProtection, ABC):
    """Clipped sums on secret Poisson batches with central noise; every step is paid for."""

    @abstractmethod
    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """Return one step at a noise multiplier."""

    @override
    def whole_run(self) -> Mechanism:
        return self.mechanism(self.algorithm.noise_guess).repeated(self.plan.total_steps)

    def keys_of(self, whole: Mechanism) -> dict[str, Any]:
        """See Protection.keys_of; the noise is given, and the budget ends with the last step."""
        stated = next(one for one in guarantees([whole], delta=self.options.delta) if one.is_proven)
        return {"epsilon": stated.epsilon, "noise_multiplier": whole.noise}

    @override
    def released(self) -> tuple[Mechanism, ...]:
        return (self.mechanism(self.noise_multiplier),)


class PrivateGradients(ABC):
    """Turns a batch's signals into gradients that may be released, and writes them into a network.

    Args:
        noise: Source of independent N(0, 1), apart from every other stream of the run.
    """

    batches_written: int = 0
    """Batches whose gradients were written; the engine refuses a protected step that wrote none."""

    def __init__(self, noise: NoiseStream) -> None:
        self._noise = noise
        self._process = OwnProcess()

    def seek(self, step: int) -> None:
        """Position the noise at the start of a step.

        Raises:
            RuntimeError: This process was forked from the one that trains.
        """
        self._process.require("the writer of private gradients")
        self._noise.seek(step)

    @property
    def reference(self) -> Tensor | None:
        """Features of public records, shape (n, n_0), whose layer inputs this step's `set_gradients` needs, or None."""
        return None

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name; a checkpoint is restored by copying into these tensors."""
        return {}

    def set_gradients(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Write the private gradient of every parameter.

        Args:
            parts: What the records of a batch add to the parameters (`LayeredNetwork.contributions`,
                `RecordTape.contributions`): one, or one after another if the batch was computed in parts.
            records: Numbers of the batch's records in the training set, shape (batch,).
            public_inputs: h_(l-1) of the reference records, shapes (n, n_(l-1)).
        """
        self._write(parts, records=records, public_inputs=public_inputs)
        self.batches_written += 1

    @abstractmethod
    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Write the private gradient of every parameter; the arguments are those of `set_gradients`."""


NOISE_RANGE = (1e-30, 1e30)
"""Range of a standard deviation of noise, far from the numbers that float32 rounds to 0 or to infinity."""


class WrappedGradients(PrivateGradients):
    """Base of writers that see or change the input of another writer, and write with its noise and its state.

    Args:
        writer: The other writer.
    """

    def __init__(self, writer: PrivateGradients) -> None:
        super().__init__(writer._noise)
        self._writer = writer

    @override
    def seek(self, step: int) -> None:
        self._writer.seek(step)

    @property
    @override
    def reference(self) -> Tensor | None:
        return self._writer.reference

    @property
    @override
    def state(self) -> dict[str, Tensor]:
        return self._writer.state


def linear_uses(found: Contributions) -> list[LinearUse]:
    """Return each layer's use in a fully connected network, unmeasured; raise TypeError for another network."""
    uses = [use for _, own in found.layers for use in own]
    linear = [use for use in uses if type(use) is LinearUse and use.positions == 1]
    if not len(linear) == len(uses) == len(found.layers):
        raise TypeError("parts: this protection is about fully connected networks; give it the layers of one")
    return linear


def noise_std(*, clip_norm: float, noise_multiplier: float, divisor: float = 1.0) -> float:
    """Return z C, the standard deviation of the noise on a sum, if float32 can hold it; z = 0 for no noise.

    Raises ValueError if C or the divisor of the noisy sum lies outside `CLIP_RANGE`, or z C or z C / divisor outside
    `NOISE_RANGE`: the clip would not hold, or the noise would vanish.
    """
    remedy = "rescale the loss or the features instead"
    checks.in_range(*CLIP_RANGE, clip_norm=clip_norm, divisor=divisor, remedy=remedy)
    std = noise_multiplier * clip_norm
    if noise_multiplier:
        noises = {
            "clip_norm * noise_multiplier": std,
            "clip_norm * noise_multiplier / divisor": std / divisor,
        }
        for name, value in noises.items():
            if not NOISE_RANGE[0] <= value <= NOISE_RANGE[1]:
                low, high = NOISE_RANGE
                raise ValueError(
                    f"{name} = {value:g}: must lie in [{low:g}, {high:g}], as float32 cannot hold such noise; "
                    "change noise_multiplier, clip_norm or divisor"
                )
    return std


def with_constant(h: Tensor, *, bias: bool) -> Tensor:
    """Return layer inputs with the bias's constant 1, shape (batch, n + 1), or h itself without a bias."""
    return torch.cat([h, h.new_ones(len(h), 1)], dim=1) if bias else h


def write_gradient(use: LinearUse, gradient: Tensor) -> None:
    """Write the gradient of a layer, shape (n_l, n_(l-1) + 1) with a bias and (n_l, n_(l-1)) without."""
    if use.bias is None:
        use.weight.grad = gradient
        return
    use.weight.grad = gradient[:, :-1].contiguous()
    use.bias.grad = gradient[:, -1].contiguous()


def creditable_law(
    device: NoisyDevice, *, key: str = "protection.noise", credit: Mapping[str, Any] | None = None
) -> GaussianNoise:
    """Return the law of a device, open or closed, whose noise a protection or a likelihood ratio may rest on.

    `key` asks for it; `credit` has the certificate and beta that the run's mechanisms name (`Plan.credit`). Raises
    ConfigError if the law is not Gaussian, is 0 at some output, or rests on a certificate that no mechanism names.
    """
    law, named = device.noise, (credit or {}).get("beta", 0.0)
    device.credit_noise()
    if isinstance(law, GaussianNoise) and law.min_std > 0 and law.beta == named:
        return law
    remedy = "use 'digital', or for label-readout another device"
    if law.beta != named:
        remedy = f"its beta = {law.beta:g} is not the one that the guarantee counts ({named:g}); set device.certificate"
    raise ConfigError(
        "configuration",
        key,
        f"'device' credits the noise of device {device.name!r} ({law.describe()}), but that takes a Gaussian law above "
        f"0; {remedy}",
    )


class DeviceNormals(NoiseStream):
    """N(0, 1) numbers from a device's blank readings, each divided by its output's standard deviation.

    Sound only for a Gaussian law: scaled readings of another law prove nothing.

    Args:
        device: Open, with Gaussian noise above 0 at every output. The trainer sets its steps.
        key: As for `creditable_law`.
        credit: As for `creditable_law`.

    Raises:
        ConfigError: See `creditable_law`.
    """

    def __init__(
        self,
        device: NoisyDevice,
        *,
        key: str = "protection.noise",
        credit: Mapping[str, Any] | None = None,
    ) -> None:
        law = creditable_law(device, key=key, credit=credit)
        self._device = device
        self._std = torch.from_numpy(np.broadcast_to(law.std, device.n_outputs).astype(np.float32))

    @override
    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        size = math.prod(shape)
        readings = self._device.draw((-(-size // len(self._std)), len(self._std)))
        readings.div_(self._std.to(readings.device))
        return readings.flatten()[:size].reshape(tuple(shape)).to(device)

    def seek(self, step: int) -> None:
        """Do nothing: the trainer sets the device's step."""


def rounds_exactly(config: RunConfig) -> bool:
    """Return whether `add_rounded` of a run's `central_noise` rounds exactly; a device's noise never does."""
    return streams.rounds_exactly(config.torch_device, config.mode) and config.protection.noise != "device"


def counts_sums(config: RunConfig) -> bool:
    """Return whether a run's noise covers the rounding of its sums: in release mode, on the processor."""
    on_processor = torch.device(config.torch_device).type == "cpu"
    return config.mode == "release" and on_processor and rounds_exactly(config)
