"""Short runs of every trainer and protection give the numbers that they gave before: a record of what is promised.

Of each run the file beside this test holds the Euclidean norm of the trained tensors and their product with a fixed
vector, and the digest of its ledger's mechanisms. Sums in another order, or another processor, move the numbers by some
1e-6; another algorithm, another noise or other batches by far more. Written anew by

    PYTHONPATH=. python tests/training/engine/test_golden_runs.py
"""

import hashlib
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opusim

FILE = Path(__file__).with_name("golden_runs.json")
TOLERANCE = 1e-3
"""Of the norm of the tensors; chaotic growth of a rounding over six steps stays far below it."""
RECORD = {"kind": "record", "noise_multiplier": 1.0, "delta": 1e-5}
SHORT: dict[str, Any] = {
    "epochs": 1, "seed": 3, "sampler": {"batch_size": 256}, "optimizer": {"name": "sgd", "lr": 0.5},
}  # fmt: skip
MLP: dict[str, Any] = {"model": {"hidden": [24, 24]}}
RUNS: dict[str, dict[str, Any]] = {
    "bp": {"trainer": {"kind": "bp"}},
    "bp-record": {"trainer": {"kind": "bp"}, "protection": RECORD},
    "bp-module-record": {
        "trainer": {"kind": "bp"}, "model": {"name": "conv-small", "options": {"width": 4, "norm": "group"}},
        "protection": RECORD,
    },
    "bp-transformer-record": {
        "trainer": {"kind": "bp"}, "model": {"name": "vit-small", "options": {"width": 16, "depth": 2, "heads": 2}},
        "protection": RECORD,
    },
    "bp-bands": {"trainer": {"kind": "bp"}, "protection": RECORD | {"bands": 2}},
    "dfa": {"trainer": {"kind": "dfa"}},
    "dfa-module": {
        "trainer": {"kind": "dfa"}, "model": {"name": "conv-small", "options": {"width": 4, "norm": "group"}},
    },
    "dfa-module-record": {
        "trainer": {"kind": "dfa"}, "model": {"name": "conv-small", "options": {"width": 4, "norm": "group"}},
        "protection": RECORD,
    },
    "tdfa-record": {"trainer": {"kind": "tdfa"}, "protection": RECORD},
    "pdfa-gaussian": {"trainer": {"kind": "pdfa"}},
    "pdfa-gaussian-record": {"trainer": {"kind": "pdfa"}, "protection": RECORD},
    "pdfa-camera": {"trainer": {"kind": "pdfa"}, "device": {"name": "camera"}},
    "ulr-record": {"trainer": {"kind": "ulr"}, "protection": RECORD},
    "zo-record": {"trainer": {"kind": "zo"}, "protection": RECORD},
    "convex-record": {"trainer": {"kind": "convex"}, "model": {}, "protection": RECORD},
    "labels-randomized": {
        "trainer": {"kind": "pdfa"}, "protection": {"kind": "label-randomized-response", "epsilon": 2.0},
    },
}  # fmt: skip


def summary(name: str, folder: Path) -> dict[str, Any]:
    """What a run of six steps leaves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = opusim.train(SHORT | MLP | RUNS[name], folder=folder / name)
    tensors = [np.ravel(t.numpy()) for _, t in sorted(run.model.state_dict().items())]
    flat = np.concatenate(tensors).astype(np.float64)
    vector = np.random.default_rng(7).standard_normal(len(flat))
    ledger = run.folder.read_ledger()
    kinds = json.dumps([one.kind for one in ledger.mechanisms] + [len(ledger.payments)])
    return {
        "size": len(flat), "norm": float(np.linalg.norm(flat)), "product": float(flat @ vector),
        "ledger": hashlib.sha256(kinds.encode()).hexdigest()[:16],
    }  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_its_recorded_numbers(name: str, tmp_path: Path) -> None:
    wanted, found = json.loads(FILE.read_text())[name], summary(name, tmp_path)
    assert (found["size"], found["ledger"]) == (wanted["size"], wanted["ledger"])
    slack = TOLERANCE * wanted["norm"]
    assert found["norm"] == pytest.approx(wanted["norm"], abs=slack)
    assert found["product"] == pytest.approx(wanted["product"], abs=slack)


def main() -> None:
    """Record all runs."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: summary(name, Path(folder)) for name in RUNS}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
