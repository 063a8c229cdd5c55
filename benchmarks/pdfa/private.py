"""How much accuracy does photonic DFA keep under each protection, compared with DP-SGD (FashionMNIST)?

54,000 private records, delta 1e-5, every run but DP-SGD's through the `gaussian` device (sigma 0.1).
- Whole records: clipping, central noise, secret batches. PDFA (784-256-10) with the error ternarized or in four bit
  planes, its output layer started from the device's own feedback; DP-SGD (backpropagation) on the same network.
- Only labels, features public (64 principal components, 64-128-10): a budget for each record, amplified noise in the
  features' geometry, one noisy reading of every label, randomized response.

`tune` tries a grid for each row and epsilon with one seed, as many points for each protection of the same unit, and
keeps the point of the best validation accuracy. `measure` trains that point with three other seeds and looks at the
test set. The choice looked at the labels of the 6,000 validation records, which no guarantee here covers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tuned_rows import RowPlan, TunedRows
from opusim.description.section import merged

MODULE, NAME = "benchmarks.pdfa.private", "pdfa_private"
RECORD_EPSILONS, LABEL_EPSILONS = (3.0, 1.0), (8.0, 3.0, 1.0)
BASE: dict[str, Any] = {
    "threads": 1,
    "data": {"name": "fashion-mnist"},
    "optimizer": {"name": "sgd", "momentum": 0.9, "averaged_tail": 0.5},
    "sampler": {"batch_size": 4096, "scheme": "poisson"},
}
RECORD: dict[str, Any] = {"model": {"hidden": [256]}, "protection": {"kind": "record"}}
DEVICE: dict[str, Any] = {"name": "gaussian", "noise": {"sigma": 0.1}}
PHOTONIC: dict[str, Any] = {
    "model": {"initial_output": "feedback"},
    "trainer": {"kind": "pdfa"},
    "device": DEVICE,
}
LABEL: dict[str, Any] = {
    "data": {"components": 64},
    "model": {"hidden": [128]},
    "trainer": {"kind": "pdfa"},
    "device": DEVICE,
}
RECORD_GRID = {"optimizer.lr": (0.5, 1.0, 2.0), "epochs": (20, 40)}
NOISE_GRID = {"optimizer.lr": (0.5, 1.0), "epochs": (5, 10), "protection.clip_norm": (0.1, 0.2)}
TABLE_GRID = {"optimizer.lr": (0.01, 0.02, 0.04), "epochs": (10,), "protection.flat_prior": (0.3, 1.0)}
SMALL_BATCHES: dict[str, Any] = {"sampler": {"batch_size": 256, "scheme": "shuffled-epochs"}}


def _records(config: dict[str, Any]) -> RowPlan:
    return RowPlan(config=merged(RECORD, config), grid=RECORD_GRID, epsilons=RECORD_EPSILONS)


def _labels(kind: str, grid: dict[str, tuple[Any, ...]], config: dict[str, Any]) -> RowPlan:
    config = merged(merged(LABEL, config), {"protection": {"kind": kind}})
    return RowPlan(config=config, grid=grid, epsilons=LABEL_EPSILONS)


ROWS = {
    "record, pdfa, bit planes": _records(merged(PHOTONIC, {"trainer": {"encoding": "planes"}})),
    "record, pdfa, ternary": _records(PHOTONIC),
    "record, DP-SGD": _records({"trainer": {"kind": "bp"}}),
    "label, amplified": _labels("label-amplified", NOISE_GRID, {}),
    "label, randomized response": _labels("label-randomized-response", TABLE_GRID, SMALL_BATCHES),
}
TABLE = TunedRows(
    module=MODULE, name=NAME, folder=Path("runs/private"), base=BASE, rows=ROWS, seeds=(0, 1, 2)
)


if __name__ == "__main__":
    TABLE.app()
