"""Check a user's device and vectors for an OPU, and lay the vectors out on its mirrors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opusim import checks
from opusim.description.schema import DeviceDescription, load_description
from opusim.description.section import merged
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.features.optical import require_window
from opusim.lightonml.context import Roi
from opusim.lightonml.types import FeaturesFormat, InputRoiStrategy

_ENCODE = (
    "encode it first, by transform(X, encoder_cls=BinaryThresholdEncoder(threshold)), or by SeparatedBitPlanEncoder() "
    "and SeparatedBitPlanDecoder for linear_transform (opusim.lightonml.encoding.base)"
)

_KNOWN_ARRAYS = {912 * 1140: (912, 1140)}
"""Rows and columns of mirror arrays by their number of mirrors; LightOn's OPU only."""
_PROBE_INPUTS = 16
"""Window that is opened before a fit gives the number of features, so that a missing device is found at once."""
_READOUT_US = 50.0
"""Time that a frame needs beyond its exposure."""


def as_array(X: Any) -> np.ndarray:
    """Return real numbers (TypeError otherwise) as a plain array: of tensors of any torch device, arrays and lists."""
    checks.complete(X=X)
    if hasattr(X, "toarray"):
        raise TypeError(f"X is sparse ({type(X).__name__}): must be dense; give X.toarray()")
    found = X.detach().cpu().numpy() if isinstance(X, torch.Tensor) else np.asarray(X)
    if found.dtype.kind not in "iufb":
        raise TypeError(
            f"X has dtype {found.dtype}: must be real numbers; give an array of 0 and 1, such as uint8"
        )
    return np.asarray(found)


def like(found: np.ndarray, X: Any) -> Any:
    """Return an array in the library, and on the torch device, of X."""
    return (
        torch.from_numpy(np.ascontiguousarray(found)).to(X.device) if isinstance(X, torch.Tensor) else found
    )


@dataclass(frozen=True)
class Features:
    """The features of a vector: what `fit1d` and `fit2d` learn.

    Attributes:
        shape: One length, or rows and columns.
        packed: Whether eight of them stand in a byte, as `numpy.packbits` gives them.
    """

    shape: tuple[int, ...]
    packed: bool = False

    @property
    def size(self) -> int:
        """Number of features."""
        return math.prod(self.shape)

    @property
    def axes(self) -> tuple[int, ...]:
        """Last axes of X: the shape, or the bytes."""
        return (-(-self.size // 8),) if self.packed else self.shape

    def rows(self, X: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return one vector, or a batch with one or two leading axes, as rows, and the shape of the batch."""
        leading = X.ndim - len(self.axes)
        if leading < 0 or X.shape[leading:] != self.axes:
            what = (
                f"{self.axes[0]} bytes for {self.size} features" if self.packed else f"features {self.axes}"
            )
            raise ValueError(
                f"X has shape {X.shape}: its last axes must be the {what} of the last fit; call fit1d or fit2d on "
                "vectors like these (on encoded ones, if an encoder changes their number of features)"
            )
        if leading > 2:
            raise ValueError(f"X has shape {X.shape}: a batch has at most two leading axes; use reshape")
        if X.size == 0:
            raise ValueError(f"X is empty, shape {X.shape}; give at least one vector")
        if self.packed and X.dtype != np.uint8:
            raise TypeError(f"X has dtype {X.dtype}: packed bits are uint8; use numpy.packbits(X, axis=-1)")
        return X.reshape(-1, math.prod(self.axes)), X.shape[:leading]

    def unpacked(self, rows: np.ndarray) -> np.ndarray:
        """Return rows with an entry for each feature."""
        return np.unpackbits(rows, axis=1, count=self.size) if self.packed else rows


def features_of(X: np.ndarray | None, n_features: Any, *, packed: bool, axes: int) -> Features:
    """Return the features that a fit is given by number or shape, or finds in X, packed or not, of 1 or 2 axes."""
    name = "n_features" if axes == 1 else "n_features (rows, columns)"
    if n_features is not None:
        shape = tuple(n_features) if isinstance(n_features, Iterable) else (n_features,)
        if len(shape) != axes:
            raise ValueError(f"n_features = {n_features!r}: must be {axes} number(s) for fit{axes}d")
        for length in shape:
            checks.integer(n_features=length, minimum=1)
        told = Features(tuple(int(length) for length in shape), packed)
        if X is not None and X.shape[-len(told.axes) :] != told.axes:
            raise ValueError(
                f"n_features = {n_features!r} and X of shape {X.shape} contradict each other; leave n_features out, "
                "or pack X by numpy.packbits(X, axis=-1) and say packed=True"
            )
        return told
    if X is None:
        raise ValueError(f"X and {name} are both missing: a fit needs one of them; give vectors, or {name}")
    if packed and axes == 2:
        raise ValueError(f"{name} is missing: packed bits do not tell it; give it with packed=True")
    if X.ndim < axes:
        raise ValueError(
            f"X has shape {X.shape}: fit{axes}d needs at least {axes} axes; use fit1d, or reshape"
        )
    if X.size == 0:
        raise ValueError(f"X is empty, shape {X.shape}; give at least one vector, or {name}")
    shape = (8 * X.shape[-1],) if packed else X.shape[-axes:]
    return Features(tuple(int(length) for length in shape), packed)


def require_shown(rows: np.ndarray, *, ternary: bool) -> None:
    """Refuse (ValueError) entries that no mirror shows, by the first one and the encoder to use; -1 needs `ternary`."""
    if rows.dtype == np.bool_:
        return
    right = (rows == 0) | (rows == 1)
    if ternary:
        right |= rows == -1
    if bool(right.all()):
        return
    wrong = rows[~right][0]
    may = "-1, 0 or 1" if ternary else "0 or 1"
    if np.isnan(wrong):
        raise ValueError(
            "X holds NaN, which no encoder takes; fill gaps first, as by sklearn.impute.SimpleImputer()"
        )
    hint = ""
    if wrong == -1:
        hint = "; linear_transform takes -1"
    elif rows.dtype.kind == "u" and wrong == np.iinfo(rows.dtype).max:
        hint = "; unsigned integers wrap -1 to their largest value: use int8 and linear_transform"
    raise ValueError(f"X holds {wrong:g}: a device shows {may}; {_ENCODE}{hint}")


@dataclass(frozen=True)
class Layout:
    """Where features stand on the mirrors of a frame.

    Attributes:
        features: The features.
        array: Rows and columns of the window, or None if features stand one after the other.
        factor: Mirrors along the side of a macro-pixel.
    """

    features: Features
    array: tuple[int, int] | None = None
    factor: int = 1

    @property
    def width(self) -> int:
        """Mirrors of the window."""
        return self.features.size if self.array is None else math.prod(self.array)

    @property
    def format(self) -> FeaturesFormat:
        """How features become mirrors."""
        return FeaturesFormat.lined if self.array is None else FeaturesFormat.macro_2d

    @property
    def roi(self) -> Roi:
        """Offset and size of the region that shows features."""
        if self.array is None:
            return (0, 0), (1, self.features.size)
        size = [self.factor * length for length in self.features.shape]
        offset = [all_ // 2 - length // 2 for all_, length in zip(self.array, size, strict=True)]
        return (offset[0], offset[1]), (size[0], size[1])

    def frames(self, rows: np.ndarray) -> np.ndarray:
        """Return the frames of unpacked rows, shape (n, width)."""
        if self.array is None:
            return rows
        (top, left), (height, width) = self.roi
        frames = np.zeros((len(rows), *self.array), dtype=rows.dtype)
        squares = (
            rows.reshape(-1, *self.features.shape).repeat(self.factor, axis=1).repeat(self.factor, axis=2)
        )
        frames[:, top : top + height, left : left + width] = squares
        return frames.reshape(len(rows), -1)


def layout_of(features: Features, mirror_shape: tuple[int, int] | None, strategy: InputRoiStrategy) -> Layout:
    """Return the layout of features on a device of `mirror_shape` (None: without geometry); ValueError if none fits."""
    if mirror_shape is None or len(features.shape) == 1 or strategy is InputRoiStrategy.small:
        return Layout(features)
    factor = min(all_ // length for all_, length in zip(mirror_shape, features.shape, strict=True))
    if not factor:
        rows, columns = mirror_shape
        raise ValueError(
            f"features of shape {features.shape} do not fit the device's {rows} x {columns} mirrors; turn or crop "
            "them, or use fit1d on X.reshape(len(X), -1)"
        )
    return Layout(features, mirror_shape, factor)


@dataclass(frozen=True)
class Fit:
    """What a fit decides.

    Attributes:
        features: Number, or shape, of the features.
        layout: Where they stand on the mirrors.
        online: Whether vectors come one by one.
        n_components: Outputs.
        strategy: The OPU's strategy at the time of the fit, which may have overridden it.
        timing: Exposure and time of a frame, if the fit sets them, microseconds.
    """

    features: Features
    layout: Layout
    online: bool
    n_components: int
    strategy: InputRoiStrategy
    timing: tuple[tuple[str, float], ...]


# The device


class OpuDevice:
    """A device by its name, or one that is open; `OPU.device`.

    Args:
        device: Name or file of a description, or an open device, whose window stays as it is.
        options: Sections laid over the description.
        mirror_shape: Rows and columns of its mirrors; None takes 912 x 1140 for devices of that many inputs, and no
            geometry for others.
        seed: Seed of the noise.
        mode: "experiment" or "release".

    Raises:
        ConfigError: There is no such device, or an option is wrong.
        ValueError: A geometry that the device does not have.
    """

    def __init__(
        self,
        device: str | Path | NoisyDevice,
        options: Mapping[str, Any] | None,
        *,
        mirror_shape: tuple[int, int] | None,
        seed: int,
        mode: str,
    ) -> None:
        self._given = device if isinstance(device, NoisyDevice) else None
        if self._given is not None and options:
            raise ValueError(
                f"options = {dict(options)!r}: device {self._given.name!r} is open already; open it with them, or give "
                "its name"
            )
        self._name = "" if isinstance(device, NoisyDevice) else str(device)
        self._options, self._seed, self._mode = dict(options or {}), seed, mode
        self._open: NoisyDevice | None = None
        self._window: tuple[Any, ...] = ()
        self.description: DeviceDescription = (
            self._given.description
            if self._given is not None
            else load_description(self._name, self._options)
        )
        self.mirror_shape = _KNOWN_ARRAYS.get(self.max_inputs)
        if mirror_shape is not None:
            rows, columns = mirror_shape
            checks.integer(mirror_rows=rows, mirror_columns=columns, minimum=1)
            if rows * columns > self.max_inputs:
                raise ValueError(
                    f"mirror_shape = {mirror_shape}: has {rows * columns} mirrors, and device {self.name!r} "
                    f"{self.max_inputs}; give a smaller shape"
                )
            self.mirror_shape = int(rows), int(columns)

    @property
    def name(self) -> str:
        """The device's name."""
        return self.description.name

    @property
    def max_inputs(self) -> int:
        """Mirrors that can be used."""
        return self.description.n_inputs if self._given is None else self._given.n_inputs

    @property
    def max_outputs(self) -> int:
        """Outputs that can be used."""
        return self.description.n_outputs if self._given is None else self._given.n_outputs

    @property
    def input_shape(self) -> tuple[int, int]:
        """Rows and columns of the mirrors; one row for devices without a geometry."""
        return self.mirror_shape or (1, self.max_inputs)

    @property
    def is_hardware(self) -> bool:
        """Whether it is an instrument, such as LightOn's appliance."""
        return not self.description.is_simulated

    @property
    def unit(self) -> str:
        """Unit of intensities."""
        return "DN" if self.description.camera is not None or self.is_hardware else "projection units"

    @property
    def exposure_us(self) -> float | None:
        """Exposure, microseconds, or None if the device has no camera or keeps its own.

        Setting it opens the device again at its next use, and lengthens the time of a frame if it must.
        """
        if self.description.camera is not None:
            return self.description.camera.light.exposure_us
        settings = self.description.bench or self.description.lighton
        return None if settings is None else settings.exposure_us

    @exposure_us.setter
    def exposure_us(self, value: float) -> None:
        self._set(self._timing(value, None))

    @property
    def frametime_us(self) -> float:
        """Time from frame to frame, microseconds; setting it opens the device again at its next use."""
        return self.description.frames.frame_period_us

    @frametime_us.setter
    def frametime_us(self, value: float) -> None:
        self._set(self._timing(None, value))

    def reader(
        self,
        n_inputs: int,
        n_outputs: int,
        *,
        exposure_us: float | None = None,
        frametime_us: float | None = None,
    ) -> NoisyDevice:
        """Return the open device in a window of at least this size, opening it if it is not."""
        if self._given is not None:
            if exposure_us is not None or frametime_us is not None:
                self._refuse_timing()
            require_window(self._given, n_inputs, n_outputs)
            return self._given
        window = (n_inputs, n_outputs, exposure_us, frametime_us)
        if self._open is None or not self._open.is_open or self._window != window:
            self.close()
            options = self._options
            if exposure_us is not None or frametime_us is not None:
                options = merged(options, self._timing(exposure_us, frametime_us))
            self._open = open_device(
                self._name,
                n_inputs=n_inputs,
                n_outputs=n_outputs,
                seed=self._seed,
                mode=self._mode,
                **options,
            )
            self._window = window
        return self._open

    def probe(self, n_outputs: int) -> None:
        """Open a small window, unless some window is open."""
        if self._given is not None:
            self._given.open()
        elif self._open is None:
            self.reader(min(_PROBE_INPUTS, self.max_inputs), n_outputs)

    def close(self) -> None:
        """Close a device that was opened here; one that was given stays open."""
        device, self._open = self._open, None
        if device is not None:
            device.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._given is not None:
            raise TypeError(
                f"device = {self._given.name!r} is open, and an open device cannot be pickled; give its name or file"
            )
        return self.__dict__ | {"_open": None, "_window": ()}

    def _timing(self, exposure_us: float | None, frametime_us: float | None) -> dict[str, Any]:
        """Return the sections that set times; a frame is made long enough for its exposure."""
        sections: dict[str, Any] = {}
        if exposure_us is not None:
            checks.positive(exposure_us=exposure_us)
            exposure_us = float(exposure_us)
            if self.description.camera is not None:
                sections["camera"] = {"light": {"exposure_us": exposure_us}}
            elif self.description.bench is not None:
                sections["bench"] = {"exposure_us": exposure_us}
            elif self.description.lighton is not None and self.is_hardware:
                sections["lighton"] = {"exposure_us": exposure_us}
            else:
                raise ValueError(
                    f"exposure_us = {exposure_us:g}: device {self.name!r} has no camera, and it would do nothing; "
                    "leave it out, or take the device camera"
                )
            if frametime_us is None:
                frametime_us = max(self.frametime_us, exposure_us + _READOUT_US)
        if frametime_us is not None:
            checks.positive(frametime_us=frametime_us)
            sections["frames"] = {"frame_period_us": float(frametime_us)}
        return sections

    def _set(self, sections: dict[str, Any]) -> None:
        if self._given is not None:
            self._refuse_timing()
        options = merged(self._options, sections)
        self.description = load_description(self._name, options)
        self._options = options
        self.close()

    def _refuse_timing(self) -> None:
        raise ValueError(
            f"device {self.name!r} is open already, and its times cannot be changed; open it with them, as "
            "open_device('camera', camera={'light': {'exposure_us': 200.0}}), or give its name"
        )
