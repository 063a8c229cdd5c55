"""Options of zeroth-order training, and of the language model that a run fine-tunes with it."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from opusim.training.config.kinds import Flag, ProtectionSection, TrainerSection
from opusim.training.config.sections import OWN_ARRAYS, Effect, Given, Relation, Section


def table_kind(path: Path) -> Literal["csv", "parquet"] | None:
    """Return the kind of table that a file of texts is by its ending, or None for a file of lines."""
    endings = path.suffixes[-1:] if path.suffix != ".gz" else path.suffixes[-2:-1]
    return {".csv": "csv", ".parquet": "parquet"}.get("".join(endings))  # type: ignore[return-value]


class LanguageConfig(Section):
    """A language model to fine-tune on texts; needs the extra `llm`. Without `model` there is none."""

    model: str | None = None
    """A local folder, a file .gguf (needs gguf), package:NAME for an installed package that holds one of them, or a
    name on the hub; a resumed run loads it again."""
    text: str | None = None
    """Training texts: a table (.csv or .parquet), or a file of lines, each a text, a tab and a class number from 0."""
    columns: tuple[str, str] = ("text", "label")
    """The columns of a table that hold the texts and their labels, which are class numbers from 0 or words of
    classes."""
    task: Literal["classify", "next-token"] = "classify"
    """What to learn from the texts. classify: the word of a text's class after its prompt. next-token: the texts
    themselves; the loss of a text is the mean over its tokens, and labels are not read."""
    prompt: str = "{text} It was"
    """Template around {text}, with {mask} for the class word of a masked model (DP-ZO paper, Table 14)."""
    classes: tuple[str, ...] = ("terrible", "great")
    """The word of each class, in the order of the class numbers; each must be one token."""
    max_tokens: int = Field(128, ge=8)
    """Longest prompt; longer texts lose their end."""
    lora_rank: int | None = Field(None, ge=1)
    """Train low-rank updates of this rank instead of the whole model (LoRA, 8 in the DP-ZO paper)."""
    lora_alpha: float = Field(16.0, gt=0.0)
    """The updates are multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Modules that get such updates, such as q_proj; empty takes those that peft knows for the architecture."""
    prefix_tokens: int | None = Field(None, ge=1)
    """Train the keys and values of this number of tokens before each text instead of the whole model (prefix tuning, 5
    in the DP-ZO paper)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the model's parameters; those of LoRA and of a prefix are float32."""

    @field_validator("text")
    @classmethod
    def _whole_path(cls, text: str | None) -> str | None:
        """Store an absolute path, so that the run can be resumed from any folder."""
        return None if text is None else str(Path(text).resolve())

    @field_validator("model")
    @classmethod
    def _whole_folder(cls, model: str | None) -> str | None:
        """Store the absolute path of a folder or file, and another name as it is."""
        if model is None:
            return None
        try:
            is_path = Path(model).suffix == ".gguf" or Path(model).is_dir()
            return str(Path(model).resolve()) if is_path else model
        except OSError as error:  # a name that is too long for a path
            raise ValueError(f"model = {reprlib.repr(model)} is no folder: {error.strerror}") from error

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if prompt.count("{text}") != 1 or prompt.count("{mask}") > 1:
            raise ValueError(f"prompt = {prompt!r} must hold {{text}} once, and {{mask}} at most once")
        return prompt

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if self.lora_rank is not None and self.prefix_tokens is not None:
            raise ValueError(
                f"lora_rank = {self.lora_rank} and prefix_tokens = {self.prefix_tokens} are two ways to train a part "
                "of the model; give one of them"
            )
        return self


class ZoConfig(TrainerSection):
    """Only forward passes: the loss on both sides of a random direction gives the move along it.

    The update takes lr, schedule and weight_decay of the section `optimizer`, and neither momentum nor moments.
    """

    implementation = "opusim.training.zeroth_order.trainer:ZoTrainer"
    protections: ClassVar[tuple[str, ...]] = ("none", "record")
    summary: ClassVar[str] = (
        "Zeroth order: forward passes on both sides of random directions, a scalar for each."
    )
    relations: ClassVar[tuple[Relation, ...]] = ("zero_out", "add_or_remove_one")
    plain_descent = True
    examples: ClassVar[tuple[str, ...]] = (
        "--data digits --epochs 30",
        "--data digits --protect record --epsilon 3 --law laplace --delta 0",
        "--language-model distilroberta-base --text reviews.tsv --lora-rank 8",
    )
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            name="language-model",
            key="trainer.language.model",
            help="Fine-tune a language model: a local folder, a file .gguf, package:NAME for an installed package that "
            "holds one, or a name on the hub (extra llm).",
        ),
    )
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("trainer.law",),
            needs="protection.kind = 'record'",
            holds=lambda run: run.protection.protects != "nothing",
        ),
        Effect(
            keys=("trainer.clip",),
            needs="protection.kind = 'record' and trainer.directions above 1",
            holds=lambda run: run.protection.protects != "nothing" and run.trainer.directions > 1,
        ),
        Effect(
            keys=("trainer.rows_at_once",),
            needs="trainer.rank",
            holds=lambda run: run.trainer.rank is not None,
        ),
        Effect(
            keys=("trainer.language",),
            needs="trainer.language.model (--language-model)",
            holds=lambda run: run.trainer.language.model is not None,
        ),
        Effect(
            keys=("trainer.language.lora_alpha", "trainer.language.lora_targets"),
            needs="trainer.language.lora_rank",
            holds=lambda run: run.trainer.language.lora_rank is not None,
        ),
        Effect(
            keys=("trainer.language.columns",),
            needs="a trainer.language.text that ends in .csv, .csv.gz or .parquet",
            holds=lambda run: table_kind(Path(run.trainer.language.text or "")) is not None,
        ),
        Effect(
            keys=("trainer.language.prompt", "trainer.language.classes"),
            needs="trainer.language.task = 'classify'",
            holds=lambda run: run.trainer.language.task == "classify",
        ),
        Effect(
            keys=("model", "data.name"),
            needs="a run without trainer.language.model, which brings its own network and data",
            holds=lambda run: run.trainer.language.model is None or run.data.name == OWN_ARRAYS,
        ),
    )

    kind: Literal["zo"] = "zo"
    """zo: zeroth-order training (SPSA) in place; private scalars with protection.kind = 'record'."""
    perturbation: float = Field(1e-3, gt=0.0)
    """phi: how far the parameters move to each side (0.001 to 0.01 in the DP-ZO paper)."""
    directions: int = Field(1, ge=1, le=1024)
    """Directions in a step, all on its batch and released together. Their updates are averaged."""
    law: Literal["gaussian", "laplace"] = "gaussian"
    """Law of the scalar noise. laplace is purely private (protection.delta = 0), and protection.noise_multiplier is
    then its scale over the clip."""
    clip: Literal["direction", "joint"] = "direction"
    """How protection.kind = 'record' clips: each loss difference to clip_norm (direction), or the norm of a record's
    differences along all directions of a step (joint). Joint clips make n directions cost as much epsilon as one, and
    take Gaussian noise."""
    rank: int | None = Field(None, ge=1, le=8)
    """Rank of the directions in matrices: both sides of many then share a forward pass. None takes full directions."""
    rows_at_once: int = Field(256, ge=2)
    """Most rows of a pass that directions share, two for each record and direction; fewer take less memory."""
    settle_every: int = Field(64, ge=1)
    """Steps after which parameters in half precision are set to their float32 copies on disk, to which the step log
    applies; parameters in float32 have no copy."""
    keep_base: bool = True
    """Keep the initial parameters in the run folder, from which the step log is replayed."""

    language: LanguageConfig = LanguageConfig()

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        if self.clip == "joint" and self.law == "laplace":
            raise ValueError(
                "clip = 'joint' bounds a Euclidean norm, which law = 'laplace' gives no epsilon for; use law = "
                "'gaussian', or clip = 'direction'"
            )
        return self

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """No momentum, and a lower rate: a random direction's slope exceeds the gradient's share along it."""
        return {"optimizer": {"lr": 0.002, "momentum": 0.0}}

    def uses_device(self, protection: ProtectionSection) -> bool:
        """With device noise on the scalars."""
        return protection.noise == "device"

    def divides_by_batch_size(self, protection: ProtectionSection) -> bool:
        """Always."""
        return True
