"""Does noise on the feedback hide a record? Inputs of a batch lie in the span of its update, whatever the noise.

python examples/gallery/membership.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import opusim

SIGMAS = (0.1, 10.0, 1000.0)
X, Y = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
X = X.float() / 16


def residuals(sigma: float, protect: float) -> tuple[np.ndarray, np.ndarray]:
    """Return how far members and outsiders lie from the row space of a noisy update, relative to their norms."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 10))
    model = opusim.FeedbackAlignment(net)
    with opusim.open_device(
        "gaussian", noise={"sigma": sigma}, **model.shape(X[:2])._asdict()
    ) as model.noisy_device:
        nn.functional.cross_entropy(model(X[:20]), Y[:20]).backward()
    update = net[0].weight.grad.double()
    update = update + protect * update.norm() * torch.randn_like(update)
    rows = torch.linalg.svd(update, full_matrices=False).Vh[:20]
    left = X.double() - X.double() @ rows.T @ rows
    share = (left.norm(dim=1) / X.norm(dim=1)).numpy()
    return share[:20], share[20:]


def main(figure: str = "membership.png") -> dict[str, tuple[float, float]]:
    """Draw the figure, and return the largest residual of a member and the smallest of an outsider."""
    found = {}
    settings = [(f"sigma {sigma:g}", sigma, 0.0) for sigma in SIGMAS]
    for place, (name, sigma, protect) in enumerate([*settings, ("central noise", 0.1, 1.0)]):
        members, others = residuals(sigma, protect)
        found[name] = float(members.max()), float(others.min())
        for share, colour, shift in ((members, "C3", -0.1), (others[:300], "C0", 0.1)):
            x = np.full(len(share), place + shift)
            plt.semilogy(x, np.maximum(share, 1e-9), "_", color=colour, alpha=0.5)
        print(f"{name}: members at most {found[name][0]:.1e}, outsiders at least {found[name][1]:.1e}")
    plt.xticks(range(len(found)), list(found))
    plt.ylabel("part of the input outside the update's row space")
    plt.title("20 members (red) and 300 outsiders (blue)")
    plt.savefig(figure, dpi=100, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
