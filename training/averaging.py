"""The mean of the last iterates: noise in the updates averages out, and nothing more is released."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class TailAverage:
    """Running mean of the parameters after each of the last steps (Polyak and Juditsky 1992).

    Args:
        share: Share of the run's steps, at its end, that are averaged, in [0, 1); 0 for none.
        total_steps: Steps of the run.
    """

    def __init__(self, share: float, total_steps: int) -> None:
        self._first = total_steps - round(share * total_steps)
        self._total = total_steps
        self._means: dict[str, Tensor] = {}

    def update(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Take in the parameters after a step; after the last one they are replaced by the mean.

        Args:
            step: Steps done, at least 1.
            parameters: By name.
        """
        count = step - self._first
        if count < 1:
            return
        if count == 1:
            self._means = {name: tensor.clone() for name, tensor in parameters.items()}
            return
        for name, tensor in parameters.items():
            self._means[name].lerp_(tensor, 1 / count)
        if step == self._total:
            with torch.no_grad():
                for name, tensor in parameters.items():
                    tensor.copy_(self._means[name])

    @property
    def state(self) -> dict[str, Tensor]:
        """The means so far, by name."""
        return self._means

    def load(self, state: Mapping[str, Tensor], place: torch.device) -> None:
        """Take back what `state` gave."""
        self._means = {name: tensor.clone().to(place) for name, tensor in state.items()}
