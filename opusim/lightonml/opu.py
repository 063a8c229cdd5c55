"""The class `OPU` in lightonml's words: fit, transform and linear_transform on any device."""

from __future__ import annotations

import datetime as dt
import inspect
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import sklearn.exceptions
import torch

from opusim import checks
from opusim.description.section import merged
from opusim.devices.base import NoisyDevice
from opusim.errors import DeviceUnavailable
from opusim.features.optical import widened
from opusim.lightonml.context import Context, ContextArray
from opusim.lightonml.encoding.base import NoDecoding, NoEncoding
from opusim.lightonml.inputs import Fit, OpuDevice, as_array, features_of, layout_of, like, require_shown
from opusim.lightonml.types import InputRoiStrategy, OutputRescaling
from opusim.progress import Progress

_LOG = logging.getLogger("opusim.lightonml")
_MIRRORS_AT_ONCE = 2**27
"""Entries of frames that are made at once: 128 MiB as bytes, four times that on the device."""
_ROWS_AT_ONCE = 8192
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG)
_verbose_level = 0


class NotFittedError(sklearn.exceptions.NotFittedError, AssertionError):
    """A transform has no fit that it can use; also an AssertionError, as lightonml raises."""


def set_verbose_level(verbose_level: int) -> None:
    """Set what is reported on standard error: 0 nothing, 1 fits, transforms and their progress, 2 and 3 more."""
    global _verbose_level
    checks.integer(verbose_level=verbose_level, minimum=0, maximum=3)
    if verbose_level and not _LOG.handlers:
        _LOG.addHandler(logging.StreamHandler())
    _LOG.setLevel(_LEVELS[verbose_level])
    _verbose_level = int(verbose_level)


def get_verbose_level() -> int:
    """Return the level that `set_verbose_level` set."""
    return _verbose_level


class OPU:
    """Random projections by a device: |R x|^2 of binary vectors (`transform`), B x (`linear_transform`).

    Intensities are in the device's own units: digital numbers, DN, of a camera; without a camera E|R_ji|^2 = 1, so
    that their mean is |x|^2 (lightonml's simulated device: 2 |x|^2 / n). R and B of simulated devices are independent.
    Linear products are scaled as `rescale` says, on every device; see `opusim.lightonml.types.OutputRescaling`.

    Args:
        n_components: Number of outputs.
        opu_device: Same as `device`, for programs that give it by position.
        max_n_features: Largest number of features that a fit takes; None allows all that the device has.
        config_file: Configuration file of the appliance; empty for its default.
        config_override: Must be None; use `options`.
        verbose_level: See `set_verbose_level`; -1 leaves it.
        input_roi_strategy: How 2-D features become mirrors, on devices with a geometry.
        open_at_init: Whether the device is opened now, so that a missing one is found now. False waits for `open`.
        disable_pbar: Whether verbose level 1 shows no progress.
        simulated: Whether to take the noiseless device `ideal`, of any size.
        rescale: What a linear product is divided by, or its name.
        device: Name or file of a description, or an open `opusim.NoisyDevice`. None takes the appliance,
            `lighton_appliance`.
        options: Sections laid over the device's description, such as {"noise": {"sigma": 0.1}}.
        mirror_shape: Rows and columns of the device's mirrors; None takes 912 x 1140 for devices of as many inputs.
        seed: Seed of the device's noise, in [0, 2^64); the medium's seed is in its description.
        mode: "experiment", or "release" for noise that cannot be replayed.

    Attributes:
        device: The device: name, input_shape, exposure_us and frametime_us, which can be set.
        rescale, input_roi_strategy: See above.

    Raises:
        TypeError, ValueError, ConfigError: An argument is out of range.
        DeviceError: The device cannot be opened.

    Example:
        >>> x = np.eye(4, 64, dtype=np.uint8)
        >>> opu = OPU(n_components=1000, simulated=True)
        >>> opu.fit1d(x).transform(x).shape
        (4, 1000)
    """

    def __init__(
        self,
        n_components: int = 200_000,
        opu_device: str | Path | NoisyDevice | None = None,
        max_n_features: int | None = None,
        config_file: str = "",
        config_override: Mapping[str, Any] | None = None,
        verbose_level: int = -1,
        input_roi_strategy: InputRoiStrategy = InputRoiStrategy.full,
        open_at_init: bool | None = None,
        disable_pbar: bool = False,
        simulated: bool = False,
        rescale: OutputRescaling | str = OutputRescaling.variance,
        *,
        device: str | Path | NoisyDevice | None = None,
        options: Mapping[str, Any] | None = None,
        mirror_shape: tuple[int, int] | None = None,
        seed: int = 0,
        mode: str = "experiment",
    ) -> None:
        if verbose_level != -1:
            set_verbose_level(verbose_level)
        if config_override is not None:
            raise ValueError(
                "config_override is not passed on; lay sections over the device by options={...}"
            )
        told = [each for each in (device, opu_device) if each is not None]
        if len(told) + simulated > 1:
            raise ValueError("device, opu_device and simulated=True each name a device; give one of them")
        chosen = "ideal" if simulated else told[0] if told else "lighton_appliance"
        remedy = "give a name such as 'camera', or open_device(...)"
        checks.instance((str, Path, NoisyDevice), device=chosen, remedy=remedy)
        sections = merged(options or {}, {"lighton": {"config_file": config_file}} if config_file else {})
        self.device = OpuDevice(chosen, sections, mirror_shape=mirror_shape, seed=seed, mode=mode)
        self._is_default = not told and not simulated
        self._fit: Fit | None = None
        self._max_n_features: int | None = None
        self._is_active = self._stays_open = False
        self.disable_pbar = disable_pbar
        self.rescale = rescale
        self.input_roi_strategy = input_roi_strategy
        self.n_components = n_components
        if max_n_features is not None:
            self.max_n_features = max_n_features
        if open_at_init is None or open_at_init:
            self.open()
            self._stays_open = False

    # Properties

    @property
    def n_components(self) -> int:
        """Number of outputs; after it is set, fit again."""
        return self._n_components

    @n_components.setter
    def n_components(self, value: int) -> None:
        remedy = f"device {self.device.name!r} has {self.max_n_components} outputs"
        checks.integer(n_components=value, minimum=1, maximum=self.max_n_components, remedy=remedy)
        self._n_components = int(value)

    @property
    def max_n_components(self) -> int:
        """Outputs that the device has."""
        return self.device.max_outputs

    @property
    def max_n_features(self) -> int:
        """Largest number of features that a fit takes."""
        return self._max_n_features or self.device.max_inputs

    @max_n_features.setter
    def max_n_features(self, value: int) -> None:
        largest = self.device.max_inputs
        remedy = f"device {self.device.name!r} has {largest} inputs"
        checks.integer(max_n_features=value, minimum=1, maximum=largest, remedy=remedy)
        self._max_n_features = int(value)

    @property
    def rescale(self) -> OutputRescaling:
        """What a linear product is divided by; set it to the choice or its name."""
        return self._rescale

    @rescale.setter
    def rescale(self, value: OutputRescaling | str) -> None:
        name = value.name if isinstance(value, OutputRescaling) else value
        checks.choice([each.name for each in OutputRescaling], rescale=str(name).lower())
        self._rescale = OutputRescaling[str(name).lower()]

    @property
    def active(self) -> bool:
        """Whether the OPU is open."""
        return self._is_active

    @property
    def fitted(self) -> Fit | None:
        """The last fit, or None. Maps that share the OPU set their own before they use it."""
        return self._fit

    @fitted.setter
    def fitted(self, value: Fit | None) -> None:
        self._fit = value
        if value is not None:
            self._n_components, self.input_roi_strategy = value.n_components, value.strategy

    # Opening and closing

    def open(self) -> None:
        """Open the device; nothing happens if it is open.

        Raises:
            DeviceError: It cannot be opened.
        """
        try:
            self.device.probe(self.n_components)
        except DeviceUnavailable as error:
            if not self._is_default:
                raise
            raise DeviceUnavailable(f"{error}, or OPU(simulated=True)") from error
        self._is_active = self._stays_open = True

    def close(self) -> None:
        """Close the device, unless it was given open; `open` opens it again, and the last fit still holds."""
        self._is_active = self._stays_open = False
        self.device.close()

    def __enter__(self) -> Self:
        """Open the OPU for a block, after which it is closed, unless `open` was called before."""
        stays_open = self._stays_open
        self.open()
        self._stays_open = stays_open
        return self

    def __exit__(self, *error: object) -> None:
        if not self._stays_open:
            self.close()

    def __sklearn_clone__(self) -> Self:
        """Return the OPU itself: clones of an estimator read the same device."""
        return self

    # Fit

    def fit1d(
        self,
        X: Any = None,
        n_features: int | None = None,
        packed: bool = False,
        online: bool = False,
        **override: Any,
    ) -> Self:
        """Learn the number of features of vectors; their values are not used.

        Args:
            X: A vector, or a batch with one or two leading axes.
            n_features: Their number of features, in place of X; or with packed X, if it is no multiple of 8.
            packed: Whether eight features stand in a byte, as `numpy.packbits(X, axis=-1)` gives them.
            online: Whether vectors come one by one; batches are then refused.
            **override: exposure_us, frametime_us or input_roi_strategy, for this fit.

        Raises:
            TypeError, ValueError: What it needs is missing, contradictory, or out of range.
        """
        return self._fit_features(X, n_features, packed, online, 1, override)

    def fit2d(
        self,
        X: Any = None,
        n_features: tuple[int, int] | None = None,
        packed: bool = False,
        online: bool = False,
        **override: Any,
    ) -> Self:
        """Learn the rows and columns of matrices; their values are not used.

        Args:
            X: A matrix, or a batch with one or two leading axes; if packed, the bytes of the flattened matrices.
            n_features: Rows and columns, in place of X, or for packed X.
            packed: See `fit1d`.
            online: See `fit1d`.
            **override: See `fit1d`.

        Raises:
            TypeError, ValueError: What it needs is missing, contradictory, or out of range.
        """
        return self._fit_features(X, n_features, packed, online, 2, override)

    def fit_transform1d(self, X: Any, packed: bool = False, **override: Any) -> Any:
        """Call `fit1d` and `transform`."""
        return self.fit1d(X, None, packed, False, **override).transform(X)

    def fit_transform2d(
        self, X: Any, packed: bool = False, n_2d_features: tuple[int, int] | None = None, **override: Any
    ) -> Any:
        """Call `fit2d` and `transform`; packed X needs n_2d_features, rows and columns."""
        return self.fit2d(X, n_2d_features, packed, False, **override).transform(X)

    def _fit_features(
        self, X: Any, n_features: Any, packed: bool, online: bool, axes: int, override: dict[str, Any]
    ) -> Self:
        unknown = sorted(set(override) - {"exposure_us", "frametime_us", "input_roi_strategy"})
        if unknown:
            raise TypeError(
                f"{unknown[0]} is no override; a fit takes exposure_us, frametime_us, input_roi_strategy"
            )
        strategy = override.pop("input_roi_strategy", self.input_roi_strategy)
        checks.instance(InputRoiStrategy, input_roi_strategy=strategy)
        found = features_of(None if X is None else as_array(X), n_features, packed=bool(packed), axes=axes)
        if found.size > self.max_n_features:
            raise ValueError(
                f"n_features = {found.size}: the OPU takes at most max_n_features = {self.max_n_features}; raise "
                "it, or take a wider device"
            )
        layout = layout_of(found, self.device.mirror_shape, strategy)
        timing = tuple((name, float(value)) for name, value in override.items())
        self._fit = Fit(found, layout, bool(online), self.n_components, self.input_roi_strategy, timing)
        _LOG.info("OPU: fit to features %s on %d mirrors", found.shape, layout.width)
        return self

    # Transform

    def transform(self, X: Any, encoder_cls: Any = NoEncoding, decoder_cls: Any = NoDecoding) -> Any:
        """Return |R x|^2 of binary vectors.

        Args:
            X: Array, tensor or list; after encoding its entries are 0 and 1, in the shape of the last fit.
            encoder_cls: Encoder, or its class, that makes X binary (`opusim.lightonml.encoding.base`).
            decoder_cls: Decoder, or its class, that joins the readings of a vector. A class gets the encoder's
                parameters that its constructor names.

        Returns:
            float32, shape (*batch, n_components), or as the decoder gives it: a `ContextArray` with the circumstances
            in `context`; for a tensor a tensor on its torch device.

        Raises:
            NotFittedError: There is no fit, or n_components or the strategy changed after it.
            DeviceUnavailable: The OPU is closed.
            TypeError, ValueError: X is not binary, or has another shape.
        """
        return self._apply(X, encoder_cls, decoder_cls, linear=False)

    def linear_transform(self, X: Any, encoder_cls: Any = NoEncoding, decoder_cls: Any = NoDecoding) -> Any:
        """Return B x, divided as `rescale` says; arguments and errors as for `transform`, and entries may be -1."""
        return self._apply(X, encoder_cls, decoder_cls, linear=True)

    def version(self, devices: bool = False) -> str:
        """Return what runs here, in a line; with `devices` a second one about the device."""
        text = f"OPU of opusim on device {self.device.name!r}"
        return f"{text}\n{self.device.description.title}" if devices else text

    def _apply(self, X: Any, encoder_cls: Any, decoder_cls: Any, *, linear: bool) -> Any:
        if not self._is_active:
            raise DeviceUnavailable("the OPU is closed; call open(), or work inside `with opu:`")
        fit = self._fit
        if fit is None:
            raise NotFittedError(
                "the OPU was not fitted; call fit1d or fit2d before transform and linear_transform"
            )
        for name, then, now in (
            ("n_components", fit.n_components, self.n_components),
            ("input_roi_strategy", fit.strategy, self.input_roi_strategy),
        ):
            if then != now:
                raise NotFittedError(
                    f"{name} was {then} at the last fit and is {now} now; call fit1d or fit2d again"
                )
        encoder: Any = encoder_cls() if inspect.isclass(encoder_cls) else encoder_cls
        rows, batch = fit.features.rows(as_array(encoder.transform(X)))
        if fit.online and math.prod(batch) != 1:
            raise ValueError(
                f"X is a batch of {math.prod(batch)} vectors, and the last fit said online=True; give one vector at a "
                "time, or fit with online=False"
            )
        numbers, context = self._read(rows, fit, linear=linear)
        decoder: Any = decoder_cls
        if inspect.isclass(decoder_cls):  # it gets the encoder's parameters that its constructor names
            wanted = inspect.signature(decoder_cls).parameters
            told = {name: getattr(encoder, name) for name in wanted if hasattr(encoder, name)}
            told |= dict(encoder.get_params()) if hasattr(encoder, "get_params") else {}
            decoder = decoder_cls(**{name: told[name] for name in wanted if name in told})
        found = np.asarray(decoder.transform(numbers.reshape(*batch, fit.n_components)))
        if linear and self.rescale is not OutputRescaling.none:
            size = fit.features.size if self.rescale is OutputRescaling.variance else fit.n_components
            found = found / np.float32(math.sqrt(size))
        _LOG.info("OPU: transformed %d vectors with %s", len(rows), context)
        return like(found, X) if isinstance(X, torch.Tensor) else ContextArray(found, context)

    def _read(self, rows: np.ndarray, fit: Fit, *, linear: bool) -> tuple[np.ndarray, Context]:
        """Return the device's numbers of rows, float32, shape (n, n_components), and the context."""
        start, ones = dt.datetime.now(), 0
        device = self.device.reader(fit.layout.width, fit.n_components, **dict(fit.timing))
        frames_before = device.usage.frames
        found = np.empty((len(rows), fit.n_components), dtype=np.float32)
        at_once = max(1, min(_ROWS_AT_ONCE, _MIRRORS_AT_ONCE // device.n_inputs))
        shows = get_verbose_level() > 0 and not self.disable_pbar
        with Progress("OPU", "vectors", show="lines" if shows else False) as progress:
            progress.start(len(rows))
            for begin in range(0, len(rows), at_once):  # frames are made a block at a time
                part = fit.features.unpacked(rows[begin : begin + at_once])
                require_shown(part, ternary=linear)
                part = part.astype(np.int8 if linear else np.uint8, copy=False)
                ones += int(np.count_nonzero(part))
                frames = widened(fit.layout.frames(part), device.n_inputs, bias=0)
                numbers = device.project(frames) if linear else device.intensities(frames)
                found[begin : begin + len(part)] = numbers[:, : fit.n_components]
                progress.advance(done=begin + len(part))
        context = Context(
            device=device.name,
            unit="projection units" if linear else self.device.unit,
            frametime_us=device.description.frames.period_us(device.n_outputs),
            exposure_us=dict(fit.timing).get("exposure_us", self.device.exposure_us),
            start=start,
            end=dt.datetime.now(),
            frames=device.usage.frames - frames_before,
            n_ones=ones * fit.layout.factor**2 / len(rows),
            fmt_type=fit.layout.format,
            fmt_factor=fit.layout.factor,
            input_roi=fit.layout.roi,
        )
        return found, context
