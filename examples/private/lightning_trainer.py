"""Train a network on digits privately by Lightning.

pip install 'opusim[frameworks]' && python examples/private/lightning_trainer.py

Lines marked `# opusim` differ from training without protection. The optimizer is built before training, because it
belongs to the private loop.
"""

import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import opusim  # opusim


class Classifier(lightning.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.criterion: nn.Module = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return self.criterion(self.model(x), y)

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        """Log the accuracy on a batch."""
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.optimizer


def main(epochs: int = 4) -> float:
    """Train, print the test accuracy and return it."""
    lightning.seed_everything(0, verbose=False)
    digits, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = (Subset(data, range(*ends)) for ends in ((0, 1500), (1500, len(data))))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    classifier = Classifier()
    loader = DataLoader(train, batch_size=100, shuffle=True)
    folder = tempfile.mkdtemp()  # opusim
    parts = {"module": classifier.model, "optimizer": classifier.optimizer}  # opusim
    parts |= {"criterion": classifier.criterion, "data_loader": loader}  # opusim
    budget = {"target_epsilon": 8.0, "target_delta": 1e-5, "epochs": epochs}  # opusim
    private = opusim.make_private(**parts, **budget, max_grad_norm=1.0, folder=folder, seed=1)  # opusim
    _, _, classifier.criterion, loader = private  # opusim
    trainer.fit(classifier, loader)
    accuracy = trainer.test(classifier, DataLoader(test, batch_size=297), verbose=False)[0]["accuracy"]
    print(f"test accuracy {100 * accuracy:.1f} %, epsilon {private.epsilon:.2f}")  # opusim
    return accuracy


if __name__ == "__main__":
    main()
