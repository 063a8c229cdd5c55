"""Classify handwritten digits by ridge regression on optical features, and draw accuracy against their number.

python examples/optical/ridge.py [FIGURE] [DATA]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import RidgeClassifier

import opusim
from opusim.features.encoders import ThresholdEncoder
from opusim.training.data import load_dataset

SIZES = (100, 300, 1000, 3000)
DEVICES = ("ideal", "camera_fitted")


def main(figure: str = "ridge.png", data: str = "digits") -> dict[str, list[float]]:
    """Draw the figure, and return the accuracies of pixels and of each device."""
    loaded = load_dataset(data, validation_fraction=0.0, split_seed=0)
    train, test = loaded.train, loaded.test
    code = ThresholdEncoder("mean")
    found = {}
    for name in DEVICES:
        features = opusim.OpticalFeatures(max(SIZES), device=name, encoder=code).fit(train.x)
        seen, unseen = features.transform(train.x), features.transform(test.x)
        size = np.sqrt(np.mean(np.square(seen)))
        found[name] = []
        for n in SIZES:
            model = RidgeClassifier(alpha=100.0).fit(seen[:, :n] / size, train.y)
            found[name].append(100 * model.score(unseen[:, :n] / size, test.y))
        features.close()
    pixels = RidgeClassifier().fit(code.fit_transform(train.x), train.y)
    found["pixels"] = [100 * pixels.score(code.transform(test.x), test.y)] * len(SIZES)
    for name, accuracies in found.items():
        plt.semilogx(SIZES, accuracies, "--" if name == "pixels" else "o-", label=name)
        print(f"{name}: {accuracies[-1]:.1f} % with {SIZES[-1]:,} features")
    plt.xlabel("optical features")
    plt.ylabel("test accuracy [%]")
    plt.title(f"Ridge regression on {data}")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
