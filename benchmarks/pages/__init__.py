"""What did the benchmarks measure? Writes benchmarks/README.md and the README's table from benchmarks/results/.

`make bench-report` runs this; a test compares the committed pages with what it would write.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.attacks.pages import mechanism_section
from benchmarks.convex.pages import convex_readme_rows, convex_section, convex_speed_rows
from benchmarks.markdown import markdown
from benchmarks.pages.curves import curve_sections
from benchmarks.results_file import FOLDER as RESULTS
from benchmarks.results_file import load_results
from benchmarks.ulr.pages import ulr_readme_rows, ulr_sections, ulr_speed_rows
from benchmarks.zeroth_order.pages import zo_readme_rows, zo_sections, zo_speed_rows

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- measured: written by `make bench-report` -->", "<!-- end of measured -->"
MONITOR_BEGIN, MONITOR_END = "<!-- monitor: written by `make bench-report` -->", "<!-- end of monitor -->"
FAULTS_BEGIN, FAULTS_END = "<!-- faults: written by `make bench-report` -->", "<!-- end of faults -->"
TABLE1 = "`python -m benchmarks.pdfa.table1`"
_SHOWN_EPSILON = 3.0

Row = tuple[str, str, str]


def readme_rows() -> list[Row]:
    """What the README shows: claim, figure, command."""
    rows: list[Row] = []
    demo = load_results("demo_digits")
    if demo:
        means = {kind: 100 * statistics.mean(values) for kind, values in demo["test_accuracy"].items()}
        text = ", ".join(f"{kind} {mean:.1f} %" for kind, mean in means.items())
        rows.append(("digits, test accuracy, mean of five seeds", text, "`make demo`"))
    rows += _table1_rows()
    rows += _learning_rows() + _private_rows()
    rows += [row for row in _speed_rows() if _is_headline(row)]
    return rows + ulr_readme_rows() + convex_readme_rows() + zo_readme_rows()


def _is_headline(row: Row) -> bool:
    """Whether the README shows a speed: one thread, the larger batch, no variant; benchmarks/README.md has them all."""
    name = row[0]
    left_out = ("release", "low_light", "batch 64", "published", "2 thread(s)", "K = ")
    return not any(word in name for word in left_out)


def _table1_rows() -> list[Row]:
    """How far the cells of the paper's table are from its figures."""
    spans = []
    for row in ("dfa", "tdfa", "pdfa"):
        found = [
            cell["difference"] for cell in load_results("pdfa_table1").get("cells", []) if cell["row"] == row
        ]
        if found:
            spans.append(f"{row} {min(found):+.2f} to {max(found):+.2f} points ({len(found)} cells)")
    claim = "FashionMNIST, Table 1 of the PDFA paper: ours minus the paper's"
    return [(claim, "; ".join(spans), TABLE1)] if spans else []


def _private_rows() -> list[Row]:
    """Accuracy under protection at the epsilon that all protections were measured at."""
    cells = load_results("pdfa_private").get("cells", [])
    figures = "; ".join(
        f"{cell['row']} {cell['test']:.1f}" for cell in cells if cell["epsilon"] == _SHOWN_EPSILON
    )
    claim = f"FashionMNIST under protection, test accuracy [%] at epsilon {_SHOWN_EPSILON:g}, delta 1e-5"
    return [(claim, figures, "`python -m benchmarks.pdfa.private measure`")] if figures else []


def _speed_rows() -> list[Row]:
    rows: list[Row] = []
    for entry in load_results("projection").get("rows", []):
        ratios = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in entry["speed_ratio"].items())
        name = f"speed of a ternary projection 4096 to 16384, noise included, {entry['threads']} thread(s)"
        rows.append((name, ratios, "`python -m benchmarks.speed.projection`"))
    for entry in load_results("pdfa_step").get("rows", []):
        if entry["work"].startswith("pdfa"):
            name = f"time of a step 784-512-512-10, {entry['work']}, {entry['threads']} thread(s)"
            rows.append(
                (
                    name,
                    f"{entry['ratio']:.2f} of autograd backpropagation",
                    "`python -m benchmarks.speed.pdfa_step`",
                )
            )
    return (
        rows + _record_step_rows() + _camera_rows() + _matrix_free_rows() + _sweep_rows() + _accounting_rows()
    )


def _camera_rows() -> list[Row]:
    """Time of the twin over that of the products its optics stand for."""
    return [
        (
            f"time of the `{entry['device']}` twin 4096 to 16384, all noise included, {entry['threads']} thread(s)",
            ", ".join(f"{work}: {ratio:.2f}" for work, ratio in entry["time_ratio"].items())
            + " of the complex64 products it stands for",
            "`python -m benchmarks.speed.camera`",
        )
        for entry in load_results("camera").get("rows", [])
    ]


def _matrix_free_rows() -> list[Row]:
    """Rate of a projection without the matrix over that of a product with one."""
    return [
        (
            f"rate of a projection without its matrix, {entry['n_inputs']:,} to {entry['n_outputs']:,}, batch "
            f"{entry['batch']}, {entry['threads']} thread(s)",
            f"{entry['rate_ratio']:.2f} of a stored float32 product, {entry['peak_mib']:.0f} MiB",
            "`python -m benchmarks.speed.matrix_free`",
        )
        for entry in load_results("matrix_free").get("rows", [])
    ]


def _learning_rows() -> list[Row]:
    """Accuracy through each device and through a Gaussian one of its noise."""
    rows = load_results("device_learning").get("rows", [])
    figures = "; ".join(f"`{row['device']}` {row['twin']:.2f} ({row['difference']:+.2f})" for row in rows)
    claim = "FashionMNIST through other devices, test accuracy [%] (and points beside a Gaussian device of their noise)"
    return [(claim, figures, "`python -m benchmarks.devices.learning`")] if rows else []


def _sweep_rows() -> list[Row]:
    """What a sweep costs beside its runs."""
    found = load_results("sweep_overhead")
    if not found:
        return []
    name = (
        f"overhead of a sweep of {found['runs']} runs of {found['run_s']:.1f} s, {found['jobs']} side by side"
    )
    figure = f"{100 * found['overhead']:.1f} % over the runs; cores busy {100 * found['busy']:.0f} %"
    return [(name, figure, "`python -m benchmarks.speed.sweep`")]


def _accounting_rows() -> list[Row]:
    results = load_results("accounting_speed")
    if not results:
        return []
    ratios = [row["speed_ratio"] for row in results["cold"]]
    warm = results["warm"]["speed_ratio"]
    fresh, built = (f"{warm[key]:.0f}" for key in ("prv_accountant", "prv_accountant, built before"))
    rest = f"warm {fresh}, against its accountant built before {built}"
    intervals = "; ".join(
        f"sigma {row['sigma']:g}: {calls['opusim']['low']:.4f} to {calls['opusim']['high']:.4f}, its "
        f"{calls['prv_accountant']['low']:.4f} to {calls['prv_accountant']['high']:.4f}"
        for row in results["cold"]
        for calls in [row["calls"]]
    )
    command = "`python -m benchmarks.speed.accounting`"
    name = "epsilon of 75,000 sampled Gaussian steps, against prv_accountant at eps_error 0.001"
    return [
        (f"speed: {name}", f"{min(ratios):.0f} to {max(ratios):.0f} times faster (cold; {rest})", command),
        (name, intervals, command),
    ]


def _record_step_rows() -> list[Row]:
    return [
        (
            f"a step 784-512-512-10, clipped records, central noise, {entry['work']}, {entry['threads']} thread(s)",
            f"{entry['times_faster']:.2f} times faster than Opacus ghost clipping",
            "`python -m benchmarks.speed.record_step`",
        )
        for entry in load_results("record_step").get("rows", [])
        if entry["work"].startswith("pdfa")
    ]


def table1_section() -> str:
    results = load_results("pdfa_table1")
    if not results:
        return ""
    rows = [
        (
            cell["row"],
            cell["column"],
            f"{cell['paper']:.2f}",
            f"{cell['test']:.2f} ± {cell['test_standard_error']:.2f}",
            f"{cell['difference']:+.2f}",
            {True: "met", False: "**missed**", None: "none"}[cell["within_bar"]],
        )
        for cell in results["cells"]
    ]
    minutes = sum(run["seconds"] for run in results["runs"]) / 60
    header = ("feedback", "sigma", "paper [%]", "ours [%]", "difference", "bar")
    return "\n\n".join(
        (
            "## Table 1 of the PDFA paper (FashionMNIST)",
            f"Test accuracy, mean of three seeds and its standard error; {minutes:.0f} minutes of one core in all; "
            f"{results['date']}, {results['machine']['processor']}, {TABLE1}. The bar: `dfa` and `tdfa` within one "
            "point of the paper, `pdfa` not more than one below (the paper's was real hardware), `bp` reported. The "
            "reading of eqs. 8 and 9 behind the clipped columns stands at the top of [pdfa/table1.py](pdfa/table1.py).",
            markdown(header, rows),
        )
    )


def readings_section() -> str:
    results = load_results("pdfa_readings")
    if not results:
        return ""
    names = list(dict.fromkeys(row["reading"] for row in results["rows"]))
    columns = list(dict.fromkeys((row["row"], row["column"]) for row in results["rows"]))
    found = {(row["reading"], row["row"], row["column"]): row for row in results["rows"]}
    paper = {column: found[(names[0], *column)]["paper"] for column in columns}
    rows: list[tuple[str, ...]] = [("*the paper*", *(f"{paper[column]:.2f}" for column in columns))]
    rows += [(name, *(f"{found[(name, *column)]['test']:.2f}" for column in columns)) for name in names]
    header = ("reading", *(f"{row}, sigma {column}" for row, column in columns))
    return "\n\n".join(
        (
            "## What the paper leaves unsaid",
            f"Test accuracy of one seed under other readings of eqs. 8 and 9 ({results['date']}, "
            "`python -m benchmarks.pdfa.readings`). Each is a named option of the configuration.",
            markdown(header, rows),
        )
    )


def demo_section() -> str:
    results = load_results("demo_digits")
    if not results:
        return ""

    def cell(values: list[float]) -> str:
        error = 100 * statistics.stdev(values) / len(values) ** 0.5
        return f"{100 * statistics.mean(values):.2f} ± {error:.2f}"

    rows: list[tuple[str, ...]] = [(kind, cell(values)) for kind, values in results["test_accuracy"].items()]
    rows += [(f"pdfa, sigma {sigma}", cell(values)) for sigma, values in results["noise"].items()]
    return "\n\n".join(
        (
            "## Digits (`make demo`)",
            f"Test accuracy [%], mean of five seeds and its standard error; {results['date']}, "
            f"{results['seconds']:.0f} s on {results['machine']['cores']} cores. The bar: `pdfa` within two points of "
            "`dfa` and `bp`.",
            markdown(("feedback", "test accuracy [%]"), rows),
        )
    )


def private_section() -> str:
    results = load_results("pdfa_private")
    if not results.get("cells"):
        return ""
    rows: list[tuple[str, ...]] = [
        (
            cell["row"],
            f"{cell['epsilon']:g}",
            f"{cell['test']:.2f} ± {cell['test_standard_error']:.2f}",
            f"{cell['validation']:.2f}",
            f"{cell['frames']:,.0f}",
            f"{cell['joules'] / 1e3:.1f}",
            ", ".join(f"{key.split('.')[-1]} {value:g}" for key, value in cell["point"].items()),
        )
        for cell in results["cells"]
    ]
    header = ("protection", "epsilon", "test [%]", "validation [%]", "frames", "kJ", "chosen point")
    return "\n\n".join(
        (
            "## What each protection costs (FashionMNIST, delta 1e-5)",
            f"54,000 private records; test accuracy, mean of three seeds and its standard error ({results['date']}, "
            "`python -m benchmarks.pdfa.private tune`, then `measure`). Learning rate, epochs and so on were chosen on "
            f"the validation records with one other seed ({len(results['trials'])} trials in all), which looks at "
            "their labels and is not covered by any guarantee here. Frames and joules are the simulated device's. "
            "The bars: records through the device at least 84.5 % at epsilon 3, 82 % at epsilon 1 and within 1.5 "
            "points of DP-SGD; amplified labels 82 % and 77.5 %.",
            markdown(header, rows),
        )
    )


def learning_section() -> str:
    rows: list[tuple[str, ...]] = [
        (
            row["device"],
            f"{row['sigma']:.3f}",
            f"{row['twin']:.2f}",
            f"{row['gaussian']:.2f}",
            f"{row['difference']:+.2f} ± {row.get('difference_standard_error', float('nan')):.2f}",
        )
        for row in load_results("device_learning").get("rows", [])
    ]
    if not rows:
        return ""
    results = load_results("device_learning")
    seeds = len({run["seed"] for run in results["runs"]})
    text = (
        f"FashionMNIST, 784-512-512-10, photonic DFA in the hardware order, 15 epochs, means of {seeds} seeds "
        f"({results['date']}, `python -m benchmarks.devices.learning`): each device beside B x + N(0, sigma²) "
        f"with the device's own noise. The bar: within {results['bar']:g} point."
    )
    header = ("device", "sigma", "through it [%]", "Gaussian device [%]", "difference")
    return "\n\n".join(("## Learning through every device", text, markdown(header, rows)))


def speed_section() -> str:
    rows: list[tuple[str, ...]] = [*_speed_rows(), *ulr_speed_rows(), *convex_speed_rows(), *zo_speed_rows()]
    if not rows:
        return ""
    text = "Medians of interleaved repeats in one process. The bars: 0.9 of the product, 5 times lightonml; at most 1; "
    text += "1.8 times; at most 1.5; 0.7 at batch 1024, 0.4 at batch 64, under 1,024 MiB; 100 times, the same digits; "
    text += "at most 1; at most 1.2, 1.5 and 10 times; at most 1.1 of the memory and 2.2 passes."
    return "\n\n".join(("## Speed", text, markdown(("work", "ratio", "command"), rows)))


def commits_section() -> str:
    """Which commit measured what."""
    found: dict[str, list[str]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        found.setdefault(load_results(file.stem).get("commit") or "unknown", []).append(file.stem)
    text = (
        "A benchmark that was measured in several parts names the commit of the last one. At 02c3c03 or before, norms "
        "were computed in float32; later commits clip linear layers up to 1e-4 lower and convolutions up to 0.2 %. The "
        "default hold-out has not changed. What was called add_or_remove_one there is now stated as zero_out."
    )
    rows = [(commit, ", ".join(names)) for commit, names in sorted(found.items())]
    return "\n\n".join(("## Commits", text, markdown(("commit", "results"), rows)))


def benchmarks_page() -> str:
    """The whole of benchmarks/README.md."""
    head = (
        "# Benchmarks\n\nWritten by `make bench-report` from `results/*.json`; nothing here is typed by hand."
    )
    sections = (
        demo_section(),
        table1_section(),
        readings_section(),
        private_section(),
        learning_section(),
        *ulr_sections(),
        convex_section(markdown),
        *zo_sections(),
        mechanism_section(),
        *curve_sections(),
        speed_section(),
        commits_section(),
    )
    return "\n\n".join((head, *(section for section in sections if section))) + "\n"


def readme_page(text: str) -> str:
    """The README with its measured table renewed."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{markdown(('what', 'figure', 'redo it'), list(readme_rows()))}\n{END}{after}"


def faults_page(text: str) -> str:
    """docs/devices.md with its table of faults renewed."""
    results = load_results("device_faults")
    rows: list[tuple[str, ...]] = [
        (
            row["fault"],
            row["error"],
            "–" if row["steps_until_stop"] is None else str(row["steps_until_stop"]),
            "as if nothing had happened" if row["as_undisturbed"] else "goes on from the step of the stop",
        )
        for row in results.get("rows", [])
    ]
    before, rest = text.split(FAULTS_BEGIN)
    _, after = rest.split(FAULTS_END)
    table = markdown(("fault", "error", "steps until the stop", "the resumed run"), rows)
    return f"{before}{FAULTS_BEGIN}\n{table}\n{FAULTS_END}{after}"


def monitor_page(text: str) -> str:
    """docs/devices.md with its table of the smallest changes that the monitor finds renewed."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in load_results("monitor").get("changes", []):
        size = (
            f"{row['smallest']:.3f}" if row["change"] == "correlation" else f"{100 * row['smallest']:.1f} %"
        )
        cell = f"{size} ({row['found']} of {row['trials']})"
        found.setdefault((row["device"], row["change"]), {})[row["checks"]] = cell
    checks = sorted({number for cells in found.values() for number in cells})
    rows = [(*key, *(cells.get(number, "–") for number in checks)) for key, cells in found.items()]
    head = ("device", "change", *(f"in {number} check{'s' * (number > 1)}" for number in checks))
    before, rest = text.split(MONITOR_BEGIN)
    _, after = rest.split(MONITOR_END)
    return f"{before}{MONITOR_BEGIN}\n{markdown(head, rows)}\n{MONITOR_END}{after}"


def pages() -> dict[Path, str]:
    readme = ROOT / "README.md"
    devices = ROOT / "docs" / "devices.md"
    return {
        readme: readme_page(readme.read_text()),
        ROOT / "benchmarks" / "README.md": benchmarks_page(),
        devices: monitor_page(faults_page(devices.read_text())),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
        print(path)
