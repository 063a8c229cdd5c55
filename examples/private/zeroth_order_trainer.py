"""Fine-tune low-rank updates of a language model privately by forward passes only, in the Hugging Face Trainer.

pip install 'opusim[frameworks,llm]' && python examples/private/zeroth_order_trainer.py

Lines marked `# opusim` differ from training by backpropagation without protection. The Trainer calls `training_step`
for each batch; `measure` takes the place of the backward pass and releases one noised sum for each direction.
"""

import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

import opusim  # opusim
from opusim.training import ZerothOrder  # opusim


class ForwardTrainer(Trainer):  # opusim
    """Measures losses on both sides of directions where a Trainer computes gradients."""

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the mean loss of a batch."""

        def losses(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            outputs = model(input_ids=batch["input_ids"], use_cache=False)
            return self.compute_loss_func(outputs, batch["labels"])

        return self.optimizer.optimizer.measure(losses, dict(self._prepare_inputs(inputs)))  # opusim


def sentences(n: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 8 tokens of two languages, which share half of their words."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (n,), generator=generator)
    tokens = torch.randint(0, 32, (n, 8), generator=generator) + 16 * labels[:, None]
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def main(epochs: int = 6) -> float:
    """Train, print the test accuracy and return it."""
    records = sentences(1200)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=49,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            pad_token_id=None,
            num_labels=2,
            initializer_range=0.1,
        )
    )
    model.config.pad_token_id = 48  # occurs in no sentence
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, lora)  # the updates and the head are trained
    optimizer = ZerothOrder(model, lr=0.05, perturbation=0.01, directions=16, rank=1)  # opusim
    criterion, folder = torch.nn.CrossEntropyLoss(), tempfile.mkdtemp()
    loader = torch.utils.data.DataLoader(records[:1000], batch_size=50, shuffle=True)
    parts = {"module": model, "optimizer": optimizer, "criterion": criterion, "data_loader": loader}  # opusim
    budget = {"target_epsilon": 8.0, "target_delta": 1e-5, "epochs": epochs}  # opusim
    parts |= {"max_grad_norm": 0.1, "folder": f"{folder}/private", "seed": 1}  # opusim
    private = opusim.make_private(**parts, **budget)  # opusim
    _, optimizer, criterion, loader = private  # opusim
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        max_grad_norm=0.0,  # there are no gradients
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=epochs * len(loader))
    trainer = ForwardTrainer(
        model=model,
        args=arguments,
        train_dataset=records[:1000],
        optimizers=(optimizer, schedule),
        compute_loss_func=lambda outputs, labels, **_: criterion(outputs.logits, labels),
    )
    trainer.get_train_dataloader = lambda: loader
    trainer.model_accepts_loss_kwargs = False  # opusim
    trainer.train()
    found = trainer.predict(records[1000:])
    accuracy = float((found.predictions.argmax(axis=1) == found.label_ids).mean())
    print(f"test accuracy {100 * accuracy:.1f} %, epsilon {private.epsilon:.2f}")  # opusim
    return accuracy


if __name__ == "__main__":
    main()
