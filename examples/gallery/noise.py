"""What does the device's noise do to learning? Accuracy of photonic DFA on digits against sigma.

python examples/gallery/noise.py [FIGURE]
"""

import sys
import tempfile

import matplotlib.pyplot as plt

import opusim

SIGMAS = (0.1, 1.0, 3.0, 10.0, 30.0)
CONFIG = {"epochs": 6, "model": {"hidden": [128]}, "sampler": {"batch_size": 32}, "data": {"name": "digits"}}


def main(figure: str = "noise.png") -> dict[float, float]:
    """Draw the figure, and return the test accuracy for each sigma, per cent."""
    found = {}
    for sigma in SIGMAS:
        device = {"name": "gaussian", "noise": {"sigma": sigma}}
        run = opusim.train({**CONFIG, "device": device}, folder=tempfile.mkdtemp() + "/run")
        found[sigma] = 100 * run.summary["test_accuracy"]
        print(f"sigma {sigma:g}: {found[sigma]:.1f} %")
    plt.semilogx(list(found), list(found.values()), "o-")
    plt.axhline(10, color="grey", linestyle="--", label="guessing")
    plt.xlabel("standard deviation of a reading's noise [projection units]")
    plt.ylabel("test accuracy [%]")
    plt.title("Photonic DFA on digits, six epochs")
    plt.legend()
    plt.savefig(figure, dpi=100, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
