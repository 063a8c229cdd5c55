"""Errors of training that a caller may want to catch."""

from __future__ import annotations

from opusim.errors import OpusimError


class TrainingDiverged(OpusimError, ArithmeticError):
    """The loss of a batch is not finite; the last checkpoint is kept."""


class RunFolderError(OpusimError, ValueError):
    """A run folder cannot be used: it is taken, finished, damaged or holds another network."""


class RunInterrupted(OpusimError):
    """The user stopped the run (Ctrl-C); a checkpoint was written and the run can be resumed."""


class FolderBusy(RunFolderError):
    """Another process is writing the folder."""


class SweepStopped(OpusimError):
    """A sweep or an audit of many trainings stopped; finished runs are kept, and the same command resumes it."""
