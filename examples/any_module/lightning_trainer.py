"""Train a network on digits by Lightning, its hidden layers through a noisy device.

pip install 'opusim[frameworks]' && python examples/any_module/lightning_trainer.py

Lines marked `# opusim` differ from training by backpropagation.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim  # opusim


class Classifier(lightning.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(
            *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        )
        self.model = opusim.FeedbackAlignment(self.model)  # opusim
        shape = self.model.shape(torch.zeros(2, 64))  # opusim
        self.model.noisy_device = opusim.open_device("gaussian", **shape._asdict())  # opusim

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        """Log the accuracy on a batch."""
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def main(epochs: int = 2) -> float:
    """Train, print the test accuracy and return it."""
    lightning.seed_everything(0, verbose=False)
    digits, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = (torch.utils.data.Subset(data, range(*ends)) for ends in ((0, 1500), (1500, len(data))))
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
    trainer.fit(classifier, DataLoader(train, batch_size=32, shuffle=True))
    accuracy = trainer.test(classifier, DataLoader(test, batch_size=297), verbose=False)[0]["accuracy"]
    print(f"test accuracy {100 * accuracy:.1f} %, {classifier.model.usage.frames:,} frames")
    return accuracy


if __name__ == "__main__":
    main()
