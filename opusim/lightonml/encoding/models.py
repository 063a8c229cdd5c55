"""Autoencoders that learn a binary code, as torch modules: the reconstruction in training, the code in evaluation.

For a scikit-learn transformer see `opusim.features.encoders.AutoencoderEncoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opusim import checks
from opusim.features.encoders import binary_code, orthogonality


class AE(nn.Module):
    """The base of the autoencoders: `forward` reconstructs in training and returns the code, uint8, in evaluation."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the reconstruction, or the code."""
        return self.reconstruction(input) if self.training else self.code(input)

    def reconstruction(self, input: Tensor) -> Tensor:
        """Return what the decoder makes of the code."""
        raise NotImplementedError

    def code(self, input: Tensor) -> Tensor:
        """Return the binary code."""
        raise NotImplementedError


class EncoderDecoder(AE):
    """Codes 1[W x > 0] with the decoder W^T; only the decoder learns. Tissier et al., arXiv 1803.09065."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, hidden_size, bias=False)

    def reconstruction(self, input: Tensor) -> Tensor:
        """Return W^T of the code."""
        return binary_code(self.proj.weight, input).to(input.dtype) @ self.proj.weight

    def code(self, input: Tensor) -> Tensor:
        """Return the code, uint8, shape (n, hidden_size)."""
        return binary_code(self.proj.weight, input).to(torch.uint8)


class _SoftCode(AE):
    """tanh(beta e) / beta in training, whose limit for large beta is a step: 1[e > 0] in evaluation."""

    encoder: nn.Module
    decoder: nn.Module
    beta: float

    def reconstruction(self, input: Tensor) -> Tensor:
        """Return what the decoder makes of the soft code."""
        found: Tensor = self.decoder(torch.tanh(self.beta * self.encoder(input)) / self.beta)
        return found

    def code(self, input: Tensor) -> Tensor:
        """Return the code, uint8."""
        found: Tensor = self.beta * self.encoder(input) > 0
        return found.to(torch.uint8)


class LinearAE(_SoftCode):
    """A linear encoder and decoder around a soft step; `train` multiplies beta by 10 every few epochs.

    Args:
        input_size: Width of x.
        hidden_size: Width of the code.
        beta: Steepness of the step.
    """

    def __init__(self, input_size: int, hidden_size: int, beta: float = 1.0) -> None:
        super().__init__()
        checks.positive(beta=beta)
        self.encoder = nn.Linear(input_size, hidden_size)
        self.decoder = nn.Linear(hidden_size, input_size)
        self.beta = beta


class ConvAE(_SoftCode):
    """A convolution and its transpose around a soft step.

    Args:
        in_ch: Channels of x.
        out_ch: Channels of the code.
        kernel_size, stride, padding, dilation, groups, bias: See `torch.nn.Conv2d`.
        beta: Steepness of the step.
        padding_mode: "zeros", the only one that a transposed convolution has.
        flatten: Whether codes are flattened, shape (n, bits).
    """

    def __init__(
        self,
        in_ch: int,
        out_ch: int,
        kernel_size: Any,
        beta: float = 1.0,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        flatten: bool = False,
    ) -> None:
        super().__init__()
        checks.positive(beta=beta)
        convolution: dict[str, Any] = {
            **{"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
            **{"bias": bias, "padding_mode": padding_mode},
        }
        self.encoder = nn.Conv2d(in_ch, out_ch, kernel_size, **convolution)
        self.decoder = nn.ConvTranspose2d(out_ch, in_ch, kernel_size, **convolution)
        self.beta, self.flatten = beta, flatten

    def code(self, input: Tensor) -> Tensor:
        """Return the code, uint8, shape (n, out_ch, h, w), or (n, bits)."""
        found = super().code(input)
        return found.flatten(1) if self.flatten else found


def train(
    model: AE,
    dataloader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    epochs: int = 10,
    beta_interval: int = 5,
    device: torch.device | str | None = None,
    verbose: bool = True,
) -> AE:
    """Train an autoencoder to reconstruct, and return it.

    Args:
        model: The autoencoder; it is set to training.
        dataloader: Batches, or tuples that begin with one.
        optimizer: Over the model's parameters.
        criterion: Loss of reconstruction and batch. `EncoderDecoder` adds |W^T W - 1|^2 / 2.
        epochs: Passes.
        beta_interval: Epochs after which the soft codes get ten times steeper.
        device: Where to train; None takes a CUDA device if there is one.
        verbose: Whether the mean loss of each epoch is printed.

    Raises:
        ValueError: There is no batch.
    """
    checks.integer(epochs=epochs, beta_interval=beta_interval, minimum=1)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model.train().to(where)
    for epoch in range(epochs):
        losses = []
        for batch in dataloader:
            data = (batch if isinstance(batch, Tensor) else next(iter(batch))).to(where)
            optimizer.zero_grad()
            loss = criterion(model(data), data)
            losses.append(float(loss.detach()))  # of the reconstruction
            if isinstance(model, EncoderDecoder):
                loss = loss + orthogonality(model.proj.weight)
            torch.autograd.backward(loss)
            optimizer.step()
        if not losses:
            raise ValueError("dataloader gives no batch; give one that can be iterated again, with data")
        if epoch and epoch % beta_interval == 0 and isinstance(model, _SoftCode):
            model.beta *= 10
        if verbose:
            print(f"Epoch {epoch + 1} of {epochs}: training loss {sum(losses) / len(losses):g}")
    return model
