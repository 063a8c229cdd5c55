"""Options of unified likelihood ratio training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from opusim.description.section import BadKey
from opusim.errors import ConfigError
from opusim.training.config.kinds import ProtectionSection, TrainerSection
from opusim.training.config.sections import Effect

Reduction = Literal["antithetic", "clean-loss", "leave-one-out", "none"]
Directions = Literal["independent", "orthogonal"]
MOST_COPIES = 10**6
"""Most copies of a record; these take some seconds a record and step in the smallest network."""


class UlrConfig(TrainerSection):
    """Forward passes with noise on one module's output at a time; score times loss estimates the gradient."""

    implementation = "opusim.training.ulr.trainer:UlrTrainer"
    protections: ClassVar[tuple[str, ...]] = ("none", "record")
    summary: ClassVar[str] = (
        "Unified likelihood ratio: forward passes with noise on one module's output at a time."
    )
    device_keys: ClassVar[Mapping[str, str] | None] = {"trainer.noise": "device"}
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("trainer.target_std", "trainer.clip_norm", "trainer.remedy"),
            needs="trainer.form = 'published'",
            holds=lambda run: run.trainer.form == "published",
        ),
        Effect(
            keys=("trainer.copies",),
            needs="no trainer.module_copies",
            holds=lambda run: not run.trainer.module_copies,
        ),
        Effect(
            keys=("trainer.module_copies",),
            needs="trainer.form = 'proven'",
            holds=lambda run: run.trainer.form == "proven",
        ),
        Effect(
            keys=("trainer.clip",),
            needs="protection.kind = 'record' (ulr)",
            holds=lambda run: run.protection.poisson,
        ),
    )

    kind: Literal["ulr"] = "ulr"
    """ulr: unified likelihood ratio."""
    form: Literal["proven", "published"] = "proven"
    """What protects the gradient: the section protection (proven) or the estimate's own noise (published). proven: a
    plain estimate of the gradient, with clipped records and central noise. published: Algorithm 1 of the DP-ULR paper,
    each module clipped separately; the paper's guarantee is stated as a claim, together with the fact that none
    holds."""
    copies: int = Field(1, ge=1, le=MOST_COPIES)
    """Noisy copies of every record for each module (K in the paper); an antithetic pair counts as one."""
    module_copies: tuple[int, ...] = ()
    """Copies for each module with parameters, in their order, in place of `copies`. A copy costs the passes through the
    modules after its own, so late modules may have many."""
    sigma: float = Field(0.1, gt=0.0)
    """Standard deviation of the noise on a module's output; its upper limit if the published controller sets it."""
    reduction: Reduction | None = None
    """Reduction of variance: antithetic pairs (proven form's default), the loss without noise as a baseline
    (clean-loss), the mean of a record's other copies as a baseline (leave-one-out), none (published form's)."""
    directions: Directions = "independent"
    """Directions of a record's copies: independent, or orthogonal in groups of up to as many copies as the module has
    outputs. Orthogonal copies of fixed length vary less, and draw one number for each output rather than one for each
    copy. There are then at most as many antithetic pairs as the module has outputs: they leave no variance of a linear
    loss. The guarantee of the proven form is the same."""
    shape: Literal["isotropic", "matched"] = "isotropic"
    """Covariance of the noise of a record: isotropic, or matched to its Jacobian if the module's parameters act at many
    positions (convolutions, linear modules on sequences), which lowers the variance. Other modules keep isotropic
    noise. The guarantee of the proven form is the same."""
    noise: Literal["digital", "device"] = "digital"
    """Where the noise on the outputs comes from: a digital generator, or the device, whose law must be Gaussian and
    whose readings are scaled to sigma."""
    clip: Literal["joint", "module"] = "joint"
    """How protection.kind = 'record' clips: a record's contribution over all modules to clip_norm, or each module's to
    clip_norm / sqrt(modules)."""
    rows_per_pass: int | None = Field(None, ge=1)
    """Most noisy rows (records times copies times modules) that go through the model together; None for one copy of all
    records for each module. Fewer take less memory; the result is the same up to rounding."""
    target_std: float = Field(4.0, gt=0.0)
    """sigma_0 of the published form: standard deviation over C that its noise should have in every direction."""
    clip_norm: float = Field(1.0, gt=0.0)
    """C of the published form, for each module separately."""
    remedy: Literal["none", "parameters", "extra-noise"] = "extra-noise"
    """What the published form does about a batch's noise, which is never of full rank (appendix A.4): refuse (none),
    put the noise on the parameters, or add noise that completes its covariance."""

    @property
    def variance_reduction(self) -> Reduction:
        """`reduction`, or the default of the form."""
        return self.reduction or ("none" if self.form == "published" else "antithetic")

    def copies_of(self, modules: int) -> tuple[int, ...]:
        """Return K of each module with parameters; raise ConfigError unless `module_copies` has one for each."""
        found = self.module_copies or (self.copies,) * modules
        if len(found) != modules:
            raise ConfigError(
                "configuration",
                "trainer.module_copies",
                f"holds {len(found)} numbers for {modules} modules with parameters; give one for each, or copies",
            )
        return found

    def uses_device(self, protection: ProtectionSection) -> bool:
        """With device noise on the outputs or on the sum."""
        return "device" in (self.noise, protection.noise)

    @model_validator(mode="after")
    def _check_estimate(self) -> Self:
        if any(copies < 1 for copies in self.module_copies):
            raise ValueError(
                f"module_copies = {list(self.module_copies)} holds a number below 1; every module needs a copy"
            )
        if any(copies > MOST_COPIES for copies in self.module_copies):
            raise ValueError(
                f"module_copies = {list(self.module_copies)} holds a number above {MOST_COPIES:,}, at which no step "
                "would end; lower it"
            )
        if self.variance_reduction == "leave-one-out" and min(self.module_copies or (self.copies,)) < 2:
            key = "module_copies holds 1" if self.module_copies else "copies = 1"
            raise ValueError(f"reduction = 'leave-one-out' needs other copies, but {key}; take at least 2")
        if self.form == "published" and self.variance_reduction != "none":
            raise ValueError(
                f"reduction = {self.reduction!r} changes the noise that form = 'published' relies on; leave it out"
            )
        if self.form == "published" and (self.directions, self.shape) != ("independent", "isotropic"):
            raise ValueError(
                "directions and shape belong to form = 'proven'; the published form relies on independent isotropic "
                "noise; leave them out"
            )
        if self.form == "published" and self.clip != "joint":
            raise ValueError(
                "clip = 'module' belongs to form = 'proven'; the published form always clips by module"
            )
        return self

    def check(self, run: Any) -> None:
        """Refuse a protection of the published form."""
        if self.form == "published" and run.protection.protects != "nothing":
            raise BadKey(
                "protection.kind",
                f"{run.protection.kind!r} is not for trainer.form = 'published', which brings its own noise; "
                "use 'none', or trainer.form = 'proven'",
            )
