"""Share the steps of a run between processes: the first one leads, the others follow.

The first process runs the engine: it draws the batches, pays in the ledger, and writes the run folder. It sends every
batch to the others, which therefore compute nothing before its step is paid for, and which need no generator of
batches. Each process takes its part of the batch; the trainer adds the gradients of all processes before its update, so
that the parameters of all processes are the same, to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from opusim.errors import ConfigError
from opusim.processes import launched_rank
from opusim.processes.ranks import Ranks
from opusim.training.config.run import RunConfig
from opusim.training.data import Split
from opusim.training.engine.algorithm import StepRecord, Trainer
from opusim.training.engine.plan import RunPlan, fingerprint
from opusim.training.engine.steps import share_state
from opusim.training.errors import RunFolderError
from opusim.training.runs.checkpoints import held_by_devices, hold_on_devices


class _Order(NamedTuple):
    """A step that the first process has paid for."""

    step: int
    rates: tuple[float, ...]  # of each group of parameters
    records: Tensor  # numbers of the batch's records in the training set, shape (batch,), on the CPU


def leads_steps(config: RunConfig) -> bool:
    """Whether the first of several processes leads the steps of such a run; else each process runs the engine."""
    return bool(config.trainer.implementing_class().processes == "steps")


def follows(config: RunConfig) -> bool:
    """Whether this process, as torchrun started it, follows another one in such a run and writes no folder."""
    return launched_rank() > 0 and leads_steps(config)


def require_shareable(config: RunConfig, ranks: Ranks) -> None:
    """Refuse what runs in one process only, before anything is written.

    Raises:
        ConfigError: There are several processes, and the trainer or the protection does not share its work.
    """
    if ranks.world == 1:
        return
    kind, protection = config.trainer.kind, config.protection
    remedy = f"start it without torchrun (there are {ranks.world} processes)"
    if config.trainer.implementing_class().processes == "none":
        reason = f"{kind!r} trains in one process; take 'bp', 'dfa', 'tdfa', 'pdfa' or 'zo', or {remedy}"
        raise ConfigError("configuration", "trainer.kind", reason)
    if not protection.implementing_class().shared:
        reason = f"{protection.kind!r} holds in one process; take 'none' or 'record', or {remedy}"
        raise ConfigError("configuration", "protection.kind", reason)
    if leads_steps(config) and protection.protects == "records" and protection.noise == "device":
        reason = f"'device' is read by one process; take 'digital', or {remedy}"
        raise ConfigError("configuration", "protection.noise", reason)


def require_same_plan(plan: RunPlan, ranks: Ranks) -> None:
    """Refuse processes that were started with another configuration or other data than the first.

    Raises:
        RunFolderError: One of them was; on every process, before anything is written.
    """
    if ranks.world > 1:
        mine = {"configuration": (plan.config.digest(),), "data": (fingerprint(plan.dataset.train),)}
        ranks.require_same(mine, RunFolderError)


def share_trainer(trainer: Trainer, ranks: Ranks) -> None:
    """Give every process the first one's parameters, optimizer, trainer's state, and what its devices hold.

    Of the state only what another process has too: earlier noise stays with the process that draws it.
    """
    if ranks.world == 1:
        return
    names = ranks.on_first(lambda: list(trainer.state))
    others = ranks.rows([name in trainer.state for name in names])[1:] if names else []
    shared = [name for name, found in zip(names, zip(*others, strict=True), strict=True) if any(found)]
    tensors = [*trainer.tensors.values(), *(trainer.state[name] for name in shared)]
    share_state(ranks, tensors, trainer.optimizer)
    held = ranks.on_first(lambda: tree_map(Tensor.cpu, held_by_devices(trainer.model)))
    if not ranks.is_first:
        hold_on_devices(trainer.model, held)


def lead(
    trainer: Trainer, split: Split, records: Tensor, *, step: int, observe: bool, ranks: Ranks
) -> StepRecord:
    """Do one step with all processes, which wait for it in `follow`.

    Args:
        trainer: Of the first process.
        split: The training records.
        records: Numbers of the batch's records, shape (batch,).
        step: Number of the step; it is paid for.
        observe: See Trainer.step; with several processes nothing is observed.
        ranks: The processes.
    """
    if ranks.world == 1:
        return trainer.step(*split.batch(records), step=step, observe=observe, records=records)
    rates = tuple(float(group["lr"]) for group in trainer.optimizer.param_groups)
    order = ranks.on_first(lambda: _Order(step=step, rates=rates, records=records.cpu()))
    return _do(order, trainer, split, ranks)


def end(ranks: Ranks) -> None:
    """Tell the processes that follow that there is no further step."""
    ranks.on_first(_no_order)


def follow(trainer: Trainer, split: Split, ranks: Ranks) -> None:
    """Do this process's part of every step that the first one leads, until that one ends the run.

    Args:
        trainer: Of this process, in the state of the first one's.
        split: The training records.
        ranks: The processes.
    """
    while (order := ranks.on_first(_no_order)) is not None:
        for group, rate in zip(trainer.optimizer.param_groups, order.rates, strict=True):
            group["lr"] = rate
        _do(order, trainer, split, ranks)


def _no_order() -> _Order | None:
    return None


def _do(order: _Order, trainer: Trainer, split: Split, ranks: Ranks) -> StepRecord:
    """Do this process's part of a step; the sums in the record are those of all processes."""
    records = order.records[ranks.part(len(order.records))].to(split.x.device)
    own = trainer.step(*split.batch(records), step=order.step, observe=False, records=records)
    judged = own.n_records if own.n_judged is None else own.n_judged
    loss, correct, judged_by_all = ranks.totals([float(own.loss_sum), float(own.n_correct), float(judged)])
    return StepRecord(
        loss_sum=own.loss_sum.new_tensor(loss),
        n_correct=own.n_correct.new_tensor(int(correct)),
        n_records=len(order.records),
        n_judged=int(judged_by_all),
    )
