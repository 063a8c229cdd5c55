"""Charging only accepted updates, as DPSUR does, charges less than the accepted updates release."""

import numpy as np
import pytest
from scipy.special import ndtr

ORDER, THRESHOLD = 2.0, -1.0


def divergences(update_noise: float, loss_noise: float, *, selective: bool) -> tuple[float, float]:
    """Return the Renyi divergence of order 2 of one released update, and what is charged for it.

    Both data sets differ in one record, which is in every batch. Its clipped gradient moves the update w by 1, and it
    moves the clipped change of the loss, which is -1 or 1, from 1 to -1 where w > c and from -1 to 1 elsewhere. w has
    noise of `update_noise`. An update is accepted if that change plus N(0, (2 loss_noise)^2) is below -1. If
    `selective`, w is drawn until it is accepted, and nothing else is released; otherwise w and whether it would be
    accepted are released once. The largest divergence over c is returned.
    """
    w = np.linspace(-80.0, 81.0, 40001)
    likely, unlikely = (float(ndtr((THRESHOLD - change) / (2 * loss_noise))) for change in (-1.0, 1.0))
    largest = 0.0
    for cut in np.linspace(-2.0, 3.0, 11) * update_noise:
        with_it, without = (
            np.exp(-((w - mean) ** 2) / (2 * update_noise**2))
            * np.where((w > cut) == present, likely, unlikely)
            for mean, present in ((1.0, True), (0.0, False))
        )
        densities = [(with_it, without)]
        if not selective:
            scale = [np.exp(-((w - mean) ** 2) / (2 * update_noise**2)) for mean in (1.0, 0.0)]
            densities.append((scale[0] - with_it, scale[1] - without))
        mass = [sum(float(pair[side].sum()) for pair in densities) for side in (0, 1)]
        moment = 0.0
        for pair in densities:
            p, q = pair[0] / mass[0], pair[1] / mass[1]
            inside = q > 1e-300
            moment += float((p[inside] ** ORDER * q[inside] ** (1 - ORDER)).sum())
        largest = max(largest, float(np.log(moment)) / (ORDER - 1))
    return largest, ORDER / 2 * (update_noise**-2 + loss_noise**-2)


@pytest.mark.parametrize("update_noise", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("loss_noise", [1.0, 2.0])
def test_updates_drawn_until_accepted_release_more_than_paid(update_noise: float, loss_noise: float) -> None:
    released, charged = divergences(update_noise, loss_noise, selective=True)
    assert released > 1.3 * charged


@pytest.mark.parametrize("update_noise", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("loss_noise", [1.0, 2.0])
def test_updates_drawn_once_release_at_most_what_is_paid(update_noise: float, loss_noise: float) -> None:
    released, charged = divergences(update_noise, loss_noise, selective=False)
    assert 0.3 * charged < released <= charged
