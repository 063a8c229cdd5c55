"""Train through modules that cannot be differentiated: another process, and spiking neurons.

    python examples/ulr_black_box.py process    # the middle layer answers HTTP requests and has its own state
    python examples/ulr_black_box.py spikes     # the activation counts spikes of integrate-and-fire neurons

Both train on the handwritten digits by unified likelihood ratios (`opusim.train`, trainer ulr), which need only forward
passes. They print the accuracy next to that of training only the last layer; the difference is what training through
the box gained.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import opusim

WIDTH = 48


class Spikes(nn.Module):
    """Share of time steps at which a leaky integrate-and-fire neuron fires, its input being a constant current.

    u <- leak u + x; if u >= 1 it fires and u <- u - 1. The rate is a staircase, of derivative 0 or none.
    """

    def __init__(self, steps: int = 8, leak: float = 0.9) -> None:
        super().__init__()
        self.steps, self.leak = steps, leak

    def forward(self, x: Tensor) -> Tensor:
        """Return rates of the shape of the currents x."""
        potential, count = torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(self.steps):
            potential = self.leak * potential + x
            fired = (potential >= 1).to(x.dtype)
            potential = potential - fired
            count = count + fired
        return count / self.steps


class Remote(nn.Module):
    """A layer in another process: sends a batch and receives its output.

    Args:
        url: Address on which it listens.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def forward(self, x: Tensor) -> Tensor:
        """Return the answer of the other process to x, shape (batch, WIDTH)."""
        body = x.detach().numpy().astype("<f4").tobytes()
        with urllib.request.urlopen(self.url, data=body, timeout=60) as answer:
            rows = np.frombuffer(answer.read(), dtype="<f4")
        return torch.from_numpy(rows.reshape(len(x), WIDTH).copy())


class Plant(BaseHTTPRequestHandler):
    """The remote layer: a saturating response through a matrix that only this process knows, which wears with use."""

    matrix = np.random.default_rng(11).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    served = 0

    def do_POST(self) -> None:
        """Answer a batch of rows; every row served lowers the gain a little."""
        rows = np.frombuffer(self.rfile.read(int(self.headers["Content-Length"])), dtype="<f4")
        x = rows.reshape(-1, WIDTH)
        gain = 1 / (1 + 1e-8 * Plant.served)
        Plant.served += len(x)
        answer = np.round(15 * np.clip(gain * (x @ Plant.matrix), 0, 1)) / 15  # four bits are read out
        self._send(answer.astype("<f4").tobytes())

    def do_GET(self) -> None:
        """Answer with the number of rows served."""
        self._send(str(Plant.served).encode())

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def plant() -> Iterator[str]:
    """Run the remote layer in another process and yield its URL."""
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise OSError("the remote layer has no output to tell its port on")
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
        finally:
            process.kill()


def serve() -> None:
    """Listen on a free port, whose number is the first line of the output."""
    server = HTTPServer(("127.0.0.1", 0), Plant)
    print(server.server_port, flush=True)
    server.serve_forever()


class Fixed(nn.Module):
    """A module that is not trained."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._call: Callable[[Tensor], Tensor] = module.requires_grad_(False).forward

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the module."""
        return self._call(x)


def accuracy(box: nn.Module, folder: Path, *, epochs: int, through: bool) -> float:
    """Return the test accuracy on the digits with a layer before the box, which is trained only if `through`."""
    torch.manual_seed(0)
    first, last = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
    model = nn.Sequential(first if through else Fixed(first), box, last)
    config = {
        "epochs": epochs,
        "optimizer": {"name": "adam", "lr": 0.005},
        "sampler": {"batch_size": 64},
        "trainer": {"kind": "ulr", "copies": 8, "sigma": 0.3},
    }
    run = opusim.train(config, model=model, folder=folder)
    return float((run.summary or {})["test_accuracy"])


def compare(box: nn.Module, epochs: int) -> tuple[float, float]:
    """Return the accuracy of training through the box, and of training only the last layer."""
    with tempfile.TemporaryDirectory() as folder:
        through = accuracy(box, Path(folder) / "through", epochs=epochs, through=True)
        only = accuracy(box, Path(folder) / "only", epochs=epochs, through=False)
    print(f"trained through the box: {100 * through:.1f} %; last layer only: {100 * only:.1f} %")
    return through, only


def main(words: list[str] | None = None) -> None:
    """Run one of the two, or serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("process", "spikes", "serve"))
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args(words)
    if given.what == "serve":
        serve()
    elif given.what == "spikes":
        compare(Spikes(), given.epochs)
    else:
        with plant() as url:
            compare(Remote(url), given.epochs)
            with urllib.request.urlopen(url, timeout=60) as answer:
                print(f"the other process answered {int(answer.read()):,} rows")


if __name__ == "__main__":
    main()
