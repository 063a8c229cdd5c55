"""The save of a private loop: what `make_private(..., resume=True)` resumes from.

A file of torch holds the content, another such file in bytes, and a sealed JSON document
(`opusim.training.runs.storage`) with the digests of the content and of the loop's settings, the length of the ledger
and the inode of a release's folder. What is written is read back first, so that a value that cannot be read again never
replaces a good save. Values of numpy are kept as bytes, since torch reads none back.
"""

from __future__ import annotations

import io
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opusim.training.private_loop.folder import SETTINGS_FILE
from torch import Tensor

from opusim import checks
from opusim.accounting.journal import Position
from opusim.files import parse_json, read_bytes, require_regular, write_file
from opusim.training.errors import RunFolderError
from opusim.training.runs.storage import digest_of, sealed, unsealed, warn_unsealed

CHECKPOINT_FILE = "private.pt"
VERSION = 2
_WITHOUT_DIGEST = 1
_REMEDY = "restore it from a copy"
_NUMPY = "opusim.numpy"
"""The only key of a mapping that stands for a value of numpy."""


def write_save(folder: Path, state: Mapping[str, Any], *, ledger: Position, bound: bool) -> None:
    """Replace the save in a folder.

    Args:
        folder: The folder of the private loop.
        state: What a resumed loop needs, by name.
        ledger: How far the ledger reaches.
        bound: Whether the loop may only be resumed in this very folder.

    Raises:
        TypeError: A value could not be read back; the message names it, and the last save is kept.
        OSError: The file could not be written; the last save is kept.
    """
    content = io.BytesIO()
    try:
        _write_readable(_encoded(state), content)
    except Exception as error:  # whatever a user's object raises
        is_endless = isinstance(error, RecursionError)  # such as a list that holds itself
        place = "a value that is nested too deep" if is_endless else _unreadable(state) or "the state"
        raise TypeError(
            f"save: {place} cannot be read back; give tensors, arrays, numbers, texts, and lists and mappings of "
            "these. The last save is kept"
        ) from error
    raw = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
    facts = sealed(
        {"content": digest_of(content.getbuffer())},
        ledger=ledger.to_json(),
        settings=digest_of(read_bytes(folder / SETTINGS_FILE)),
        inode=folder.stat().st_ino if bound else None,
    )
    file = io.BytesIO()
    torch.save({"version": VERSION, "facts": json.dumps(facts), "content": raw}, file)
    write_file(folder / CHECKPOINT_FILE, file.getbuffer())


def read_save(folder: Path) -> tuple[dict[str, Any], Position]:
    """Return the state in the last save of a folder, and how far the ledger reached.

    Raises:
        RunFolderError: There is none, it cannot be read or was changed, or the folder is a copy of that of a release.
    """
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        raise RunFolderError(f"folder {folder} has no save to resume from; start a new folder")
    try:
        require_regular(file)
        outer = torch.load(file, map_location="cpu", weights_only=True)
        version = outer["version"]
    except Exception as error:  # torch.load has no error of its own
        raise _unreadable_save(file, error) from error
    if version == _WITHOUT_DIGEST:
        state, ledger, inode = _without_digest(file, outer)
    elif version == VERSION:
        state, ledger, inode = _checked(file, outer)
    else:
        raise RunFolderError(f"{file} is of another version; resume it with the opusim that wrote it")
    if inode not in (None, folder.stat().st_ino):
        raise RunFolderError(
            f"folder {folder} is a copy, and no ledger counts what two copies release; resume in the folder "
            "where the loop was started, or start a new one"
        )
    return state, ledger


def _checked(file: Path, outer: Mapping[str, Any]) -> tuple[dict[str, Any], Position, int | None]:
    """Return state, ledger and inode of a save whose digests fit."""
    try:
        raw = outer["content"].numpy().data
        facts = {**parse_json(outer["facts"]), "content": digest_of(raw)}
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise _unreadable_save(file, error) from error
    _, seal = unsealed(file, facts, remedy=_REMEDY)
    settings = file.with_name(SETTINGS_FILE)
    if seal.get("settings") != digest_of(read_bytes(settings)):
        raise RunFolderError(f"{settings} is not the file that {file.name} was written under; {_REMEDY}")
    state = _decoded(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True))
    return state, Position.from_json(seal["ledger"]), seal["inode"]


def _without_digest(file: Path, state: dict[str, Any]) -> tuple[dict[str, Any], Position, int | None]:
    """Return state, ledger and inode of a save of a version before 0.3."""
    try:
        ledger, inode = Position.from_json(state["ledger"]), state["inode"]
    except (KeyError, ValueError, TypeError) as error:
        raise _unreadable_save(file, error) from error
    warn_unsealed(file)
    return state, ledger, inode


def _unreadable_save(file: Path, error: Exception) -> RunFolderError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return RunFolderError(f"{file} is not a readable save ({reason}); {_REMEDY}")


def _write_readable(value: Any, file: io.BytesIO) -> None:
    """Write a value and read it again, as a resumed loop will; raises whatever either raises."""
    torch.save(value, file)
    file.seek(0)
    torch.load(file, map_location="cpu", weights_only=True)


def _unreadable(value: Any, place: str = "") -> str | None:
    """Return the place and the value of the first part that cannot be read back, or None if all of it can."""
    try:
        _write_readable(_encoded(value), io.BytesIO())
    except Exception:  # whatever a user's object raises
        parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
        if isinstance(value, list | tuple):
            parts = enumerate(value)
        inner = (_unreadable(part, f"{place}[{key!r}]" if place else str(key)) for key, part in parts)
        return next((found for found in inner if found), f"{place} = {checks.short(value)}")
    return None


def _encoded(value: Any) -> Any:
    """Return a value with bytes for what numpy holds in it; itself if there is nothing of numpy."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject or value.dtype.names:
            return value  # which is refused
        raw = value.tobytes()
        kept = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        return {_NUMPY: (value.dtype.str, value.shape, isinstance(value, np.generic), kept)}
    return _mapped(value, _encoded)


def _decoded(value: Any) -> Any:
    """Return what `_encoded` was given."""
    if type(value) is dict and value.keys() == {_NUMPY}:
        kind, shape, is_scalar, raw = value[_NUMPY]
        array = np.zeros(shape, dtype=kind)
        if math.prod(shape) and array.itemsize:
            array = np.frombuffer(bytearray(raw.numpy()), dtype=kind).reshape(shape)
        return array[()] if is_scalar else array
    return _mapped(value, _decoded)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a list, tuple or mapping with its entries changed; itself if no entry changes, or if it is none."""
    if type(value) in (dict, OrderedDict):
        found = {key: change(each) for key, each in value.items()}
        return type(value)(found) if any(found[key] is not value[key] for key in found) else value
    if type(value) in (list, tuple):
        items = [change(each) for each in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value


def generator_states() -> list[Tensor]:
    """Return the states of torch's generators: that of the CPU, then one for each GPU."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Set what `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
