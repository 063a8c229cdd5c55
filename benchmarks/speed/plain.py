"""The plainest script that trains like `opusim train`: torch, scikit-learn and matplotlib, no opusim.

    python benchmarks/speed/plain.py digits|mnist bp|pdfa EPOCHS FOLDER

It loads the data, trains 784-512-512-10 (64-512-512-10 for digits) with tanh, draws a learning curve, the alignment of
the hidden layers with backpropagation and the noise of the feedback, and writes a page with them. `pdfa` sends the
ternary error through a fixed random matrix with Gaussian noise; `bp` is autograd.
"""

import base64
import gzip
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

DATA, TRAINER, EPOCHS, FOLDER = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
WIDTH, BATCH, SIGMA, THRESHOLD = 512, 256, 0.1, 0.15


def read(name: str) -> np.ndarray:
    path = Path(os.environ["OPUSIM_DATA"]) / "MNIST" / "raw" / f"{name}.gz"
    raw = gzip.decompress(path.read_bytes()) if path.exists() else path.with_suffix("").read_bytes()
    return np.frombuffer(raw, np.uint8, offset=16 if "images" in name else 8)


def load() -> list[torch.Tensor]:
    if DATA == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images, n_train = images / 16, 1438
    else:
        images = np.concatenate([read(f"{part}-images-idx3-ubyte") for part in ("train", "t10k")])
        labels = np.concatenate([read(f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")])
        images, n_train = images.reshape(-1, 784) / np.float32(255), 60_000
    x = torch.from_numpy(((images - images.mean()) / images.std()).astype(np.float32))
    y = torch.from_numpy(labels.astype(np.int64))
    held_out = n_train // 10
    return [x[:-held_out][: n_train - held_out], y[: n_train - held_out], x[n_train:], y[n_train:]]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    x, y, x_test, y_test = load()
    layers = [nn.Linear(x.shape[1], WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)]
    parameters = [value for layer in layers for value in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)
    feedback = torch.randn(10, 2 * WIDTH) / WIDTH**0.5
    history, alignment, noises = [], [], torch.zeros(0)

    def forward(batch: torch.Tensor) -> list[torch.Tensor]:
        first = torch.tanh(layers[0](batch))
        second = torch.tanh(layers[1](first))
        return [batch, first, second, layers[2](second)]

    def photonic(batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal noises
        with torch.no_grad():
            values = forward(batch)
            error = functional.softmax(values[3], 1)
            loss = -error.gather(1, labels[:, None]).log().mean()
            error[torch.arange(len(labels)), labels] -= 1
            ternary = torch.sign(error) * (error.abs() > THRESHOLD)
            noises = SIGMA * torch.randn(len(batch), 2 * WIDTH)
            signals = [*(ternary @ feedback + noises).split(WIDTH, 1), error]
            for index, layer in enumerate(layers):
                delta = signals[index]
                if index < 2:
                    delta = delta * (1 - values[index + 1] ** 2)
                layer.weight.grad = delta.T @ values[index] / len(batch)
                layer.bias.grad = delta.mean(0)
        return loss

    def backpropagation(batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(batch)[3], labels)
        loss.backward()
        return loss

    step = photonic if TRAINER == "pdfa" else backpropagation
    for _ in range(EPOCHS):
        for index in torch.randperm(len(x)).split(BATCH):
            loss = step(x[index], y[index])
            optimizer.step()
        step(x[:BATCH], y[:BATCH])
        mine = [layer.weight.grad.flatten().clone() for layer in layers[:2]]
        backpropagation(x[:BATCH], y[:BATCH])
        theirs = [layer.weight.grad.flatten() for layer in layers[:2]]
        alignment.append(
            [float(functional.cosine_similarity(*pair, dim=0)) for pair in zip(mine, theirs, strict=True)]
        )
        with torch.no_grad():
            accuracy = float((forward(x_test)[3].argmax(1) == y_test).float().mean())
        history.append((float(loss), accuracy))
    draw(history, alignment, noises)


def draw(history: list[tuple[float, float]], alignment: list[list[float]], noises: torch.Tensor) -> None:
    import matplotlib.pyplot as plt

    FOLDER.mkdir(parents=True)
    pictures = []
    for name, values in (("learning", history), ("alignment", alignment), ("noise", None)):
        figure, axes = plt.subplots()
        if values is None:
            axes.hist(noises.flatten()[:100_000].numpy(), bins=60)
        else:
            axes.plot(values)
        axes.set(title=name)
        figure.savefig(FOLDER / f"{name}.svg")
        source = base64.b64encode((FOLDER / f"{name}.svg").read_bytes()).decode()
        pictures.append(f'<img src="data:image/svg+xml;base64,{source}">')
    (FOLDER / "report.html").write_text("".join(pictures) + f"<p>{history[-1][1]:.4f}</p>")


main()
