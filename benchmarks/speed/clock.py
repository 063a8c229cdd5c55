"""Run an opusim command and write the processor seconds of each cause: imports by package, and parts of the work.

    python benchmarks/speed/clock.py OUT.json train pdfa --data digits

It is a script of its own, which imports nothing but the standard library before the command does. A cause has the time
that no cause within it has: an import that starts another one, or a step that loads a kernel, pauses meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from types import ModuleType
from typing import Any

WORK = {
    "opusim.training.reports.run_report": {"write_report": "report and figures"},
    "opusim.training.runs.checkpoints": {"save_checkpoint": "checkpoints"},
    "opusim.training.runs.folder": {"read_run": "reading the run"},
    "opusim.training.runs.run": {"evaluate_split": "evaluation passes", "load_run": "reading the run"},
    "opusim.training.feedback.trainer": {
        "FeedbackTrainer.step": "training steps",
    },
    "opusim.training.feedback.closed_form": {"ClosedForm._diagnostics": "diagnostics"},
    "opusim.training.engine.plan": {"load_data": "loading data"},
    "opusim.accounting.numerics.poisson_loss": dict.fromkeys(
        ("_worst", "_lower", "renyi_upper"), "accounting"
    ),
    "opusim.accounting.ledger": {"Ledger.pay": "ledger"},
    "numba.core.dispatcher": {"Dispatcher.compile": "loading kernels"},
    "matplotlib.figure": {"Figure.savefig": "drawing"},
}
"""Functions by module, and the cause that their time belongs to."""


class Clock:
    """Adds processor time to the cause that runs; causes nest."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._running = ["the rest"]
        self._since = 0.0

    def enter(self, cause: str) -> None:
        """Start a cause within the running one."""
        self._add()
        self._running.append(cause)

    def leave(self) -> None:
        """End it."""
        self._add()
        self._running.pop()

    def _add(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def timed(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time belongs to a cause."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            self.enter(cause)
            try:
                return function(*arguments, **options)
            finally:
                self.leave()

        return run

    def watch_imports(self) -> None:
        """Time the execution of every module from now on, and the functions in `WORK` once they exist."""
        for loader in (SourceFileLoader, ExtensionFileLoader):
            execute = loader.exec_module
            create = loader.create_module

            def executed(own: Any, module: ModuleType, execute: Any = execute) -> None:
                self.timed(package_of(module.__name__), execute)(own, module)
                self._watch(module)

            def created(own: Any, spec: Any, create: Any = create) -> Any:
                return self.timed(package_of(spec.name), create)(own, spec)

            loader.exec_module, loader.create_module = executed, created  # type: ignore[method-assign]

    def _watch(self, module: ModuleType) -> None:
        for path, cause in WORK.get(module.__name__, {}).items():
            holder: Any = module
            *owners, name = path.split(".")
            for owner in owners:
                holder = getattr(holder, owner)
            setattr(holder, name, self.timed(cause, getattr(holder, name)))


def package_of(module: str) -> str:
    """Return the cause of an import: its package."""
    package = module.partition(".")[0]
    return f"import {package}" if package not in sys.stdlib_module_names else "import standard library"


def main() -> None:
    """Run the command and write the seconds."""
    out, sys.argv = sys.argv[1], ["opusim", *sys.argv[2:]]
    sys.path.pop(0)  # the folder of this script
    clock = Clock()
    clock.watch_imports()
    try:
        importlib.import_module("opusim.training.cli").main()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        clock.enter("the rest")
        with open(out, "w") as file:
            json.dump(clock.seconds, file)


if __name__ == "__main__":
    main()
