"""Train a network on digits privately by direct feedback alignment through a noisy device.

python examples/private/feedback_alignment.py

Lines marked `# opusim` differ from training by backpropagation without protection.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim  # opusim


def main(epochs: int = 4) -> float:
    """Train, print the test accuracy and return it."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    )
    model = opusim.FeedbackAlignment(model)  # opusim
    model.noisy_device = opusim.open_device("gaussian", **model.shape(x[:2])._asdict())  # opusim
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=100, shuffle=True)
    folder = tempfile.mkdtemp()  # opusim
    parts = {"module": model, "optimizer": optimizer, "criterion": criterion, "data_loader": loader}  # opusim
    budget = {"target_epsilon": 8.0, "target_delta": 1e-5, "epochs": epochs}  # opusim
    private = opusim.make_private(**parts, **budget, max_grad_norm=1.0, folder=folder, seed=1)  # opusim
    model, optimizer, criterion, loader = private  # opusim
    for _ in range(epochs):
        for images, targets in loader:
            optimizer.zero_grad()
            criterion(model(images), targets).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()
    print(f"test accuracy {100 * accuracy:.1f} %, epsilon {private.epsilon:.2f}")  # opusim
    return accuracy


if __name__ == "__main__":
    main()
