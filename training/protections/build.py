"""The protection that a run's configuration asks for, ready to take part in its steps."""

from __future__ import annotations

import math

import numpy as np
import torch

from accounting.errors import LedgerCorrupt
from accounting.labels.observations import UniformSource
from accounting.ledger.ledger import Ledger
from accounting.mechanisms import Mechanism
from opusim.devices.base import NoisyDevice
from opusim.randomness.streams import NoiseStream, SystemUniforms, noise_stream
from training.config.run import RunConfig
from training.config.seeds import seed_for
from training.data import Dataset
from training.feedback.config import FeedbackConfig
from training.protections.amplified_labels import AmplifiedLabels
from training.protections.base import DeviceNormals, Protection
from training.protections.budgeted_labels import BudgetedLabels
from training.protections.noisy_labels import (
    NoisyLabels,
    randomize,
    read_once,
    read_once_through,
    readable_law,
)
from training.protections.planning import divisor_of, label_budget, label_mu, label_response
from training.protections.record import RecordProtection
from training.runs.folder import RunFolder
from training.runs.storage import read_array, write_array

_LABELS = "labels"
"""What a ledger calls the one look at the labels that label-once and label-response take."""
_BUDGET = "label budget"


def make_protection(
    config: RunConfig, feedback: FeedbackConfig, dataset: Dataset, device: NoisyDevice | None
) -> Protection | None:
    """What clips and noises the updates; None where nothing does.

    Args:
        config: The run, with its noise multiplier.
        feedback: Its trainer's options.
        dataset: Its data.
        device: Its open device, for noise that is the device's.

    Raises:
        ConfigError: The device's noise cannot be credited.
    """
    options = config.protection
    kind, noise_multiplier = options.kind, options.noise_multiplier
    if kind == "label-once" and options.noise == "device" and device is not None:
        readable_law(device)  # refused before the run begins
    if kind not in ("record", "label", "label-amplified") or noise_multiplier is None:
        return None
    if kind == "record":
        return make_record_protection(config, device)
    noise = _central_noise(config, device)
    clip_norm, divisor, floor = options.clip, divisor_of(config), options.floor
    if kind == "label":
        return BudgetedLabels(
            budget_mu=label_budget(config).budget_mu,
            n_records=len(dataset.train),
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            floor=floor,
            noise=noise,
            output_gain=_output_gain(feedback),
        )
    return AmplifiedLabels(
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        divisor=divisor,
        floor=floor,
        reference=_reference(config, dataset),
        equalise=options.equalise,
        noise=noise,
    )


def make_record_protection(
    config: RunConfig, device: NoisyDevice | None, *, by_layer: bool = False
) -> RecordProtection | None:
    """What clips records and adds central noise, for any layered network; None where nothing does.

    Args:
        config: The run, with its noise multiplier.
        device: Its open device, for noise that is the device's.
        by_layer: See RecordProtection.

    Raises:
        ConfigError: The device's noise cannot be credited.
    """
    options = config.protection
    if options.kind != "record" or options.noise_multiplier is None:
        return None
    return RecordProtection(
        clip_norm=options.clip,
        noise_multiplier=options.noise_multiplier,
        divisor=divisor_of(config),
        noise=_central_noise(config, device),
        by_layer=by_layer,
    )


def pay_for_budget(config: RunConfig, ledger: Ledger) -> None:
    """Pay for a budget that covers the whole run; a release run that was killed spends it again.

    What each record has spent is in the checkpoint (`BudgetedLabels.state`), so a run that stopped cleanly is resumed
    under the same budget.

    Raises:
        BudgetExceeded: It was spent before.
    """
    if config.protection.kind == "label":
        ledger.pay_once(_BUDGET, label_budget(config), whole_run=True)


def make_noisy_labels(
    config: RunConfig,
    dataset: Dataset,
    device: NoisyDevice | None,
    ledger: Ledger,
    folder: RunFolder,
    *,
    steps: int,
) -> NoisyLabels | None:
    """The one look at the labels that a run takes, paid for first and kept in its folder; None where it takes none.

    Raises:
        BudgetExceeded: It would cost more than the budget.
        ConfigError: The device's noise cannot be credited.
        LedgerCorrupt: The look was taken and is not paid for.
    """
    if config.protection.kind not in ("label-once", "label-response"):
        return None
    if not folder.labels_file.exists():
        write_array(folder.labels_file, _look(config, dataset, device, ledger).numpy())
    elif all(payment.name != _LABELS for payment in ledger.content.payments):
        raise LedgerCorrupt(
            f"{folder.ledger_file}: does not pay for {folder.labels_file.name}, which is there; restore it from a copy"
        )
    scores = torch.from_numpy(read_array(folder.labels_file)).to(config.torch_device)
    return NoisyLabels(log_likelihood=scores, flat_steps=math.ceil(config.protection.flat_prior * steps))


def _look(config: RunConfig, dataset: Dataset, device: NoisyDevice | None, ledger: Ledger) -> torch.Tensor:
    """Read or randomize every label, once."""
    labels, k = dataset.train.y.cpu(), dataset.n_classes

    def pay(mechanism: Mechanism) -> None:
        ledger.pay_once(_LABELS, mechanism)

    if config.protection.kind == "label-response":
        seed = seed_for(config, "labels")
        source: UniformSource = SystemUniforms() if seed is None else np.random.default_rng(seed)
        return randomize(labels, label_response(config, k), source, pay=pay)
    noise = noise_stream(config.mode, seed_for(config, "label-noise"), "label-noise")
    mu = label_mu(config)
    if config.protection.noise == "device" and device is not None:
        return read_once_through(device, labels, k, mu=mu, noise=noise, pay=pay)
    return read_once(labels, k, mu=mu, noise=noise, pay=pay)


def _central_noise(config: RunConfig, device: NoisyDevice | None) -> NoiseStream:
    if config.protection.noise == "device" and device is not None:
        return DeviceNormals(device)
    return noise_stream(config.mode, seed_for(config, "central-noise"), "central-noise")


def _output_gain(options: FeedbackConfig) -> float:
    """By how much a feedback may stretch the distance of two errors on their way to the output layer."""
    if options.kind != "bp":
        return 1.0
    return (
        math.inf if options.scale == "sphere" else options.signal_gain
    )  # the ball of eq. 9 stretches nothing


def _reference(config: RunConfig, dataset: Dataset) -> torch.Tensor:
    """Features of training records that stand for all: public, since the labels alone are protected."""
    x = dataset.train.x
    generator = torch.Generator().manual_seed(config.data.split_seed)
    chosen = torch.randperm(len(x), generator=generator)[: config.protection.reference_size]
    return x[chosen].to(config.torch_device)
