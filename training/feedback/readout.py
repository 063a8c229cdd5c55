"""A learnt read-out: a small digital matrix for each feedback point, behind a fixed random medium.

A medium's matrix T cannot be trained; what is done with its readings can. Point l then receives s J_i M_l r_i instead
of s J_i times a slice of r_i, the reading of T e_i, with s its scale gain / sqrt(C P) and J_i the Jacobian of a layer
norm where the feedback is normalised (`opusim.training.feedback.layout.through_layer_norm`), else the identity. M_l
starts as the slice, and then is the best linear predictor of the true gradient,

    M_l = argmin sum_i |s M r_i / std_i - g_i|^2 + ridge |M|^2  over the rows i of some batches,

where g_i is dL/dh_l by backpropagation. J_i is taken as 1 / std(h_i) in it: the rest of it projects directions out that
the true gradient lacks as well. Readings are taken with their noise, so that M_l weighs them by what they are worth.

Sources: Launay et al. 2020 (fixed feedback); GrAPE (ICLR 2026), which learns feedback from a backpropagated batch in an
epoch; the least-squares form is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opusim import checks
from opusim.training.feedback.layout import Slice


class LearntReadout:
    """The matrices M_l of all calls of points, and the sums that they are fitted to.

    Args:
        slices: The outputs of B of each call of a point, at which the read-out starts: plain feedback.
        n_outputs: Outputs of B that are read.
        decay: Weight of earlier updates against each newer one, in (0, 1].
        ridge: Of the fit, in parts of the mean square of a reading, above 0.
    """

    def __init__(
        self, slices: Sequence[Slice], n_outputs: int, *, decay: float = 0.9, ridge: float = 1e-3
    ) -> None:
        checks.positive(decay=decay, ridge=ridge)
        checks.in_range(0, 1, decay=decay)
        self.updates = 0
        """Batches that it was fitted to."""
        self._decay, self._ridge = decay, ridge
        self._matrices = [torch.eye(n_outputs)[part.offset : part.end] for part in slices]
        self._squares = [torch.zeros(n_outputs, n_outputs, dtype=torch.float64) for _ in slices]
        self._products = [torch.zeros(len(m), n_outputs, dtype=torch.float64) for m in self._matrices]

    def apply(self, number: int, reading: Tensor) -> Tensor:
        """Return M_l r for the readings of rows.

        Args:
            number: Of the call of a point.
            reading: Shape (records, rows, n_outputs).
        """
        matrix = self._matrices[number] = self._matrices[number].to(reading.device)
        return reading[..., : matrix.shape[1]] @ matrix.T

    def fit(self, number: int, features: Tensor, gradient: Tensor) -> None:
        """Fit the matrix of a call to the rows of a batch, besides those before.

        Args:
            number: Of the call.
            features: s r_i / std_i, shape (rows, n_outputs).
            gradient: g_i, shape (rows, outputs of the point).
        """
        # 1. Add the batch to the sums, in which earlier ones fade.
        place = features.device
        squares, products = self._squares[number].to(place), self._products[number].to(place)
        features = features[:, : len(squares)].double()
        squares = self._decay * squares + features.T @ features
        products = self._decay * products + gradient.double().T @ features
        self._squares[number], self._products[number] = squares, products
        # 2. Solve the normal equations.
        ridge = self._ridge * squares.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        damped = squares + ridge * torch.eye(len(squares), dtype=torch.float64, device=place)
        self._matrices[number] = torch.linalg.solve(damped, products.T).T.float()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "updates": self.updates,
            "matrices": [tensor.clone() for tensor in self._matrices],
            "squares": [tensor.clone() for tensor in self._squares],
            "products": [tensor.clone() for tensor in self._products],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned.

        Raises:
            ValueError: It is of points of other sizes.
        """
        wanted = [tuple(tensor.shape) for tensor in self._matrices]
        found = [tuple(tensor.shape) for tensor in state["matrices"]]
        if found != wanted:
            raise ValueError(
                f"state: has matrices of shapes {found}, and the points need {wanted}; load it into the model that it "
                "was saved from"
            )
        self.updates = int(state["updates"])
        place = self._matrices[0].device
        for name, tensors in (
            ("matrices", self._matrices),
            ("squares", self._squares),
            ("products", self._products),
        ):
            tensors[:] = [tensor.clone().to(place) for tensor in state[name]]
