"""What a private loop has probed of a module: its parameters, parts, modes and hooks, which must stay as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class ProbedParts:
    """Refuses a module that is another one than was probed, since nothing is known about it.

    Args:
        module: As it was probed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = {id(p) for p in module.parameters() if p.requires_grad}
        self._parts = dict(module.named_modules())
        self._modes = {name: part.training for name, part in self._parts.items()}
        self._held = list(_hooks(module))  # so that no later hook has the identity of one of these
        self._hooks = {(id(owner), id(hook)) for owner, hook in self._held}

    def require_same(self) -> None:
        """Refuse other parameters that learn, other parts, and further hooks; hooks may have been removed.

        Raises:
            RuntimeError: There are some.
        """
        if {id(p) for p in self._module.parameters() if p.requires_grad} != self._parameters:
            raise RuntimeError(
                "module: its parameters that learn changed since make_private; freeze, unfreeze or add parameters "
                "before it, or close the private loop and start another one"
            )
        for name, part in self._module.named_modules():
            if self._parts.get(name) is not part:
                raise RuntimeError(
                    f"module: part {name!r} ({type(part).__name__}) is new since make_private, which has not probed "
                    "whether it mixes records; exchange parts before make_private"
                )
        if any((id(owner), id(hook)) not in self._hooks for owner, hook in _hooks(self._module)):
            raise RuntimeError(
                "module: a hook was added since make_private, which has not probed whether it mixes records; "
                "register hooks before make_private, or remove them before the next batch"
            )
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter._backward_hooks:
                raise RuntimeError(
                    f"module: parameter {name!r} has a gradient hook, which would not run; remove it, and change "
                    "gradients after backward"
                )

    def require_same_modes(self) -> None:
        """Refuse a training pass in other modes than those that were probed, such as frozen batch statistics in use.

        Raises:
            RuntimeError: A part of the module changed its mode.
        """
        for name, each in self._module.named_modules():
            if self._modes.get(name) != each.training:
                now = "training" if each.training else "evaluation"
                raise RuntimeError(
                    f"module: {name!r} ({type(each).__name__}) is in {now} mode now, and was not when make_private "
                    "probed whether it mixes records; put it back after module.train(), such as by .eval() on frozen "
                    "batch normalisation"
                )


def _hooks(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each hook that sees what a module computes, or its gradients, with its owner."""
    for part in module.modules():
        for name in _HOOKS:
            yield from ((part, hook) for hook in getattr(part, name).values())
    for name in _GLOBAL_HOOKS:
        yield from ((torch_module, hook) for hook in getattr(torch_module, name).values())
