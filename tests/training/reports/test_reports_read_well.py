"""What reports and tables look like: whole words and tables, fitting units, reasons for what is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer

from opusim import training
from opusim.accounting.explanation import guarantee_rows, print_rows
from opusim.tables import column_widths, output_width, print_table, wrapped
from opusim.training.reports import run_report, sweep_report
from opusim.training.reports.run_report import RELEASE_DASHES, run_name, summary_row, write_report
from opusim.training.reports.sweep_report import setting_rows, write_sweep
from opusim.training.runs import drawing
from opusim.training.runs.drawing import Line, LineChart
from opusim.training.runs.run import Run
from opusim.training.sweeps import sweep as curves
from opusim.training.sweeps.sweep import Curve, Level, SweepFolder, SweepResult, parse_spec, points_of, row_of

SMALL: dict[str, Any] = {"threads": 1, "data": {"name": "digits"}, "model": {"hidden": [8]}, "epochs": 1}
RELEASED = {
    **SMALL,
    "trainer": {"kind": "bp"},
    "mode": "release",
    "sampler": {"scheme": "poisson"},
    "protection": {"kind": "record", "noise_multiplier": 1.0},
}
SPEC = {
    "title": "t",
    "config": {
        **SMALL,
        "trainer": {"kind": "bp"},
        "sampler": {"scheme": "poisson"},
        "protection": {"kind": "record"},
    },
    "axes": {"protection.epsilon": [0.5, 8.0]},
}


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return training.train(SMALL, folder=tmp_path_factory.mktemp("one") / "run")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return training.train(RELEASED, folder=tmp_path_factory.mktemp("released") / "run")


def test_a_report_names_the_command_that_lists_assumptions_and_what_the_devices_noise_earns(
    one_epoch: Run, tmp_path: Path
) -> None:
    assert f"opusim account run {one_epoch.folder.path}" in write_report(one_epoch).read_text()
    assert one_epoch.device_note is None, "no epsilon, so nothing that noise could earn"
    protected = {
        **SMALL,
        "sampler": {"scheme": "poisson"},
        "protection": {"kind": "record", "noise_multiplier": 2.0},
    }
    run = training.train(protected, folder=tmp_path / "digital")
    assert run.device_note is not None
    assert "'gaussian' earns no privacy here" in write_report(run).read_text().replace("&#39;", "'")
    credited = {**protected, "device": {"name": "gaussian", "noise": {"sigma": 1.0}}}
    credited["protection"] = {**protected["protection"], "noise": "device"}
    run = training.train(credited, folder=tmp_path / "device")
    assert run.device_note is None
    assert "earns no privacy" not in write_report(run).read_text()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    folder = SweepFolder(tmp_path_factory.mktemp("sweep"))
    spec, text = parse_spec(SPEC, "spec")
    points = points_of(spec, text)
    rows = {}
    for point in points:
        run = training.train(point.config, folder=folder.run_path(point))
        row = row_of(run, point.config, wall_s=45_402.0)
        rows[point.identity] = replace(
            row, figures={**row.figures, "joules": 1_362_060.0, "seconds": 45_402.0}
        )
    return SweepResult(spec=spec, points=points, rows=rows, folder=folder)


@pytest.fixture(scope="module")
def page(sweep: SweepResult) -> str:
    return write_sweep(sweep, "").read_text()


def test_one_epoch_stands_on_an_axis_of_whole_epochs(one_epoch: Run) -> None:
    for drawn in (
        run_report.learning_curves([one_epoch], ["a"]),
        drawing.alignment_curves(one_epoch),
        drawing.noise_curves(one_epoch),
    ):
        assert drawn is not None
        assert drawn.x_ticks == [1.0]
        assert drawn.x_limits == (0.5, 1.5)


def test_accuracies_that_barely_differ_do_not_fill_the_axis(one_epoch: Run) -> None:
    drawn = run_report.learning_curves([one_epoch], ["a"])
    assert drawn is not None
    low, high = drawn.limits
    assert high - low >= 2.0


def test_a_release_run_says_why_it_has_dashes(
    released: Run, one_epoch: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    from opusim.training.cli.train import print_run

    page = write_report(released).read_text()
    assert RELEASE_DASHES.replace("'", "&#39;") in page
    uncovered = "They do not cover the losses, accuracies, norms, frames and times in this report."
    assert uncovered not in page
    assert uncovered in write_report(one_epoch).read_text()
    assert RELEASE_DASHES not in write_report(one_epoch).read_text()
    print_run(released, released.folder.report_file)
    assert RELEASE_DASHES in " ".join(capsys.readouterr().out.split())


def test_long_times_and_large_energies_are_short(sweep: SweepResult, page: str) -> None:
    (row, *_) = setting_rows(sweep)
    assert (row["device energy"], row["device time"], row["wall time"]) == ("1.36 MJ", "12.6 h", "12.6 h")
    assert "1,362,060" not in page
    drawn = sweep_report.cost(sweep)
    assert drawn is not None
    labels = [axes.get_xlabel() for axes in drawn.axes]
    assert labels == ["device energy [MJ]", "device time [h]", "wall time [h]"]
    assert [text.get_text() for text in drawn.axes[0].texts] == ["1.36"]


def test_a_run_report_takes_the_same_units(one_epoch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {**(one_epoch.summary or {}), "seconds": 45_402.0, "joules": 1_362_060.0}
    monkeypatch.setattr(Run, "summary", property(lambda _: spent))
    row = summary_row(one_epoch, "a")
    assert (row["device time"], row["device energy"]) == ("12.6 h", "1.36 MJ")


@pytest.mark.parametrize(
    ("accuracy", "said"), [(0.1, "10.00 % (no better than guessing: 10 %)"), (0.11, "11.00 %")]
)
def test_an_accuracy_that_guessing_reaches_says_so(
    one_epoch: Run, monkeypatch: pytest.MonkeyPatch, accuracy: float, said: str
) -> None:
    summary = {**(one_epoch.summary or {}), "test_accuracy": accuracy}
    monkeypatch.setattr(Run, "summary", property(lambda _: summary))
    assert summary_row(one_epoch, "a")["test accuracy"] == said


def test_a_sweep_whose_runs_guess_says_so(sweep: SweepResult, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting_rows(sweep)[0]["accuracy [%]"] == "6.69 (no better than guessing: 10 %)"
    monkeypatch.setattr("opusim.training.sweeps.sweep.chance", lambda _: 5.0)
    assert setting_rows(sweep)[0]["accuracy [%]"] == "6.69"


def test_the_statement_of_a_series_is_that_with_the_least_noise(page: str) -> None:
    privacy = page.split("<h2>Privacy</h2>")[1].split("<h2>")[0]
    assert "protection.epsilon = 8.0" in privacy
    (epsilon,) = re.findall(r"<td>(\d\.\d{3})</td>", privacy)
    assert 7.9 < float(epsilon) <= 8.0


def test_columns_without_a_figure_are_left_out_and_long_names_can_break(
    sweep: SweepResult, page: str
) -> None:
    assert not {"ε claimed", "ε audited"} & set(setting_rows(sweep)[0])
    results = page.split("<h2>Results</h2>")[1].split("<h2>")[0]
    assert "protection.<wbr>epsilon" in results


TEXTS = ["replace_one and add_or_remove_one", "multiplier", "trainer.tau_h_max, trainer.tau_b", "1e-05"]


@pytest.mark.parametrize("width", [30, 60, 80, 100, 140])
def test_no_table_breaks_a_word(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, released: Run
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ["a", "sampling_probability", "text", "delta"]
    print_table("A title", columns, [TEXTS, TEXTS[::-1]])
    print_rows(guarantee_rows(released.guarantees))
    print_rows([summary_row(released, run_name(released))])
    found = capsys.readouterr().out
    words = set(re.split(r"[\s│┃]+", found))
    for text in [*columns, *TEXTS, released.guarantees[0].mechanism, "validation", "accuracy"]:
        assert set(text.split()) <= {word.rstrip(":") for word in words} | words, (width, text)
    if width >= 60:
        assert max(map(len, found.splitlines())) <= width


def test_widths_of_columns_hold_their_longest_words_and_fill_the_page() -> None:
    cells = [["a", "bb"], ["one two three", "x"]]
    assert column_widths(cells, 80) == [13, 2]
    assert column_widths(cells, 16) == [7, 2]
    assert column_widths(cells, 14) == [5, 2]
    assert column_widths(cells, 13) is None


def test_a_tall_row_is_printed_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for words, tall in ((16, False), (60, True)):
        print_table("", ["status", "mechanism"], [["proven", "word " * words]])
        assert ("mechanism: word word" in capsys.readouterr().out) is tall


def test_paragraphs_are_as_wide_as_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert output_width() == 80
    assert max(map(len, wrapped("word " * 100).splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert output_width() == 140


@pytest.mark.parametrize(
    ("epsilons", "seeds", "accuracy", "ticks", "label"),
    [
        ((2.0, 3.0, 4.5), 1, 80.0, ["2", "3", "4.5", "∞"], "test accuracy [%]; chance is 10"),
        (tuple(1.2 + 0.2 * k for k in range(12)), 3, 20.0, ["1.5", "2", "3", "∞"], "test accuracy [%]"),
        ((0.5,), 1, 80.0, ["0.5", "∞"], "test accuracy [%]; chance is 10"),
    ],
)
def test_epsilon_has_numbers_infinity_and_chance_marks(
    monkeypatch: pytest.MonkeyPatch,
    epsilons: tuple[float, ...],
    seeds: int,
    accuracy: float,
    ticks: list[str],
    label: str,
) -> None:
    """Less than a decade of epsilon had no number, and the legend an error bar of one seed."""
    levels = [Level(x=x, mean=accuracy + x, error=seeds - 1.0, n=seeds) for x in (*epsilons, math.inf)]
    levels[-1] = Level(x=math.inf, mean=97.0, error=0.0, n=seeds)
    drawn = [Curve(name="a", kind="proven", levels=tuple(levels))]
    for name, found in (
        ("accuracy_against_epsilon", drawn),
        ("references", []),
        ("published", []),
        ("chance", 10.0),
    ):
        monkeypatch.setattr(curves, name, lambda _, found=found: found)
    figure = sweep_report.accuracy_epsilon(SimpleNamespace(series=["a"], references=[]))  # type: ignore[arg-type]
    assert figure is not None
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ticks
    assert axes.get_ylabel() == label
    handles, labels = axes.get_legend_handles_labels()
    assert ("chance, 10 %" in labels) == (accuracy < 30)
    (bars,) = (handle for handle in handles if isinstance(handle, ErrorbarContainer))
    assert bars.has_yerr == (seeds > 1)


def test_a_report_says_whether_features_were_changed(tmp_path: Path) -> None:
    config = {**SMALL, "trainer": {"kind": "bp"}, "sampler": {"batch_size": 8}}
    data = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    plain = training.train({**config, "data": {}}, data=data, folder=tmp_path / "plain")
    scaled = training.train(
        {**config, "data": {"mean": 0.0, "std": 2.0}}, data=data, folder=tmp_path / "scaled"
    )
    pages = [write_report(run).read_text() for run in (plain, scaled)]
    assert ["Features are used as they are given." in page for page in pages] == [True, False]
    assert ["standardised with public constants" in page for page in pages] == [False, True]


def test_a_chart_places_values_by_their_ticks() -> None:
    """Decades are equally far apart, whole numbers are labelled, and a value stands at the height of its tick."""
    chart = LineChart(
        lines=[Line(x=[1, 2, 3], y=[0.1, 1.0, 10.0], label="a & b", number=0)],
        x_label="epoch",
        y_label="norm",
        logarithmic=True,
    )
    drawn = ElementTree.fromstring(chart.svg())
    texts = [each.text for each in drawn.findall(".//{*}text")]
    assert texts == ["a & b", "1", "2", "3", "0.1", "1", "10", "epoch", "norm"]
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
    assert not replace(chart, lines=[Line(x=[1], y=[0.0], label="zero", number=0)]).is_logarithmic


def chart_of(y: Sequence[float], *, logarithmic: bool = False, label: str = "a run") -> LineChart:
    """A chart with one line."""
    line = Line(x=range(1, len(y) + 1), y=y, label=label, number=0)
    return LineChart(lines=[line], x_label="epoch", y_label="value", logarithmic=logarithmic)


def tick_texts(chart: LineChart) -> list[str]:
    """The numbers at the axis of the values."""
    drawn = ElementTree.fromstring(chart.svg())
    return [text.text or "" for text in drawn.findall(".//{*}text") if text.get("text-anchor") == "end"]


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize(
    "y",
    [
        [1234560.0, 1234562.5],
        [1.00001e-5, 1.00002e-5],
        [0.9, 1.9],
        [1.0],
        [1.0, 1.0 + 2**-52],
        [3e-7, 0.02, 4e5],
        [0.0, 0.0],
        [-5.0, -4.999999],
    ],
)
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


class Counted(list[float]):
    """A list that counts how often it is read through."""

    passes = 0

    def __iter__(self) -> Iterator[float]:
        self.passes += 1
        return super().__iter__()


def test_the_work_of_a_chart_is_linear_in_its_points() -> None:
    y = Counted([1.0, 2.0] * 500)
    chart_of(y, logarithmic=True).svg()
    assert 0 < y.passes < 10


def test_long_numbers_move_the_plot_and_leave_room_for_the_axis_label() -> None:
    drawn = ElementTree.fromstring(chart_of([1234560.0, 1234562.5]).svg())
    (axes,) = (path.get("d", "") for path in drawn.findall(".//{*}path") if path.get("stroke") == "#333")
    left = float(axes.split(",")[0][1:])
    assert left > 20 + 7.6 * len("1234560.5")  # the label stands within 20 pixels, and a digit is 7.6 wide
