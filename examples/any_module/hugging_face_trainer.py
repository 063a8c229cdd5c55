"""Train a BERT classifier on digits by the Hugging Face Trainer, its layers through a noisy device.

pip install 'opusim[frameworks]' && python examples/any_module/hugging_face_trainer.py

Lines marked `# opusim` differ from training by backpropagation. The model computes its own loss and returns a mapping,
so the error is taken at a submodule. The Trainer reads the signature of the model's forward, so it is given the model
itself, on which the hooks are.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import opusim  # opusim


def digits() -> list[dict[str, torch.Tensor]]:
    """Return images of 4 x 4 pixels as records of 16 tokens, the grey levels up to 16."""
    images, labels = load_digits(return_X_y=True)
    tokens = torch.tensor(images).view(-1, 4, 2, 4, 2).mean(dim=(2, 4)).long().flatten(1)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def main(epochs: int = 5) -> float:
    """Train, print the test accuracy and return it."""
    records = digits()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=17,
            max_position_embeddings=16,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,
            num_labels=10,
        )
    )
    point, error_at = "bert.encoder.layer.0", "bert.encoder"  # opusim
    feedback = opusim.FeedbackAlignment(model, point, error_at=error_at)  # opusim
    shape = feedback.shape(records[0]["input_ids"].expand(2, -1))  # opusim
    feedback.noisy_device = opusim.open_device("gaussian", **shape._asdict())  # opusim
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=20,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=records[:1500])
        trainer.train()
        found = trainer.predict(records[1500:])
    accuracy = float((found.predictions.argmax(axis=1) == found.label_ids).mean())
    print(f"test accuracy {100 * accuracy:.1f} %, {feedback.usage.frames:,} frames")
    return accuracy


if __name__ == "__main__":
    main()
