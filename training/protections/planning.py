"""What a protection needs of its run and of its algorithm, and refusals of runs that no theorem covers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelReadout
from opusim.accounting.theorems import require_poisson
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import Certificate
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise, NoiseModel
from opusim.training.config.run import RunConfig, split_refusal
from opusim.training.data import Dataset
from opusim.training.data.public_maps import map_from_facts
from opusim.training.data.samplers import Sampler


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
