"""LightOn's OPU through lightonml: the appliance, or lightonml's own simulated device.

lightonml is imported when a device opens, quietly, and its failures become errors of this project. lightonml 1.4.3
needs `pkg_resources` only to look at versions, and newer setuptools no longer have it; a stand-in replaces it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import re
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import numpy as np
import torch
from typing_extensions import override

from opusim.description.schema import DeviceDescription, LightonSettings
from opusim.devices.access import INSTALL_LIGHTONML, require_lighton
from opusim.devices.base import NoisyDevice
from opusim.devices.kinds import Capability
from opusim.errors import (
    ConfigError,
    DeviceBusy,
    DeviceError,
    DeviceFault,
    DeviceTimeout,
    DeviceUnavailable,
    NoiseUnknown,
)
from opusim.noise import GaussianNoise
from opusim.randomness.streams import noise_stream

_WORD = 2**32
_LOG = logging.getLogger("opusim")
_TOO_LARGE = ("can't be greater than", "is beyond maximum", "doesn't fit in target")
"""What lightonml says of a window that is larger than the OPU."""
_BUSY = ("OpuAlreadyUsedException", "ProcessRunningException")
"""Exceptions of a closed package, recognised by name since their modules change between versions."""


class LightonDevice(NoisyDevice):
    """y = sqrt(n) (linear_transform(x+) - linear_transform(x-)): two passes of binary frames for a ternary vector.

    lightonml's linear_transform gives R x with entries of R of variance 1/n on n inputs (the appliance by its factory
    calibration, rescale="variance"; the simulated device by construction, rescale="none"), so that the factor sqrt(n)
    brings entries of B to variance 1, times ``lighton.scale`` if that calibration is off. One fitted
    OPU object serves all readings; the fit uses no data.

    The simulated device is a noiseless product whose matrix comes from the description's medium.seed; ``[noise]`` adds
    Gaussian noise to it in software. The appliance has noise of an unpublished law: `noise` is what
    ``[noise]`` assumes or a certificate found, and without either it is refused.
    """

    can = NoisyDevice.can | {"intensities"}

    reads_noise = True

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._settings: LightonSettings = description.needed(
            "lighton", "a device of this kind needs [lighton]"
        )
        if self._settings.simulated:
            description.needed("medium", "a simulated device needs [medium] with a seed")
        self._std = None if description.noise is None else description.noise.value()
        self._stream = noise_stream(self.mode, self._seed, f"device {description.kind}")
        self._opu: Any = None

    @classmethod
    @override
    def capabilities_of(cls, description: DeviceDescription) -> frozenset[Capability]:
        """`matrix` for the simulated device only; hardware cannot tell its matrix."""
        return cls.can | {"matrix"} if description.is_simulated else cls.can

    @property
    def described_noise(self) -> GaussianNoise:
        """Gaussian, as the description assumes; NoiseUnknown if it assumes nothing."""
        if self._std is None:
            raise NoiseUnknown(
                f"device {self.name!r}: its noise is not known; measure it by "
                "`opusim device calibrate`, or assume a noise.sigma"
            )
        return GaussianNoise(std=self._std, n_outputs=self.n_outputs)

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """B of the simulated device, float32, shape (n_outputs, n_inputs); hardware cannot tell it."""
        self.require("matrix")
        self._require_open()
        b = self._opu.device.random_matrix.real.T * (math.sqrt(self.n_inputs) * (self._settings.scale or 1.0))
        return torch.from_numpy(np.ascontiguousarray(b, dtype=np.float32)).to(self._torch_device)

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Return the variance of readings of x as the law states it, float64."""
        variance = torch.as_tensor(np.array(self.noise.variance_bounds()[1]))
        return variance.expand(x.shape[0], self.n_outputs)

    @override
    def open(self) -> Self:
        if not self.is_open:
            require_lighton(self.name, self._settings)  # once: what is not installed does not pass
        return super().open()

    def _open(self) -> None:
        lightonml = import_lightonml()
        with translated(self.name), quiet():
            options: dict[str, Any] = {
                "n_components": self.n_outputs,
                "max_n_features": self.n_inputs,
                "disable_pbar": True,
                "open_at_init": False,
            }
            if self._settings.simulated:
                from lightonml.internal.simulated_device import SimulatedOpuDevice

                simulated = SimulatedOpuDevice()
                seed = 0 if self.description.medium is None else self.description.medium.seed
                words = [seed % _WORD, seed // _WORD]  # of 32 bits, as numpy's old generator takes them
                simulated.build_random_matrix(self.n_inputs, self.n_outputs, words)
                options |= {"opu_device": simulated, "rescale": "none"}
            else:
                options |= {"config_file": self._settings.config_file, "rescale": "variance"}
            self._opu = lightonml.OPU(**options)
            self._opu.open()
            exposure_us = self._settings.exposure_us
            overrides = {} if exposure_us is None else {"exposure_us": exposure_us}
            if not self._settings.simulated:
                # the described time of a frame, or the least that the camera's window allows if that is longer, by
                # which frames are counted then; lightonml 1.4.3, internal/runner.py
                device, described = self._opu.device, self.description.frames.period_us(self.n_outputs)
                exposed_us = device.exposure_us if exposure_us is None else exposure_us
                least = max(device.output_readout_us, exposed_us) + 50
                if least > described:
                    _LOG.warning(
                        "opusim: device %r: frames.frame_period_us = %g is shorter than the %g us that %d outputs "
                        "take; frames take %g us, set it to that",
                        *(self.name, described, least, self.n_outputs, least),
                    )
                self._actual_frame_us = float(math.ceil(max(described, least)))
                overrides["frametime_us"] = int(self._actual_frame_us)
            self._opu.fit1d(n_features=self.n_inputs, online=False, **overrides)

    def _close(self) -> None:
        opu, self._opu = self._opu, None
        if opu is not None:
            with translated(self.name), quiet():
                opu.close()

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return torch.zeros((0, self.n_outputs), device=self._torch_device)
        positive, negative = ((x == sign).to(torch.uint8).cpu().numpy() for sign in (1, -1))
        with translated(self.name), quiet():
            y = np.subtract(self._opu.linear_transform(positive), self._opu.linear_transform(negative))
        factor = math.sqrt(self.n_inputs) * (self._settings.scale or 1.0)
        scaled = np.asarray(y, dtype=np.float32) * np.float32(factor)
        return self._with_noise(torch.from_numpy(scaled).to(self._torch_device))

    def _intensities(self, x: torch.Tensor) -> torch.Tensor:
        """Return lightonml's own transform: the appliance's digital numbers, 0 to 255."""
        if not len(x):
            return torch.zeros((0, self.n_outputs), device=self._torch_device)
        with translated(self.name), quiet():
            numbers = np.asarray(self._opu.transform(x.to(torch.uint8).cpu().numpy()), dtype=np.float32)
        return torch.from_numpy(numbers).to(self._torch_device)

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._settings.simulated:
            return self._with_noise(torch.zeros(shape, device=self._torch_device))
        return super()._draw(shape)

    def _seek(self, step: int) -> None:
        self._stream.seek(step)

    def _with_noise(self, y: torch.Tensor) -> torch.Tensor:
        """Add the simulated device's software noise; hardware has physical noise."""
        if self._settings.simulated and self._std:
            return self._stream.add_to(y, self._std)
        return y


def import_lightonml() -> types.ModuleType:
    """Import lightonml; DeviceUnavailable if it is not installed, or does not import."""
    if "pkg_resources" not in sys.modules and importlib.util.find_spec("pkg_resources") is None:
        sys.modules["pkg_resources"] = _pkg_resources()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import lightonml
            import lightonml.opu  # its class must be there
    except ImportError as error:
        raise DeviceUnavailable(f"lightonml does not import ({error}); {INSTALL_LIGHTONML}") from error
    return lightonml


class _OtherThreads:
    """Passes what threads print on to a stream, except for quiet threads."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        return len(text) if _is_quiet.get() else int(self.stream.write(text))

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream."""
        return getattr(self.stream, name)


_is_quiet: ContextVar[bool] = ContextVar("opusim_is_quiet", default=False)
_quiet_lock = threading.Lock()
_quiet_calls = 0
_FILTER = ("ignore", None, Warning, re.compile(r"lighton(ml|opu)(\.|$)"), 0)
"""Entry of `warnings.filters`: other packages' warnings still appear, whatever call hangs."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lightonml's prints and its warnings off the terminal.

    Thread-safe: what other threads print appears, even while one thread hangs in an abandoned call. The last call to
    end restores standard output unless it was replaced meanwhile, as by a test that has begun since; the stream that a
    call found may be closed by then.
    """
    global _quiet_calls
    with _quiet_lock:
        if not isinstance(sys.stdout, _OtherThreads):
            stream: Any = _OtherThreads(sys.stdout)
            sys.stdout = stream
        _quiet_calls += 1
        filters: Any = warnings.filters
        if _FILTER not in filters:
            filters.insert(0, _FILTER)
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)
        with _quiet_lock:
            _quiet_calls -= 1
            if not _quiet_calls:
                if isinstance(sys.stdout, _OtherThreads):
                    sys.stdout = sys.stdout.stream
                filters = warnings.filters
                if _FILTER in filters:
                    filters.remove(_FILTER)


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Turn every exception of lightonml into an error of this project that names the device; Ctrl-C passes."""
    try:
        yield
    except (DeviceError, ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # ProcessRunningException is no Exception
        text = " ".join(str(error).split()) or type(error).__name__
        found: Exception = DeviceFault(f"device {name!r} reports: {text}; reset it")
        if {kind.__name__ for kind in type(error).__mro__}.intersection(_BUSY):
            found = DeviceBusy(f"device {name!r} is used by another program ({text}); end it")
        elif isinstance(error, ImportError):
            found = DeviceUnavailable(
                f"device {name!r} needs LightOn's driver, which comes with the appliance ({text}); "
                "run on the appliance, or take the device lightonml_simulated"
            )
        elif isinstance(error, TimeoutError):
            found = DeviceTimeout(
                f"device {name!r} did not answer in time ({text}); check its cables and power"
            )
        elif isinstance(error, OSError):
            found = DeviceUnavailable(
                f"device {name!r} cannot be reached ({text}); check its cables and power"
            )
        elif "No configuration files" in text:
            found = DeviceUnavailable(
                f"device {name!r}: no OPU is configured on this machine; set lighton.config_file, or take the device "
                "lightonml_simulated"
            )
        elif any(words in text for words in _TOO_LARGE):
            found = ConfigError(
                name, "lighton", f"the OPU is smaller than this window ({text}); open a smaller window"
            )
        elif isinstance(error, LookupError | ValueError | TypeError | AttributeError):
            found = DeviceFault(
                f"device {name!r}: its driver failed ({type(error).__name__}: {text}); check that lightonopu belongs "
                "to lightonml 1.4.3, and the OPU's configuration (lighton.config_file)"
            )
        raise found from error


def _pkg_resources() -> types.ModuleType:
    """Return the few names of pkg_resources that lightonml uses."""
    module: Any = types.ModuleType("pkg_resources")

    class ResolutionError(Exception):
        """A requirement that is not met."""

    def get_distribution(name: str) -> types.SimpleNamespace:
        try:
            return types.SimpleNamespace(version=version(name), project_name=name)
        except PackageNotFoundError as error:
            raise ResolutionError(name) from error

    def require(requirement: str) -> list[types.SimpleNamespace]:
        return [get_distribution(requirement.partition(">")[0])]

    module.ResolutionError = module.DistributionNotFound = ResolutionError
    module.get_distribution, module.require = get_distribution, require
    result: types.ModuleType = module
    return result
