"""What reports and tables look like: whole words and tables, fitting units, reasons for what is missing."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.container import ErrorbarContainer

from opusim import training
from opusim.errors import ConfigError
from opusim.training.reports import sweep_report
from opusim.training.reports.sweep_report import write_sweep
from opusim.training.runs.drawing import Line, LineChart, noise_curves
from opusim.training.runs.folder import StoredRun
from opusim.training.sweeps import sweep as curves
from opusim.training.sweeps.sweep import Curve, Level, SweepFolder, SweepResult, parse_spec, points_of, row_of

SMALL: dict[str, Any] = {"threads": 1, "data": {"name": "digits"}, "model": {"hidden": [8]}, "epochs": 1}
SPEC = {
    "title": "t",
    "config": {**SMALL, "trainer": {"kind": "bp"}, "sampler": {"scheme": "poisson"}, "protection": {"kind": "record"}},
    "axes": {"protection.epsilon": [0.5, 8.0]},
}  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    folder = SweepFolder(tmp_path_factory.mktemp("sweep"))
    spec, text = parse_spec(SPEC, "spec")
    points = points_of(spec, text)
    rows = {}
    for point in points:
        run = training.train(point.config, folder=folder.run_path(point))
        row = row_of(run, point.config, wall_s=45_402.0)
        rows[point.identity] = replace(row, figures={**row.figures, "joules": 1362060.0, "seconds": 45402.0})
    return SweepResult(spec=spec, points=points, rows=rows, folder=folder)


@pytest.fixture(scope="module")
def page(sweep: SweepResult) -> str:
    return write_sweep(sweep, "").read_text()


def test_the_statement_of_a_series_is_that_with_the_least_noise(page: str) -> None:
    privacy = page.split("<h2>Privacy</h2>")[1].split("<h2>")[0]
    assert "protection.epsilon = 8.0" in privacy
    (epsilon,) = re.findall(r"<td>(\d\.\d{3})</td>", privacy)
    assert 7.9 < float(epsilon) <= 8.0


@pytest.mark.parametrize(("epsilons", "seeds", "accuracy", "ticks"), [
    ((2.0, 3.0, 4.5), 1, 80.0, ["2", "3", "4.5", "∞"]),
    (tuple(1.2 + 0.2 * k for k in range(12)), 3, 20.0, ["1.5", "2", "3", "∞"]),
    ((0.5,), 1, 80.0, ["0.5", "∞"]),
])  # fmt: skip
def test_epsilon_has_numbers_infinity_and_chance_marks(
    monkeypatch: pytest.MonkeyPatch, epsilons: tuple[float, ...], seeds: int, accuracy: float, ticks: list
) -> None:
    """Also if epsilons are less than a decade apart; one seed has no error bar."""
    levels = [Level(x=x, mean=accuracy + x, error=seeds - 1.0, n=seeds) for x in epsilons]
    levels.append(Level(x=math.inf, mean=97.0, error=0.0, n=seeds))
    drawn = [Curve(name="a", kind="proven", levels=tuple(levels))]
    names = ("accuracy_against_epsilon", "references", "published", "chance")
    for name, found in zip(names, (drawn, [], [], 10.0), strict=True):
        monkeypatch.setattr(curves, name, lambda _, found=found: found)
    figure = sweep_report.accuracy_epsilon(SimpleNamespace(series=["a"], references=[]))  # type: ignore[arg-type]
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ticks
    handles, labels = axes.get_legend_handles_labels()
    assert ("chance, 10 %" in labels) == (accuracy < 30) != ("chance is 10" in axes.get_ylabel())
    (bars,) = (handle for handle in handles if isinstance(handle, ErrorbarContainer))
    assert bars.has_yerr == (seeds > 1)


def test_a_series_off_the_axis_is_a_level_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sigmas = [{"device.noise.sigma": sigma} for sigma in (0.0, 1.0, 10.0, 100.0)]
    points = [SimpleNamespace(series="pdfa", values=each) for each in sigmas]
    points += [SimpleNamespace(series="bp", values={"seed": seed}) for seed in (0, 1)]
    points += [SimpleNamespace(series="dfa", values={"trainer.gain": gain}) for gain in (0.5, 1.0)]

    def finished(name: str) -> list[Any]:
        row = SimpleNamespace(accuracy=0.9, noise_std=None)
        return [(point, row) for point in points if point.series == name]

    monkeypatch.setattr(curves, "chance", lambda _: None)
    names = ["pdfa", "bp", "dfa"]
    result = SimpleNamespace(
        series=names, references=[], noise_key="device.noise.sigma", points=points, finished=finished
    )
    (axes,) = sweep_report.accuracy_noise(result).axes  # type: ignore[arg-type,union-attr]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1", "10", "100"]
    assert set(axes.get_legend_handles_labels()[1]) == {"pdfa", "bp"}
    assert axes.get_title() == "without dfa: device.noise.sigma is no axis there"


def test_a_module_draws_the_signal_to_noise_of_its_points() -> None:
    metrics = [{"epoch": epoch, "signal_to_noise": [3.0 / epoch, 2.0]} for epoch in (1, 2)]
    chart = noise_curves(SimpleNamespace(metrics=metrics))  # type: ignore[arg-type]
    found = {line.label: list(line.y) for line in chart.lines}  # type: ignore[union-attr]
    assert found == {"point 1": [3.0, 1.5], "point 2": [2.0, 2.0]}


def test_a_chart_is_written_as_matplotlib_writes_figures(tmp_path: Path) -> None:
    chart = chart_of([0.1, 1.0, 10.0], logarithmic=True)
    for ending, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<svg")):
        chart.savefig(tmp_path / f"a{ending}")
        assert (tmp_path / f"a{ending}").read_bytes().startswith(start)
    with pytest.raises(ConfigError, match=r"must end in \.png or \.pdf or \.svg"):
        chart.savefig(tmp_path / "a.txt")


def test_a_chart_places_values_by_their_ticks() -> None:
    """Decades are equally far apart, whole numbers are labelled, and a value stands at the height of its tick."""
    chart = chart_of([0.1, 1.0, 10.0], logarithmic=True, label="a & b")
    drawn = ElementTree.fromstring(chart.svg())
    texts = [each.text for each in drawn.findall(".//{*}text")]
    assert texts == ["a & b", "1", "2", "3", "0.1", "1", "10", "epoch", "value"]
    curve = next(path for path in drawn.findall(".//{*}path") if path.get("d", "").count("L") == 2)
    points = [tuple(map(float, point.split(","))) for point in curve.get("d", "")[1:].split("L")]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    grid = [path.get("d", "") for path in drawn.findall(".//{*}path") if path.get("stroke") == "#ddd"]
    levels = [float(line.split(",")[1].split("H")[0]) for line in grid if "H" in line]
    assert [y1, y2, y3] == levels
    linear = replace(chart, logarithmic=False)
    ElementTree.fromstring(linear.svg())
    assert linear.y_ticks == [0, 2, 4, 6, 8, 10]
    assert not chart_of([0.0], logarithmic=True).is_logarithmic


def chart_of(y: Sequence[float], *, logarithmic: bool = False, label: str = "a run") -> LineChart:
    """A chart with one line."""
    line = Line(x=range(1, len(y) + 1), y=y, label=label, number=0)
    return LineChart(lines=[line], x_label="epoch", y_label="value", logarithmic=logarithmic)


def tick_texts(chart: LineChart) -> list[str]:
    """The numbers at the axis of the values."""
    drawn = ElementTree.fromstring(chart.svg())
    return [text.text or "" for text in drawn.findall(".//{*}text") if text.get("text-anchor") == "end"]


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("y", [
    [1234560.0, 1234562.5],
    [1.00001e-5, 1.00002e-5],
    [0.9, 1.9],
    [1.0],
    [1.0, 1.0 + 2**-52],
    [3e-7, 0.02, 4e5],
    [0.0, 0.0],
    [-5.0, -4.999999],
])  # fmt: skip
def test_an_axis_has_at_least_two_ticks_that_read_differently(y: list[float], logarithmic: bool) -> None:
    texts = tick_texts(chart_of(y, logarithmic=logarithmic))
    assert 2 <= len(texts) == len(set(texts))
    low, high = chart_of(y, logarithmic=logarithmic).limits
    assert all(low < value < high for value in y)
    read = [float(text.replace("\u2212", "-")) for text in texts]
    assert read == pytest.approx(chart_of(y, logarithmic=logarithmic).y_ticks, abs=1e-9 * (high - low))


def test_a_chart_of_any_name_is_xml_and_stays_within_its_width() -> None:
    label = "<run>\x1b\udcff & " + "x" * 200 + " the end"
    drawn = ElementTree.fromstring(chart_of([1.0, 2.0], label=label).svg())
    (shown,) = (text.text or "" for text in drawn.findall(".//{*}text") if "run" in (text.text or ""))
    assert shown.startswith("<run>\ufffd\ufffd & x")
    assert shown.endswith("x the end")
    assert len(shown) < 80


def test_only_noise_that_comes_from_no_seed_is_said_not_to_repeat() -> None:
    twin, bench = {"name": "twin", "medium": {"seed": 0}}, {"name": "bench", "medium": None}

    def note(device: Any, features: Any = None, mode: str = "experiment", **more: Any) -> str | None:
        data = {} if features is None else {"features": {"device": features}}
        facts = {"device": device, "data": data, **more}
        run = SimpleNamespace(facts=facts, config=SimpleNamespace(mode=mode))
        return StoredRun.fresh_noise_note.fget(run)  # type: ignore[attr-defined]

    assert note(None) is note(twin) is note(None, twin) is note(bench, mode="release") is None
    told = "The noise of device 'bench' comes from no seed, so a repetition of this run gives other figures."
    assert note(bench) == note(None, bench) == note(bench, bench, noise_repeats=False) == told
    assert note(twin, noise_repeats=False) == told.replace("bench", "twin")  # a simulation that clients share
