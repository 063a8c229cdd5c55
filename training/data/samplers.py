"""Draw batches: one class per sampling scheme, which states the law that an accountant's theorem requires.

A privacy theorem covers one sampling law. PyTorch's ``DataLoader(shuffle=True)`` draws shuffled epochs, which are not
Poisson sampling, and an epsilon computed for one does not hold for the other.

| scheme | batch size | a record in one step | two steps | two records in one step |
| --- | --- | --- | --- | --- |
| poisson | Binomial(n, q) | with probability q | independent | independent |
| poisson-min-batch | the same, given at least a minimum | slightly above q | independent | dependent |
| fixed-size | b | with probability b / n | independent | dependent |
| shuffled-epochs | b, the last one of an epoch may be smaller | once per epoch | dependent | dependent |
| disjoint-cyclic | b | every k-th step | fixed | fixed |
| full-batch | n | always | fixed | fixed |

A batch is a function of (seed, step), so a resumed run needs only the number of its next step. With ``seed=None`` each
batch comes from a fresh generator (PCG64) keyed with 128 bits of the operating system's entropy and cannot be repeated;
Poisson schemes then take their uniform numbers from the system's cryptographic generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch

from opusim import checks
from opusim.files import OwnProcess
from opusim.plugins import Deferred
from opusim.randomness.streams import SystemUniforms, derive_seed

special, stats = Deferred("scipy.special"), Deferred("scipy.stats")

OVERFLOW = 1e-9
"""Largest probability that a step needs more than its fixed number of physical batches, which its time reveals."""
FIXED_FROM = 1024
"""Expected records of a batch from which physical batches are fixed on a processor, too: they add a fifth of rows."""

_MIN_ACCEPTANCE = 1e-3
"""Smallest probability of acceptance: below it, a batch would take over 1,000 draws on average."""


@dataclass(frozen=True)
class Sampler(ABC):
    """Chooses the records of each step's batch.

    Attributes:
        n_records: Number of records to choose from, at least 1.
        seed: Fixes all batches, in [0, 2^64); ``None`` draws each from the operating system's entropy.
        scheme: Name of the law, by which an accountant finds its theorem.
        sampling_probability: Probability with which each record enters a batch, independently of all other records and
            steps; None if the scheme lacks this independence.
    """

    n_records: int
    seed: int | None = field(kw_only=True)
    sampling_probability: float | None = field(init=False, repr=False, default=None)
    _process: OwnProcess = field(default_factory=OwnProcess, init=False, repr=False, compare=False)

    scheme: ClassVar[str]

    def __post_init__(self) -> None:
        checks.integer(n_records=self.n_records, minimum=1)
        if self.seed is not None:
            checks.integer(seed=self.seed, minimum=0, maximum=2**64 - 1)

    @property
    @abstractmethod
    def expected_batch_size(self) -> float:
        """Mean number of records in a batch."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Number of steps in which each record is used once; on average, if batches are random."""

    def indices(self, step: int) -> torch.Tensor:
        """Return the distinct positions of one step's records, int64, one-dimensional; a batch may be empty.

        Raises TypeError or ValueError for a step that is no whole number from 0, and RuntimeError if there is no seed
        and this process was forked from the one that made the sampler.
        """
        if type(step) is not int or step < 0:
            checks.integer(step=step, minimum=0)
        if self.seed is None:
            self._process.require("a sampler without a seed")
        return torch.from_numpy(self._draw(step))

    @abstractmethod
    def _draw(self, step: int) -> np.ndarray:
        """Return the batch of a checked step, int64."""

    def _generator(self, index: int) -> np.random.Generator:
        """Return the generator of one step or epoch, keyed with the seed or with 128 fresh bits of entropy."""
        return np.random.default_rng(None if self.seed is None else derive_seed(self.seed, "sampler", index))


@dataclass(frozen=True)
class PoissonSampler(Sampler):
    """Each record enters each batch with probability q, independently of all other records and steps.

    The batch size is Binomial(n, q). An empty batch is valid: the trainer takes the step nevertheless. Uniform
    numbers of 53 bits are compared with q, so the realised probability is within 2^-53 of it.

    Attributes:
        sampling_probability: q, above 0 and at most 1.
    """

    sampling_probability: float = field()  # given here, a constant of the other schemes

    scheme: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)

    @property
    def expected_batch_size(self) -> float:
        """The mean of the law: n q."""
        return self.n_records * self.sampling_probability

    @property
    def steps_per_epoch(self) -> int:
        """The nearest whole number to 1 / q: each record is used about once on average."""
        return max(1, round(1 / self.sampling_probability))

    def _draw(self, step: int) -> np.ndarray:
        return self._one_batch(self._generator(step))

    def _one_batch(self, generator: np.random.Generator) -> np.ndarray:
        return np.flatnonzero(self._uniforms(generator) < self.sampling_probability)

    def _uniforms(self, generator: np.random.Generator) -> np.ndarray:
        """Draw one number of 53 bits in [0, 1) per record; without a seed, from the system's generator."""
        source = SystemUniforms() if self.seed is None else generator
        return source.random(self.n_records)


@dataclass(frozen=True)
class PoissonMinBatchSampler(PoissonSampler):
    """Poisson sampling, repeated until the batch has at least `min_batch_size` records.

    This is the rejection step of DP-ULR (Algorithm 1). Given that event records are no longer independent, and theorems
    about Poisson sampling do not cover this law.

    Attributes:
        sampling_probability: q of the draw before rejection, above 0 and at most 1.
        min_batch_size: N_B, from 0 (plain Poisson sampling) to a size that a draw reaches with probability
            0.001 or more.
    """

    min_batch_size: int

    scheme: ClassVar[str] = "poisson-min-batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(min_batch_size=self.min_batch_size, minimum=0, maximum=self.n_records)
        if self.acceptance_probability < _MIN_ACCEPTANCE:
            raise ValueError(
                f"min_batch_size={self.min_batch_size} is reached with probability "
                f"{self.acceptance_probability:.2g} only (mean batch {super().expected_batch_size:g}); "
                "lower it or raise sampling_probability"
            )

    @property
    def acceptance_probability(self) -> float:
        """P(Binomial(n, q) >= N_B), the share of draws that are kept."""
        return _binomial_at_least(self.min_batch_size, self.n_records, self.sampling_probability)

    @property
    def expected_batch_size(self) -> float:
        """The mean of the law: n q P(Binomial(n - 1, q) >= N_B - 1) / P(Binomial(n, q) >= N_B)."""
        q = self.sampling_probability
        others_suffice = _binomial_at_least(self.min_batch_size - 1, self.n_records - 1, q)
        return self.n_records * q * others_suffice / self.acceptance_probability

    def _draw(self, step: int) -> np.ndarray:
        generator = self._generator(step)
        batch = self._one_batch(generator)
        while len(batch) < self.min_batch_size:
            batch = self._one_batch(generator)
        return batch


@dataclass(frozen=True)
class _SizedSampler(Sampler):
    """A scheme with a stated batch size.

    Attributes:
        batch_size: b, from 1 to `n_records`.
    """

    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(batch_size=self.batch_size, minimum=1, maximum=self.n_records)

    @property
    def expected_batch_size(self) -> float:
        """Every batch has b records."""
        return float(self.batch_size)


@dataclass(frozen=True)
class FixedSizeSampler(_SizedSampler):
    """Each batch is a uniformly random set of b records, without replacement and independent of other steps.

    A record is in a batch with probability b / n, but not independently of the other records: sampling without
    replacement has theorems of its own.
    """

    scheme: ClassVar[str] = "fixed-size"

    @property
    def steps_per_epoch(self) -> int:
        """The nearest whole number to n / b: each record is used about once on average."""
        return max(1, round(self.n_records / self.batch_size))

    def _draw(self, step: int) -> np.ndarray:
        return self._generator(step).choice(self.n_records, self.batch_size, replace=False, shuffle=False)


@dataclass(frozen=True)
class ShuffledEpochsSampler(_SizedSampler):
    """Each epoch cuts a new uniformly random order of the records into batches.

    PyTorch's ``DataLoader(shuffle=True)`` does the same. It is not Poisson sampling: each record is used exactly once
    per epoch, and no theorem of amplification by sampling covers it.

    The object keeps the order of the current epoch. Without a seed that order exists nowhere else, so a run resumed in
    the middle of an epoch draws a new one, and may use a record twice in that epoch or not at all.

    Attributes:
        batch_size: b, from 1 to `n_records`.
        drop_last: Whether an epoch leaves out its last ``n_records % batch_size`` records; otherwise they form a
            shorter batch.
    """

    drop_last: bool = False

    scheme: ClassVar[str] = "shuffled-epochs"
    _order: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def expected_batch_size(self) -> float:
        """The mean over an epoch: b, or less if the last batch is shorter."""
        return float(self.batch_size) if self.drop_last else self.n_records / self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """The ratio n / b, rounded down if the last batch is dropped, else up."""
        return self.n_records // self.batch_size if self.drop_last else -(-self.n_records // self.batch_size)

    def _draw(self, step: int) -> np.ndarray:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch not in self._order:
            self._order.clear()
            self._order[epoch] = self._generator(epoch).permutation(self.n_records)
        start = position * self.batch_size
        return self._order[epoch][start : start + self.batch_size].copy()


@dataclass(frozen=True)
class DisjointCyclicSampler(_SizedSampler):
    """The first b records, the next b, and so on, in the same order in every epoch.

    A record is used at the steps i, i + k, i + 2 k, ... and at no other, as the analysis of NoisyCGD (Theorem 2.8)
    requires, with n = k b. The remaining ``n_records % batch_size`` records are never used, because the theorem divides
    every batch by the same b. The order of the records must not depend on their values; ``split="index"`` of
    `opusim.training.data` puts them in random order.
    """

    scheme: ClassVar[str] = "disjoint-cyclic"

    @property
    def steps_per_epoch(self) -> int:
        """The theorem's k: n / b, rounded down."""
        return self.n_records // self.batch_size

    def _draw(self, step: int) -> np.ndarray:
        start = (step % self.steps_per_epoch) * self.batch_size
        return np.arange(start, start + self.batch_size)


@dataclass(frozen=True)
class FullBatchSampler(Sampler):
    """Every batch holds all records in their order: Poisson sampling with q = 1."""

    sampling_probability: float = field(init=False, repr=False, default=1.0)

    scheme: ClassVar[str] = "full-batch"

    @property
    def expected_batch_size(self) -> float:
        """Every batch has n records."""
        return float(self.n_records)

    @property
    def steps_per_epoch(self) -> int:
        """One step is an epoch."""
        return 1

    def _draw(self, step: int) -> np.ndarray:
        return np.arange(self.n_records)


SCHEMES: dict[str, type[Sampler]] = {
    kind.scheme: kind
    for kind in (
        PoissonSampler,
        PoissonMinBatchSampler,
        FixedSizeSampler,
        ShuffledEpochsSampler,
        DisjointCyclicSampler,
        FullBatchSampler,
    )
}
"""Every sampling scheme by name."""


@dataclass(frozen=True, kw_only=True)
class PhysicalBatches:
    """How each process runs its part of a step's records: forward and backward passes on a few of them at a time.

    Attributes:
        size: Records in a pass at most; None for all.
        count: How often a pass runs in each step, whatever was drawn: rows of weight zero fill the passes up to `size`.
            None if only the drawn records run.
    """

    size: int | None = None
    count: int | None = None

    @classmethod
    def of_steps(
        cls,
        expected: float,
        *,
        records: int | None,
        processes: int,
        on_card: bool,
        fixed: bool | None = None,
        size: int | None = None,
    ) -> PhysicalBatches:
        """Return how the records of Poisson batches of an expected size, of all processes, run in passes.

        A pass has at most `size` records. With `fixed` every step runs a fixed number of rows; None means so on a card
        or from `FIXED_FROM` records. `records` is the number to draw from, None if it is private.
        """
        if not (on_card or round(expected) >= FIXED_FROM if fixed is None else fixed):
            return cls(size=size)
        return cls.fixed(most_records(expected, records=records, processes=processes), size=size)

    @classmethod
    def fixed(cls, most: int, *, size: int | None) -> PhysicalBatches:
        """Return the smallest equal batches of at most `size` records (None for any) that hold `most` >= 1."""
        count = 1 if size is None else -(-most // size)
        return cls(size=-(-most // count), count=count)

    def rows(self, records: int) -> int:
        """Return the rows that run for a number of drawn records; more batches run if they do not fit."""
        if self.count is None or self.size is None:
            return records
        return self.size * max(self.count, -(-records // self.size))

    def most(self, expected: float, *, records: int | None, processes: int) -> int:
        """Return a public bound on a step's records in one process, exceeded with probability at most `OVERFLOW`."""
        return max(most_records(expected, records=records, processes=processes), self.rows(0))

    def expected_rows(self, records: float) -> float:
        """Return a step's mean number of rows from that of its records, for the forecast of device usage."""
        return records if self.count is None or self.size is None else float(self.size * self.count)


def never_filled(expected: float, divisor: float, *, rate: str, constant: str) -> str | None:
    """Warn in a line of Poisson batches of far fewer records than the constant (`divisor`) that divides their sum."""
    if expected >= divisor / 2:
        return None
    return (
        f"{rate}: batches never fill, since {expected:.4g} are expected in one and its sum is divided by {divisor:g} "
        f"({constant}); raise {rate}, or lower {constant} to what is expected"
    )


def most_records(expected: float, *, records: int | None, processes: int) -> int:
    """Return a bound on a step's records in one of some processes, exceeded with probability at most `OVERFLOW`.

    The step draws Binomial(n, b / n) of `records` n. If n is private, None, Poisson(b) replaces that law: its upper
    tail is above that of each such binomial law (Anderson and Samuels 1967), so that the bound reveals nothing of n.
    """
    law = stats.poisson(expected) if records is None else stats.binom(records, min(expected / records, 1.0))
    return max(1, -(-int(law.isf(OVERFLOW)) // processes))


def make_sampler(
    scheme: str, n_records: int, batch_size: int | None, seed: int | None, **options: Any
) -> Sampler:
    """Make the sampler of a named scheme.

    Args:
        scheme: A key of `SCHEMES`.
        n_records: Number of records to choose from, at least 1.
        batch_size: From 1 to `n_records`. Poisson schemes sample each record with probability
            ``batch_size / n_records``, so this is their mean batch size (before rejection); ``full-batch``
            takes ``None`` or `n_records`.
        seed: Fixes all batches, in [0, 2^64); ``None`` draws each from the operating system's entropy.
        **options: Further options of the scheme: ``min_batch_size`` (poisson-min-batch), ``drop_last``
            (shuffled-epochs). ``None`` counts as not given.

    Raises:
        TypeError: An option that the scheme needs is missing, or it has no such option.
        ValueError: The scheme is unknown, or a number is out of range.

    Example:
        >>> sampler = make_sampler("poisson", 54_000, 256, seed=0)
        >>> sampler.scheme, sampler.expected_batch_size, sampler.steps_per_epoch
        ('poisson', 256.0, 211)
    """
    checks.choice(SCHEMES, scheme=scheme)
    checks.integer(n_records=n_records, minimum=1)
    kind = SCHEMES[scheme]
    given = {name: value for name, value in options.items() if value is not None}
    # the scheme's options are its fields other than size and seed
    size_fields = ("n_records", "seed", "sampling_probability", "batch_size")
    own = {f.name: f for f in fields(kind) if f.init and f.name not in size_fields}
    for name in given:
        if name not in own:
            takes = ", ".join(own) or "none"
            raise TypeError(f"scheme {scheme!r} has no option {name!r}; its options: {takes}")
    for name, option in own.items():
        if option.default is MISSING and name not in given:
            raise TypeError(f"scheme {scheme!r} needs the option {name!r}")
    # the argument that sets the size
    if kind is FullBatchSampler:
        if batch_size not in (None, n_records):
            raise ValueError(
                f"batch_size = {batch_size}: must be None or n_records = {n_records} for full-batch; "
                "leave it out, or choose another scheme"
            )
    elif batch_size is None:
        raise TypeError(f"batch_size = None: scheme {scheme!r} needs a batch size")
    else:
        checks.integer(batch_size=batch_size, minimum=1, maximum=n_records)
        if issubclass(kind, PoissonSampler):
            given["sampling_probability"] = batch_size / n_records
        else:
            given["batch_size"] = batch_size
    return kind(n_records=n_records, seed=seed, **given)


def _binomial_at_least(least: int, trials: int, probability: float) -> float:
    """Return P(Binomial(trials, probability) >= least)."""
    return 1.0 if least <= 0 else float(special.bdtrc(least - 1, trials, probability))
