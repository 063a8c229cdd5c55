"""Simulate or drive an optical processing unit, train networks on it, and state how private the training was.

``opusim.X`` has the names that a script starts with; `opusim/__init__.pyi` lists them. The others are in their
subject's module: ``opusim.devices``, ``opusim.crossbar``, ``opusim.features``, ``opusim.noise``, ``opusim.accounting``,
``opusim.training`` and so on. Each name is imported when it is first used, so that ``import opusim.noise`` and ``opusim
--help`` load neither torch nor numba.

    >>> import opusim
    >>> with opusim.open_device("gaussian", n_inputs=4, n_outputs=6) as device:
    ...     device.draw((2, 6)).shape
    torch.Size([2, 6])
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
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
    """Return each public name's module, read from the stub; a subject's module is opusim itself.

    `lazy_loader.attach_stub` reads stubs of one package only; this one also names the layers above.
    """
    nodes = ast.parse(_STUB.read_text(encoding="utf-8")).body
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _homes()
_SUBJECTS = frozenset(name for name, home in _HOMES.items() if home == __name__)
__all__ = sorted(_HOMES.keys() - _SUBJECTS)
_MOVED = {
    name: subject
    for subject, names in {
        "accounting": """
            AdditiveNoise Adjacency Assumption Budget ConvexLastIterate Gaussian LabelAmplified LabelArgmax
            LabelBudget LabelCounts LabelReadout LabelRelease Ledger LedgerCorrupt NoisyTrial
            PdfaWithoutFormula PoissonGaussian PoissonLaplace PrivateSelection PublishedLayer PublishedPdfa
            PublishedUlr RandomizedResponse RecordCentral RecordReplaced RejectionGaussian Release
            StagedResponse Status Theorem Unit Unprotected ZoGaussian ZoLaplace mechanism_from_json
            require_poisson
        """,
        "crossbar": "Converter DeviceConv2d DeviceLinear DeviceModel ProgrammableDevice",
        "description": "DeviceDescription",
        "devices": "DeviceWork Usage",
        "encodings": "binarize bit_planes split_frames ternarize",
        "errors": """
            CapabilityMissing DeviceBusy DeviceFault DeviceTimeout DeviceUnavailable NoiseBelowCertificate
            NoiseUnknown
        """,
        "features": "opu_kernel",
        "medium": "Medium",
        "noise": "ConverterLatticeNoise FluctuatingCountNoise GaussianNoise PhotonCountNoise SignalGaussianNoise",
        "randomness": "NoiseStream SeededStream SystemStream derive_seed noise_stream",
        "temperature": "TemperatureLaw",
        "training": """
            Algorithm DeviceShape Diagnosis PoissonProtection PrivateGradients Protection ProtectionSection
            RecordGradients RunInterrupted StepRecord Trainer TrainerSection TrainingDiverged
        """,
    }.items()
    for name in names.split()
}
"""Names that opusim itself had in version 0.2, and the subject that has them now."""
_FORMER = {
    "calibrate": "opusim.calibrate_noise finds the noise for an epsilon, opusim.calibration measures a device",
    **dict.fromkeys(
        ("TensorBoardLogger", "MLflowLogger", "WandbLogger"),
        "write an opusim.Callback, as examples/tensorboard_logger.py does",
    ),
    "require_scheme": "opusim.accounting.require_poisson refuses every other scheme",
    "train_on": "opusim.train takes arrays or a Dataset as data",
}
"""Former public names, and what to use now."""


def __getattr__(name: str) -> Any:
    """Import a public name or a subject when it is first used (PEP 562), and keep it; tell new names of former ones."""
    if name == "__version__":
        return import_module("importlib.metadata").version("opusim")
    if name in _SUBJECTS:
        value: Any = import_module(f"opusim.{name}")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name not in _MOVED:
        advice = f"; {_FORMER[name]}" if name in _FORMER else ""
        raise AttributeError(f"module 'opusim' has no attribute {name!r}{advice}")
    else:
        home = f"opusim.{_MOVED[name]}"
        message = f"opusim.{name} is {home}.{name}; the short name leaves in 0.4"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBJECTS})
