"""What does a call of a served device cost over loopback, against the same call of the local device?

784 inputs, 1,024 outputs, batch 256, ternary projections; server and client are processes of their own with one thread
each, the connection is encrypted. Required on `camera`: at most 1.3 times the local call; `gaussian`, whose reading
takes a few milliseconds, is reported. Processor time is that of client and server together, over that of the local
call; other work on the machine does not change it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer

from benchmarks.results_file import save_results
from benchmarks.timing import interleaved
from opusim import open_device
from opusim.serving.keys import make_key

MODULE, NAME = "benchmarks.speed.served", "served"
N_INPUTS, N_OUTPUTS, BATCH = 784, 1024, 256
REQUIRED = {"camera": 1.3, "gaussian": None}
SERVED, LOCAL = "over loopback", "local"
START = "from opusim.training.cli import main; main()"


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Serve a device from a process of its own; yields its address and the number of the process."""
    keys, journal = folder / "server", folder / "usage.jsonl"
    ends = ["--bind", "tcp://127.0.0.1:*", "--keys", str(keys), "--journal", str(journal)]
    server = subprocess.Popen(
        [sys.executable, "-c", START, "device", "serve", name, *ends],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        line = "" if server.stdout is None else server.stdout.readline()
        found = re.search(r" at tcp://(\S+);", line)
        if found is None:
            raise RuntimeError(f"the server said {line!r}")
        yield f"remote://{found[1]}", server.pid
    finally:
        server.terminate()
        server.communicate()


def make_keys(folder: Path) -> None:
    """Make the server's and the user's keys, and let this process be the user."""
    own = folder / "user" / "opusim" / "keys"
    make_key("server", folder / "server")
    make_key("user", own)
    shutil.copy(folder / "server" / "server.pub", own)
    shutil.copy(own / "user.pub", folder / "server")
    os.environ["XDG_CONFIG_HOME"] = str(folder / "user")


def processor_s(process: int) -> float:
    """Return the processor time of all threads of a process so far, seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Return median seconds of a call, processor seconds of a call, and their ratios."""
    x = torch.randint(-1, 2, (BATCH, N_INPUTS), generator=torch.Generator().manual_seed(0)).float()
    window = {"n_inputs": N_INPUTS, "n_outputs": N_OUTPUTS}
    with (
        serving(name, folder) as (address, server),
        open_device(address, **window) as remote,
        open_device(name, **window) as local,
    ):
        work = {SERVED: lambda: remote.project(x), LOCAL: lambda: local.project(x)}
        seconds = interleaved(work, repeats=repeats, inner=5)
        spent = {}  # processor time of a call, in this process and in the server
        for each in (LOCAL, SERVED):
            before = time.process_time() + processor_s(server)
            for _ in range(10 * repeats):
                work[each]()
            spent[each] = (time.process_time() + processor_s(server) - before) / (10 * repeats)
    return {
        "device": name,
        "seconds": seconds,
        "time_ratio": seconds[SERVED] / seconds[LOCAL],
        "processor_seconds": spent,
        "processor_ratio": spent[SERVED] / spent[LOCAL],
        "required": REQUIRED[name],
    }


def main(repeats: int = 11) -> None:
    """Measure each device and save."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        make_keys(Path(name))
        rows = [measure(device, Path(name), repeats) for device in REQUIRED]
    shape = {"n_inputs": N_INPUTS, "n_outputs": N_OUTPUTS, "batch": BATCH, "repeats": repeats}
    save_results(NAME, {"shape": shape, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
