"""An OPU as a scikit-learn transformer."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin

from opusim.errors import OpusimError
from opusim.lightonml.projections import OpuTransformer


class OPUMap(OpuTransformer, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """`OPU.transform`, or `OPU.linear_transform`, for Pipeline and GridSearchCV.

    Binary vectors or matrices of any batch shape are taken; an encoder stands before it in a pipeline. A clone shares a
    given OPU, and makes its own if the map did. Arguments are those of `OpuTransformer`.
    """

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters as they were given."""
        return super().get_params(deep=False) | {"opu": self._given}

    def set_params(self, **params: Any) -> Self:
        """Set parameters, and take or make the OPU that they name; fit again afterwards."""
        before = {name: getattr(self, name) for name in params if name != "opu" and hasattr(self, name)}
        earlier, given = self._given, params.pop("opu", self._given)
        super().set_params(**params)
        if params.keys() & {"simulated", "max_n_features"} or given is not earlier:
            self._given = given
            try:
                opu = self._chosen_opu()
            except (TypeError, ValueError, OpusimError):
                self._given = earlier
                super().set_params(**before)
                raise
            if earlier is None:
                self.opu.close()
            self.opu = opu
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
