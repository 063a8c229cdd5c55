"""What a search's folder remembers: what was asked, which payment it rests on, what was drawn, begun and scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from training.errors import RunFolderError
from training.runs.storage import read_json, write_json
from training.tuning.grid import Draw, draw_from_json, draw_to_json

STATE_FILE = "tuning.json"
SCHEMA_VERSION = 2


@dataclass(kw_only=True)
class SearchState:
    """A search as far as it got.

    Attributes:
        asked: Digest of the configuration, choices and mean, as plain values.
        payment: Number of the ledger's payment that this search rests on, from 1.
        draw: What was drawn after that payment.
        started: Numbers of the trials whose training was begun.
        scores: Noised score of each trial that is done.
    """

    asked: Mapping[str, Any]
    payment: int
    draw: Draw
    started: list[int]
    scores: dict[int, float]

    def write(self, folder: Path) -> None:
        """Replace the folder's state."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "asked": dict(self.asked),
            "payment": self.payment,
            "draw": draw_to_json(self.draw),
            "started": self.started,
            "scores": {str(number): score for number, score in self.scores.items()},
        }
        write_json(folder / STATE_FILE, content)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The folder's state; None if no search was begun there.

        Raises:
            RunFolderError: It cannot be read, was changed, or is of another schema.
        """
        file = folder / STATE_FILE
        if not file.exists():
            return None
        try:
            content = read_json(file)
            if content["schema_version"] != SCHEMA_VERSION:
                raise RunFolderError(
                    f"{file}: schema_version {content['schema_version']!r} is not {SCHEMA_VERSION}; "
                    "finish the search with the opusim that began it, or choose an empty folder"
                )
            return cls(
                asked=dict(content["asked"]),
                payment=int(content["payment"]),
                draw=draw_from_json(content["draw"]),
                started=[int(number) for number in content["started"]],
                scores={int(number): float(score) for number, score in content["scores"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, RunFolderError):
                raise
            raise RunFolderError(f"{file}: was changed ({error}); restore it from a copy") from error
