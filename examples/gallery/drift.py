"""How long does a network stay right on phase-change memory? Accuracy against time since programming.

python examples/gallery/drift.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import opusim

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


def main(figure: str = "drift.png") -> dict[str, list[float]]:
    """Draw the figure, and return the accuracies at each time, per cent."""
    found: dict[str, list[float]] = {}
    for name, noise, compensate in (
        ("noise-aware, compensated", 0.1, True),
        ("plain, compensated", 0.0, True),
        ("plain, not compensated", 0.0, False),
    ):
        with opusim.convert(trained(noise), "pcm", seed=1, compensate_drift=compensate) as analog:
            passed, found[name] = 0.0, []
            for time in TIMES_S:
                analog.wait(time - passed)
                passed = time
                right = analog(X[1200:]).argmax(dim=1) == Y[1200:]
                found[name].append(100 * right.float().mean().item())
        plt.semilogx(TIMES_S, found[name], "o-", label=name)
        print(f"{name}: {found[name][0]:.1f} % after a second, {found[name][-1]:.1f} % after a year")
    plt.xlabel("time since programming [s]")
    plt.ylabel("test accuracy [%]")
    plt.title("A network of digits on phase-change memory")
    plt.legend()
    plt.savefig(figure, dpi=100, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
