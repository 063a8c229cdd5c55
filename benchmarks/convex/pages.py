"""What the pages show of the convex trainer's benchmarks, from benchmarks/results/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.convex.rows import LAST_ITERATE
from benchmarks.results_file import load_results

Row = tuple[str, str, str]
Table = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]


def convex_readme_rows() -> list[Row]:
    """Claim, figure, command."""
    cells = [cell for cell in load_results("convex").get("cells", []) if _is_headline(cell)]
    rows: list[Row] = []
    for data, epsilon in dict.fromkeys((cell["data"], cell["epsilon"]) for cell in cells):
        mine = [cell for cell in cells if (cell["data"], cell["epsilon"]) == (data, epsilon)]
        figures = "; ".join(f"{_name(cell)} {cell['test']:.1f}" for cell in mine)
        claim = f"{data}, test accuracy [%], epsilon {epsilon:g} for replacing a record, delta 1e-5"
        rows.append((claim, figures, "`python -m benchmarks.convex.accuracy`"))
    return rows + [row for row in convex_speed_rows() if " 1 thread" in row[0]]


def _is_headline(cell: dict[str, Any]) -> bool:
    """Whether the README shows a cell: one size of the last iterate, no variant, and each of its rivals."""
    if cell["row"] == LAST_ITERATE:
        return bool(cell["point"]["trainer.hyperplanes"] == 128)
    return not cell["row"].startswith(LAST_ITERATE)


def convex_speed_rows() -> list[Row]:
    """The step beside its products and beside Opacus."""
    command = "`python -m benchmarks.convex.step`"
    rows = []
    for row in load_results("convex_step").get("rows", []):
        faster = ", ".join(
            f"{value:.1f} times faster than {name}" for name, value in row["times_faster"].items()
        )
        claim = f"a noisy step of the convex trainer, P = 128, batch 1000, {row['threads']} thread(s)"
        rows.append((claim, f"{row['of_two_products']:.2f} of its two matrix products, {faster}", command))
    return rows


def convex_section(markdown: Table) -> str:
    """The table of benchmarks.convex.accuracy, the noise of a last iterate, the cost of choosing.

    Args:
        markdown: Makes a table of a header and rows.
    """
    results = load_results("convex")
    if not results.get("cells"):
        return ""
    rows = [
        (
            cell["data"],
            f"{cell['epsilon']:g}",
            _name(cell),
            _accuracy(cell),
            {True: "met", False: "**missed**", None: "none"}[cell["within_bar"]],
            "none" if cell["paper"] is None else f"{cell['paper']:.1f}",
            f"{cell['seconds']:.0f}",
            ", ".join(
                f"{key.split('.')[-1]} {value}" for key, value in cell["point"].items() if "hyper" not in key
            ),
        )
        for cell in results["cells"]
    ]
    header = ("data", "epsilon", "trained by", "test [%]", "bar", "paper [%]", "s", "chosen point")
    return _joined(
        "## Convex ReLU approximation, private at the last iterate",
        "Replacing a record, delta 1e-5, proven epsilon at most the one shown; 60,000 private records; test "
        f"accuracy, mean and standard error over seeds ({results['date']}, "
        "`python -m benchmarks.convex.accuracy search`, then `measure`; seconds of one thread on a machine with "
        "other work). Settings were chosen with one other seed on "
        f"6,000 held-out records ({len(results.get('trials', []))} trials), which no guarantee here covers. The bars, "
        "for the last iterate on MNIST: 92.5 % and 94.3 %. The paper's figures are after tuning, with constants that "
        "do not cover its runs.",
        markdown(header, rows),
        _curves_section(markdown),
        _tuned_section(markdown),
        _device_text(),
        _opacus_text(),
        _noise_section(markdown),
    )


def _joined(*parts: str) -> str:
    """Paragraphs, empty ones left out."""
    return "\n\n".join(part for part in parts if part)


def _name(cell: dict[str, Any]) -> str:
    hyperplanes = cell["point"].get("trainer.hyperplanes")
    return cell["row"] if hyperplanes is None else f"{cell['row']}, P = {hyperplanes}"


def _accuracy(cell: dict[str, Any]) -> str:
    """Mean and standard error; the number of seeds where it is not three."""
    error, seeds = cell["test_standard_error"], cell["seeds"]
    if error is None:
        return f"{cell['test']:.2f} (1 seed)"
    return f"{cell['test']:.2f} ± {error:.2f}" + ("" if seeds == 3 else f" ({seeds} seeds)")


def _device_text() -> str:
    found = load_results("convex_device")
    if not found:
        return ""
    text = "; ".join(
        f"{name} {row['test']:.2f} ± {row['test_standard_error']:.2f}" for name, row in found["rows"].items()
    )
    return (
        f"Hyperplanes and noise from a seed or from the `gaussian` device (sigma {found['sigma']:g}), "
        f"{found['data']} at epsilon {found['epsilon']:g}, {found['seeds']} seeds each, test accuracy [%]: {text} "
        "(`python -m benchmarks.convex.device`)."
    )


def _curves_section(markdown: Table) -> str:
    """Accuracy at each epsilon, a row a way to train."""
    found = load_results("convex_curves")
    points = found.get("points", [])
    if not points:
        return ""
    epsilons = sorted({point["epsilon"] for point in points})
    test = {(point["row"], point["epsilon"]): f"{point['test']:.2f}" for point in points}
    rows = [
        (row, *(test.get((row, epsilon), "not run") for epsilon in epsilons))
        for row in dict.fromkeys(point["row"] for point in points)
    ]
    text = (
        f"Test accuracy [%] by epsilon, {found['data']}, one seed, settings of the nearest searched epsilon "
        "(`python -m benchmarks.convex.curves`; [the figure](../docs/convex.png))."
    )
    return "\n\n".join((text, markdown(("trained by", *(f"{epsilon:g}" for epsilon in epsilons)), rows)))


def _tuned_section(markdown: Table) -> str:
    """What a whole search costs and finds."""
    found = load_results("convex_tuned")
    rows = [
        (
            f"{row['base_epsilon']:g}",
            str(row["mean"]),
            str(row["trials"]),
            f"{row['epsilon']:.2f}",
            ", ".join(row["settings"]) or "none",
            *("none" if row[key] is None else f"{row[key]:.2f}" for key in ("score", "test")),
        )
        for row in found.get("rows", [])
    ]
    header = (
        "epsilon of a trial",
        "trials, mean",
        "drawn",
        "epsilon of all",
        "chosen",
        "score [%]",
        "test [%]",
    )
    text = (
        "Settings chosen privately, as `opusim tune` does it: MNIST, P = 64, 54,000 private records, the clip drawn "
        "from five values, one search each (`python -m benchmarks.convex.tuned`)."
    )
    return "\n\n".join((text, markdown(header, rows))) if rows else ""


def _opacus_text() -> str:
    rows = load_results("convex_opacus").get("rows", [])
    if not rows:
        return ""
    text = "; ".join(
        f"epsilon {row['epsilon']:g}: {row['opacus']:.2f} (ours {', '.join(f'{v:.2f}' for v in row['ours'])})"
        for row in rows
    )
    return (
        "The ReLU baseline on MNIST trained by Opacus itself, one seed, same network, settings and noise, test "
        f"accuracy [%]: {text} (`python -m benchmarks.convex.opacus_baseline`)."
    )


def _noise_section(markdown: Table) -> str:
    noise = load_results("convex_accounting").get("noise", [])
    rows = [
        (
            f"{row['epsilon']:g}",
            str(row["batches"]),
            str(row["epochs"]),
            f"{row['without']['noise_multiplier']:.3f}",
            f"{row['with']['noise_multiplier']:.3f}",
            f"{row['with']['total'] / row['without']['total']:.2f}",
        )
        for row in noise
    ]
    header = ("epsilon", "batches", "epochs", "multiplier", "with noise at the end", "total noise, ratio")
    text = "Least noise multiplier of the last iterate (`python -m benchmarks.convex.noise`)."
    return "\n\n".join((text, markdown(header, rows))) if rows else ""
