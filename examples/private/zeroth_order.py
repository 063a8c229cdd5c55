"""Train a network on digits privately by forward passes only, in a plain torch loop.

python examples/private/zeroth_order.py

Lines marked `# opusim` differ from training by backpropagation without protection. Thirty-two directions of rank one
share each forward pass; what a step releases of the records is one noised sum for each.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import opusim  # opusim
from opusim.training import ZerothOrder  # opusim


def main(epochs: int = 20) -> float:
    """Train, print the test accuracy and return it."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = ZerothOrder(model, lr=0.05, perturbation=0.01, directions=32, rank=1)  # opusim
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=100, shuffle=True)
    folder = tempfile.mkdtemp()  # opusim
    parts = {"module": model, "optimizer": optimizer, "criterion": criterion, "data_loader": loader}  # opusim
    budget = {"target_epsilon": 8.0, "target_delta": 1e-5, "epochs": epochs}  # opusim
    private = opusim.make_private(**parts, **budget, max_grad_norm=0.1, folder=folder, seed=1)  # opusim
    model, optimizer, criterion, loader = private  # opusim

    def losses(images: Tensor, targets: Tensor) -> Tensor:
        return criterion(model(images), targets)

    for _ in range(epochs):
        for batch in loader:
            optimizer.step(losses, *batch)  # opusim
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()
    print(f"test accuracy {100 * accuracy:.1f} %, epsilon {private.epsilon:.2f}")  # opusim
    return accuracy


if __name__ == "__main__":
    main()
