"""`OPUMap`: an OPU as a scikit-learn transformer and as a torch module."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from opusim import checks
from opusim.lightonml.inputs import Fit, as_array, like
from opusim.lightonml.opu import OPU, set_verbose_level


class OpuTransformer:
    """The base of both classes `OPUMap`: an OPU, a fit of the map's own, and the mapping of vectors.

    Args:
        n_components: Number of outputs.
        opu: The OPU; None makes one, as `OPU(n_components)` does.
        ndims: 1 for vectors, 2 for matrices.
        n_2d_features: Rows and columns of packed matrices.
        packed: Whether eight features stand in a byte.
        simulated: Whether to make a simulated OPU.
        max_n_features: See `OPU`; for an OPU that is made here.
        verbose_level: See `opusim.lightonml.set_verbose_level`; -1 leaves it.
        linear: Whether to map linearly.

    Attributes:
        opu: The OPU; several maps may share one.
        fitted: Whether the map was fitted.
    """

    _fit: Fit | None = None

    def __init__(
        self,
        n_components: int,
        opu: OPU | None = None,
        ndims: int = 1,
        n_2d_features: tuple[int, int] | None = None,
        packed: bool = False,
        simulated: bool = False,
        max_n_features: int | None = None,
        verbose_level: int = -1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.n_components, self.ndims, self.n_2d_features = n_components, ndims, n_2d_features
        self.packed, self.simulated, self.linear = packed, simulated, linear
        self.max_n_features, self.verbose_level, self._given = max_n_features, verbose_level, opu
        self.opu = self._chosen_opu()

    @property
    def fitted(self) -> bool:
        """Whether the map was fitted."""
        return self._fit is not None

    def open(self) -> None:
        """Open the OPU."""
        self.opu.open()

    def close(self) -> None:
        """Close the OPU."""
        self.opu.close()

    def __enter__(self) -> Self:
        """Open the OPU for a block."""
        self.opu.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.opu.__exit__(*error)

    def fit(
        self, X: Any = None, y: Any = None, n_features: Any = None, packed: bool = False, online: bool = False
    ) -> Self:
        """Learn the number of features, from X or n_features (None: n_2d_features if packed); see `OPU.fit1d`."""
        checks.choice((1, 2), ndims=self.ndims)
        packed = packed or self.packed
        self.opu.n_components = self.n_components
        if n_features is None and packed and self.ndims == 2:
            n_features = self.n_2d_features
        fit = self.opu.fit1d if self.ndims == 1 else self.opu.fit2d
        self._fit = fit(X, n_features, packed=packed, online=online).fitted
        return self

    def _chosen_opu(self) -> OPU:
        """Return the OPU that the arguments name, with that many components; ValueError if it is no simulated one."""
        if self.verbose_level >= 0:
            set_verbose_level(self.verbose_level)
        opu = self._given
        if opu is None:
            return OPU(self.n_components, max_n_features=self.max_n_features, simulated=self.simulated)
        checks.instance(OPU, opu=opu)
        if self.simulated and opu.device.is_hardware:
            raise ValueError(
                f"simulated=True, and the given OPU is hardware, {opu.device.name!r}; leave one of them out"
            )
        opu.n_components = self.n_components
        return opu

    def _map(self, X: Any) -> Any:
        """Return features of X; the first X fits, and an online map takes the vectors of a batch one by one."""
        if self._fit is None:
            self.fit(X)
        self.opu.fitted = self._fit
        self.opu.n_components = self.n_components
        transform = self.opu.linear_transform if self.linear else self.opu.transform
        fit = self.opu.fitted
        if fit is None or not fit.online:
            return transform(X)
        rows, batch = fit.features.rows(as_array(X))
        found = [np.asarray(transform(row)) for row in rows.reshape(-1, *fit.features.axes)]
        return like(np.stack(found).reshape(*batch, -1), X)
