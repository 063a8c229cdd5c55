"""The feedback options of a run."""

from __future__ import annotations

from training.config.feedback import FeedbackConfig
from training.config.run import RunConfig


def feedback_options(config: RunConfig) -> FeedbackConfig:
    """The section `trainer`, where it is that of a feedback.

    Raises:
        TypeError: It is another family's.
    """
    options = config.trainer
    if not isinstance(options, FeedbackConfig):
        raise TypeError(f"trainer.kind = {options.kind!r} is no feedback; take bp, dfa, tdfa or pdfa")
    return options
