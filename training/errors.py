"""Errors of training that a caller may want to catch."""

from __future__ import annotations

from opusim.errors import OpusimError


class TrainingDiverged(OpusimError, ArithmeticError):
    """The loss of a batch is not finite; the last checkpoint is kept."""


class CardMemoryError(OpusimError, RuntimeError):
    """A step does not fit into the memory of the card; the message names a batch size that should, by an estimate."""


class RunFolderError(OpusimError, ValueError):
    """A run folder cannot be used: it is taken, finished, damaged or holds another network."""


class RunInterrupted(OpusimError):
    """The user stopped the run (Ctrl-C); a checkpoint was written and the run can be resumed."""


class FolderBusy(RunFolderError):
    """Another process is writing the folder."""


class SweepStopped(OpusimError):
    """A sweep or an audit of many trainings stopped; finished runs are kept, and the same command resumes it."""


class DataError(OpusimError, ValueError):
    """A data set cannot be used: a file is missing, cut short or of another kind, or a download failed.

    The message names the file or data set, the problem and the remedy. It is also a ``ValueError``, which is what wrong
    values in user-supplied arrays raise.
    """
