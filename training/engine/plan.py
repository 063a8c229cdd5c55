"""The plan of a run: everything that is known before it starts, resolved once from its configuration."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import nn

from opusim.accounting.ledger import Alarm, CertificateFacts, Ledger
from opusim.accounting.mechanism import Mechanism
from opusim.description.schema import (
    DeviceDescription,
    MonitorSettings,
    NoiseSettings,
    load_description,
    parse_description,
)
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import Certificate, load_certificate
from opusim.devices.kinds import device_factory
from opusim.devices.registry import SharedDevice, open_described
from opusim.devices.usage import DeviceWork, Usage
from opusim.errors import ConfigError, DeviceError, DeviceFault, NoiseBelowCertificate
from opusim.files import quoted
from opusim.processes.ranks import Ranks
from opusim.training.config.run import RunConfig, require_offered
from opusim.training.config.sections import OWN_ARRAYS, DeviceChoice
from opusim.training.data import Dataset, Split
from opusim.training.data.dataset import PrincipalComponents, reduced
from opusim.training.data.public_maps import (
    map_from_facts,
    named_map,
    synthetic_components,
    with_public_features,
)
from opusim.training.data.samplers import PoissonSampler, Sampler, make_sampler
from opusim.training.data.tables import OwnData, OwnTest, own_dataset
from opusim.training.data.users import Users
from opusim.training.engine.algorithm import Algorithm, Arrays, require_applied, require_float64
from opusim.training.engine.cards import named_here, to_device
from opusim.training.errors import RunFolderError
from opusim.training.networks.any_module import own_model_name
from opusim.training.networks.base import Network, require_fresh_noise, require_room
from opusim.training.networks.user_code import (
    named_dataset,
    require_importable,
    require_trusted,
    warn_if_changed,
)
from opusim.training.protections.base import Plan, Protection
from opusim.training.protections.record import CyclicPoissonSampler
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint, reseal_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array


class RunPlan(Plan):
    """A run before it starts: what it trains on, with what, and what it releases.

    Training, resumption, audits and `opusim tune` take one. It never changes; `unchecked` returns another.
    """

    @classmethod
    def resolve(
        cls,
        config: RunConfig,
        dataset: Dataset,
        *,
        model: nn.Module | None = None,
        folder: RunFolder | None = None,
    ) -> Self:
        """Return the plan of a run: built, checked, its noise calibrated.

        A folder to resume gives the configuration, its components and its device's description; a model takes the place
        of the network of the configuration. Raises ConfigError for a wrong configuration or description, TypeError or
        ValueError for a module that cannot be used, and NoGuarantee if no theorem covers the run, its algorithm does
        not apply the protection, or no noise reaches its epsilon.
        """
        plan = cls.checked(config, dataset, model=model, folder=folder)
        section = plan.config.protection
        found = {k: v for k, v in plan.protection.resolved().items() if v != getattr(section, k)}
        return plan.unchecked(protection=found) if found else plan

    @classmethod
    def checked(
        cls,
        config: RunConfig,
        dataset: Dataset,
        *,
        model: nn.Module | None = None,
        folder: RunFolder | None = None,
    ) -> Self:
        """Return the plan of a run whose noise is not calibrated yet; see `resolve`."""
        config = for_this_machine(config)
        implementation = config.trainer.implementing_class()
        # 1. Refuse records that are not the named ones, or that the trainer or the protection does not take.
        name, kind, target, taken = (
            config.data.name,
            config.trainer.kind,
            dataset.target,
            implementation.targets,
        )
        # private records must not take the constants of a named set
        if name not in (OWN_ARRAYS, dataset.name):
            raise ConfigError(
                "configuration",
                "data.name",
                f"{name!r} is not the name of the given data set ({dataset.name!r}); give user-supplied records to "
                "opusim.train(data=...)",
            )
        if target not in taken:
            reason = (
                f"{target!r} is not what trainer.kind = {kind!r} learns, which is {' or '.join(map(repr, taken))}; "
                "take trainer.kind = 'bp', 'dfa', 'tdfa' or 'pdfa' with a model of your own"
            )
            raise ConfigError("configuration", "data.target", reason)
        if dataset.holds_tokens and "tokens" not in taken:
            reason = f"'tokens' is not what trainer.kind = {kind!r} takes; give features, as float32"
            raise ConfigError("configuration", "data.inputs", reason)
        if config.protection.protects == "labels" and target != "class":
            reason = (
                f"{config.protection.kind!r} protects class numbers, and data.target is {target!r}; take another "
                "protection"
            )
            raise ConfigError("configuration", "protection.kind", reason)
        # 2. The device, the maps of the features, the network and the sampler.
        description = _description(config, folder)
        certificate = certificate_of(config.device, config.protection.delta, description, folder)
        dataset = with_maps(config, dataset, folder)
        require_room(dataset)
        if description is not None and certificate is not None and description.monitor is None:
            # a run under a certificate is monitored before each step
            monitor = MonitorSettings(every_steps=1)
            description = description.model_copy(update={"monitor": monitor})
        plan = cls(
            config=config,
            dataset=dataset,
            network=implementation.build_network(config, dataset, model),
            description=description,
            sampler=build_sampler(config, dataset),
            certificate=certificate,
        )
        return (plan if folder is not None else plan._with_choices())._require_covered()

    def _with_choices(self) -> Self:
        """Return the plan of a new run with what its algorithm chooses for the network."""
        found = self.algorithm.chosen()
        return self.unchecked(trainer=dict(found)) if found else self

    def _require_covered(self) -> Self:
        """Return the plan; refuse a run whose network or algorithm does not support its guarantee."""
        if self.config.mode == "release":
            require_fresh_noise(self.network.model)
        require_applied(self.algorithm)
        require_float64(self.algorithm)
        self.algorithm.require_covered()
        return self

    def varied(self, config: RunConfig) -> Self:
        """Return the checked plan of another run, of equal sections data and device, with a network of its own."""
        plan = self.configured(config)
        return plan.on_network(plan.new_network())._with_choices()._require_covered()

    def new_network(self) -> Network:
        """Return a network as the configuration builds it."""
        network: Network = self.config.trainer.implementing_class().build_network(
            self.config, self.dataset, None
        )
        return network

    @classmethod
    def stored(
        cls,
        folder: RunFolder,
        data: OwnData | Dataset | None = None,
        model: nn.Module | None = None,
        *,
        trust_code: bool = False,
    ) -> Self:
        """Return the plan of the run in a folder, without another check or calibration.

        User-supplied records and a module that the folder cannot describe are given; `trust_code` executes the code
        that the run names by import path. Raises RunFolderError if the data differ, the network cannot be rebuilt, or
        code is not trusted, and ConfigError if the data are missing, or the torch device is not available.
        """
        facts, config = folder.read_facts(), for_this_machine(folder.read_config())
        require_trusted(facts, trust_code=trust_code)
        require_importable(facts)
        warn_if_changed(facts.get("code", []))
        config, data, model = default_inputs(config, data, model)
        dataset = with_maps(config, load_data(config, data), folder)
        # Refuse data that differ from the facts in the run's folder.
        stored, kept = facts["data"], facts.get("certificate")
        if (split := stored.get("split", dataset.split)) != dataset.split:
            raise RunFolderError(
                f"run folder {folder.path} held records out by {split}, and these are held out by {dataset.split}; "
                "give the same data in the same form"
            )
        counts = {"n_train": len(dataset.train)}
        if "n_users" in stored:
            counts["n_users"] = len(users_of(config, dataset) or ())
        for key, count in counts.items():
            if stored.get(key, count) != count:
                raise RunFolderError(
                    f"run folder {folder.path} was trained with {key} = {stored[key]}, and these data have {count}; "
                    "give the same data again"
                )
        for key, labels in (("fingerprint", True), ("features_fingerprint", False)):
            found = stored.get(key)
            owners = dataset.owners if config.of_users else ()
            if found is not None and found != fingerprint(dataset.train, labels=labels, owners=owners):
                raise RunFolderError(
                    f"run folder {folder.path} was trained on other data; give the same again"
                )
        return cls(
            config=config,
            dataset=to_device(dataset, config.torch_device, resident=True),
            network=config.trainer.implementing_class().rebuild_network(facts["network"], model),
            description=_description(config, folder),
            sampler=build_sampler(config, dataset),
            certificate=None if kept is None else Certificate.model_validate(kept),
        )

    @cached_property
    def algorithm(self) -> Algorithm[Any, Any, Any]:
        """The algorithm of the run; raise ConfigError for a stored run of a kind that was dropped."""
        require_offered(self.config)
        options = self.config.trainer
        algorithm: Algorithm[Any, Any, Any] = options.implementing_class()(self, options)
        return algorithm

    @cached_property
    def users(self) -> Users | None:
        """The users that are drawn instead of records, or None; see `users_of`."""
        return users_of(self.config, self.dataset)

    @property
    def protection(self) -> Protection:
        """The protection of the run."""
        return self.algorithm.protection

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """What one step releases; nothing if the run pays for everything upfront."""
        return self.algorithm.released(self.noise)

    def unchecked(self, **changes: Any) -> Self:
        """Return the plan with some keys of its configuration changed and not validated; see `RunConfig.unchecked`."""
        return self.configured(self.config.unchecked(**changes))

    def configured(self, config: RunConfig) -> Self:
        """Return the plan under another configuration, on the same data set and network."""
        return replace(self, config=config, sampler=build_sampler(config, self.dataset))

    def started(self, *, threads: int, device: NoisyDevice | None) -> Self:
        """Return the plan with the thread count and the open device's noise law."""
        noise = None if device is None else device.stated_noise
        return replace(self, config=self.config.unchecked(threads=threads), noise=noise)

    def on_network(self, network: Network) -> Self:
        """Return the plan with another network of the same shape, moved to the torch device of the run."""
        network.model.to(self.config.torch_device)
        return replace(self, network=network)

    def with_silent_device(self) -> Self:
        """Return the plan with a simulated device that adds no noise."""
        if self.description is None or self.description.noise is None:
            return self
        silent = self.description.model_copy(update={"noise": NoiseSettings(sigma=0.0)})
        return replace(self, description=silent, certificate=None)

    def require_window(self) -> None:
        """Refuse (ConfigError) a device that is too small for the network."""
        if self.description is None:
            return
        shape = self.algorithm.device_shape
        tiles = hasattr(device_factory(self.description.name, self.description.kind), "for_window")
        for key, wanted in (("n_inputs", shape.n_inputs), ("n_outputs", shape.n_outputs)):
            largest = getattr(self.description, key)
            if wanted > largest and not tiles:
                raise ConfigError(
                    self.description.name,
                    key,
                    f"is {largest}, and this run's network needs {wanted}; make the network smaller, such as by "
                    f"model.hidden, or raise {key} if the device has more",
                )

    @contextmanager
    def opened_device(self, ranks: Ranks | None = None) -> Iterator[NoisyDevice | None]:
        """Open the device of the run, which the processes use as one; yields None if it has none.

        Raises ConfigError if it is too small for the network, and DeviceError if it cannot be opened.
        """
        if self.description is None:
            yield None
            return
        self.require_window()
        shape = self.algorithm.device_shape
        opener = partial(
            open_described,
            self.description,
            mode=self.config.mode,
            seed=self.config.seed_for("device") or 0,
            torch_device=self.config.torch_device,
            n_inputs=shape.n_inputs,
            n_outputs=shape.n_outputs,
            certificate=self.certificate,
        )
        with opener() if ranks is None or ranks.world == 1 else SharedDevice(opener, ranks) as device:
            yield device


def for_this_machine(config: RunConfig) -> RunConfig:
    """Return a configuration with a torch device of this machine, and no seed in a release run, which uses none."""
    place = named_here(config.torch_device)
    found = config if place == config.torch_device else config.unchecked(torch_device=place)
    return found.unchecked(seed=0) if found.mode == "release" else found


def default_inputs(
    config: RunConfig, data: OwnData | Dataset | None, model: nn.Module | None
) -> tuple[RunConfig, OwnData | Dataset | None, nn.Module | None]:
    """Return what a run trains on: what the user gave, or what the configuration itself names."""
    if data is not None or model is not None:
        return config, data, model
    inputs: tuple[RunConfig, Arrays | None, nn.Module | None]
    inputs = config.trainer.implementing_class().default_inputs(config)
    return inputs


def with_own_inputs(
    config: RunConfig,
    data: OwnData | Dataset | None,
    label: str | Sequence[str] | None = None,
    model: nn.Module | None = None,
) -> RunConfig:
    """Return the configuration for user-supplied inputs: their names, and no constants of a known data set.

    `label` is the column of a table that holds what to predict, or several; None takes data.label. Raises ConfigError
    if a key does not fit them, or model.name names another network.
    """
    changes: dict[str, Any] = {} if label is None else {"label": label}
    if data is not None:
        changes["name"] = OWN_ARRAYS
        if config.data.standardise != "records":
            changes["standardise"] = config.data.mean is not None
        if isinstance(data, tuple) and len(data) == 3 and config.data.split is None:
            changes["split"] = "id"
    found, name = config, own_model_name(config, model)
    if name != config.model.name:
        found = found.unchecked(model={"name": name})
    if any(getattr(config.data, key) != value for key, value in changes.items()):
        found = found.unchecked(data=changes)
    return config if found is config else found.replaced()


def load_data(config: RunConfig, data: OwnData | Dataset | None, test: OwnTest | None = None) -> Dataset:
    """Return the records to train on: those given, with their test records, or the data set of the configuration.

    Raises TypeError for data of another form, ValueError for `test` without arrays, and ConfigError if data.split does
    not fit the given IDs, or a key contradicts the given Dataset.
    """
    if test is not None and (data is None or isinstance(data, Dataset)):
        raise ValueError(
            "test = (x, y) goes with data=(x, y); a known data set and a Dataset have their own test records, and "
            "data.test names a file"
        )
    if isinstance(data, Dataset):
        found = {
            "split": data.split,
            "target": data.target,
            "inputs": "tokens" if data.holds_tokens else "features",
            "n_classes": data.n_classes,
            "vocabulary": data.vocabulary,
            "classes": data.classes,
            "label": (),
        }
        if config.data.standardise == "records":
            reason = "'records' is for features as they were measured, and a Dataset has its constants; leave it out"
            raise ConfigError("configuration", "data.standardise", reason)
        for key, value in found.items():
            stated = getattr(config.data, key)
            if stated not in (None, "auto", (), value):
                reason = f"{stated!r} is not that of the given Dataset ({value}); leave it out"
                raise ConfigError("configuration", f"data.{key}", reason)
        return data
    if data is None:
        return named_dataset(config.data, config.split)
    return own_dataset(config.data, config.split, data, test)


def with_maps(config: RunConfig, dataset: Dataset, folder: RunFolder | None) -> Dataset:
    """Return the data set after the configured maps: a public one, then principal components.

    The folder of a run that has started gives its maps. The records may be those after the public map, as an audit
    changes them.
    """
    if config.data.features is not None and dataset.public_map is None:
        public = (
            named_map(config.data, dataset)
            if folder is None
            else map_from_facts(folder.read_facts()["data"]["features"])
        )
        dataset = with_public_features(dataset, public, cached=not config.data.is_own)
    wanted, options = config.data.components, config.data
    if wanted is None:
        return dataset
    if dataset.holds_tokens:
        reason = f"{wanted} is for features, and these records hold tokens; leave it out"
        raise ConfigError("configuration", "data.components", reason)
    is_public = options.components_from == "synthetic"
    if folder is not None:
        components = PrincipalComponents.from_array(read_array(folder.components_file), public=is_public)
        return reduced(dataset, components)
    if is_public:
        components = synthetic_components(
            dataset,
            wanted,
            whitening=options.whitening,
            mirrored=options.components_mirrored,
            cached=not options.is_own,
        )
    else:
        components = PrincipalComponents.fit(dataset.train.x, wanted, whitening=options.whitening)
    return reduced(dataset, components)


def users_of(config: RunConfig, dataset: Dataset) -> Users | None:
    """Return the users of the training records, None if records are protected; raise ConfigError without IDs."""
    if not config.of_users:
        return None
    if not dataset.owners:
        reason = "is missing: protection.unit = 'user' needs the ID of each record's user; name its column, or give "
        raise ConfigError("configuration", "data.user", f"{reason}arrays (x, y, ids)")
    found = Users.of(dataset.owners, count=len(dataset.train), most=config.group, name="data.user")
    return replace(found, seed=config.seed_for("users"))


def build_sampler(config: RunConfig, dataset: Dataset) -> Sampler:
    """Return the sampler over the training records; raise ConfigError if sampler.batch_size exceeds their number."""
    options, users = config.sampler, users_of(config, dataset)
    n_records = len(dataset.train if users is None else users)
    if config.protection.bands > 1:
        return CyclicPoissonSampler.of(config, n_records)
    if options.sampling_probability is not None:
        return PoissonSampler(
            n_records, sampling_probability=options.sampling_probability, seed=config.seed_for("sampler")
        )
    if options.batch_size > n_records and options.scheme != "full-batch":
        raise ConfigError(
            "configuration",
            "sampler.batch_size",
            f"{options.batch_size} exceeds the {n_records} {'records' if users is None else 'users'} that are trained "
            f"on, without those held out; set sampler.batch_size to at most {n_records}",
        )
    return make_sampler(
        options.scheme,
        n_records,
        None if options.scheme == "full-batch" else options.batch_size,
        config.seed_for("sampler"),
        min_batch_size=options.min_batch_size,
        drop_last=options.drop_last or None,
    )


def fingerprint(split: Split, *, labels: bool = True, owners: Sequence[str | None] = ()) -> str:
    """Return BLAKE2b of records in order, their labels and their users' IDs: keeps a run from other data."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (split.x, split.y) if labels else (split.x,):
        digest.update(tensor.cpu().contiguous().numpy().view(np.uint8).data)
    if owners:
        digest.update(repr(tuple(owners)).encode())
    return digest.hexdigest()


def _description(config: RunConfig, folder: RunFolder | None) -> DeviceDescription | None:
    """Return the device's description: the stored one of a run that has started, so that its file may be gone."""
    if not config.uses_device:
        return None
    if folder is not None:
        return parse_description(str(folder.config_file), folder.read_facts()["device"])
    return load_description(config.device.name, config.device.overrides)


OBSERVED_STEPS = 5
"""Steps at the end of each epoch whose diagnostics are averaged; each costs about another step."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected usage of a run's open device, by the device's description.

    If batches are random, figures are means. Draws of noise whose size follows the batch are rounded up to whole
    readings of a mean batch.

    Attributes:
        plan: The run.
        device: Its open device.
        before: Work of a new run before its first step.
        step: Work of a step.
        observed: Work of a step that fills in its diagnostics.
        is_mean: Whether the work of a step is random, because the size of its batch is.
    """

    plan: RunPlan
    device: NoisyDevice
    before: DeviceWork
    step: DeviceWork
    observed: DeviceWork
    is_mean: bool

    @classmethod
    def of(cls, plan: RunPlan, device: NoisyDevice | None) -> Self | None:
        """Return the forecast of a run on its open device before its trainer is made.

        Returns None without a device, or if the work is known only after a step.
        """
        if device is None:
            return None
        algorithm, n_outputs, records = plan.algorithm, device.n_outputs, float(plan.config.divisor)
        if plan.config.tells_records:  # else the public constant replaces the mean batch
            records = plan.sampler.expected_batch_size
        step = algorithm.work_of_step(records, n_outputs, observed=False)
        observed = algorithm.work_of_step(records, n_outputs, observed=True)
        if step is None or observed is None:
            return None
        follows = algorithm.work_of_step(2 * records, n_outputs, observed=False) != step
        return cls(
            plan=plan,
            device=device,
            before=algorithm.work_before(),
            step=step,
            observed=observed,
            is_mean=follows and plan.config.sampler.is_random,
        )

    def usage(self, first: int = 0) -> Usage:
        """Return the expected usage after `first` steps that are done, plus that of opening the device."""
        plan, device = self.plan, self.device
        looks = _observed(plan, plan.total_steps) - _observed(plan, first)
        work = self.step.times(plan.total_steps - first - looks) + self.observed.times(looks)
        inspections, per_epoch = 0, plan.sampler.steps_per_epoch
        if plan.certificate is not None:  # then the device is checked at checkpoints and at the end
            every = plan.config.checkpoint.every_steps or per_epoch
            steps = range(first + 1, plan.total_steps + 1)
            inspections = 1 + sum(step % every == 0 or step % per_epoch == 0 for step in steps)
        work += device.upkeep(first, plan.total_steps, inspections=inspections)
        if not first:
            work += self.before
        return device.usage + work.usage(device.description.frames, n_outputs=device.n_outputs)


def _observed(plan: RunPlan, steps: int) -> int:
    """Return how many of the first steps fill in their diagnostics."""
    if plan.config.mode == "release":
        return 0
    epochs, rest = divmod(steps, plan.sampler.steps_per_epoch)
    each = min(OBSERVED_STEPS, plan.sampler.steps_per_epoch)
    return epochs * each + max(rest - (plan.sampler.steps_per_epoch - each), 0)


VOUCHED = "noise_vouched"
"""Key of a checkpoint's progress: step of the last check that confirmed the noise of all steps before it, or -1."""


def certificate_of(
    chosen: DeviceChoice, delta: float, description: DeviceDescription | None, folder: RunFolder | None
) -> Certificate | None:
    """Return the certificate that a run rests on, checked against the device, the date and the run's delta.

    The folder of a run to resume keeps the certificate, so that its file may be gone. Raises ConfigError if it is
    another device's or description's, too old, without a law, or its beta leaves no delta, and RunFolderError if the
    file now holds another one than the run was started with.
    """
    if chosen.certificate is None or description is None:
        return None
    if folder is None:
        found = load_certificate(chosen.certificate)
    else:
        found, path = Certificate.model_validate(folder.read_facts()["certificate"]), Path(chosen.certificate)
        if path.exists() and load_certificate(path).digest != found.digest:
            raise RunFolderError(
                f"run folder {folder.path} was started under the certificate of {found.date}, and {path} now holds "
                "another; move that file away, or begin a new run"
            )
    found.check_device(description, n_outputs=0)  # the window is checked when the device is opened
    if (age := found.age_days(date.today())) > chosen.certificate_days:
        reason = (
            f"{found.date} is {age} days ago, and a certificate holds for device.certificate_days = "
            f"{chosen.certificate_days}; calibrate again: opusim device calibrate {quoted(found.device)} --out FOLDER"
        )
        raise ConfigError(found.device, "certificate.date", reason)
    if found.beta >= delta:
        reason = (
            f"beta = {found.beta:g} is the certificate's own error and leaves nothing of protection.delta = {delta:g}; "
            f"calibrate with --beta {delta / 10:g}, or raise protection.delta"
        )
        raise ConfigError(found.device, "certificate.beta", reason)
    return found


def facts_of(certificate: Certificate, device: NoisyDevice) -> CertificateFacts:
    """Return what the ledger keeps of a certificate, whose law the open device states and monitors."""
    monitor = device.description.monitor or MonitorSettings()
    found = device.smallest_changes(1)
    single = found["variance of one output below the law"]
    return CertificateFacts(
        digest=certificate.digest,
        device=certificate.device,
        date=certificate.date,
        age_days=certificate.age_days(date.today()),
        beta=certificate.beta,
        law=device.noise.describe(),
        remarks=certificate.assumptions,
        every_steps=monitor.every_steps,
        finds=found["variance below the law"],
        finds_output=None if math.isnan(single) else single,
    )


def vouched_step(device: NoisyDevice, step: int, earlier: int) -> int:
    """Return the step of the last check that confirmed the device's noise in all steps before it.

    Labels are read under a step number beyond all others, and their checks do not count; then it is `earlier`, the
    checkpoint's, at most.
    """
    found = device.monitor.vouched
    return found if 0 <= found <= step else min(earlier, step)


def without_remedy(error: DeviceError) -> str:
    """Return the text of a device's error without its remedy."""
    return str(error).split("; ")[0]


@contextmanager
def noted_alarms(folder: RunFolder, ledger: Callable[[], Ledger]) -> Iterator[None]:
    """Record an alarm that stops a certified run outside its steps, such as when a resumed run opens its device.

    Doubt then begins at the last passed check of the newest checkpoint. The folder's lock is held.
    """
    try:
        yield
    except DeviceError as error:
        checkpoints = list_checkpoints(folder.checkpoints)
        # no alarm for a fault such as an unplugged cable
        judged = error.alarm and isinstance(error, DeviceFault | NoiseBelowCertificate)
        if not judged or not checkpoints or not folder.ledger_file.exists():
            raise
        newest = read_checkpoint(checkpoints[-1])
        since = newest.step if error.covered else min(newest.progress.get(VOUCHED, -1), newest.step)
        alarm = Alarm(step=newest.step, since=since, found=without_remedy(error), covered=error.covered)
        content = folder.read_ledger()
        if not content.payments or content.doubts or not alarm.doubts:  # a line would undo a clean stop
            raise
        with ledger() as opened:
            opened.note_alarm(alarm)
            reseal_checkpoint(checkpoints[-1], replace(newest.header.seal, ledger=opened.position))
        raise type(error)(f"{error}. {doubt_text(alarm, folder)}") from error


def doubt_text(alarm: Alarm, folder: RunFolder) -> str:
    """Return the message to the user about an alarm that leaves steps in doubt."""
    return (
        f"Its noise may have been weaker than certified from step {max(alarm.since, 0)} on; see what is covered "
        f"with: opusim account run {quoted(folder.path)}"
    )
