"""Find changes in a stream of vectors by two moving averages of optical features: NEWMA (Keriven et al. 2020).

python examples/optical/change_points.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

import opusim

WIDTH, FEATURES, PERIOD = 40, 1000, 400
FAST, SLOW = 0.03, 0.01


def stream(segments: int, seed: int = 0) -> np.ndarray:
    """Return vectors whose covariance changes every PERIOD samples, shape (segments * PERIOD, WIDTH)."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(PERIOD, 5)) @ rng.normal(size=(5, WIDTH)) for _ in range(segments)]
    return np.concatenate(parts) + 0.1 * rng.normal(size=(segments * PERIOD, WIDTH))


def statistic(x: np.ndarray) -> np.ndarray:
    """Return the distance between a fast and a slow moving average of the features, one vector after the other."""
    averages, found, rates = np.zeros((2, FEATURES)), np.zeros(len(x)), np.array([[FAST], [SLOW]])
    with opusim.open_device("camera", n_inputs=WIDTH, n_outputs=FEATURES) as device:
        for step, vector in enumerate(x):
            features = device.intensities((vector > 0)[None])[0].astype(np.float64)
            averages += rates * (features - averages)
            fast, slow = averages / (1 - (1 - rates) ** (step + 1))  # both started at 0
            found[step] = np.linalg.norm(fast - slow)
    return found


def main(figure: str = "change_points.png", segments: int = 6) -> tuple[int, int, float]:
    """Draw the statistic; return the number of changes found, of false alarms, and the mean delay in samples."""
    found = statistic(stream(segments))
    calm = found[PERIOD // 2 : PERIOD]  # before the first change, once the averages are warm
    level = calm.mean() + 4 * calm.std()
    starts = np.flatnonzero((found[1:] > level) & (found[:-1] <= level)) + 1
    changes = range(PERIOD, len(found), PERIOD)
    delays = [starts[starts >= change][0] - change for change in changes if np.any(starts >= change)]
    hits = [delay for delay in delays if delay < PERIOD // 2]
    false = sum(int(start % PERIOD >= PERIOD // 2) for start in starts if start >= PERIOD)
    print(
        f"{len(hits)} of {len(changes)} changes found {np.mean(hits):.0f} samples late, {false} false alarms"
    )
    plt.plot(found, label="distance of the averages")
    plt.axhline(level, ls="--", c="k", label="threshold")
    for change in changes:
        plt.axvline(change, c="0.8", zorder=0)
    plt.xlabel("sample")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    return len(hits), false, float(np.mean(hits))


if __name__ == "__main__":
    main(*sys.argv[1:])
