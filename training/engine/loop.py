"""The loop that runs every trainer: sample, step, observe, write metrics, checkpoint."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opusim import checks
from opusim.accounting.guarantee import BudgetExceeded, NoGuarantee
from opusim.accounting.ledger import Alarm
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import Usage
from opusim.errors import DeviceError, OpusimError
from opusim.processes.ranks import Ranks
from opusim.training.data import Split
from opusim.training.data.users import Users
from opusim.training.engine.algorithm import EpochSums, StepRecord, Trainer
from opusim.training.engine.callbacks import Callback
from opusim.training.engine.cards import StepMemory, exhausted, to_device
from opusim.training.engine.plan import (
    OBSERVED_STEPS,
    VOUCHED,
    RunPlan,
    doubt_text,
    vouched_step,
    without_remedy,
)
from opusim.training.engine.steps import STEPS_TO_MOVE, Movement, PaidSteps
from opusim.training.errors import RunFolderError, RunInterrupted, TrainingDiverged
from opusim.training.networks.optimizers import TailAverage, set_learning_rate
from opusim.training.networks.record_independence import system_generators
from opusim.training.runs.checkpoints import (
    list_checkpoints,
    read_checkpoint,
    reseal_checkpoint,
    restore,
    save_checkpoint,
)
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import evaluate_split
from opusim.training.runs.storage import Seal, read_header

STEPS_BETWEEN_READS = 64
"""Steps of a card after which the host reads whether they were finite, if no checkpoint comes before."""


class Engine:
    """Trains for a number of epochs, leaving a run folder from which a killed run can resume.

    A step on a card waits for nothing: sums stay there until the end of an epoch, and what must be finite is read every
    `STEPS_BETWEEN_READS` steps and before each checkpoint, so that nothing wrong is saved.

    A resumed run repeats an uninterrupted one bit for bit in experiment mode at the same thread count:
    batches and noise are keyed by the step, and everything else that a step depends on is in the checkpoint.

    Attributes:
        steps: The steps, and the ledger that they are paid for in.
        total_steps: Steps of the whole run.
        mechanisms: Mechanisms of one step; empty if everything is paid for upfront.

    Args:
        plan: The run; its device is open, its torch device holds the network.
        trainer: The trainer.
        folder: The run folder; the caller holds its lock.
        watcher: Receives the progress.
        ranks: The processes, which this one leads; None for one.
        device: The open device of the run, or None without one. Under a certificate it is checked at each stop, too.
    """

    def __init__(
        self,
        plan: RunPlan,
        trainer: Trainer,
        folder: RunFolder,
        watcher: Callback | None = None,
        *,
        ranks: Ranks | None = None,
        device: NoisyDevice | None = None,
    ) -> None:
        config = plan.config
        self._plan, self._identity = plan, config.digest()
        self._private = config.mode == "release"  # then no figure is written that depends on the data
        self._trainer = trainer
        self._writer = plan.algorithm.writer
        self._certified = None if plan.certificate is None else device
        self._dataset = to_device(plan.dataset, config.torch_device)
        self._sampler = plan.sampler
        self._folder = folder
        self.total_steps = plan.total_steps
        self._average = TailAverage(config.optimizer.averaged_tail, self.total_steps)
        self._checkpoint_every = config.checkpoint.every_steps or self._sampler.steps_per_epoch
        self._watcher = watcher
        self._ranks = ranks or Ranks.one()
        self.steps = PaidSteps(Ranks.one(), folder.path)  # the others learn of a step once it is paid for
        self.mechanisms = plan.mechanisms
        self._vouched, self._told = -1, False
        self._sums = EpochSums(self._dataset.train.place)
        self._late = checks.LateChecks()
        self._allocated = StepMemory.allocated(self._dataset.train.place)
        self._earlier_usage = Usage()
        self._epoch_started = time.perf_counter()
        self._files: Mapping[str, str | None] = {}

    @property
    def step(self) -> int:
        """Steps done."""
        return self.steps.step

    def tell(self, expected: Usage, *, is_mean: bool) -> None:
        """Tell the watcher the expected device usage of the remaining steps, a mean if `is_mean`."""
        self._told = True
        if self._watcher is not None and expected.frames:
            self._watcher.on_usage(expected, steps=self.total_steps - self.step, is_mean=is_mean)

    def begin(self, configuration: bytes) -> None:
        """Write the first checkpoint of a new run, whose `config.json` will have this content."""
        self._files = self._folder.digests(configuration)
        self.checkpoint()

    def resume(self) -> None:
        """Restore the newest checkpoint of a folder that can be resumed (`RunFolder.require_resumable`).

        Raises RunFolderError if it is damaged, or of another network or configuration.
        """
        newest = list_checkpoints(self._folder.checkpoints)[-1]
        checkpoint = read_checkpoint(newest)
        if checkpoint.progress.get("identity") != self._identity:
            raise RunFolderError(
                f"{self._folder.config_file} is not the configuration that {newest.name} was written under; "
                "restore it, or start a new folder"
            )
        restore(self._trainer, self._average, checkpoint, newest)
        self.steps.step = checkpoint.step
        self._vouched = int(checkpoint.progress.get(VOUCHED, -1))
        self._sums.load(checkpoint.progress["sums"])
        self._earlier_usage = Usage.from_json(checkpoint.progress["usage"])
        self._folder.drop_metrics_behind(checkpoint.header.seal)

    def run(self, interrupted: threading.Event) -> None:
        """Train to the end and write the summary; the ledger is open.

        Args:
            interrupted: Checked after each step; Ctrl-C sets it (see `deferred_interrupt`).

        Raises:
            BudgetExceeded: The next step would cost more than the budget; the run ends here, with its summary.
            LedgerCorrupt: A step that was computed is not paid for.
            NoGuarantee: A step did not use the writer of private gradients that the trainer was given.
            TrainingDiverged: A batch's error is not finite; the last checkpoint is kept.
            CardMemoryError: A step does not fit into the card's memory; the last checkpoint is kept.
            RunInterrupted: Ctrl-C; a checkpoint was written first.
            DeviceError: The device failed; a checkpoint of the steps before was written first.
            OSError: The disk is full or not writable; the last checkpoint is kept.
        """
        if self._watcher:
            self._watcher.on_start(step=self.step, total_steps=self.total_steps)
        self._epoch_started = time.perf_counter()
        # Seal labels and payments that are newer than the newest checkpoint into it, before a step is computed: a run
        # that is killed before its next checkpoint could otherwise resume with the ledger that it started with.
        self._files = self._folder.digests()
        newest = list_checkpoints(self._folder.checkpoints)[-1]
        seal = self._seal()
        if self.steps.content.payments and seal != read_header(newest).seal:
            reseal_checkpoint(newest, seal)
        try:
            # Several processes wait for each other in each step, and must fail in the same one.
            with self._late.collecting() if self._ranks.world == 1 else nullcontext():
                self._train(interrupted)
        except Exception as error:
            self.steps.return_unused()
            earlier = self._earlier(error)
            self._check_after(earlier or error)
            if earlier is not None:
                raise earlier from error
            raise
        self._folder.finish(self._summary(), self.steps.position)

    def _earlier(self, error: Exception) -> Exception | None:
        """Return the error of an earlier step, which a card reports late, if it is the cause of this one, else None."""
        if not isinstance(error, ValueError):
            return None
        try:
            self._late.read()
        except (OpusimError, ValueError) as found:
            return None if found is error else found
        return None

    def _train(self, interrupted: threading.Event) -> None:
        """Do the remaining steps, or those until Ctrl-C."""
        first, before = self.step, self._trainer.usage
        protected = self._plan.config.protection.protects != "nothing"
        # if only the last model is released, a resumed run must not look at its checkpoint
        watched = protected and (self.mechanisms or not first)
        movement = Movement(self._trainer.model) if watched else None
        # A run that is paid for at once releases only its last model, so its earlier models must not be compared.
        look = min(first + STEPS_TO_MOVE, self.total_steps) if self.mechanisms else self.total_steps
        while self.step < self.total_steps:
            if self.step == first + 1 and not self._told and not self._private:
                left = self.total_steps - self.step
                self.tell(
                    (self._trainer.usage - before).times(left), is_mean=self._plan.config.sampler.is_random
                )
            if self.mechanisms:
                self._pay()
            # A step reads its device before it changes the model. If it did not, because a user-supplied module reads
            # another device, the trainer is not intact, and the newest checkpoint stays the last one.
            try:
                self._advance()
            except DeviceError as error:
                kept = "all before it are kept"
                if self._trainer.intact and self._late.failed is None:
                    self._stop_cleanly(error)
                else:
                    self._alarm_of(error, self.step, noted=True)
                    newest = list_checkpoints(self._folder.checkpoints)[-1]
                    when = "the step" if self._late.failed is None else "this step or one before it"
                    kept = f"{when} failed while updating parameters; those of {newest.stem} are kept"
                undone = f"Step {self.step} of {self.total_steps} was not done, {kept}. "
                told = self._text_of(self._alarm_of(error, self.step))
                raise type(error)(
                    f"{error}. {undone if self.step < self.total_steps else ''}{told}"
                ) from error
            if movement is not None and self.step == look:
                movement.tell(self.step - first)
            if interrupted.is_set() and self.step < self.total_steps:
                self._check_device()
                self._stop_cleanly()
                trust = ", trust_code=True" if "--trust-code" in self._folder.resume_command else ""
                raise RunInterrupted(
                    f"stopped after step {self.step} of {self.total_steps}; a checkpoint was written, resume "
                    f"it with: {self._folder.resume_command} (from Python: opusim.train(folder=..., "
                    f"resume=True{trust}), with the same data and model if they were given)"
                )
        self._check_device()

    def _check_device(self) -> None:
        """Check the certified device once more after its steps, before they count as done.

        Raises DeviceError if it has changed; a checkpoint was written, and the ledger says from which step on.
        """
        if self._certified is None:
            return
        try:
            self._certified.monitor.check(self.step)
        except DeviceError as error:
            self._stop_cleanly(error)
            raise type(error)(f"{error}. {self._text_of(self._alarm_of(error, self.step))}") from error

    def _check_after(self, error: Exception) -> None:
        """Check the certified device after an error that is not its own, such as a divergence, and write no checkpoint.

        Raises DeviceError if it has changed; the ledger says from which step on. The step that failed counts as done.
        """
        if self._certified is None or isinstance(error, (DeviceError, RunInterrupted, BudgetExceeded)):
            return
        step = min(self.step + 1, self.total_steps)
        try:
            self._certified.monitor.check(step)
        except DeviceError as found:
            alarm = self._alarm_of(found, step)
            if alarm is None:
                return
            with suppress(OSError):
                self.steps.ledger.note_alarm(alarm)
            raise type(found)(
                f"{found}. This check ran because training stopped: {error}. {self._text_of(alarm)}"
            ) from error

    def _text_of(self, alarm: Alarm | None) -> str:
        """Return the message to the user about an alarm, or about a device that failed without one."""
        if alarm is None or not alarm.doubts:
            return f"When the device is back, resume with: {self._folder.resume_command}"
        return doubt_text(alarm, self._folder)

    def _seal(self) -> Seal:
        return self._folder.seal(self._files, self.steps.position, bound=self._private)

    def _alarm_of(self, error: DeviceError, step: int, *, noted: bool = False) -> Alarm | None:
        """Return, and record if `noted`, the alarm for a device's error before a certified run's step, or None."""
        device = self._certified
        if device is None or not device.monitor.changed:  # no alarm of the monitor
            return None
        covered = device.monitor.doubtful_from is None
        since = step if covered else vouched_step(device, step, self._vouched)
        alarm = Alarm(step=step, since=since, found=without_remedy(error), covered=covered)
        if noted:
            self.steps.ledger.note_alarm(alarm)
        return alarm

    def _stop_cleanly(self, error: DeviceError | None = None) -> None:
        """Return reserved steps, record the alarm and write a checkpoint, so that a resumed run does not pay twice.

        The checkpoint holds the result of every step that was started; a step in which the device failed has none.
        """
        self.steps.ledger.return_unused()
        if error is not None:
            self._alarm_of(error, self.step, noted=True)
        self.checkpoint()

    def _pay(self) -> None:
        """Pay for the next step; a spent budget ends the run."""
        try:
            self.steps.pay(*self.mechanisms, until=self.total_steps)
        except BudgetExceeded as error:
            raise self.ended_by(error) from error

    def ended_by(self, error: BudgetExceeded) -> BudgetExceeded:
        """End the run with the model that it has, because the budget pays for no further step; return the error."""
        self._check_device()
        self.checkpoint()
        self._folder.finish(self._summary() | {"stopped": str(error)}, self.steps.position)
        return BudgetExceeded(
            f"{error}; training ended after step {self.step} of {self.total_steps}, whose model is in "
            f"{self._folder.path}{self.steps.lost}"
        )

    def _advance(self) -> None:
        """Do one step, then the metrics and the checkpoint that are due; refuse (RuntimeError) a forked process."""
        self.steps.require_own()
        index, place = self._sampler.indices(self.step), self._dataset.train.place
        left_in_epoch = -(self.step + 1) % self._sampler.steps_per_epoch
        ends_epoch = left_in_epoch == 0
        set_learning_rate(self._trainer.optimizer, self._plan.config.optimizer, self.step / self.total_steps)
        observe = not self._private and left_in_epoch < OBSERVED_STEPS
        written = None if self._writer is None else self._writer.batches_written
        try:
            with system_generators(place) if self._private else nullcontext():
                record = lead(
                    self._trainer,
                    self._dataset.train,
                    index,
                    step=self.step,
                    observe=observe,
                    ranks=self._ranks,
                    users=self._plan.users,
                )
        except torch.OutOfMemoryError as error:
            config = self._plan.config
            found = None if self._private else StepMemory.since(self._allocated, place)
            batch = self._sampler.expected_batch_size if config.tells_records else config.sampler.batch_size
            raise exhausted(self.step, round(batch), place, found) from error
        self.steps.require_own()
        if self._writer is not None and self._writer.batches_written == written:
            raise NoGuarantee(
                f"step {self.step}: trainer.kind = {self._plan.config.trainer.kind!r} moved its parameters without the "
                "writer of private gradients that it was given; its step must call set_gradients of what "
                "Algorithm.gradients returns"
            )
        if record.diagnostics:
            self._late.read()  # first: its error names the step that diverged
            _require_finite(record.diagnostics)
        if not self._private:
            self._sums.add(record)
        self.steps.step += 1
        if self._average.covers(self.step):
            self._average.update(self.step, self._trainer.tensors)
        if ends_epoch or self.step % STEPS_BETWEEN_READS == 0:
            self._late.read()
        if ends_epoch:
            self._end_epoch()
        if ends_epoch or self.step % self._checkpoint_every == 0:
            if self._certified is not None:  # now: a device repaired after a kill would pass
                self._certified.monitor.check(self.step)
            self.checkpoint()
        if self._watcher:
            self._watcher.on_step(step=self.step)

    def _end_epoch(self) -> None:
        metrics: dict[str, Any] = {"epoch": self.step // self._sampler.steps_per_epoch, "step": self.step}
        if not self._private:
            metrics |= {f"train_{key}": value for key, value in self._sums.means().items()}
            if len(self._dataset.validation):
                validation = self._measured("validation", self._dataset.validation)
                metrics |= {f"validation_{key}": value for key, value in validation.items()}
            metrics |= self._sums.diagnostics() | _rounded(self._usage())
        _require_finite(metrics)
        self._folder.append_metrics(metrics)
        if not self._private:  # times reveal batch sizes
            now = time.perf_counter()
            self._folder.append_timing(
                {"epoch": metrics["epoch"], "step": self.step, "wall_s": now - self._epoch_started}
            )
            self._epoch_started = now
        self._sums.clear()
        if self._watcher:
            self._watcher.on_epoch(metrics)

    def _measured(self, part: str, split: Split) -> dict[str, float]:
        """Return the figures of a part of the data; for a text also bits per byte."""
        figures = evaluate_split(self._plan.network, split, self._plan.config.loss, self._dataset.target)
        if "bits_per_token" in figures and "bytes_per_token" in self._dataset.origin:
            figures["bits_per_byte"] = (
                figures["bits_per_token"] / self._dataset.origin["bytes_per_token"][part]
            )
        return figures

    def checkpoint(self) -> None:
        """Write a checkpoint of the steps done so far.

        Raises TrainingDiverged or DeviceFault if one of them was not finite, which a card reports only now.
        """
        self._late.read()
        self._trainer.before_checkpoint()
        vouched = {}  # up to where checks confirm the noise, which an alarm after a kill needs
        if self._certified is not None:
            vouched[VOUCHED] = vouched_step(self._certified, self.step, self._vouched)
        save_checkpoint(
            self._folder.checkpoints,
            step=self.step,
            trainer=self._trainer,
            average=self._average,
            progress={
                "identity": self._identity,
                "sums": self._sums.dump(),
                "usage": self._usage().to_json(),
                **vouched,
            },
            seal=self._seal(),
            keep=self._plan.config.checkpoint.keep,
        )

    def _usage(self) -> Usage:
        """Return the device's usage; nothing in a private run, since it reveals batch sizes."""
        return Usage() if self._private else self._earlier_usage + self._trainer.usage

    def _summary(self) -> dict[str, Any]:
        """Return the final figures; the only place that evaluates the test set."""
        summary: dict[str, Any] = {"steps": self.step}
        if self._private:
            return summary
        for name in ("train", "validation", "test"):
            split = getattr(self._dataset, name)
            if split is not None and len(split):
                figures = self._measured(name, split)
                summary |= {f"{name}_{key}": value for key, value in figures.items()}
        _require_finite(summary)
        return summary | _rounded(self._usage())


def _require_finite(figures: Mapping[str, Any]) -> None:
    """Refuse figures that are not finite."""
    for name, value in figures.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in numbers):
            raise TrainingDiverged(
                f"{name} is {value}, so the training diverged; start a new run with a lower optimizer.lr or less noise"
            )


def _rounded(usage: Usage) -> dict[str, float]:
    """Return usage to the microsecond and microjoule, so that the order of additions does not show."""
    times = {"seconds": usage.seconds, "joules": usage.joules, "host_seconds": usage.host_seconds}
    return {"frames": usage.frames, **{name: round(amount, 6) for name, amount in times.items()}}


class _Order(NamedTuple):
    """A step that the first process has paid for."""

    step: int
    rates: tuple[float, ...]  # of each group of parameters
    records: Tensor  # numbers of the batch's records in the training set, shape (batch,), on the CPU


def lead(
    trainer: Trainer,
    split: Split,
    records: Tensor,
    *,
    step: int,
    observe: bool,
    ranks: Ranks,
    users: Users | None = None,
) -> StepRecord:
    """Do one paid step with all processes, which wait for it in `follow`; with several, nothing is observed.

    `records` are the numbers of the batch's records, or of its users, on the host, shape (batch,).
    """
    if ranks.world == 1:
        return _step(trainer, split, records, users, step=step, observe=observe)
    rates = tuple(float(group["lr"]) for group in trainer.optimizer.param_groups)
    order = ranks.on_first(lambda: _Order(step=step, rates=rates, records=records.cpu()))
    return _do(order, trainer, split, ranks, users)


def follow(trainer: Trainer, split: Split, ranks: Ranks, users: Users | None = None) -> None:
    """Do this process's part of every step that the first one leads, until that one ends the run."""
    while (order := ranks.on_first(_no_order)) is not None:
        for group, rate in zip(trainer.optimizer.param_groups, order.rates, strict=True):
            group["lr"] = rate
        _do(order, trainer, split, ranks, users)


def _no_order() -> _Order | None:
    return None


def _step(
    trainer: Trainer, split: Split, records: Tensor, users: Users | None, *, step: int, observe: bool
) -> StepRecord:
    """Do a step on some records, or on the records that it takes of some users."""
    filled: dict[str, Tensor] = {}
    if users is not None:
        records, padding = users.rows(records.tolist(), step)
        filled = {"filled": padding.to(split.place, non_blocking=True)}
    x, y = split.batch(records)
    numbers = records.to(y.device, non_blocking=True)
    return trainer.step(x, y, step=step, observe=observe, records=numbers, **filled)


def _do(order: _Order, trainer: Trainer, split: Split, ranks: Ranks, users: Users | None) -> StepRecord:
    """Do this process's part of a step; the sums in the record are those of all processes."""
    records = order.records[ranks.part(len(order.records))]
    own = _step(trainer, split, records, users, step=order.step, observe=False)
    judged = own.n_records if own.n_judged is None else own.n_judged
    sums = [float(own.loss_sum), float(own.n_correct), float(judged), float(own.n_records)]
    loss, correct, judged_by_all, count = ranks.totals(sums)
    return StepRecord(
        loss_sum=own.loss_sum.new_tensor(loss),
        n_correct=own.n_correct.new_tensor(int(correct)),
        n_records=int(count),
        n_judged=int(judged_by_all),
    )
