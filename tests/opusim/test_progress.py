"""What a long command says on the way: a line with an estimate first, then one every ten seconds at most."""

import io
import itertools
import re
import time

import pytest

from opusim.progress import BETWEEN_LINES_S, Progress
from opusim.tables import duration, energy, table_text

LINE = re.compile(r"^audit: ([\d,]+) of ([\d,]+) trials, about ([\d.]+) (s|min|h|days) left$")
SET_UP = re.compile(r"^audit: ([\d,]+) of [\d,]+ trials; the time left is not known yet$")


class Clock:  # seconds that pass only when they are told to
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(total: int, seconds: float, *, done: int = 0) -> list[tuple[float, str]]:
    """When each line came, in work whose units take so many seconds each."""
    clock, stream = Clock(), io.StringIO()
    found: list[tuple[float, str]] = []
    with Progress("audit", "trials", stream=stream, clock=clock) as progress:
        progress.start(total, done=done)
        for _ in range(total - done):
            clock.now += seconds
            progress.advance()
            new = stream.getvalue().splitlines()[len(found) :]
            found += [(clock.now, line) for line in new]
    found += [(clock.now, line) for line in stream.getvalue().splitlines()[len(found) :]]
    return found


@pytest.mark.parametrize(("total", "seconds"), [(800, 0.5), (60, 7.0), (10_000, 0.03), (3, 400.0)])
def test_lines_come_at_once_and_then_ten_seconds_apart_at_least(total: int, seconds: float) -> None:
    found = lines_of(total, seconds)
    assert found[0][0] == pytest.approx(seconds)  # the first unit of work gives the first line
    *during, (_, last) = found
    assert last == f"audit: done after {duration(total * seconds)}"
    assert SET_UP.match(during[0][1]), during[0]
    assert during[1][0] == pytest.approx(2 * seconds)  # the second one tells the pace
    del during[0]
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(during)]
    assert all(gap >= BETWEEN_LINES_S for gap in gaps)
    assert all(gap <= BETWEEN_LINES_S + 2 * seconds for gap in gaps)
    for moment, line in during:
        match = LINE.match(line)
        assert match, line
        unit = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86_400.0}[match[4]]
        assert float(match[3]) * unit == pytest.approx(total * seconds - moment, rel=0.1, abs=0.06 * unit)
        assert int(match[1].replace(",", "")) == round(moment / seconds)


def test_short_work_says_nothing_and_resumed_work_is_estimated_by_its_pace() -> None:
    assert not lines_of(100, 0.03)
    (_, first), (_, second), *_ = lines_of(100, 100.0, done=90)
    assert first == "audit: 91 of 100 trials; the time left is not known yet"
    assert second == "audit: 92 of 100 trials, about 13.3 min left"


@pytest.mark.parametrize("first_s", [8.0, 114.0])
def test_set_up_in_the_first_unit_is_left_out_of_estimates(first_s: float) -> None:
    """A first step that compiles for seconds, or for minutes on a busy machine, and 119 of 0.4 s."""
    clock, stream = Clock(), io.StringIO()
    with Progress("audit", "trials", stream=stream, clock=clock) as progress:
        progress.start(120)
        for number in range(120):
            clock.now += 0.4 if number else first_s
            progress.advance()
    first, second, third, *_ = stream.getvalue().splitlines()
    assert first == "audit: 1 of 120 trials; the time left is not known yet"
    assert second == "audit: 2 of 120 trials, about 47 s left"
    assert re.fullmatch(r"audit: 2[78] of 120 trials, about 37 s left", third)


def test_work_that_reports_nothing_is_followed_from_outside() -> None:
    frames, stream, clock = [0], io.StringIO(), Clock()
    with Progress("device record", "frames", stream=stream, clock=clock) as progress:
        progress.follow(100, lambda: frames[0])
        frames[0], clock.now = 25, 30.0
        deadline = time.monotonic() + 10
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert stream.getvalue().splitlines()[0] == "device record: 25 of 100 frames, about 90 s left"


@pytest.mark.parametrize(("stream", "show"), [(io.StringIO, True), (io.StringIO, False), (Terminal, False)])
def test_work_shows_nothing_without_a_terminal_or_if_asked(stream: type[io.StringIO], show: bool) -> None:
    clock, written = Clock(), stream()
    with Progress("audit", "trials", show=show, stream=written, clock=clock) as progress:
        progress.start(4, at_once=True)
        for _ in range(4):
            clock.now += 100.0
            progress.advance()
        progress.say("failed: one")
        progress.follow(4, lambda: 3)
    assert not progress.is_shown
    assert not written.getvalue()


def test_durations_and_energies_are_in_the_unit_that_a_reader_takes() -> None:
    said = ["0 s", "7.4 s", "3.5 min", "12.6 h", "3.2 days"]
    assert [duration(s) for s in (0.0, 7.44, 210.0, 45_402.0, 273_000.0)] == said
    assert [energy(j) for j in (0.387, 1_362.0, 1_362_060.0)] == ["0.387 J", "1,362 J", "1.36 MJ"]


@pytest.mark.parametrize("notebook", [False, True])
def test_a_table_is_plain_text_wherever_it_is_made(notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel sets FORCE_COLOR, and rich displays what it prints in a notebook."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    text = table_text(("name", "value"), [("sigma", "0.5")])
    assert "\x1b" not in text
    assert "│ sigma │ 0.5   │" in text
