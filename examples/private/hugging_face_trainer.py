"""Train a BERT classifier on digits privately by the Hugging Face Trainer.

pip install 'opusim[frameworks]' && python examples/private/hugging_face_trainer.py

Lines marked `# opusim` differ from training without protection. The Trainer hands model outputs and labels to
`compute_loss_func`, and `get_train_dataloader` is its hook for a loader of one's own. By default it also hands over
the number of a batch's records, which is private: `model_accepts_loss_kwargs = False` keeps it from doing so.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import opusim  # opusim


def digits() -> list[dict[str, torch.Tensor]]:
    """Return images of 4 x 4 pixels as records of 16 tokens, the grey levels up to 16."""
    images, labels = load_digits(return_X_y=True)
    tokens = torch.tensor(images).view(-1, 4, 2, 4, 2).mean(dim=(2, 4)).long().flatten(1)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of logits."""
    return torch.nn.functional.cross_entropy(outputs, labels)


def main(epochs: int = 25) -> float:
    """Train, print the test accuracy and return it."""
    records = digits()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=17,
            max_position_embeddings=16,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
            num_labels=10,
        )
    )
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=1.0), loss_of
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    loader = DataLoader(records[:1500], batch_size=100, shuffle=True)
    parts = {"module": model.train(), "optimizer": optimizer, "criterion": criterion}  # opusim
    parts |= {"data_loader": loader, "folder": f"{folder}/private", "seed": 1}  # opusim
    budget = {"target_epsilon": 8.0, "target_delta": 1e-5, "epochs": epochs}  # opusim
    private = opusim.make_private(**parts, **budget, max_grad_norm=1.0)  # opusim
    _, optimizer, criterion, loader = private  # opusim
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=records[:1500],
        optimizers=(optimizer, None),
        compute_loss_func=lambda outputs, labels, **_: criterion(outputs.logits, labels),
    )
    trainer.get_train_dataloader = lambda: loader
    trainer.model_accepts_loss_kwargs = False  # opusim
    trainer.train()
    found = trainer.predict(records[1500:])
    accuracy = float((found.predictions.argmax(axis=1) == found.label_ids).mean())
    print(f"test accuracy {100 * accuracy:.1f} %, epsilon {private.epsilon:.2f}")  # opusim
    return accuracy


if __name__ == "__main__":
    main()
