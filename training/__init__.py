"""How do networks learn with noisy hardware in the loop? Trainers, the engine, runs and their reports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.attacks.mechanism.audit import audit_mechanism as audit_mechanism
    from training.attacks.run_audit import audit_run as audit_run
    from training.config import RunConfig as RunConfig
    from training.config import load_config as load_config
    from training.engine.session import train as train
    from training.reports.run_report import write_comparison as write_comparison
    from training.reports.run_report import write_report as write_report
    from training.runs.run import Run as Run
    from training.runs.run import load_run as load_run

# Names are imported when they are first used, so that `opusim --help` need not load torch.
_HOMES = {
    "Run": "training.runs.run",
    "RunConfig": "training.config",
    "audit_mechanism": "training.attacks.mechanism.audit",
    "audit_run": "training.attacks.run_audit",
    "load_config": "training.config",
    "load_run": "training.runs.run",
    "train": "training.engine.session",
    "write_comparison": "training.reports.run_report",
    "write_report": "training.reports.run_report",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'training' has no attribute {name!r}; it offers {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
