"""Steps of a data-parallel model with feedback points: `python -m tests.support.feedback_ranks FOLDER`.

Two forked processes write their gradients of the first step and their parameters after three to FOLDER/0.pt and 1.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opusim import FeedbackAlignment, open_device
from tests.support.ranks import run_ranks

PROCESSES = 2


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def new_model(rank: int) -> FeedbackAlignment:
    """The same model and medium in each process, and noise of its own."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    device = open_device("gaussian", n_inputs=3, n_outputs=6, seed=rank, noise={"sigma": 0.5})
    return FeedbackAlignment(net, device=device)


def gradients(model: nn.Module, rank: int) -> list[Tensor]:
    """Gradients of the loss on the batch of a process."""
    x, y = batch(rank)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters()]


def work(rank: int, folder: Path) -> None:
    model = nn.parallel.DistributedDataParallel(new_model(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = gradients(model, rank)
    optimizer.step()
    for _ in range(2):
        gradients(model, rank)
        optimizer.step()
    torch.save({"gradients": first, "parameters": list(model.parameters())}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    codes = run_ranks(lambda rank: work(rank, folder), PROCESSES)
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
