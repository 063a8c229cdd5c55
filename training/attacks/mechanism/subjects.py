"""The records and models that the self-test uses for each trainer.

All records of a run are identical, their gradient is longer than the clip in every layer, and most of their features
are 0, so that the weights of these features receive only noise. Learning rates are small enough that this stays true to
the end, and large enough for float32: a step's noise exceeds 100 units in the last place of the weights that it moves.
Settings that these statistics do not bear are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opusim.description.schema import load_description
from opusim.description.section import flat
from opusim.errors import ConfigError
from opusim.training.attacks.base import crafted
from opusim.training.config.run import RunConfig
from opusim.training.convex.trainer import GatedRelu
from opusim.training.data import Dataset
from opusim.training.networks.sequence_models import encoder_block
from opusim.training.zeroth_order.config import ZoConfig

SINGLE_RECORDS = 12
"""Records that differ, each with a feature of its own."""
_TOUCHED = 8
_UNIT = 2.0**-12
"""Entries of a zeroth-order direction are integer multiples of this, smaller than 2^16 of it."""
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The records and model for a trainer.

    Attributes:
        defaults: Configuration keys that the caller may change.
        rate: Learning rate times the clip: the distance that a record's contribution moves the parameters in a step.
        n_classes: Number of classes.
        record: Returns the features of every record, shape (d,), for a clip and a perturbation.
        label: Class number of every record.
        model: Returns a new model for a clip.
        vocabulary: Number of token values if records hold tokens, else None.
        points: Feedback points; empty for a fully connected network.
        single_rows: Returns the features of records that differ, shape (`SINGLE_RECORDS`, d), for a clip and a
            perturbation; None if the trainer is not tested on them.
        single_model: Returns a new model of such records for a clip, or None without such records.
    """

    defaults: Mapping[str, Any]
    rate: float
    n_classes: int
    record: Callable[[float, float], Tensor]
    label: int
    model: Callable[[float], nn.Module]
    vocabulary: int | None = None
    points: tuple[str, ...] = ()
    single_rows: Callable[[float, float], Tensor] | None = None
    single_model: Callable[[float], nn.Module] | None = None

    def dataset(self, n_records: int | None, *, clip: float, perturbation: float) -> Dataset:
        """Return so many identical records, or for None records that differ; raise TypeError if there are none."""
        if n_records is not None:
            x = self.record(clip, perturbation).repeat(n_records, 1)
        elif self.single_rows is not None:
            x = self.single_rows(clip, perturbation)
        else:
            raise TypeError("subject: has no records that differ")
        y = torch.full((len(x),), self.label)
        return crafted(x, y, n_classes=self.n_classes, vocabulary=self.vocabulary)

    def new_model(self, clip: float, *, single: bool = False) -> nn.Module:
        """Return a new model, of records that differ if `single`; raise TypeError if the trainer has none for these."""
        make = self.single_model if single else self.model
        if make is None:
            raise TypeError("subject: has no model of records that differ")
        return make(clip)


class AffineTail(nn.Module):
    """Compute scale x + offset, without parameters."""

    def __init__(self, scale: float, offset: float) -> None:
        super().__init__()
        self.scale, self.offset = scale, offset

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return self.scale * x + self.offset


class AgainstZero(nn.Module):
    """Return the logits (0, v) for a number v, shape (batch, 1): for label 0 and large v the cross-entropy is v."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 2)."""
        return torch.cat([torch.zeros_like(x), x], dim=1)


class OneLogit(nn.Module):
    """Return the logits (0, w . x), with w = 0 initially.

    Args:
        n_inputs: Number of features.
    """

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, n_inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 2)."""
        score = nn.functional.linear(x, self.weight)
        return torch.cat([torch.zeros_like(score), score], dim=1)


def _padded(values: Tensor, zeros: int) -> Tensor:
    return torch.cat([values, torch.zeros(zeros)])


def _feedback_record(clip: float, perturbation: float) -> Tensor:
    signs = torch.tensor([1.0, -1.0]).repeat(_TOUCHED // 2)
    return _padded(0.5 * signs, 32)


def _feedback_model(clip: float) -> nn.Module:
    """Return a 40-16-4 tanh network whose largest logit is not the label's."""
    first, last = nn.Linear(_TOUCHED + 32, 16), nn.Linear(16, 4)
    model = nn.Sequential(first, nn.Tanh(), last)
    generator = np.random.default_rng(20260101)
    with torch.no_grad():
        for linear in (first, last):
            shape = (linear.out_features, linear.in_features)
            linear.weight.copy_(torch.from_numpy(generator.uniform(-0.5, 0.5, size=shape)))
            linear.bias.zero_()
        first.weight[:, _TOUCHED:] = 0.0
        output = model(_feedback_record(clip, 0.0)[None])[0]
        last.bias.copy_(torch.tensor([-2.0, 0.0, 0.0, 0.0]) - output)
    return model


def _apart(length: float, zeros: int) -> Tensor:
    """Return records of one feature each, with lengths from `length` to twice that, and features that all lack."""
    lengths = torch.linspace(length, 2 * length, SINGLE_RECORDS)
    return torch.cat([torch.diag(lengths), torch.zeros(SINGLE_RECORDS, zeros)], dim=1)


def _single_feedback_model(clip: float) -> nn.Module:
    """Return a 40-16-4 tanh network whose first weights are 0, so that all records have one output."""
    model = _feedback_model(clip)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        parameters["0.weight"].zero_()
        parameters["2.bias"].copy_(torch.tensor([-2.0, 0.0, 0.0, 0.0]))
    return model


def _ulr_model(clip: float) -> nn.Module:
    """Return v_1 = w_1 . x, v_2 = w_2 (1 + v_1), loss b (20 + v_2): linear, so that estimates keep their sign.

    With w_1 = 0, w_2 = 0.001 and b = 2e6 C, a record's gradient has norm 2e6 C in layer 2 and 2e3 C in layer 1.
    """
    steepness = 2e6 * clip
    first, second = nn.Linear(_TOUCHED + 64, 1, bias=False), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        first.weight.zero_()
        second.weight.fill_(1e-3)
    return nn.Sequential(
        first, AffineTail(1.0, 1.0), second, AffineTail(steepness, 20 * steepness), AgainstZero()
    )


def _zo_record(clip: float, perturbation: float) -> Tensor:
    """Return features X 2^(-16 j): the sum of z_j x_j has the sign of the first nonzero z_j, and is never small.

    Its smallest magnitude X 2^-60 times phi is 1,000 C. All four entries of a direction are 0 with probability 1e-16.
    """
    places = 2.0 ** (-16 * torch.arange(_DIGITS, dtype=torch.float64))
    size = 1e3 * clip / (perturbation * _UNIT * float(places[-1]))
    return (size * places).float()


def _convex_model(n_inputs: int) -> nn.Module:
    """Return a model whose four gates are open for records without negative features."""
    return GatedRelu(n_inputs, 3, torch.ones(4, n_inputs), centre=False)


class MeanOverPositions(nn.Module):
    """Return the mean over positions, (batch, T, n) to (batch, n)."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, n)."""
        return x.mean(dim=1)


def _image_record(clip: float, perturbation: float) -> Tensor:
    """Return an image of 8 channels of 3x3, of which two are not 0."""
    return _padded(torch.linspace(-1.0, 1.0, 18).sin(), 54)


def _convolution_model(clip: float) -> nn.Module:
    """Return a convolution with a group norm, whose largest score is not the label's."""
    layers = (nn.Unflatten(1, (8, 3, 3)), nn.Conv2d(8, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Tanh())
    return _initialised(nn.Linear(54, 4), _image_record(clip, 0.0), *layers, nn.Flatten())


def _token_record(clip: float, perturbation: float) -> Tensor:
    """Return six tokens of the first four of the vocabulary."""
    return torch.tensor([0, 1, 2, 3, 1, 0])


def _attention_model(clip: float) -> nn.Module:
    """Return an embedding, a block of attention and a linear layer, whose largest score is not the label's."""
    layers = (nn.Embedding(24, 8), encoder_block(8, 2, 2, norm="post"), MeanOverPositions())
    return _initialised(nn.Linear(8, 4), _token_record(clip, 0.0), *layers)


def _initialised(last: nn.Linear, record: Tensor, *before: nn.Module) -> nn.Module:
    """Draw the parameters of a model from a fixed generator; the bias of its last layer rejects label 0."""
    model = nn.Sequential(*before, last)
    generator = np.random.default_rng(20260102)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(generator.uniform(-0.5, 0.5, size=tuple(parameter.shape))))
        last.bias.zero_()
        last.bias.copy_(torch.tensor([-2.0, 0.0, 0.0, 0.0]) - model(record[None])[0])
    return model


_FEEDBACK = Subject(
    defaults={"protection": {"clip_norm": 0.05}},
    rate=1e-4,
    n_classes=4,
    record=_feedback_record,
    label=0,
    model=_feedback_model,
    single_rows=lambda clip, perturbation: _apart(20.0, 28),
    single_model=_single_feedback_model,
)

PRIVATE_LOOP = "private-loop"
_OF_LOOPS = (
    *("protection.noise_multiplier", "protection.clip_norm", "protection.delta"),
    *("protection.unit", "protection.records_per_user", "sampler.batch_size"),
)
"""Keys that a self-test of a private loop takes."""
MODULES: dict[str, Subject] = {
    "convolution": Subject(
        defaults={"protection": {"clip_norm": 0.01}},
        rate=1e-4,
        n_classes=4,
        record=_image_record,
        label=0,
        model=_convolution_model,
        points=("3",),
    ),
    "attention": Subject(
        defaults={"protection": {"clip_norm": 0.01}},
        rate=1e-4,
        n_classes=4,
        record=_token_record,
        label=0,
        model=_attention_model,
        vocabulary=24,
        points=("1",),
    ),
}
"""Modules for the trainers that take any, by name."""
SUBJECTS: dict[str, Subject] = {
    **dict.fromkeys(("pdfa", "dfa", "tdfa", "bp"), _FEEDBACK),
    PRIVATE_LOOP: replace(_FEEDBACK),  # a subject of its own, with the same records
    "ulr": Subject(
        defaults={"protection": {"clip_norm": 0.05}, "trainer": {"copies": 16}},
        rate=1e-6,
        n_classes=2,
        record=lambda clip, perturbation: _padded(torch.full((_TOUCHED,), _TOUCHED**-0.5), 64),
        label=0,
        model=_ulr_model,
        single_rows=lambda clip, perturbation: _apart(2e4, 60),
        single_model=_ulr_model,
    ),
    "zo": Subject(
        defaults={"protection": {"clip_norm": 0.05}, "trainer": {"directions": 48}},
        rate=5e-32,
        n_classes=2,
        record=_zo_record,
        label=0,
        model=lambda clip: OneLogit(_DIGITS),
        single_rows=lambda clip, perturbation: _apart(1e3 * clip / (perturbation * _UNIT), 0),
        single_model=lambda clip: OneLogit(SINGLE_RECORDS),
    ),
    "convex": Subject(
        defaults={"trainer": {"hyperplanes": 4, "centre": False}},
        rate=1e-4,
        n_classes=3,
        record=lambda clip, perturbation: _padded(torch.ones(_TOUCHED), 16),
        label=0,
        model=lambda clip: _convex_model(_TOUCHED + 16),
        single_rows=lambda clip, perturbation: _apart(1.0, 16),
        single_model=lambda clip: _convex_model(SINGLE_RECORDS + 16),
    ),
}
"""By trainer.kind."""


# What a self-test takes

MIN_FREE = 40
"""Smallest number of components of a step that no record touches."""
QUIET_SIGMA, _LARGEST_SIGMA = 1e-3, 0.01
"""Noise in a simulated device's readings: the default, and the largest at which a contribution's direction is known (at
0.01 a contribution loses 5e-5 of its length along it)."""
COUNTED: dict[str, dict[str, Any]] = {
    noise: {
        "device": {"name": "camera_low_light"},
        "model": {"hidden": [40]},
        "protection": {"epsilon": epsilon},
    }
    for noise, epsilon in (("counts", 10.0), ("argmax", 2.0))
}
"""What a look by a camera is tested with: outputs for ten labels, and enough light that 20 % more of it is seen."""
_OWN = (
    *("schema_version", "mode", "seed", "epochs", "loss", "torch_device", "data.", "model.", "optimizer."),
    *("sampler.scheme", "sampler.min_batch_size", "sampler.drop_last", "checkpoint.", "trainer.kind"),
    *("trainer.sigma:feedback", "trainer.tau_h_max", "trainer.tau_h_min", "trainer.centre"),
    *("trainer.gates", "trainer.final_noise", "trainer.regularisation", "trainer.language."),
)
"""Keys that the self-test sets, or whose value would invalidate its statistics."""


def require_free(kind: str, asked: Mapping[str, Any]) -> None:
    """Refuse settings that the self-test chooses."""
    for key, value in flat(asked).items():
        kept = value == "record" if key == "protection.kind" else key in _OF_LOOPS
        if kind == PRIVATE_LOOP and not kept:
            raise ConfigError("--set", key, "does not apply to a private loop; leave it out")
        own = [name for name in _OWN if key == name or (name.endswith(".") and key.startswith(name))]
        if key == "trainer.sigma" and kind != "ulr":
            own = [key]
        if own:
            raise ConfigError(
                "--set",
                key,
                "is reserved: the self-test chooses data, model and optimizer; leave it out",
            )


def require_known_laws(config: RunConfig) -> None:
    """Refuse (ConfigError) a device, or directions, whose noise the self-test cannot compare with the accounted law."""
    options = config.trainer
    problems: list[tuple[str, str]] = []
    if config.uses_device:
        description = load_description(config.device.name, config.device.overrides)
        noise = getattr(config.protection, "noise", "digital")
        if noise in COUNTED:
            camera = description.camera
            given = {
                "device.certificate": config.device.certificate,
                "device.camera.light.power": None if camera is None else camera.light.power,
            }
            limits = "leaves only limits of the light, and the self-test compares laws; leave it out"
            problems += [(key, limits) for key, value in given.items() if value is not None]
        elif config.protection.labels_read_once and noise == "device":
            reason = (
                "'device' reads labels through a matrix, which the self-test does not undo; use 'counts' or "
                "'argmax'"
            )
            problems.append(("protection.noise", reason))
        elif description.kind not in ("ideal", "gaussian"):
            reason = (
                f"{config.device.name!r} is of kind {description.kind!r}, whose readings the self-test cannot predict; "
                "use 'ideal' or 'gaussian'"
            )
            problems.append(("device.name", reason))
        elif options.kind == "pdfa" and description.noise is not None:
            sigma = description.noise.value()
            reason = f"{sigma:g} changes the direction of each contribution; use at most {_LARGEST_SIGMA:g}"
            problems += [("device.noise.sigma", reason)] if sigma > _LARGEST_SIGMA else []
    if isinstance(options, ZoConfig) and options.directions <= MIN_FREE:
        reason = (
            f"{options.directions} leaves {options.directions - 1} noise-only components per step, and the self-test "
            f"needs {MIN_FREE}; use at least {MIN_FREE + 1}"
        )
        problems.append(("trainer.directions", reason))
    elif isinstance(options, ZoConfig) and options.law != "gaussian":
        reason = f"the self-test has no exact checks for {options.law!r} noise; use 'gaussian'"
        problems.append(("trainer.law", reason))
    for key, reason in problems:
        raise ConfigError("--set", key, reason)
