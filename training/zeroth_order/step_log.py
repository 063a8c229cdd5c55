"""The step log of zeroth-order training, which rebuilds the final parameters from the initial ones.

The log is a file of fixed-size records after a header. Bytes, little-endian:

    8   magic "OPUSIMZO"
    4   length of the header
    ..  the header, JSON
    16  digest of the header
    then for each step
    4   eta, float32
    12  for each direction: its seed (8), its scalar (float32)
    8   digest of the previous digest and this record

The digests (BLAKE2b) chain the records: one that is changed, moved, removed or inserted is found at its position. The
mark, a file next to the log that each checkpoint replaces, holds the number of steps, the last digest and a digest of
the parameters. It reveals a log that was cut, and lets a replay verify its result. The digests are not keyed: they
detect accidents and careless edits, not an adversary who recomputes them.

The noised scalars are all that the log contains of the data. The directions' seeds are public.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from opusim.files import AppendedFile, parse_json, read_head
from opusim.training.errors import RunFolderError
from opusim.training.networks.base import parameters_digest, tensor_facts
from opusim.training.runs.checkpoints import read_tensors
from opusim.training.runs.storage import read_json, require_unchanged, sealed, write_json
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, StepEntry

MAGIC = b"OPUSIMZO"
SCHEMA_VERSION = 1
LOG_FILE = "steps.zo"
BASE_FILE = "base.safetensors"
_DIGEST, _HEADER_DIGEST = 8, 16


class StepLogCorrupt(RunFolderError):
    """A step log was changed, cut or reordered, or belongs to parameters other than those it is replayed on."""


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """Common facts of all steps of a log.

    Attributes:
        root: Seed from which the directions' seeds derive.
        perturbation: phi.
        directions: n.
        weight_decay: lambda.
        settle_every: Steps after which half-precision parameters are settled.
        tensors: Name, shape and dtype of each tensor, in the order of their numbers.
        base: Digest of the parameters before the first step.
        rank: Rank of the directions in matrices, or None if all are full.
        at_once: Whether directions are evaluated at once, which perturbs no parameter.
    """

    root: int
    perturbation: float
    directions: int
    weight_decay: float
    settle_every: int
    tensors: list[list[Any]]
    base: str
    rank: int | None = None
    at_once: bool = False

    def to_bytes(self) -> bytes:
        """Return magic, length, JSON and digest; full directions have neither `rank` nor `at_once` in it."""
        facts = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        if self.rank is None:
            del facts["rank"], facts["at_once"]
        content = json.dumps(facts, allow_nan=False).encode()
        return MAGIC + struct.pack("<I", len(content)) + content + _hashed(content, size=_HEADER_DIGEST)

    @property
    def record_size(self) -> int:
        """Number of bytes of a step."""
        return 4 + 12 * self.directions + _DIGEST


class StepLog:
    """Appends steps to a log; the run folder's lock ensures that there is one writer.

    Args:
        path: The file: created if `steps` is 0, else continued after its first `steps` records.
        header: Facts of the run; an existing log must have the same.
        steps: Number of steps that the run has done.

    Raises:
        StepLogCorrupt: The existing log is damaged, too short, or of another run.
    """

    def __init__(self, path: Path, header: LogHeader, *, steps: int) -> None:
        self.path = path
        self.header = header
        if not steps:
            content = header.to_bytes()
            self._file = AppendedFile(path, end=0)
            self._file.append(content, end=0, sync=False)
            self._start, self._last = len(content), (0, content[-_HEADER_DIGEST:])
            return
        self.header, start = read_header(path)
        if self.header != header:
            raise StepLogCorrupt(f"{path}: is the log of another run; restore it from a copy")
        found = list(_records(path, self.header, start, at_most=steps))
        if len(found) < steps:
            raise StepLogCorrupt(
                f"{path}: holds {len(found)} of the {steps} steps done; restore it from a copy"
            )
        self._start, self._last = start, (steps, found[-1][1])
        self._file = AppendedFile(path, end=self._end)

    @property
    def steps(self) -> int:
        """Steps in the log."""
        return self._last[0]

    @property
    def _end(self) -> int:
        return self._start + self.steps * self.header.record_size

    def append(self, entry: StepEntry) -> None:
        """Write a step; it survives a power cut once `mark` returns.

        Raises OSError if it, or an earlier step, cannot be written, and RuntimeError in a forked process.
        """
        pairs = (struct.pack("<Qf", s, v) for s, v in zip(entry.seeds, entry.scalars, strict=True))
        body, (steps, before) = struct.pack("<f", entry.rate) + b"".join(pairs), self._last
        digest = _hashed(before + body, size=_DIGEST)
        self._file.append(body + digest, end=self._end, sync=False)
        self._last = steps + 1, digest

    def mark(self, tensors: Mapping[str, Tensor]) -> None:
        """Sync the log, then record its length and the current parameters in the mark; raise errors as `append`."""
        self._file.sync()
        steps, digest = self._last
        mark = {
            "schema_version": SCHEMA_VERSION,
            "steps": steps,
            "digest": digest.hex(),
            "parameters": parameters_digest(tensors),
        }
        write_json(mark_file(self.path), sealed(mark))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class LogContent:
    """A verified step log: common facts, the steps, and the mark's digest of the parameters after them, or None."""

    header: LogHeader
    entries: list[StepEntry]
    parameters: str | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and verify a log and its mark; StepLogCorrupt names file and step of a change, cut or reordering."""
        header, start = read_header(path)
        found = list(_records(path, header, start))
        entries = [entry for entry, _ in found]
        parameters = None
        if (own := mark_file(path)).exists():
            mark = read_json(own)
            kinds = {"schema_version": int, "steps": int, "digest": str, "parameters": str}
            whole = isinstance(mark, dict) and all(type(mark.get(key)) is kind for key, kind in kinds.items())
            if not whole or mark["schema_version"] != SCHEMA_VERSION or mark["steps"] < 0:
                raise StepLogCorrupt(f"{own}: was changed, or does not have schema version {SCHEMA_VERSION}")
            try:
                require_unchanged(own, mark, remedy="restore log and mark from a copy")
            except RunFolderError as error:
                raise StepLogCorrupt(str(error)) from error
            steps = mark["steps"]
            if len(entries) < steps:
                raise StepLogCorrupt(
                    f"{path}: ends after step {len(entries)}, but {mark_file(path).name} counts {steps}: it was cut; "
                    "restore the file from a copy"
                )
            if steps and found[steps - 1][1].hex() != mark["digest"]:
                raise StepLogCorrupt(
                    f"{path}: step {steps} is not the one that {mark_file(path).name} names; restore both from a copy"
                )
            entries, parameters = entries[:steps], mark["parameters"]
        return cls(header=header, entries=entries, parameters=parameters)


def mark_file(path: Path) -> Path:
    """Return the path of a log's mark."""
    return path.with_suffix(".mark.json")


def read_header(path: Path) -> tuple[LogHeader, int]:
    """Return the header of a log and the offset of its first record; raise StepLogCorrupt if it was changed."""
    try:
        content = read_head(path, 2**24)
    except OSError as error:
        raise StepLogCorrupt(f"{path}: cannot be read ({error.strerror}); give a step log") from error
    if content[:8] != MAGIC or len(content) < 12:
        raise StepLogCorrupt(f"{path}: is not a step log; give {LOG_FILE} of a run folder")
    end = 12 + struct.unpack("<I", content[8:12])[0]
    if _hashed(content[12:end], size=_HEADER_DIGEST) != content[end : end + _HEADER_DIGEST]:
        raise StepLogCorrupt(f"{path}: the header was changed or cut; restore the file from a copy")
    values = parse_json(content[12:end])
    if values.pop("schema_version") != SCHEMA_VERSION:
        raise StepLogCorrupt(f"{path}: has another schema version; read it with the opusim that wrote it")
    return LogHeader(**values), end + _HEADER_DIGEST


def _records(
    path: Path, header: LogHeader, start: int, *, at_most: float = math.inf
) -> Iterator[tuple[StepEntry, bytes]]:
    """Yield steps with their digests; skip a last record that is incomplete, as a killed process leaves it."""
    size, number = header.record_size, 0
    with path.open("rb") as file:
        file.seek(start - _HEADER_DIGEST)
        digest = file.read(_HEADER_DIGEST)
        while number < at_most and len(record := file.read(size)) == size:
            number += 1
            body = record[:-_DIGEST]
            digest = _hashed(digest + body, size=_DIGEST)
            if digest != record[-_DIGEST:]:
                raise StepLogCorrupt(
                    f"{path}: step {number}: its digest does not match: a record was changed, moved or removed; "
                    "restore the file from a copy"
                )
            (rate,) = struct.unpack("<f", body[:4])
            pairs = list(struct.iter_unpack("<Qf", body[4:]))
            yield (
                StepEntry(rate=rate, seeds=tuple(s for s, _ in pairs), scalars=tuple(v for _, v in pairs)),
                digest,
            )


def _hashed(content: bytes, *, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The parameters that a step log leads to.

    Attributes:
        steps: Number of replayed steps.
        tensors: The parameters after the last step, by name.
        digest: Digest of these parameters.
        arrived: Whether they equal, to the bit, those of the log's mark; None if there is no mark.
    """

    steps: int
    tensors: dict[str, Tensor]
    digest: str
    arrived: bool | None


def replay(
    path: str | Path,
    *,
    base: str | Path | None = None,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> Replayed:
    """Rebuild the final parameters from the initial ones and a step log, to the bit and without any data.

    Args:
        path: A step log, or the run folder that holds one.
        base: Safetensors file of the initial parameters; None for the one next to the log. It may hold tensors that
            were not trained.
        on_step: Called with the number of steps done and their total.

    Raises:
        StepLogCorrupt: The log was changed, cut or reordered, the base belongs to another run, or the final parameters
            differ from those of the mark.
    """
    log = Path(path) / LOG_FILE if Path(path).is_dir() else Path(path)
    content = LogContent.read(log)
    # 1. The initial parameters, in the order of the log.
    start = Path(base) if base is not None else log.with_name(BASE_FILE)
    held, names = read_tensors(start), [name for name, _, _ in content.header.tensors]
    missing = [name for name in names if name not in held]
    if missing:
        raise StepLogCorrupt(
            f"{start}: holds no {missing[0]}, which the log moves; give the base of the same run"
        )
    tensors = {name: held[name] for name in names}
    if tensor_facts(tensors) != content.header.tensors or parameters_digest(tensors) != content.header.base:
        raise StepLogCorrupt(f"{start}: is not what the log starts from; give the base of the same run")
    tensors = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
    # 2. The steps.
    perturbation = InPlacePerturbation(
        list(tensors.values()),
        perturbation=content.header.perturbation,
        weight_decay=content.header.weight_decay,
        rank=content.header.rank,
    )
    for number, entry in enumerate(content.entries, start=1):
        perturbation.replay(entry, at_once=content.header.at_once)
        on_step(number, len(content.entries))
    perturbation.settle()
    digest = parameters_digest(tensors)
    arrived = None if content.parameters is None else digest == content.parameters
    if arrived is False:
        raise StepLogCorrupt(
            f"{log}: its {len(content.entries)} steps lead to parameters {digest}, but the mark names "
            f"{content.parameters}; log, base or mark were changed"
        )
    return Replayed(steps=len(content.entries), tensors=tensors, digest=digest, arrived=arrived)
