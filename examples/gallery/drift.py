"""How long does a network stay right on phase-change memory? Accuracy against time since programming.

python examples/gallery/drift.py [FIGURE]
"""

import sys
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import opusim

CHIPS = 5
TIMES_S = (1.0, 60.0, 3600.0, 86_400.0, 2_592_000.0, 31_536_000.0)
X, Y = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
X = X.float() / 16


def trained(noise: float) -> nn.Module:
    """Return a network that was trained with noise on its weights, relative to the largest of a row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = opusim.noise_aware(model, noise) if noise else model
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in torch.randperm(1200).repeat(30).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[batch]), Y[batch]).backward()
        optimizer.step()
    return model.eval()


def accuracies(model: nn.Module, chip: int, compensate: bool) -> list[float]:
    """Return the test accuracies of a network on a chip at each time, per cent."""
    found = []
    with opusim.convert(model, "pcm", seed=chip, compensate_drift=compensate) as analog:
        for before, time in pairwise((0.0, *TIMES_S)):
            analog.wait(time - before)
            found.append(100 * float((analog(X[1200:]).argmax(dim=1) == Y[1200:]).float().mean()))
    return found


def main(figure: str = "drift.png") -> dict[str, list[float]]:
    """Draw the figure, and return the mean accuracies over chips at each time, per cent."""
    plain, aware = trained(0.0), trained(0.1)
    found: dict[str, list[float]] = {}
    for name, model, compensate in (
        ("noise-aware, compensated", aware, True),
        ("plain, compensated", plain, True),
        ("plain, not compensated", plain, False),
    ):
        chips = np.array([accuracies(model, chip, compensate) for chip in range(CHIPS)])
        found[name] = chips.mean(axis=0).tolist()
        plt.errorbar(TIMES_S, found[name], chips.std(axis=0, ddof=1) / CHIPS**0.5, fmt="o-", label=name)
        print(f"{name}: {found[name][0]:.1f} % after a second, {found[name][-1]:.1f} % after a year")
    plt.xscale("log")
    plt.xlabel("time since programming [s]")
    plt.ylabel("test accuracy [%]")
    plt.title("A network of digits on phase-change memory, five chips")
    plt.legend(loc="lower left")
    plt.savefig(figure, dpi=100, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
