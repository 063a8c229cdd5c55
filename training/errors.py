"""Errors of training that a caller may want to catch."""

from __future__ import annotations

from opusim.errors import OpusimError


class TrainingDiverged(OpusimError, ArithmeticError):
    """The error of a batch is not finite; the last checkpoint is kept."""


class RunFolderError(OpusimError, ValueError):
    """A run folder cannot be used as asked: it is taken, finished, damaged or of another network."""


class RunInterrupted(OpusimError):
    """A person stopped the run (Ctrl-C); a checkpoint was written and the run can be resumed."""


class FolderBusy(RunFolderError):
    """Another process is writing the folder."""


class SweepStopped(OpusimError):
    """A sweep could not go on; the runs so far are kept, and the same command goes on."""
