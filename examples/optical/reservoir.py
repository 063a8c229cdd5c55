"""Predict a chaotic series (Mackey-Glass) with an optical reservoir: the frame shows the last state and the input.

python examples/optical/reservoir.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import Ridge

import opusim

STATES, BITS, WASHED_OUT = 800, 1600, 100


def mackey_glass(steps: int, delay: int = 17) -> np.ndarray:
    """Return x with x' = 0.2 x(t - delay) / (1 + x(t - delay)^10) - 0.1 x, in steps of one, scaled to [0, 1]."""
    x = np.full(10 * (steps + delay + 100), 1.2)
    for t in range(10 * delay, len(x) - 1):
        past = x[t - 10 * delay]
        x[t + 1] = x[t] + 0.1 * (0.2 * past / (1 + past**10) - 0.1 * x[t])
    series = x[-10 * steps :: 10]
    return (series - series.min()) / np.ptp(series)


def states(series: np.ndarray) -> np.ndarray:
    """Return the reservoir's states, shape (steps, STATES): a thermometer code of the input next to the last state."""
    levels = (np.arange(BITS) + 0.5) / BITS
    found = np.zeros((len(series), STATES))
    frame = np.random.default_rng(0).integers(2, size=(1, STATES + BITS), dtype=np.uint8)
    with opusim.open_device("camera", n_inputs=STATES + BITS, n_outputs=STATES) as device:
        middle = np.median(device.intensities(frame))
        for step, value in enumerate(series):
            frame[0, STATES:] = value > levels
            found[step] = device.intensities(frame)[0]
            frame[0, :STATES] = found[step] > middle
    return (found - found.mean(axis=0)) / found.std(axis=0)


def main(figure: str = "reservoir.png", steps: int = 1500) -> dict[str, float]:
    """Draw the prediction; return its error and that of repeating the last value, over the series' deviation."""
    series = mackey_glass(steps + 5)
    x, y = states(series[:-5])[WASHED_OUT:], series[5:][WASHED_OUT:]  # five steps ahead
    half = len(y) // 2
    model = Ridge(alpha=100.0).fit(x[:half], y[:half])
    guess, last = model.predict(x[half:]), series[WASHED_OUT + half : -5]
    results = {"reservoir": guess, "last value": last}
    found = {name: float(np.std(p - y[half:]) / np.std(y)) for name, p in results.items()}
    print(", ".join(f"error of the {name} {value:.3f}" for name, value in found.items()))
    plt.plot(y[half : half + 200], label="series")
    plt.plot(guess[:200], "--", label="predicted five steps before")
    plt.xlabel("step")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
