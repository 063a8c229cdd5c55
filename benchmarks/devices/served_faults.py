"""Do runs that share one served device under faults end like undisturbed ones, bit for bit?

Two training processes, two ranks and a calibration share one served simulation in ``experiment`` mode
(`tests.support.served_runs`). The server is killed, stopped and frozen; clients are killed; one user's network is slow
and breaks; a vandal shows wrong and expired keys and sends garbage, replayed and oversized messages. Each run and each
calibration is compared with the same one on a local device. The result is written every minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from benchmarks.results_file import save_results
from opusim.files import parse_json

NAME = "served_faults"
_EVERY_S = 60.0
_EXPECTED = {
    "wrong key": "does not know the key",
    "expired key": "expired on",
    "replayed": "replayed: call",
    "oversized": "oversized: ",
}
"""What the refusal of an attack says; no other attack is answered."""
_NO_SERVER = ("no answer from its server", "the server was stopped", "does not know this session")
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")


def summary(folder: Path) -> dict[str, Any]:
    """Return the counts of what a play noted so far."""
    path = folder / "notes.jsonl"
    notes = [parse_json(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    if not notes:
        return {}
    of = {
        kind: [note for note in notes if note["what"] == kind]
        for kind in ("fault", "attack", "run", "stop", "calibration", "victim")
    }
    faults = Counter(note["fault"] for note in of["fault"] + of["attack"])
    log = folder / "lab" / "server.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return {
        "minutes": round((notes[-1]["time"] - notes[0]["time"]) / 60, 1),
        "finished": notes[-1]["what"] == "end" and not any(notes[-1]["codes"]),
        "faults": dict(sorted(faults.items())),
        "runs": [
            _compared(user, [note for note in of["run"] if note["user"] == user])
            for user in sorted({note["user"] for note in of["run"]})
        ]
        + [_compared(kind, of[kind]) for kind in ("calibration", "victim")],
        "stops": dict(Counter(f"{note['run'].partition('-')[0]}: {note['error']}" for note in of["stop"])),
        "crashes": [note["text"] for note in notes if note["what"] == "crash"],
        "unexpected": [note for note in of["attack"] if not _as_expected(note)][:20],
        "stops_of_more_lines": sum("\n" in note["text"] for note in of["stop"]),
        "log_lines": len(lines),
        "log_lines_without_time": sum(_LOG_LINE.match(line) is None for line in lines),
    }


def _compared(name: str, notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many of some results equal the local ones, and in what the others differ."""
    different = [note["different"] for note in notes if note["different"]]
    counts = {"results": len(notes), "equal": len(notes) - len(different)}
    return {"who": name, **counts, "different": different[:5]}


def _as_expected(note: dict[str, Any]) -> bool:
    """Whether an attack was refused as it is to be, in one line, or met no server, or one that was started anew."""
    text, wanted = note["text"], _EXPECTED.get(note["fault"])
    if wanted is None:
        return not text
    return "\n" not in text and any(each in text for each in (wanted, *_NO_SERVER))


def main(minutes: float = 60.0, folder: Path | None = None) -> None:
    """Let faults happen for some minutes, and save what was noted every minute."""
    place = folder or Path(tempfile.mkdtemp())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.served_runs", str(place), str(60 * minutes)]
    play = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment)
    ended = None
    while ended is None:
        time.sleep(min(_EVERY_S, 20 * minutes))
        ended = play.poll()
        if found := summary(place):
            save_results(NAME, found)
    sys.exit(ended)


if __name__ == "__main__":
    typer.run(main)
