"""The save of a private loop: what `make_private(..., resume=True)` resumes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opusim.files import require_regular
from training.errors import RunFolderError

CHECKPOINT_FILE = "private.pt"
VERSION = 1


def read_save(folder: Path) -> dict[str, Any]:
    """Return the last save in a folder.

    Raises:
        RunFolderError: There is none, it cannot be read, or the folder is a copy of that of a release.
    """
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        raise RunFolderError(f"folder {folder} has no save to resume from; start a new folder")
    try:
        require_regular(file)
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        version, inode = state["version"], state["inode"]
    except Exception as error:  # torch.load has no error of its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RunFolderError(f"{file} is not a readable save ({reason}); restore it from a copy") from error
    if version != VERSION:
        raise RunFolderError(f"{file} is of another version; resume it with the opusim that wrote it")
    if inode not in (None, folder.stat().st_ino):
        raise RunFolderError(
            f"folder {folder} is a copy, and no ledger counts what two copies release; resume in the folder "
            "where the loop was started, or start a new one"
        )
    return state


def generator_states() -> list[Tensor]:
    """Return the states of torch's generators: that of the CPU, then one for each GPU."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Set what `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
