"""An OPU as a scikit-learn transformer."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin

from opusim.errors import OpusimError
from opusim.lightonml.opu import OPU
from opusim.lightonml.projections import OpuTransformer, chosen_opu


class OPUMap(OpuTransformer, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """`OPU.transform`, or `OPU.linear_transform`, for Pipeline and GridSearchCV.

    Binary vectors or matrices of any batch shape are taken; an encoder stands before it in a pipeline. A clone shares
    an OPU that was given; one that the map made is made anew. Arguments are those of `OpuTransformer`.
    """

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
        self.n_components = n_components
        self.ndims = ndims
        self.n_2d_features = n_2d_features
        self.packed = packed
        self.simulated = simulated
        self.max_n_features = max_n_features
        self.verbose_level = verbose_level
        self.linear = linear
        self._given = opu
        self.opu = chosen_opu(
            opu, n_components, max_n_features, simulated=simulated, verbose_level=verbose_level
        )

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters as they were given."""
        return super().get_params(deep=False) | {"opu": self._given}

    def set_params(self, **params: Any) -> Self:
        """Set parameters, and take or make the OPU that they name; fit again after it."""
        before = {name: getattr(self, name) for name in params if name != "opu" and hasattr(self, name)}
        given = params.pop("opu", self._given)
        super().set_params(**params)
        if params.keys() & {"simulated", "max_n_features"} or given is not self._given:
            try:
                opu = chosen_opu(
                    given,
                    self.n_components,
                    self.max_n_features,
                    simulated=self.simulated,
                    verbose_level=self.verbose_level,
                )
            except (TypeError, ValueError, OpusimError):
                super().set_params(**before)
                raise
            if self._given is None:
                self.opu.close()
            self._given, self.opu = given, opu
        self._fit = None
        return self

    def transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Return the features of X, a plain array; a map that was not fitted is fitted to X."""
        return np.array(self._map(X))

    def __sklearn_is_fitted__(self) -> bool:
        return self.fitted

    @property
    def n_features_in_(self) -> int:
        """Features of a fitted map."""
        if self._fit is None:
            raise AttributeError("n_features_in_: the map was not fitted; call fit")
        return self._fit.features.size

    @property
    def _n_features_out(self) -> int:
        return self.n_components
