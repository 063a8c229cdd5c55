"""The step log of zeroth-order training: enough to rebuild the final parameters from the first ones.

A file of fixed-size records behind a header. Bytes, little-endian:

    8   magic "OPUSIMZO"
    4   length of the header
    ..  the header, JSON
    16  digest of the header
    then for each step
    4   eta, float32
    12  for each direction: its seed (8), its scalar (float32)
    8   digest of the digest before, and of this record

The digests (BLAKE2b) chain the records: one that is changed, moved, removed or put in is found at its place. Beside
the log stands its mark, replaced at each checkpoint: the steps so far, the last digest, and a digest of the parameters,
so that a log which was cut is found too, and a replay knows whether it arrived. Nobody holds a key: the digests find
accidents and careless edits, not somebody who computes them anew.

A log holds nothing that depends on the data but the noised scalars. Directions' seeds are public.

What a step did to the parameters: its rate, and a seed and a scalar for each direction.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from opusim.files import open_to_write, parse_json, read_head, write_all
from training.errors import RunFolderError
from training.networks.base import parameters_digest, tensor_facts
from training.runs.checkpoints import read_tensors
from training.runs.storage import read_json, write_json
from training.zeroth_order.perturbation import InPlacePerturbation, StepEntry

MAGIC = b"OPUSIMZO"
SCHEMA_VERSION = 1
LOG_FILE = "steps.zo"
BASE_FILE = "base.safetensors"
_DIGEST, _HEADER_DIGEST = 8, 16


class StepLogCorrupt(RunFolderError):
    """A step log was changed, cut or reordered; or it does not belong to the parameters that it is replayed on."""


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """What all steps of a log have in common.

    Attributes:
        root: Seed of the directions' seeds.
        perturbation: phi.
        directions: n.
        weight_decay: lambda.
        settle_every: Of the perturbation.
        tensors: Name, shape and type of each tensor, in the order of their numbers.
        base: Digest of the parameters before the first step.
    """

    root: int
    perturbation: float
    directions: int
    weight_decay: float
    settle_every: int
    tensors: list[list[Any]]
    base: str

    def to_bytes(self) -> bytes:
        """Magic, length, JSON and digest."""
        content = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, allow_nan=False).encode()
        return MAGIC + struct.pack("<I", len(content)) + content + _hashed(content, size=_HEADER_DIGEST)

    @property
    def record_size(self) -> int:
        """Bytes of a step."""
        return 4 + 12 * self.directions + _DIGEST


class StepLog:
    """Appends steps. One writer; the run folder's lock sees to that.

    Args:
        path: The file; a new one is begun, an old one goes on behind its first `steps` records.
        header: Of the run; an old log must have the same.
        steps: Steps that the run has done.

    Raises:
        StepLogCorrupt: The old log is damaged, too short, or of another run.
    """

    def __init__(self, path: Path, header: LogHeader, *, steps: int) -> None:
        self.path = path
        self.header, self.steps = header, steps
        if not steps:
            content = header.to_bytes()
            self._descriptor = open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            write_all(self._descriptor, content)
            self._digest = content[-_HEADER_DIGEST:]
            return
        self.header, start = read_header(path)
        if self.header != header:
            raise StepLogCorrupt(f"{path}: is the log of another run; restore it from a copy")
        found = list(_records(path, self.header, start, _first_digest(path, start), at_most=steps))
        if len(found) < steps:
            raise StepLogCorrupt(
                f"{path}: holds {len(found)} of the {steps} steps done; restore it from a copy"
            )
        self._digest = found[-1][1]
        self._descriptor = open_to_write(path, os.O_WRONLY)
        end = start + steps * self.header.record_size
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)

    def append(self, entry: StepEntry) -> None:
        """Write a step; `mark` has it on disk for good."""
        body = _body(entry)
        self._digest = _hashed(self._digest, body, size=_DIGEST)
        write_all(self._descriptor, body + self._digest)
        self.steps += 1

    def mark(self, tensors: Mapping[str, Tensor]) -> None:
        """Sync the log and say beside it how far it goes and where it leads.

        Args:
            tensors: The parameters as they are now.
        """
        os.fsync(self._descriptor)
        write_json(
            mark_file(self.path),
            {
                "schema_version": SCHEMA_VERSION,
                "steps": self.steps,
                "digest": self._digest.hex(),
                "parameters": parameters_digest(tensors),
            },
        )

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)


@dataclass(frozen=True, kw_only=True)
class LogContent:
    """A step log as read back.

    Attributes:
        header: What all steps have in common.
        entries: The steps.
        parameters: Digest of the parameters behind the last of them, where the mark tells; else None.
    """

    header: LogHeader
    entries: list[StepEntry]
    parameters: str | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a log and its mark.

        Raises:
            StepLogCorrupt: It was changed, cut or reordered; the message names file and step.
        """
        header, start = read_header(path)
        found = list(_records(path, header, start, _first_digest(path, start)))
        entries = [entry for entry, _ in found]
        parameters = None
        if mark_file(path).exists():
            mark = _read_mark(mark_file(path))
            steps = mark["steps"]
            if len(entries) < steps:
                raise StepLogCorrupt(
                    f"{path}: ends behind step {len(entries)}, but {mark_file(path).name} counts {steps}; it was cut"
                )
            if steps and found[steps - 1][1].hex() != mark["digest"]:
                raise StepLogCorrupt(f"{path}: step {steps} is not the one that {mark_file(path).name} names")
            entries, parameters = entries[:steps], mark["parameters"]
        return cls(header=header, entries=entries, parameters=parameters)


def mark_file(path: Path) -> Path:
    """Where the mark of a log stands."""
    return path.with_suffix(".mark.json")


def read_header(path: Path) -> tuple[LogHeader, int]:
    """The header of a log, and where its records begin.

    Raises:
        StepLogCorrupt: It is none, or was changed.
    """
    try:
        content = read_head(path, 2**24)
    except OSError as error:
        raise StepLogCorrupt(f"{path}: cannot be read ({error.strerror}); give a step log") from error
    if content[:8] != MAGIC or len(content) < 12:
        raise StepLogCorrupt(f"{path}: is no step log; give {LOG_FILE} of a run folder")
    end = 12 + struct.unpack("<I", content[8:12])[0]
    if _hashed(content[12:end], size=_HEADER_DIGEST) != content[end : end + _HEADER_DIGEST]:
        raise StepLogCorrupt(f"{path}: the header was changed or cut; restore the file from a copy")
    values = parse_json(content[12:end])
    if values.pop("schema_version") != SCHEMA_VERSION:
        raise StepLogCorrupt(f"{path}: is of another schema; read it with the opusim that wrote it")
    return LogHeader(**values), end + _HEADER_DIGEST


def _records(
    path: Path, header: LogHeader, start: int, digest: bytes, *, at_most: float = math.inf
) -> Iterator[tuple[StepEntry, bytes]]:
    """Steps with their digests; a last record that a kill cut short is left out."""
    size, number = header.record_size, 0
    with path.open("rb") as file:
        file.seek(start)
        while number < at_most and len(record := file.read(size)) == size:
            number += 1
            body = record[:-_DIGEST]
            digest = _hashed(digest, body, size=_DIGEST)
            if digest != record[-_DIGEST:]:
                raise StepLogCorrupt(
                    f"{path}: step {number}: its digest does not fit: a record was changed, moved or removed; "
                    "restore the file from a copy"
                )
            (rate,) = struct.unpack("<f", body[:4])
            pairs = list(struct.iter_unpack("<Qf", body[4:]))
            yield (
                StepEntry(rate=rate, seeds=tuple(s for s, _ in pairs), scalars=tuple(v for _, v in pairs)),
                digest,
            )


def _body(entry: StepEntry) -> bytes:
    pairs = (struct.pack("<Qf", s, v) for s, v in zip(entry.seeds, entry.scalars, strict=True))
    return struct.pack("<f", entry.rate) + b"".join(pairs)


def _first_digest(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start - _HEADER_DIGEST)
        return file.read(_HEADER_DIGEST)


def _read_mark(path: Path) -> dict[str, Any]:
    mark = read_json(path)
    kinds = {"schema_version": int, "steps": int, "digest": str, "parameters": str}
    whole = isinstance(mark, dict) and all(type(mark.get(key)) is kind for key, kind in kinds.items())
    if not whole or mark["schema_version"] != SCHEMA_VERSION or mark["steps"] < 0:
        raise StepLogCorrupt(f"{path}: was changed, or is of another schema than {SCHEMA_VERSION}")
    return mark


def _hashed(*parts: bytes, size: int) -> bytes:
    state = hashlib.blake2b(digest_size=size)
    for part in parts:
        state.update(part)
    return state.digest()


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Where a step log led.

    Attributes:
        steps: How many were replayed.
        tensors: The parameters behind the last of them, by name.
        digest: Of these parameters.
        arrived: Whether they are, to the bit, those that the log's mark names; None where there is no mark.
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
    """Rebuild the parameters that a step log leads to.

    Args:
        path: A step log, or the run folder that holds one.
        base: The parameters that training began with, safetensors; None for the file beside the log. It may hold
            more tensors than were trained.
        on_step: Told how many steps are done, of how many.

    Raises:
        StepLogCorrupt: The log was changed, cut or reordered; the base is another; or the parameters at the end are
            not those of the mark.
    """
    log = Path(path) / LOG_FILE if Path(path).is_dir() else Path(path)
    content = LogContent.read(log)
    tensors = _base_tensors(content.header, Path(base) if base is not None else log.with_name(BASE_FILE))
    perturbation = InPlacePerturbation(
        list(tensors.values()),
        perturbation=content.header.perturbation,
        weight_decay=content.header.weight_decay,
    )
    for number, entry in enumerate(content.entries, start=1):
        perturbation.replay(entry)
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


def _base_tensors(header: LogHeader, path: Path) -> dict[str, Tensor]:
    """The first parameters, in the order of the log.

    Raises:
        StepLogCorrupt: They are not those that the log begins with.
    """
    held = read_tensors(path)
    names = [name for name, _, _ in header.tensors]
    missing = [name for name in names if name not in held]
    if missing:
        raise StepLogCorrupt(f"{path}: holds no {missing[0]}, which the log moves; give the run's own base")
    tensors = {name: held[name] for name in names}
    if tensor_facts(tensors) != header.tensors or parameters_digest(tensors) != header.base:
        raise StepLogCorrupt(f"{path}: is not what the log began with; give the run's own base")
    return {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
