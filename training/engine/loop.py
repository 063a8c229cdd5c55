"""The loop that runs every trainer: sample, step, observe, write metrics, checkpoint."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from accounting.errors import BudgetExceeded, NoGuarantee
from accounting.ledger.evidence import Alarm
from accounting.ledger.journal import Position
from accounting.ledger.ledger import Ledger
from accounting.mechanisms import Mechanism
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import Usage
from opusim.errors import DeviceError
from opusim.files import OwnProcess
from opusim.processes.ranks import Ranks
from training.data import Split
from training.engine.callbacks import UsageWatcher, Watcher
from training.engine.certified import VOUCHED, alarm_of, doubt_text, vouched_step
from training.engine.forecast import OBSERVED_STEPS
from training.engine.leading import lead
from training.engine.plan import RunPlan, to_device
from training.engine.trainer import EpochSums, Trainer
from training.errors import RunFolderError, RunInterrupted, TrainingDiverged
from training.networks.optimizers import TailAverage, set_learning_rate
from training.networks.record_independence import system_generators
from training.runs.checkpoints import (
    list_checkpoints,
    read_checkpoint,
    reseal_checkpoint,
    restore,
    save_checkpoint,
)
from training.runs.folder import RunFolder
from training.runs.run import evaluate_split
from training.runs.seal import Seal, read_header


class Engine:
    """Trains for a number of epochs, leaving a run folder from which a killed run can resume.

    A resumed run repeats an uninterrupted one bit for bit in experiment mode at the same thread count:
    batches and noise are keyed by the step, and what else a step depends on is in the checkpoint.

    Args:
        plan: The run; its device is open, its torch device holds the network.
        trainer: What is trained.
        folder: Where the run is written; the caller holds its lock.
        watcher: Receives the progress.
        ranks: The processes, of which this one leads; None for one.
        device: The open device of the run, or None without one. Under a certificate it is checked at each stop, too.
    """

    def __init__(
        self,
        plan: RunPlan,
        trainer: Trainer,
        folder: RunFolder,
        watcher: Watcher | None = None,
        *,
        ranks: Ranks | None = None,
        device: NoisyDevice | None = None,
    ) -> None:
        config = plan.config
        self._identity = config.digest()
        self._private = config.mode == "release"  # then no figure is written that depends on the data
        self._trainer = trainer
        self._network = plan.network
        self._writer = plan.algorithm.writer
        self._certified = None if plan.certificate is None else device
        self._kind = config.trainer.kind
        self._dataset = to_device(plan.dataset, config.torch_device)
        self._sampler = plan.sampler
        self._folder = folder
        self.total_steps = plan.total_steps
        self._loss = config.loss
        self._optimizer = config.optimizer
        self._average = TailAverage(config.optimizer.averaged_tail, self.total_steps)
        self._checkpoint_every = config.checkpoint.every_steps or self._sampler.steps_per_epoch
        self._keep = config.checkpoint.keep
        self._watcher = watcher
        self._ranks = ranks or Ranks.one()
        self._step = 0
        self._vouched, self._told = -1, False
        self._is_random = config.sampler.is_random
        self._sums = EpochSums(self._dataset.train.x.device)
        self._earlier_usage = Usage()
        self._epoch_started = time.perf_counter()
        self._files: Mapping[str, str | None] = {}
        self._ledger: Ledger | None = None
        self._process = OwnProcess()

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    def tell(self, expected: Usage, *, is_mean: bool) -> None:
        """Tell the watcher what the steps that are left will take of the device; `is_mean` says that this is random."""
        self._told = True
        if isinstance(self._watcher, UsageWatcher) and expected.frames:
            self._watcher.on_usage(expected, steps=self.total_steps - self._step, is_mean=is_mean)

    def begin(self, configuration: bytes) -> None:
        """Write the first checkpoint of a new run.

        Args:
            configuration: The content that `config.json` will have.
        """
        self._files = self._folder.digests(configuration)
        self.checkpoint()

    def resume(self, *, moved: bool = False) -> str:
        """Restore the newest checkpoint.

        Args:
            moved: Whether the user confirms that no copy of this folder resumes.

        Returns:
            Digest of that checkpoint.

        Raises:
            RunFolderError: There is none, it is damaged, it is of another network or configuration, or a file of the
                folder was changed.
        """
        seal = self._folder.require_resumable(moved=moved).seal
        checkpoints = list_checkpoints(self._folder.checkpoints)
        checkpoint = read_checkpoint(checkpoints[-1])
        if checkpoint.progress.get("identity") != self._identity:
            raise RunFolderError(
                f"{self._folder.config_file} is not the configuration that {checkpoints[-1].name} was written under; "
                "restore it, or start a new folder"
            )
        restore(self._trainer, self._average, checkpoint, checkpoints[-1])
        self._step = checkpoint.step
        self._vouched = int(checkpoint.progress.get(VOUCHED, -1))
        self._sums.load(checkpoint.progress["sums"])
        self._earlier_usage = Usage.from_json(checkpoint.progress["usage"])
        if seal is not None:
            self._folder.drop_metrics_behind(seal)
        return checkpoint.header.digest

    def run(
        self, ledger: Ledger, mechanisms: Sequence[Mechanism], interrupted: threading.Event
    ) -> dict[str, Any]:
        """Train to the end and write the summary, which is returned.

        Args:
            ledger: Where every step is paid for before it is computed.
            mechanisms: What one step releases; empty if everything was paid for upfront.
            interrupted: Checked after each step; Ctrl-C sets it (see `deferred_interrupt`).

        Raises:
            BudgetExceeded: The next step would cost more than the budget; the run ends here, with its summary.
            LedgerCorrupt: A step that was computed is not paid for.
            NoGuarantee: A step did not use the writer of private gradients that the trainer was given.
            TrainingDiverged: A batch's error is not finite; the last checkpoint is kept.
            RunInterrupted: Ctrl-C; a checkpoint was written first.
            DeviceError: The device failed; a checkpoint of the steps before was written first.
            OSError: The disk is full or not writable; the last checkpoint is kept.
        """
        self._ledger = ledger
        if self._watcher:
            self._watcher.on_start(step=self._step, total_steps=self.total_steps)
        self._epoch_started = time.perf_counter()
        if mechanisms:
            ledger.require_covers(self._step)
        self._seal_what_was_paid(ledger)
        try:
            self._train(ledger, mechanisms, interrupted)
        except Exception as error:
            with suppress(OSError):  # the error that ended the run is the one to report
                ledger.return_unused()
            self._looked_after(ledger, error)
            raise
        summary = self._summary()
        self._folder.finish(summary, ledger.position)
        return summary

    def _train(self, ledger: Ledger, mechanisms: Sequence[Mechanism], interrupted: threading.Event) -> None:
        """Do the remaining steps, or those until Ctrl-C."""
        first, before = self._step, self._trainer.usage
        while self._step < self.total_steps:
            if self._step == first + 1 and not self._told and not self._private:
                left = self.total_steps - self._step
                self.tell((self._trainer.usage - before).times(left), is_mean=self._is_random)
            if mechanisms:
                self._pay(ledger, mechanisms)
            self._advance_or_keep(ledger, paid_at_start=not mechanisms)
            if interrupted.is_set() and self._step < self.total_steps:
                self._looked_at(ledger, paid_at_start=not mechanisms)
                self._stop_cleanly(ledger, paid_at_start=not mechanisms)
                trust = ", trust_code=True" if "--trust-code" in self._folder.resume_command else ""
                raise RunInterrupted(
                    f"stopped after step {self._step} of {self.total_steps}; a checkpoint was written, resume "
                    f"it with: {self._folder.resume_command} (from Python: opusim.train(folder=..., "
                    f"resume=True{trust}), with the same data and model if they were given)"
                )
        self._looked_at(ledger, paid_at_start=not mechanisms)

    def _looked_at(self, ledger: Ledger, *, paid_at_start: bool) -> None:
        """Check the certified device once more after the steps that it took part in, before they are declared done.

        Raises:
            DeviceError: It has changed; a checkpoint was written, and the ledger says from which step on.
        """
        if self._certified is None:
            return
        try:
            self._certified.inspect(self._step)
        except DeviceError as error:
            self._stop_cleanly(ledger, paid_at_start=paid_at_start, error=error)
            raise type(error)(f"{error}. {self._state_after(error)}") from error

    def _looked_after(self, ledger: Ledger, error: Exception) -> None:
        """Check the certified device after an error that is not its own, such as a divergence, and write no checkpoint.

        Raises:
            DeviceError: It has changed; the ledger says from which step on. The step that broke off counts as done.
        """
        if self._certified is None or isinstance(error, (DeviceError, RunInterrupted, BudgetExceeded)):
            return
        step = min(self._step + 1, self.total_steps)
        try:
            self._certified.inspect(step)
        except DeviceError as found:
            alarm = alarm_of(found, self._certified, step=step, vouched=self._vouched)
            if alarm is None:
                return
            with suppress(OSError):
                ledger.note_alarm(alarm)
            raise type(found)(
                f"{found}. It was looked at because the run ended: {error}. {self._text_of(alarm)}"
            ) from error

    def _state_after(self, error: DeviceError) -> str:
        """Return what an alarm under a certificate means for the steps that were done."""
        return self._text_of(None if self._certified is None else self._alarm_of(error))

    def _text_of(self, alarm: Alarm | None) -> str:
        """Return what a user is told of an alarm, or of a device that failed without one."""
        if alarm is None or not alarm.doubts:
            return f"When the device is back, resume with: {self._folder.resume_command}"
        return doubt_text(alarm, self._folder)

    def _seal_what_was_paid(self, ledger: Ledger) -> None:
        """Seal labels and payments that are newer than the newest checkpoint into it, before a step is computed.

        Otherwise a run that is killed before its next checkpoint could resume with the ledger that it started with.
        """
        self._files = self._folder.digests()
        newest = list_checkpoints(self._folder.checkpoints)[-1]
        seal = self._seal()
        if ledger.content.payments and seal != read_header(newest).seal:
            reseal_checkpoint(newest, seal)

    def _seal(self) -> Seal:
        position = Position() if self._ledger is None else self._ledger.position
        return self._folder.seal(self._files, position, bound=self._private)

    def _note_alarm(self, ledger: Ledger, error: DeviceError) -> None:
        """Record in the ledger of a run under a certificate that its device has changed, if that is the error."""
        alarm = self._alarm_of(error)
        if alarm is not None:
            ledger.note_alarm(alarm)

    def _alarm_of(self, error: DeviceError) -> Alarm | None:
        """Return what the ledger of a run under a certificate says of a device's error, or None."""
        if self._certified is None:
            return None
        return alarm_of(error, self._certified, step=self._step, vouched=self._vouched)

    def _stop_cleanly(self, ledger: Ledger, *, paid_at_start: bool, error: DeviceError | None = None) -> None:
        """Return what was reserved, keep the steps done, and tell the ledger, so that a resumed run does not pay twice.

        The checkpoint holds the result of every step that was started; a step in which the device failed has none.
        """
        ledger.return_unused()
        if error is not None:
            self._note_alarm(ledger, error)
        digest = self.checkpoint()
        if paid_at_start and ledger.charges_again:
            ledger.note_stop(self._step, digest)

    def _pay(self, ledger: Ledger, mechanisms: Sequence[Mechanism]) -> None:
        """Pay for the next step; a spent budget ends the run."""
        try:
            ledger.pay(self._step, *mechanisms, until=self.total_steps)
        except BudgetExceeded as error:
            raise self.ended_by(error, ledger) from error

    def ended_by(self, error: BudgetExceeded, ledger: Ledger) -> BudgetExceeded:
        """End the run with the model that it has, because the budget pays for no further step; return the error."""
        self._ledger = ledger
        self._looked_at(ledger, paid_at_start=False)
        self.checkpoint()
        self._folder.finish(self._summary() | {"stopped": str(error)}, ledger.position)
        return BudgetExceeded(
            f"{error}; training ended after step {self._step} of {self.total_steps}, whose model is in "
            f"{self._folder.path}"
        )

    def _advance_or_keep(self, ledger: Ledger, *, paid_at_start: bool) -> None:
        """Do one step; if the device fails in it, write a checkpoint of the steps before, so that none is lost.

        A step reads its device before it changes the model. If it did not, because a user-supplied module reads another
        device, the trainer is not intact, and the newest checkpoint stays the last one.
        """
        try:
            self._advance()
        except DeviceError as error:
            kept = "all before it are kept"
            if self._trainer.intact:
                self._stop_cleanly(ledger, paid_at_start=paid_at_start, error=error)
            else:
                self._note_alarm(ledger, error)
                newest = list_checkpoints(self._folder.checkpoints)[-1]
                kept = f"and broke off amid the parameters, so that those of {newest.stem} are kept"
            undone = f"Step {self._step} of {self.total_steps} was not done, {kept}. "
            raise type(error)(
                f"{error}. {undone if self._step < self.total_steps else ''}{self._state_after(error)}"
            ) from error

    def _advance(self) -> None:
        """Do one step, then the metrics and the checkpoint that are due.

        Raises:
            RuntimeError: This process was forked from the one that trains, before the step or in it.
        """
        self._process.require(self._folder.path)
        index = self._sampler.indices(self._step).to(self._dataset.train.x.device)
        left_in_epoch = -(self._step + 1) % self._sampler.steps_per_epoch
        ends_epoch = left_in_epoch == 0
        set_learning_rate(self._trainer.optimizer, self._optimizer, self._step / self.total_steps)
        observe = not self._private and left_in_epoch < OBSERVED_STEPS
        written = None if self._writer is None else self._writer.batches_written
        with system_generators(index.device, fresh=self._private):
            record = lead(
                self._trainer, self._dataset.train, index, step=self._step, observe=observe, ranks=self._ranks
            )
        self._process.require(self._folder.path)
        if self._writer is not None and self._writer.batches_written == written:
            raise NoGuarantee(
                f"step {self._step}: trainer.kind = {self._kind!r} moved its parameters without the writer of private "
                "gradients that it was given; its step must call set_gradients of what Algorithm.gradients returns"
            )
        _require_finite(record.diagnostics)
        if not self._private:
            self._sums.add(record)
        self._step += 1
        if self._average.covers(self._step):
            self._average.update(self._step, self._trainer.tensors)
        if ends_epoch:
            self._end_epoch()
        if ends_epoch or self._step % self._checkpoint_every == 0:
            if (
                self._certified is not None
            ):  # so that no step of a checkpoint rests on a device repaired after a kill
                self._certified.inspect(self._step)
            self.checkpoint()
        if self._watcher:
            self._watcher.on_step(step=self._step)

    def _end_epoch(self) -> None:
        metrics: dict[str, Any] = {"epoch": self._step // self._sampler.steps_per_epoch, "step": self._step}
        if not self._private:
            metrics |= self._figures_of_epoch()
        _require_finite(metrics)
        self._folder.append_metrics(metrics)
        if not self._private:  # times reveal batch sizes
            now = time.perf_counter()
            self._folder.append_timing(
                {"epoch": metrics["epoch"], "step": self._step, "wall_s": now - self._epoch_started}
            )
            self._epoch_started = now
        self._sums.clear()
        if self._watcher:
            self._watcher.on_epoch(metrics)

    def _figures_of_epoch(self) -> dict[str, Any]:
        """Return the figures of an epoch, which depend on the data."""
        figures: dict[str, Any] = {f"train_{key}": value for key, value in self._sums.means().items()}
        if len(self._dataset.validation):
            validation = self._measured("validation", self._dataset.validation)
            figures |= {f"validation_{key}": value for key, value in validation.items()}
        return figures | self._sums.diagnostics() | _rounded(self._usage())

    def _measured(self, part: str, split: Split) -> dict[str, float]:
        """Return the figures of a part of the data; for a text also bits per byte."""
        figures = evaluate_split(self._network, split, self._loss, self._dataset.target)
        if "bits_per_token" in figures and "bytes_per_token" in self._dataset.origin:
            figures["bits_per_byte"] = (
                figures["bits_per_token"] / self._dataset.origin["bytes_per_token"][part]
            )
        return figures

    def checkpoint(self) -> str:
        """Write a checkpoint of the steps done so far; returns its digest."""
        self._trainer.before_checkpoint()
        header = save_checkpoint(
            self._folder.checkpoints,
            step=self._step,
            trainer=self._trainer,
            average=self._average,
            progress={
                "identity": self._identity,
                "sums": self._sums.dump(),
                "usage": self._usage().to_json(),
                **self._vouched_for(),
            },
            seal=self._seal(),
            keep=self._keep,
        )
        return header.digest

    def _vouched_for(self) -> dict[str, int]:
        """Return up to where checks speak for the noise, which an alarm after a kill needs; nothing if uncertified."""
        if self._certified is None:
            return {}
        return {VOUCHED: vouched_step(self._certified, self._step, self._vouched)}

    def _usage(self) -> Usage:
        """Return the device's usage; nothing in a private run, since it reveals batch sizes."""
        return Usage() if self._private else self._earlier_usage + self._trainer.usage

    def _summary(self) -> dict[str, Any]:
        """Return the final figures; the only place that evaluates the test set."""
        summary: dict[str, Any] = {"steps": self._step}
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


@contextmanager
def torch_threads(wanted: int | None) -> Iterator[int]:
    """Set torch's thread count for the run and put it back.

    Args:
        wanted: Threads, or None for torch's own number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event that is checked between steps; a second one acts at once.

    Enter it before the ledger is opened. Opening uses up the last clean stop, so a process that ended without another
    one could not resume under a label budget.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
