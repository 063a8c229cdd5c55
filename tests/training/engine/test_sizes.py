"""Sizes that need more memory than is free end in one line, before they are allocated."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim import files, processes
from opusim.training.config import load_config
from opusim.training.data.arrays import from_arrays
from opusim.training.data.public_maps import HogMap
from opusim.training.engine.plan import RunPlan
from opusim.training.networks.network import FullyConnected

ROOT = Path(__file__).parents[3]
GIB = 2**30


def plan(n_features: int = 16, n_classes: int = 2, **config: Any) -> RunPlan:
    x, y = np.eye(40, n_features, dtype=np.float32), np.arange(40) % 2
    dataset = from_arrays(x, y, n_classes=n_classes, validation_fraction=0.0, split_seed=0)
    whole = {"data": {"name": "arrays"}, "sampler": {"batch_size": 10}, "trainer": {"kind": "bp"}}
    return RunPlan.resolve(load_config(whole | config), dataset)


@pytest.mark.parametrize(("config", "message"), [
    ({"model": {"hidden": [10**9, 10**9]}}, r"model.hidden = \[1000000000, 1000000000\].*need at least"),
    ({"model": {"hidden": [4096] * 20}}, "model.hidden = .*weights and gradients of an mlp .* 2.4 GiB"),
    ({"n_classes": 10**7, "model": {"hidden": [4]}}, "n_classes = 10000000: outputs for 40 records"),
    ({"model": {"name": "gru", "options": {"width": 10**5}}}, "model.options = {'width': 100000}"),
    ({"model": {"name": "gru", "options": {"width": 10**10}}}, r"model.options = {'width': 10000000000}"),
    ({"trainer": {"kind": "convex", "hyperplanes": 10**8}}, "trainer.hyperplanes = 100000000"),
    ({"trainer": {"kind": "ulr", "copies": 10**12}}, "at most 1e"),
    ({"trainer": {"kind": "ulr", "module_copies": [1, 1, 10**12]}}, "a number above 1,000,000"),
])  # fmt: skip
def test_too_large_sizes_refused(config: dict[str, Any], message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "available_memory", lambda: float(GIB))
    if config.get("trainer", {}).get("kind") == "convex":
        config = config | {"sampler": {"scheme": "disjoint-cyclic", "batch_size": 10}}
    with pytest.raises(ValueError, match=message):
        plan(**config)


def test_what_fits_exactly_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients of 16 x 8 and 8 x 2 numbers take 8 bytes each, the biases are not counted."""
    needed = 8 * (16 * 8 + 8 * 2)
    monkeypatch.setattr(processes, "available_memory", lambda: float(needed))
    plan(model={"hidden": [8]})
    monkeypatch.setattr(processes, "available_memory", lambda: float(needed - 1))
    with pytest.raises(ValueError, match=r"model.hidden = \[8\].*1.1 KiB, and 1.1 KiB of memory"):
        plan(model={"hidden": [8]})


def test_a_stored_network_and_many_features_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = plan(model={"hidden": [8]}).network.facts
    facts["layers"][0]["n_outputs"] = 10**9
    with pytest.raises(ValueError, match="need at least"):
        FullyConnected.from_facts(facts)
    monkeypatch.setattr(processes, "available_memory", lambda: 1000.0)
    with pytest.raises(ValueError, match=r"data.features = 'hog', .*records = 8: features in half precision"):
        HogMap(record_shape=(1, 16, 16), groups=None).apply(torch.zeros(8, 256))


# Memory that is free


def test_free_memory_is_the_least_of_what_limits_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_of_system", lambda: 7.0 * GIB)
    monkeypatch.setattr(processes, "_of_limit", lambda: 9.0 * GIB)
    monkeypatch.setattr(processes, "_CGROUP", tmp_path)
    assert processes.available_memory() == 7 * GIB
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nfile {GIB}\n")
    assert processes.available_memory() == 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert processes.available_memory() == 7 * GIB


@pytest.mark.parametrize(("error", "found"), [
    (MemoryError(), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
    (RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"), True),
    (ImportError("libtorch.so: failed to map segment from shared object"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (ValueError("out of memory"), False),
])  # fmt: skip
def test_errors_of_exhausted_memory_are_known(error: Exception, found: bool) -> None:
    assert processes.is_exhausted(error) == found


def limited(code: str, n_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a limit of its address space."""
    first = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({n_bytes}, {n_bytes}))\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    call = [sys.executable, "-c", first + code, *arguments]
    return subprocess.run(call, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_limit_of_the_address_space_counts() -> None:
    """A file is read within a limit that leaves no room for the longest file that would be taken."""
    code = (
        "from opusim import files, processes\n"
        "free = processes.available_memory()\nassert 0 < free < 2**28, free\n"
        'assert files.read_bytes(files.__file__, at_most=2**31).startswith(b\'"""\')\n'
        "try: processes.require_memory(2**28, why='it', remedy='lower it', size=3)\n"
        "except ValueError as error: print(error)\n"
    )
    done = limited(code, 2**28)
    assert "size = 3: it need at least 256 MiB, and " in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("n_bytes", "hidden", "message"), [
    (400 * 2**20, "[8]", "opusim: the memory is exhausted (the 400 MiB that `ulimit -v` allows): lower"),
    (6 * GIB, "[1e9,1e9]", "opusim: model.hidden = [1000000000, 1000000000], inputs = 64"),
])  # fmt: skip
def test_a_command_without_memory_is_one_line(n_bytes: int, hidden: str, message: str, tmp_path: Any) -> None:
    line = f"train bp --data digits --set model.hidden={hidden} --out {tmp_path / 'run'}"
    done = limited("from opusim.training.cli import main; main()", n_bytes, *line.split())
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


# Keys of files


def dotted(keys: int, parts: int) -> str:
    return "\n".join(".".join(f"k{n}_{part}" for part in range(parts)) + " = 1" for n in range(keys))


@pytest.mark.parametrize("text", [
    dotted(20_000, 4),
    dotted(60_000, 1),
    "\n".join(f"[a.b.c.k{n}]" for n in range(20_000)),
    "x = {" + ", ".join(f"a.b.k{n} = 1" for n in range(20_000)) + "}",
    "\n".join(f'a."b,c".k{n} = 1' for n in range(20_000)),
    "\n".join(f"[a.']='.b.c.k{n}]" for n in range(20_000)),
])  # fmt: skip
def test_many_keys_are_refused_before_they_are_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.tomllib, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(files.tomllib.TOMLDecodeError, match=r"its keys have \d+,\d{3} parts"):
        files.parse_toml(text)


def test_long_lists_of_numbers_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "KEY_LIMIT", 50)
    numbers, rows = ", ".join(["0.5"] * 200), ",\n".join(["[0.25, 0.5]"] * 60)
    found = files.parse_toml(f"[data]\nmean = [{numbers}]\nrows = [\n{rows}\n]\n" + dotted(10, 4))
    assert len(found["data"]["mean"]) == 200


def test_many_tables_of_json_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(files.json.JSONDecodeError, match="1,100,001 tables and lists, more than"):
        files.parse_json("[" + ",".join(["{}"] * 1_100_000) + "]")
