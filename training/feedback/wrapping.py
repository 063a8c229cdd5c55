"""Let a module with feedback points stand in for the plain model: names, attributes, torch device, and exports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opusim.training.feedback.hooks import PointHooks

_OWN_NAME = "(FeedbackAlignment)"
"""Name of the wrapper among the named modules; no attribute can have it, so that it is no submodule's."""


class Wrapping(PointHooks):
    """Gives parameters, buffers and submodules the names of the plain model, in state dicts and in `named_parameters`.

    Subclasses set `model` and call `_keep_names`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.model(*args, **kwargs)

    @property
    def _torch_device(self) -> torch.device:
        """The torch device of the model's first parameter or buffer; the processor if it has none."""
        tensor = next(self.model.parameters(), next(self.model.buffers(), None))
        return torch.device("cpu") if tensor is None else tensor.device

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module first, under a name of its own, then those of the model under the model's names."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield f"{prefix}.{_OWN_NAME}" if prefix else _OWN_NAME, self
            yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Look up in the model what this module lacks, such as `config` or `generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(super().__getattr__("model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor under the name of the model's parameter or buffer takes its place in the model.

        `torch.func.functional_call` sets parameters by their names in `named_parameters`.
        """
        if isinstance(value, Tensor) and name not in vars(self) and "model" in self._modules:
            registries: tuple[dict[str, Any], ...] = (self.model._parameters, self.model._buffers)
            for registry in registries:
                if name in registry:
                    registry[name] = value
                    return
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse `torch.jit.script`, which calls this method first."""
        raise ValueError(_no_export("torch.jit.script"))

    def _keep_names(self) -> None:
        """Name the entries of state dicts as the plain model does."""
        self.register_state_dict_post_hook(_drop_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)


def refuse_export(module: nn.Module, args: Any) -> None:
    """Refuse a forward pass that torch records for an export: feedback points are Python code.

    Raises:
        ValueError: `torch.export` or `torch.jit.trace` records the pass.
    """
    if torch.compiler.is_exporting():
        raise ValueError(_no_export("torch.export"))
    if torch.jit.is_tracing():
        raise ValueError(_no_export("torch.jit.trace"))


def _no_export(call: str) -> str:
    return (
        f"{call} cannot record feedback points, which are Python code; give it the plain model, which remove() of "
        "FeedbackAlignment returns"
    )


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Name the entries of a state dict, and its metadata, as the plain model does."""
    inner = f"{prefix}model."
    _rename(state, {key: prefix + key.removeprefix(inner) for key in state if key.startswith(inner)})
    versions = getattr(state, "_metadata", {})
    whole = inner.removesuffix(".")
    renamed = {key: prefix + key.removeprefix(inner) for key in versions if key.startswith(inner)}
    _rename(versions, {whole: prefix.removesuffix("."), **renamed} if whole in versions else renamed)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undo `_drop_prefix` before a state dict is loaded."""
    _rename(
        state, {key: f"{prefix}model.{key.removeprefix(prefix)}" for key in state if key.startswith(prefix)}
    )


def _rename(entries: dict[str, Any], names: dict[str, str]) -> None:
    """Rename entries, all at once: a new name may be another entry's old one."""
    values = {new: entries.pop(old) for old, new in names.items()}
    entries.update(values)
