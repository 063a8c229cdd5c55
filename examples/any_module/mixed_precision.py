"""Train a network on digits with autocast and a gradient scaler, its hidden layers through a noisy device.

python examples/any_module/mixed_precision.py

Lines marked `# opusim` differ from training by backpropagation. Each row of the error is
shown relative to its own size, so the scale of the loss does not matter to the device.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import opusim  # opusim


def main(epochs: int = 2) -> float:
    """Train, print the test accuracy and return it."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    model = opusim.FeedbackAlignment(model)  # opusim
    model.noisy_device = opusim.open_device("gaussian", **model.shape(x[:2])._asdict())  # opusim
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu")  # on a GPU: "cuda", and torch.float16 below
    for _ in range(epochs):
        for rows in torch.randperm(1500).split(32):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()
    print(f"test accuracy {100 * accuracy:.1f} %, {model.usage.frames:,} frames")
    return accuracy


if __name__ == "__main__":
    main()
