"""A planted fault: what the registry holds, and how a fault gets into the code that runs.

A fault changes one thing in the product by replacing a name where the product looks it up, and puts it back. It must
break a guarantee that the ledger still states. A test of a detector plants every fault of `FAULTS` that applies:

    for fault in FAULTS:
        if fault.applies(trainer="pdfa", protection="record", mode="release"):
            with fault.planted():
                ...  # the detector must notice

Faults are planted in the running process; start no other process inside `planted`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

FEEDBACKS = ("pdfa", "dfa", "tdfa", "bp")
STEPWISE = (*FEEDBACKS, "ulr", "zo", "convex")
"""Trainers whose every update is released."""
MODES = ("experiment", "release")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault, which some trainers, protections and modes have."""

    name: str
    breaks: str  # what it does to which promise, one sentence
    trainers: tuple[str, ...]  # values of trainer.kind that it reaches
    protections: tuple[str, ...] = ("record",)
    modes: tuple[str, ...] = MODES
    checks: tuple[str, ...]  # of the self-test, of which at least one must raise an alarm
    plant: Callable[[], AbstractContextManager[None]]  # a context in which the product is at fault
    settings: tuple[str, ...] = ()  # further ones of the run, "key=value", which it needs
    small_batches: bool = False  # only runs with small batches show it

    def applies(self, *, trainer: str, protection: str = "record", mode: str) -> bool:
        """Whether there is such a run, and the fault does anything to it; only feedbacks protect labels."""
        runs = {"record": STEPWISE, "last-iterate": ("convex",)}
        exists = trainer in runs.get(protection, FEEDBACKS)
        reached = trainer in self.trainers and protection in self.protections
        return exists and reached and mode in self.modes

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The product with this fault, until the context ends."""
        with self.plant():
            yield


@contextmanager
def replaced(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace "module:name" or "module:Class.name" by what `make` makes of its present value, and put it back.

    An AttributeError says that there is no such name: the product moved it, and the fault must follow.
    """
    module, _, path = target.partition(":")
    owner: Any = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    inherits = name not in vars(owner)
    before = getattr(owner, name) if inherits else owner.__dict__[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if inherits:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def all_replaced(targets: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Several of `replaced` at once."""
    with ExitStack() as stack:
        for target, make in targets.items():
            stack.enter_context(replaced(target, make))
        yield
