"""How often a run can be taken up again."""

from __future__ import annotations

from pydantic import Field

from training.config.section import Section


class CheckpointConfig(Section):
    """How often a run can be taken up again."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints; None: one at the end of each epoch."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
