"""Transfer learning: the features of a small network, as bits, through a device to ridge regression on other classes.

python examples/optical/transfer.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from torch import nn

import opusim
from opusim.features.encoders import ThresholdEncoder

SIZES = (50, 150, 500, 1500)


def trained(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Return a convolutional network without its head, trained on some classes."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(256, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for rows in torch.randperm(len(y)).repeat(8).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return body.eval()


def main(figure: str = "transfer.png") -> dict[str, list[float]]:
    """Draw accuracy on the classes 5 to 9 against the number of features; return it for pixels and for the network."""
    digits, labels = load_digits(return_X_y=True)
    images = torch.tensor(digits / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    known, new = labels < 5, labels >= 5
    body = trained(images[known], torch.tensor(labels[known]))
    with torch.no_grad():
        learnt = body(images[new]).numpy()
    y, found = labels[new], {}
    for name, x in (("pixels", digits[new]), ("features of the network", learnt)):
        found[name] = []
        for n in SIZES:
            features = opusim.OpticalFeatures(n, device="camera", encoder=ThresholdEncoder("mean"))
            z = features.fit(x[:100]).transform(x)
            z /= np.sqrt(np.mean(np.square(z)))
            found[name].append(100 * RidgeClassifier(10.0).fit(z[:100], y[:100]).score(z[100:], y[100:]))
        plt.semilogx(SIZES, found[name], "o-", label=name)
        print(f"{name}: {found[name][-1]:.1f} % with 100 examples of five new classes")
    plt.xlabel("optical features")
    plt.ylabel("test accuracy [%]")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
