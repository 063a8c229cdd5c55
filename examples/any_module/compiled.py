"""Train a compiled network on digits, its hidden layers through a noisy device.

python examples/any_module/compiled.py

Lines marked `# opusim` differ from training by backpropagation. torch.compile compiles what lies between the points;
the points themselves break the graph, so that `fullgraph=True` is refused.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import opusim  # opusim


def main(epochs: int = 2, backend: str = "inductor") -> float:
    """Train, print the test accuracy and return it."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    model = opusim.FeedbackAlignment(model)  # opusim
    model.noisy_device = opusim.open_device("gaussian", **model.shape(x[:2])._asdict())  # opusim
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for rows in torch.randperm(1500)[:1472].split(32):  # batches of one size compile once
            optimizer.zero_grad()
            nn.functional.cross_entropy(compiled(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()
    print(f"test accuracy {100 * accuracy:.1f} %, {model.usage.frames:,} frames")
    return accuracy


if __name__ == "__main__":
    main()
