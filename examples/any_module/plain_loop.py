"""Train a transformer on digits in a plain torch loop, its blocks through a noisy device.

python examples/any_module/plain_loop.py

Lines marked `# opusim` differ from training by backpropagation.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import opusim  # opusim


class Transformer(nn.Module):
    """Classifies an image of 8 x 8 pixels from its eight rows."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(8, width) / 8)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(blocks)
        ]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, 10), for images (batch, 64)."""
        return self.head(self.blocks(self.embed(x.view(-1, 8, 8)) + self.place).mean(dim=1))


def main(epochs: int = 2) -> float:
    """Train, print the test accuracy and return it."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels)
    model = opusim.FeedbackAlignment(Transformer())  # opusim
    shape = model.shape(x[:2])  # opusim
    model.noisy_device = opusim.open_device("gaussian", **shape._asdict())  # opusim
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for number, rows in enumerate(torch.randperm(1500).split(16)):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2
            loss.backward()
            if number % 2:  # two batches are accumulated
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()
    print(f"test accuracy {100 * accuracy:.1f} %, {model.usage.frames:,} frames")
    return accuracy


if __name__ == "__main__":
    main()
