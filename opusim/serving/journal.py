"""The use of a served device: one JSON line for each client and minute of work, and their sums."""

from __future__ import annotations

import datetime
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.dates import DAILY, AutoDateLocator, DateFormatter, date2num
from matplotlib.figure import Figure

from opusim.devices.usage import Usage
from opusim.errors import ConfigError
from opusim.files import append_whole_line, make_private_folder, open_to_read, parse_json
from opusim.tables import blank_figure, duration, energy

_SCHEMA = 1


def journal_file(name: str) -> Path:
    """Return where a device's journal is by default: opusim/NAME.usage.jsonl in $XDG_STATE_HOME or ~/.local/state."""
    chosen = os.environ.get("XDG_STATE_HOME")
    state = Path(chosen) if chosen else Path.home() / ".local" / "state"
    return state / "opusim" / f"{name}.usage.jsonl"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a client used between its last entry and this one.

    Attributes:
        time: when it was written, ISO 8601, UTC; now by default.
        device: the served device.
        user: whose key was shown.
        run: what the client called its run.
        calls: calls that were answered, or that ended with their client or the server.
        used: frames, device time and energy, as the description gives them.
        busy_s: seconds that the server worked for it; for a simulation, the simulation's own time.
    """

    time: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )
    device: str
    user: str
    run: str
    calls: int
    used: Usage
    busy_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return {"schema": _SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Entry:
        """Return what `to_json` wrote; KeyError, TypeError or ValueError if it is no entry."""
        values = dict(content)
        if values.pop("schema") != _SCHEMA:
            raise ValueError("another version's entry")
        entry = cls(**{**values, "used": Usage.from_json(values["used"])})
        datetime.datetime.fromisoformat(entry.time)
        return entry


class Journal:
    """Appends entries to a file, one whole line each; its folder is made, closed to other users."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.parent.is_dir():
                make_private_folder(path.parent)
            append_whole_line(path, b"")
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); name another file"
            raise ConfigError("--journal", str(path), reason) from error

    def write(self, entry: Entry) -> None:
        """Append an entry; what a failed or killed write left of an earlier one is removed."""
        append_whole_line(self.path, json.dumps(entry.to_json()).encode() + b"\n")


def read_journal(path: Path) -> list[Entry]:
    """Read a journal (ConfigError: a line is no entry); a last line that a crash cut off is left out."""
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); the server writes it, or name one with --journal"
        raise ConfigError("journal", str(path), reason) from error
    entries = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entries.append(Entry.from_json(parse_json(line)))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(str(path), f"line {number}", "is no entry; remove the line") from None
    return entries


USAGE_COLUMNS = ("user", "run", "calls", "frames", "device time", "energy", "with the host", "server's time")


def usage_rows(entries: Iterable[Entry]) -> list[tuple[str, ...]]:
    """Return a row for each user and run, in descending order of device time, and one for all."""
    sums: dict[tuple[str, str], tuple[int, Usage, float]] = {}
    for entry in entries:
        for key in ((entry.user, entry.run), ("all", "")):
            calls, used, busy_s = sums.get(key, (0, Usage(), 0.0))
            sums[key] = calls + entry.calls, used + entry.used, busy_s + entry.busy_s
    total = sums.pop(("all", ""), None)
    ordered = sorted(sums.items(), key=lambda item: -item[1][1].seconds)
    if total is not None:
        ordered.append((("all", ""), total))
    return [
        (
            *key,
            f"{calls:,}",
            f"{used.frames:,}",
            duration(used.seconds),
            energy(used.joules),
            duration(used.seconds + used.host_seconds),
            duration(busy_s),
        )
        for key, (calls, used, busy_s) in ordered
    ]


_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


def usage_figure(entries: Iterable[Entry]) -> Figure:
    """Draw device time, the host's included, of each user and day (UTC), stacked; days without use are empty."""
    seconds: dict[str, dict[datetime.date, float]] = defaultdict(lambda: defaultdict(float))
    for entry in entries:
        day = datetime.datetime.fromisoformat(entry.time).astimezone(datetime.UTC).date()
        seconds[entry.user][day] += entry.used.seconds + entry.used.host_seconds
    days = sorted({day for of_user in seconds.values() for day in of_user})
    users = sorted(seconds, key=lambda user: -sum(seconds[user].values()))
    heights = np.array([[seconds[user].get(day, 0.0) for day in days] for user in users])
    largest = float(heights.sum(axis=0).max()) if days else 0.0
    unit, size = next((each for each in _UNITS if largest >= each[1]), _UNITS[-1])
    figure = blank_figure(8, 3.5)
    axes = figure.add_subplot()
    below = np.zeros(len(days))
    for user, of_user in zip(users, heights / size, strict=True):
        axes.bar(date2num(days), of_user, bottom=below, width=0.8, label=user)
        below += of_user
    axes.set_ylim(0, 1.08 * largest / size or 1.0)
    axes.set_xlabel("day, UTC")
    axes.set_ylabel(f"device time, host included [{unit}]")
    if days:
        locator = AutoDateLocator(minticks=1, maxticks=10, interval_multiples=False)
        locator.intervald[DAILY] = [1, 2, 3, 7, 14]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(DateFormatter("%d %b %Y" if len(days) == 1 else "%d %b"))
        axes.set_xlim(date2num(days[0]) - 0.7, date2num(days[-1]) + 0.7)
        axes.legend(title="user", loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no use in this time", ha="center", va="center", transform=axes.transAxes)
    return figure
