"""Options of zeroth-order training.

Which language model a run fine-tunes, on which texts, asked how.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from training.config.section import Section, TrainerSection
from training.protections.config import ProtectionConfig, Relation


class LanguageConfig(Section):
    """A language model as a classifier of texts; needs the extra `llm`. Without `model` there is none."""

    model: str | None = None
    """A local folder, or a name on the hub; a run that goes on loads it again."""
    text: str | None = None
    """What it learns from: a file of lines, text, tab, class number from 0."""
    prompt: str = "{text} It was"
    """Template around {text}; {mask} marks the class word of a masked model (the DP-ZO paper's, Table 14)."""
    classes: tuple[str, ...] = ("terrible", "great")
    """The word of each class, in the order of the class numbers; each must be one token."""
    max_tokens: int = Field(128, ge=8)
    """Longest prompt; longer texts lose their end."""
    lora_rank: int | None = Field(None, ge=1)
    """Train low-rank updates of this rank (LoRA; 8 in the DP-ZO paper) instead of the whole model."""
    lora_alpha: float = Field(16.0, gt=0.0)
    """The updates are multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Modules that get them, such as q_proj; none takes those that peft knows for the architecture."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the model's parameters; LoRA's factors are float32."""

    @field_validator("text")
    @classmethod
    def _whole_path(cls, text: str | None) -> str | None:
        """A file by its whole path, so that the run can be resumed from any folder."""
        return None if text is None else str(Path(text).resolve())

    @field_validator("model")
    @classmethod
    def _whole_folder(cls, model: str | None) -> str | None:
        """A folder by its whole path; a hub's name as it is."""
        return str(Path(model).resolve()) if model is not None and Path(model).is_dir() else model

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if prompt.count("{text}") != 1 or prompt.count("{mask}") > 1:
            raise ValueError(f"prompt = {prompt!r} must hold {{text}} once, and {{mask}} at most once")
        return prompt


class ZoConfig(TrainerSection):
    """Forward passes alone: the loss on both sides of a random direction tells how far to go along it.

    The update takes lr, schedule and weight_decay of the section `optimizer`, and neither momentum nor moments.
    """

    relations: ClassVar[tuple[Relation, ...]] = ("zero_out", "add_or_remove_one")
    """What protection.relation may be under protection.kind = 'record'; the first is its default."""

    kind: Literal["zo"] = "zo"
    """zo: zeroth-order training (SPSA) in place, with private scalars under protection.kind = 'record'."""
    perturbation: float = Field(1e-3, gt=0.0)
    """phi: how far the parameters are moved to each side (0.001 to 0.01 in the DP-ZO paper)."""
    directions: int = Field(1, ge=1, le=1024)
    """Directions a step, all on the step's batch and released together. Their updates are averaged."""
    law: Literal["gaussian", "laplace"] = "gaussian"
    """Law of the scalar noise; laplace is purely private (protection.delta = 0), and protection.noise_multiplier is
    then its scale over the clip."""
    settle_every: int = Field(64, ge=1)
    """Steps after which parameters in half precision are set to their float32 copies on disk, which the step log
    moves; parameters in float32 have no copy."""
    keep_base: bool = True
    """Whether the run folder keeps the parameters that training began with, from which the step log is replayed."""

    language: LanguageConfig = LanguageConfig()

    def implementation(self) -> Any:
        """See TrainerSection.implementation."""
        from training.zeroth_order.algorithm import ZoAlgorithm

        return ZoAlgorithm

    def uses_device(self, protection: ProtectionConfig) -> bool:
        """Whether the run opens its device."""
        return protection.kind == "record" and protection.noise == "device"
