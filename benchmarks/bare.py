"""How is a trainer made without a run, to look at single steps?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from opusim.processes.ranks import Ranks
from opusim.training.config import load_config
from opusim.training.config.run import RunConfig
from opusim.training.engine.algorithm import Algorithm
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.trainer import FeedbackTrainer, ModuleGradients
from opusim.training.networks.base import Network
from opusim.training.protections.base import PrivateGradients, SoftLabels
from opusim.training.zeroth_order.trainer import ScalarRelease, ZoTrainer

TrainerT = TypeVar("TrainerT", bound=Algorithm[Any, Any, Any])


def bare(
    kind: type[TrainerT], network: Network, config: RunConfig, *, total_steps: int = 10**9, **opened: Any
) -> TrainerT:
    """Return a trainer of a kind without data; `opened` is what `open` would set."""
    plan: Any = SimpleNamespace(config=config, dataset=None, network=network, total_steps=total_steps)
    trainer = kind(plan, config.trainer)
    vars(trainer).update(opened)
    return trainer


def zo_trainer(network: Network, config: RunConfig, release: ScalarRelease, *, root: int) -> ZoTrainer:
    """Return a zeroth-order trainer without data; see `ZoTrainer`."""
    trainer = bare(ZoTrainer, network, config)
    trainer.start(release, root=root, ranks=Ranks())
    return trainer


def feedback_trainer(
    source: ClosedForm | ModuleGradients,
    optimizer: torch.optim.Optimizer,
    *,
    protection: PrivateGradients | None = None,
    labels: SoftLabels | None = None,
    ranks: Ranks | None = None,
) -> FeedbackTrainer:
    """Return a trainer of a source of gradients without data; see `FeedbackTrainer`."""
    opened = {"source": source, "optimizer": optimizer, "writer": protection, "labels": labels}
    config = load_config({"trainer": {"kind": "bp"}})
    return bare(
        FeedbackTrainer, source.network, config, device=source.device, ranks=ranks or Ranks.one(), **opened
    )
