"""Train nanoGPT's processor setting on characters, its blocks through a noisy device.

python examples/any_module/nanogpt.py                    # 40 steps on the text of Python's manual
python examples/any_module/nanogpt.py 2000 input.txt     # Tiny Shakespeare: some four minutes

Lines marked `# opusim` differ from training by backpropagation. In the first hundreds of steps feedback is no better
than none; `benchmarks/known_models` has losses after 2,000 steps, by device.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn

import opusim  # opusim

WIDTH, CONTEXT, BATCH = 128, 64, 12


class GPT(nn.Module):
    """Four pre-norm blocks of width 128 that see earlier characters only."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **block) for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of the next character, shape (batch, context, characters)."""
        h = self.tokens(x) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))


def main(steps: int = 40, text: str | None = None) -> float:
    """Train, print the loss of every tenth part and return the last."""
    torch.manual_seed(0)
    content = "".join(topics.values()) if text is None else Path(text).read_text()
    characters = sorted(set(content))
    numbers = torch.tensor([characters.index(c) for c in content])
    model: nn.Module = GPT(len(characters))
    model = opusim.FeedbackAlignment(model)  # opusim
    shape = model.shape(numbers[None, :CONTEXT])  # opusim
    model.noisy_device = opusim.open_device("gaussian", **shape._asdict())  # opusim
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(1, steps + 1):
        stretches = torch.randint(len(numbers) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        x, y = numbers[stretches][:, :-1], numbers[stretches][:, 1:]
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, steps // 10) == 0:
            print(f"step {step}: loss {sum(losses[-20:]) / len(losses[-20:]):.3f}")
    print(f"{model.usage.frames:,} frames")  # opusim
    return losses[-1]


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:]))
