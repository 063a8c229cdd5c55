"""Small, well-known models by name, as `opusim train pdfa --model vit-small` takes them.

A factory takes the keywords `record_shape` and `n_outputs` and its own options. It returns a module that maps records
(batch, *record_shape) to outputs (batch, n_outputs), a language model to (batch, T, n_outputs). The module states where
feedback enters (`opusim.training.networks.sequence_models.BlockModel`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opusim.description.section import did_you_mean
from opusim.processes import is_exhausted, require_memory
from opusim.training.networks.base import BYTES_PER_PARAMETER, seeded_torch
from opusim.training.networks.models import ConvolutionalNetwork, Mixer, ResNet, VisionTransformer
from opusim.training.networks.sequence_models import Gru, TransformerEncoder, TransformerLM

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "vit-small": VisionTransformer,
    "mixer-small": Mixer,
    "resnet-small": ResNet,
    "conv-small": ConvolutionalNetwork,
    "transformer-lm": TransformerLM,
    "transformer-encoder": TransformerEncoder,
    "gru": Gru,
}
"""The built-in models by name; `opusim.training.config.sections.MODEL_NAMES` lists the same names."""


def build_model(
    factory: Callable[..., nn.Module],
    options: Mapping[str, Any],
    *,
    record_shape: Sequence[int],
    n_outputs: int,
    seed: int | None,
    name: str,
    vocabulary: int | None = None,
) -> nn.Module:
    """Return a new module, whose initial parameters come from a seed.

    torch's global random state is seeded for the call and then put back, so it is neither read nor changed.

    Args:
        factory: A class or function; it gets those of `record_shape`, `n_outputs` and `vocabulary` that it takes as
            keywords.
        options: Its other keywords.
        record_shape: Shape of a record.
        n_outputs: Number of outputs: classes, tokens, real numbers or labels.
        seed: Seed of the initial parameters, or None to let the system choose.
        name: Name of the factory, for messages.
        vocabulary: Number of token values if records hold tokens, else None.

    Raises:
        TypeError: The factory takes no such option, or returns no module.
        ValueError: It refuses an option or the records.
    """
    taken = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    facts: dict[str, Any] = {"record_shape": tuple(record_shape), "n_outputs": n_outputs}
    facts |= {} if vocabulary is None else {"vocabulary": vocabulary}
    if not takes_any:
        facts = {key: value for key, value in facts.items() if key in taken}
        for option in options:
            if option not in taken or option in facts:
                known = [key for key in taken if key not in facts]
                raise TypeError(
                    f"model.options.{option}: {name} has no such option{did_you_mean(option, known)}; it takes "
                    f"{', '.join(known) or 'none'}"
                )
    if factory in MODELS.values():
        _require_room(factory, name, facts, options)
    with seeded_torch(seed):
        model = factory(**facts, **options)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model.name = {name!r} returns a {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model


def _require_room(
    factory: Callable[..., nn.Module], name: str, facts: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuse options of a built-in model whose weights and gradients need more memory than is free."""
    try:
        with torch.device("meta"):
            size: float = sum(p.numel() for p in factory(**facts, **options).parameters())
    except RuntimeError as error:
        if not is_exhausted(error):
            raise
        size = 2.0**61  # more than torch can count
    require_memory(
        BYTES_PER_PARAMETER * size,
        why=f"weights and gradients of {name}",
        remedy="lower them",
        model__options=dict(options),
        **facts,
    )


def multiply_adds(model: nn.Module, record_shape: Sequence[int], *, tokens: bool = False) -> int:
    """Count the multiply-adds of matrix products, convolutions and attention in a forward pass of one record.

    The pass runs on shapes only.

    Args:
        model: The model; a copy is used.
        record_shape: Shape of a record.
        tokens: Whether records hold whole numbers.

    Example:
        >>> multiply_adds(nn.Linear(3, 5), (3,))
        15
    """
    blank = torch.zeros((1, *record_shape), dtype=torch.int64 if tokens else torch.float32, device="meta")
    copy = deepcopy(model).to("meta").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy(blank)
    return counter.get_total_flops() // 2
