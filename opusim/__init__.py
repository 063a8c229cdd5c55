"""Simulate or drive an optical processing unit, train networks on it, and state how private the training was.

Everything that a user needs is reachable as ``opusim.X``; `opusim/__init__.pyi` lists the names. Each one is imported
when it is first used, so that ``import opusim.noise`` and ``opusim --help`` load neither torch nor numba.

    >>> import opusim
    >>> with opusim.open_device("gaussian", n_inputs=4, n_outputs=6) as device:
    ...     device.draw((2, 6)).shape
    torch.Size([2, 6])
"""

from __future__ import annotations

import ast
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    raise ImportError(
        "opusim runs on Linux: its locks and file modes are those of POSIX; on Windows take its Subsystem for Linux "
        "(WSL)"
    )
if sys.platform != "linux" and os.environ.get("OPUSIM_UNTESTED") != "1":
    raise ImportError(
        f"opusim is tested on Linux only, not on {sys.platform!r}: its locks, file modes and kernels were never tried "
        "there; set the environment variable OPUSIM_UNTESTED=1 to use it all the same, and run its tests first"
    )

_STUB = Path(__file__).with_suffix(".pyi")


def _homes() -> dict[str, str]:
    """Return the module that each public name comes from, as the stub says.

    `lazy_loader.attach_stub` reads stubs of one package only; this one also names the layers above.
    """
    nodes = ast.parse(_STUB.read_text(encoding="utf-8")).body
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = sorted(_HOMES)
_FORMER = {
    "calibrate": "opusim.calibrate_noise finds the noise for an epsilon, opusim.calibration measures a device",
    **dict.fromkeys(
        ("TensorBoardLogger", "MLflowLogger", "WandbLogger"),
        "write an opusim.Callback, as examples/tensorboard_logger.py does",
    ),
    "require_scheme": "opusim.require_poisson refuses every other scheme",
    "train_on": "opusim.train takes arrays or a Dataset as data",
}
"""Former public names, and what to use now."""


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562) and keep it."""
    home = _HOMES.get(name)
    if home is None:
        advice = f"; {_FORMER[name]}" if name in _FORMER else ""
        raise AttributeError(f"module 'opusim' has no attribute {name!r}{advice}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
