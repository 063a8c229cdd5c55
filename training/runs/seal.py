"""What a run folder held when a checkpoint was written, so that files which were changed since are noticed.

A checkpoint is one safetensors file; its facts stand as JSON in the header. The `Seal` among them covers what a resumed
run, an evaluation or a statement of guarantees reads besides the checkpoint itself:

| file | what the seal holds | what is legal later |
| --- | --- | --- |
| config.json, components, baseline, labels | digest of the content, or that there is none | the same content |
| metrics.jsonl | length and digest | more lines behind: a run that was killed after an epoch's line |
| ledger.jsonl | number of lines and the last digest | more lines behind: steps paid for after the checkpoint |
| the folder (release mode) | its inode number | the same: a copy has another |

Labels are drawn after the first checkpoint, which is sealed anew right behind them; until then a kill may leave labels
that no seal knows. The digest of the facts covers the seal, the step, the running sums and the digest of the tensors.
No digest is keyed: they find accidents and careless edits, not an adversary who computes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from accounting.ledger.journal import Position
from opusim.files import parse_json, require_regular
from training.errors import RunFolderError
from training.runs.storage import digest_of

HEADER_KEY = "opusim"
SCHEMA_VERSION = 2
UNSEALED_VERSION = 1
"""Schema of checkpoints whose digest covered the tensors only."""
REMEDY = "delete it to go on from the checkpoint before it"


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What stood beside a checkpoint.

    Attributes:
        files: Digest of each file that never changes, by its name; None for a file that is not there.
        metrics_bytes: Length of the metrics.
        metrics_digest: Of these bytes.
        ledger: How far the ledger went.
        inode: Of the folder, in release mode; else None.
    """

    files: Mapping[str, str | None]
    metrics_bytes: int
    metrics_digest: str
    ledger: Position
    inode: int | None

    def to_json(self) -> dict[str, Any]:
        """As a mapping of JSON."""
        return {
            "files": dict(self.files),
            "metrics": {"bytes": self.metrics_bytes, "digest": self.metrics_digest},
            "ledger": self.ledger.to_json(),
            "inode": self.inode,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """What `to_json` wrote."""
        metrics = content["metrics"]
        return cls(
            files=content["files"],
            metrics_bytes=metrics["bytes"],
            metrics_digest=metrics["digest"],
            ledger=Position.from_json(content["ledger"]),
            inode=content["inode"],
        )


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts of a checkpoint, without its tensors.

    Attributes:
        step: Steps done.
        progress: The engine's running sums and the usage of the device, as JSON.
        tensors: Digest of the tensors.
        seal: What stood beside it; None in a checkpoint that was written before there were seals.
    """

    step: int
    progress: Mapping[str, Any]
    tensors: str
    seal: Seal | None

    @property
    def digest(self) -> str:
        """Of all facts, and so of the whole checkpoint."""
        return facts_digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The facts without their own digest."""
        return {
            "schema_version": UNSEALED_VERSION if self.seal is None else SCHEMA_VERSION,
            "step": self.step,
            "progress": dict(self.progress),
            "tensors": self.tensors,
            "seal": None if self.seal is None else self.seal.to_json(),
        }

    def to_metadata(self) -> dict[str, str]:
        """As the file's header holds it."""
        return {HEADER_KEY: json.dumps({**self.to_json(), "digest": self.digest}, allow_nan=False)}


def facts_digest(facts: Mapping[str, Any]) -> str:
    """BLAKE2b of a mapping of JSON, whatever the order of its keys."""
    content = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return digest_of(content)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Name of the checkpoint of a step; names sort by step."""
    return folder / f"step-{step:010d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def read_header(path: Path) -> Header:
    """Read the facts of a checkpoint and check their digest; the tensors are not looked at.

    Raises:
        RunFolderError: The file is missing, cut, damaged or of another schema.
    """
    try:
        require_regular(path)  # safetensors would wait for a named pipe
        with safe_open(path, framework="np") as file:
            facts = parse_json((file.metadata() or {})[HEADER_KEY])
        version, digest = facts["schema_version"], facts.pop("digest")
        if version not in (UNSEALED_VERSION, SCHEMA_VERSION):
            raise RunFolderError(
                f"{path}: schema_version {version!r} is not {SCHEMA_VERSION}; read it with the opusim that wrote it"
            )
        unsealed = version == UNSEALED_VERSION
        header = Header(
            step=facts["step"],
            progress=facts["progress"],
            tensors=digest if unsealed else facts["tensors"],
            seal=None if unsealed else Seal.from_json(facts["seal"]),
        )
    except RunFolderError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is not a readable checkpoint ({error}); {REMEDY}") from error
    if not unsealed and (
        facts_digest(facts) != digest or path.name != checkpoint_path(path, header.step).name
    ):
        raise RunFolderError(
            f"{path} is damaged (its header does not match its digest or its name); {REMEDY}"
        )
    return header
