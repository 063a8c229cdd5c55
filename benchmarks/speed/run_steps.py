"""How many operators does a step of each trainer of `train` dispatch, and how often would it wait for a card?

Operators are counted on the processor, as `benchmarks.speed.operators` counts them; the noise is one operator.

Waits are counted on torch's meta device. Its tensors have a shape and no numbers, and take the branches of a card, so
that a step that needs a number on the host shows it: the known ways of reading one are counted and get an answer, every
hidden one raises. A copy between the host and the card counts as a wait, too, unless it is asynchronous. What the host
computes in numpy is no step of a card: the uniform numbers of a sampler, and the readout of a simulated camera, which
is why a trainer on a camera is not among the cases; it waits for each reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.speed.operators import Counted, HostReads, OneKernel
from opusim import checks
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import SeededStream
from opusim.tables import print_table
from opusim.training.config.run import load_config
from opusim.training.engine.algorithm import EpochSums
from opusim.training.engine.cards import to_device
from opusim.training.engine.loop import lead
from opusim.training.engine.plan import RunPlan, load_data, with_own_inputs
from opusim.training.feedback import hooks
from opusim.training.networks import clipping, optimizers

_BASE: dict[str, Any] = {
    "threads": 1,
    "epochs": 4,  # too short for the control without feedback
    "data": {"n_classes": 3},
    "model": {"hidden": [16, 8]},
    "sampler": {"batch_size": 32},
}
_RECORD: dict[str, Any] = {
    "sampler": {"scheme": "poisson", "batch_size": 64},
    "protection": {"kind": "record", "noise_multiplier": 0.7},
}
_ZO: dict[str, Any] = {
    "trainer": {"kind": "zo"},
    "optimizer": {"name": "sgd", "lr": 0.01},
    "model": {"hidden": []},
}
_CONVEX: dict[str, Any] = {
    "trainer": {"kind": "convex", "hyperplanes": 4},
    "model": None,
    "optimizer": {"momentum": 0.0},
}
_MODULE: dict[str, Any] = {"model": None}
CASES: dict[str, dict[str, Any]] = {
    "bp": {"trainer": {"kind": "bp"}},
    "dfa": {"trainer": {"kind": "dfa"}},
    "tdfa": {"trainer": {"kind": "tdfa"}},
    "pdfa": {"trainer": {"kind": "pdfa"}},
    "pdfa, published order": {
        "trainer": {"kind": "pdfa", "order": "published", "tau_b": 1.0, "tau_h_max": 1.0}
    },
    "pdfa, bit planes": {"trainer": {"kind": "pdfa", "encoding": "planes"}},
    "ulr": {"trainer": {"kind": "ulr", "copies": 4}},
    "ulr, orthogonal": {
        "trainer": {"kind": "ulr", "copies": 4, "shape": "matched", "directions": "orthogonal"}
    },
    "ulr, published": {"trainer": {"kind": "ulr", "form": "published", "copies": 4, "target_std": 0.5}},
    "zo": _ZO,
    "convex": _CONVEX,
    "bp, module": {"trainer": {"kind": "bp"}, **_MODULE},
    "dfa, module": {"trainer": {"kind": "dfa"}, **_MODULE},
    "pdfa, module": {"trainer": {"kind": "pdfa"}, **_MODULE},
    "bp, record": {"trainer": {"kind": "bp"}, **_RECORD},
    "pdfa, record": {"trainer": {"kind": "pdfa"}, **_RECORD},
    "ulr, record": {"trainer": {"kind": "ulr", "copies": 4}, **_RECORD},
    "zo, record": {**_ZO, **_RECORD},
    "convex, record": {**_CONVEX, **_RECORD},
    "tdfa, amplified labels": {
        "trainer": {"kind": "tdfa"},
        "sampler": {"scheme": "poisson", "batch_size": 64},
        "protection": {"kind": "label-amplified", "epsilon": 4.0},
    },
}
"""Trainers and protections; `None` leaves a section out."""
WAITS = {
    "ulr, published": 3,  # an eigenvalue problem for each layer, which the paper's remedy asks for
    "zo, record": 1,  # the sums, to which the host adds exactly rounded noise
    "convex, record": 1,  # records near a hyperplane, for which float64 decides
}
"""Waits of a step on a card; none if it is not named."""
CEILINGS = {
    **{"bp": 39, "dfa": 38, "tdfa": 46, "pdfa": 51, "pdfa, published order": 88, "pdfa, bit planes": 93},
    **{"ulr": 153, "ulr, orthogonal": 228, "ulr, published": 339, "zo": 53, "convex": 108},
    **{"bp, module": 51, "dfa, module": 66, "pdfa, module": 84},
    **{"bp, record": 82, "pdfa, record": 96, "ulr, record": 193, "zo, record": 65, "convex, record": 109},
    "tdfa, amplified labels": 120,
}
"""Operators of a step on the processor; they only fall."""


def _records(n: int = 320) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    y = np.arange(n) % 3
    return generator.normal(size=(n, 8)) + 2.0 * np.eye(3, 8)[y], y


def _module() -> nn.Module:
    """Return a module without a closed form: a convolution over the features, and a head."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )


class OnCard(Counted):
    """Counts waits for tensors of the meta device, answers those that it knows, and notes tensors of float64 there.

    Attributes:
        doubles: How often each operator returned a float64 tensor on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.doubles: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, or answer in its place, and count."""
        name, kwargs = func._opname, kwargs or {}
        tensors = [one for one in args if isinstance(one, Tensor)]
        if name == "_local_scalar_dense":
            if not args[0].is_meta:
                return func(*args)
            self.waits[name] += 1
            return 1.0 if args[0].is_floating_point() else 1
        if name == "nonzero" and args[0].is_meta:
            self.waits[name] += 1
            return torch.empty(0, args[0].ndim, dtype=torch.int64, device="meta")
        if name == "_linalg_eigh" and args[0].is_meta:  # torch reads whether it converged
            self.waits[name] += 1
        place = kwargs.get("device")
        if (
            name == "_to_copy"
            and place is not None
            and args[0].is_meta != (torch.device(place).type == "meta")
        ):
            self.waits["copy"] += not kwargs.get("non_blocking") or args[0].is_meta
            if args[0].is_meta:
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "copy_" and len({one.is_meta for one in tensors}) > 1:
            self.waits["copy"] += not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, Tensor) and one.is_meta and one.dtype == torch.float64:
                self.doubles[name] = self.doubles.get(name, 0) + 1
        return found


class HostNumbers(HostReads):
    """Counts tensors that are made on the meta device of numbers on the host, which torch copies and waits for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            place = (kwargs or {}).get("device") or (args[0].device if func is Tensor.new_tensor else "cpu")
            self.count += torch.device(place).type == "meta"
        return func(*args, **(kwargs or {}))


@contextmanager
def _noise_of_one_operator() -> Iterator[None]:
    kernel = OneKernel()
    with ExitStack() as replaced:
        for name in ("normal", "add_to"):
            own = getattr(kernel, name)
            new = lambda self, *args, own=own, **kwargs: own(*args, **kwargs)  # noqa: E731
            replaced.enter_context(mock.patch.object(SeededStream, name, new))
        rounded = lambda self, y, std: kernel.add_to(y, std)  # noqa: E731
        replaced.enter_context(mock.patch.object(SeededStream, "add_rounded", rounded))
        yield


@contextmanager
def _meta_as_card() -> Iterator[None]:
    """Let the meta device pass for a card where torch or opusim refuses it."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(optimizers, "_FUSED", ()))
        replaced.enter_context(mock.patch.object(hooks, "holds_no_numbers", return_value=False))
        replaced.enter_context(mock.patch.object(torch, "autocast", return_value=nullcontext()))
        torch.__future__.set_swap_module_params_on_conversion(True)  # views keep their parameters
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)


@contextmanager
def without_float64() -> Iterator[None]:
    """Let the meta device have no float64, as Apple's GPU."""
    with mock.patch.object(clipping, "WITHOUT_FLOAT64", {"mps", "meta"}):
        yield


def plan_of(name: str, place: str) -> RunPlan:
    """Return the plan of a case for a torch device that this machine need not have."""
    values = {**_BASE, **CASES[name]}
    module = _module() if "module" in name else None
    config = load_config({key: value for key, value in values.items() if value is not None}, ())
    config = with_own_inputs(config, _records(), None, module)
    plan = RunPlan.resolve(config, load_data(config, _records()), model=module)
    return plan.configured(plan.config.model_copy(update={"torch_device": place}))


@contextmanager
def steps_of(name: str, place: str) -> Iterator[Callable[[int], None]]:
    """Give the steps of a case, as the engine takes them, on a torch device: the processor, or "meta" for a card."""
    plan = plan_of(name, place)
    with ExitStack() as opened:
        opened.enter_context(_noise_of_one_operator())
        if place == "meta":
            opened.enter_context(_meta_as_card())
        device = opened.enter_context(plan.opened_device())
        plan = plan.started(threads=1, device=device)
        plan.network.model.to(place)
        trainer = plan.algorithm.trainer(device)
        split = to_device(plan.dataset, place).train
        sums = EpochSums(split.x.device)
        opened.enter_context(checks.LateChecks().collecting())

        def step(number: int) -> None:
            records = plan.sampler.indices(number).to(place, non_blocking=True)
            found = lead(trainer, split, records, step=number, observe=False, ranks=Ranks.one())
            sums.add(found)

        yield step


def operators(name: str) -> int:
    """Return the operators that a step dispatches on the processor, after one that is not counted."""
    with steps_of(name, "cpu") as step:
        step(0)
        with Counted() as found:
            step(1)
    return found.operators.total()


def on_card(name: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the waits of a step on a card, and its operators that return float64 tensors there."""
    with steps_of(name, "meta") as step:
        with OnCard():
            step(0)
        with HostNumbers() as numbers, OnCard() as found:
            step(1)
    found.waits["numbers of the host"] += numbers.count
    return +found.waits, found.doubles


def main() -> None:
    """Count and print."""
    rows = []
    for name in CASES:
        waits, doubles = on_card(name)
        rows.append((name, str(operators(name)), str(sum(waits.values())), str(sum(doubles.values()))))
    print_table("A step of a run", ("trainer", "operators", "waits", "float64 tensors"), rows)


if __name__ == "__main__":
    main()
