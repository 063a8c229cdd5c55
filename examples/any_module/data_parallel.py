"""Train a network on digits in two processes with DistributedDataParallel, which share a noisy device.

python examples/any_module/data_parallel.py

Lines marked `# opusim` differ from training by backpropagation. The first process holds the device and
reads for both. The processes average gradients, so their parameters stay the same, bit for bit.
"""

import os
import socket

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn

import opusim  # opusim

PROCESSES = 2


def accuracy(rank: int, epochs: int) -> float:
    """Train on this process's share of the batches and return the test accuracy."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits / 16, dtype=torch.float32), torch.tensor(labels)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    model = opusim.FeedbackAlignment(model)  # opusim
    model.noisy_device = opusim.open_shared_device("gaussian", **model.shape(x[:2])._asdict())  # opusim
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(1500).split(64):
            rows = batch[rank::PROCESSES]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()


def process(rank: int, port: int, epochs: int, found: torch.Tensor) -> None:
    """Join the other process, train, and write the test accuracy to found[rank]."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    found[rank] = accuracy(rank, epochs)
    distributed.destroy_process_group()


def main(epochs: int = 2) -> float:
    """Train, print the test accuracy and return it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = torch.zeros(PROCESSES).share_memory_()
    torch.multiprocessing.spawn(process, args=(port, epochs, found), nprocs=PROCESSES)
    print(f"test accuracy {100 * float(found[0]):.1f} % in each of {PROCESSES} processes")
    return float(found.min())


if __name__ == "__main__":
    main()
