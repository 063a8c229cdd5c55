"""Fewer features: the principal components of the training records, for features that are public."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from training.data.dataset import Dataset, Split


@dataclass(frozen=True, kw_only=True)
class PrincipalComponents:
    """The affine map x -> (x - mean) axes.

    It is computed from all training records without noise, so it is admissible only where their features are public.

    Attributes:
        mean: Shape (d,), float64.
        axes: Orthogonal columns, each scaled, shape (d, k), float64.
    """

    mean: np.ndarray
    axes: np.ndarray

    @classmethod
    def of(cls, x: Tensor, n_components: int, *, whitening: float) -> PrincipalComponents:
        """The leading components of some records.

        Component j has standard deviation proportional to s_j^(1 - whitening), s_j its own, and the mean of the
        variances is 1. The sign makes each axis' largest entry positive.

        Args:
            x: Records, shape (n, d).
            n_components: k, from 1 to d.
            whitening: From 0 (components as they are) to 1 (all of the same variance).

        Raises:
            ValueError: k exceeds the features, or the number of components with any variance.
        """
        values = x.double().cpu().numpy()
        if n_components > values.shape[1]:
            raise ValueError(
                f"data.components = {n_components} exceeds the {values.shape[1]} features; lower it"
            )
        mean = values.mean(axis=0)
        variances, vectors = np.linalg.eigh((values - mean).T @ (values - mean) / len(values))
        largest = np.argsort(variances)[::-1][:n_components]
        stds, vectors = np.sqrt(np.maximum(variances[largest], 0.0)), vectors[:, largest]
        if not stds[-1] > 1e-6 * stds[0]:
            raise ValueError(
                f"data.components = {n_components}: the records vary in {int(np.sum(stds > 1e-6 * stds[0]))} "
                "directions only; lower it"
            )
        signs = np.sign(vectors[np.argmax(np.abs(vectors), axis=0), np.arange(n_components)])
        scaled = stds ** (1 - whitening)
        return cls(mean=mean, axes=vectors * signs * stds**-whitening / np.sqrt(np.mean(scaled**2)))

    @classmethod
    def from_array(cls, rows: np.ndarray) -> PrincipalComponents:
        """What `to_array` gave."""
        return cls(mean=rows[0], axes=rows[1:].T)

    def to_array(self) -> np.ndarray:
        """The mean, then the axes, as rows, shape (k + 1, d)."""
        return np.vstack([self.mean, self.axes.T])

    @property
    def n_features(self) -> int:
        """Number d of original features."""
        return len(self.mean)

    def apply(self, x: Tensor) -> Tensor:
        """Components of records (n, d), float32, shape (n, k)."""
        mean, axes = torch.from_numpy(self.mean).to(x.device), torch.from_numpy(self.axes).to(x.device)
        return ((x.double() - mean) @ axes).float()


def reduced(dataset: Dataset, components: PrincipalComponents) -> Dataset:
    """The data set with every record's features replaced by their components."""

    def transform(split: Split) -> Split:
        return Split(components.apply(split.x), split.y)

    return replace(
        dataset,
        train=transform(dataset.train),
        validation=transform(dataset.validation),
        test=None if dataset.test is None else transform(dataset.test),
        components=components,
    )
