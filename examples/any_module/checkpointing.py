"""Train a network on digits with activation checkpointing, its blocks through a noisy device.

python examples/any_module/checkpointing.py

Lines marked `# opusim` differ from training by backpropagation. Checkpointing must be the non-reentrant one; the other
kind gives a block no gradient if the block's input requires none, and is refused.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint

import opusim  # opusim


class Block(nn.Module):
    """A residual block with a normalised output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return norm(x + inner(x))."""
        return self.norm(x + self.inner(x))


class Network(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, 10), for images (batch, 64)."""
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def main(epochs: int = 2) -> float:
    """Train, print the test accuracy and return it."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels)
    model: nn.Module = Network()
    model = opusim.FeedbackAlignment(model)  # opusim
    model.noisy_device = opusim.open_device("gaussian", **model.shape(x[:2])._asdict())  # opusim
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for rows in torch.randperm(1500).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()
    print(f"test accuracy {100 * accuracy:.1f} %, {model.usage.frames:,} frames")
    return accuracy


if __name__ == "__main__":
    main()
