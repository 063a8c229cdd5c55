"""Send a run's figures to TensorBoard; a logger for MLflow or Weights & Biases differs in three lines.

    python examples/tensorboard_logger.py logs
    opusim train bp --callback tensorboard_logger:logger    # in this folder
    tensorboard --logdir logs

It takes tensorboard: pip install 'opusim[tracking]'. A release run sends epochs and steps only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

import opusim


class TensorBoardLogger(opusim.Callback):
    """Writes an epoch's figures as scalars at its last step; those of a layer are numbered, as "alignment/1"."""

    def __init__(self, path: str | Path) -> None:
        self._writer = SummaryWriter(str(path))  # mlflow.start_run(), wandb.init()

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See opusim.Callback."""
        for name, value in record.items():
            for number, entry in enumerate(value if isinstance(value, list) else [value], start=1):
                place = f"{name}/{number}" if isinstance(value, list) else name
                self._writer.add_scalar(place, entry, record["step"])  # mlflow.log_metric, wandb.log

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """See opusim.Callback."""
        self._writer.close()  # mlflow.end_run(), wandb.finish()


def logger() -> TensorBoardLogger:
    """Return a logger into the folder logs, for the option --callback."""
    return TensorBoardLogger("logs")


def main(path: str, **options: Any) -> opusim.Run:
    """Train on digits for two epochs."""
    return opusim.train(
        {"trainer": {"kind": "bp"}, "epochs": 2}, callbacks=[TensorBoardLogger(path)], **options
    )


if __name__ == "__main__":
    main(sys.argv[1])
