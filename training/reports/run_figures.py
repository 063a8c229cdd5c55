"""Figures of runs: learning curves, alignment with backpropagation, signal and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.reports.line_chart import Line, LineChart
from training.runs.stored_run import StoredRun

_MIN_ACCURACY_RANGE = 2.0
"""Smallest range of an accuracy axis, in percentage points."""
_LEAST_ALIGNMENT, _MOST_ALIGNMENT = -0.05, 1.05
"""Ends of the axis of cosines, unless one is lower."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The figure that a table shows of a target.

    Attributes:
        key: Its name in metrics, behind "train_", "validation_" or "test_".
        label: Its name in tables.
        share: Whether it is a share, shown in percent.
    """

    key: str
    label: str
    share: bool = False

    def shown(self, value: float | None, *, digits: int = 2) -> str:
        """Return a value as text, or a dash if there is none."""
        if value is None:
            return "–"
        return f"{100 * value:.{digits}f} %" if self.share else f"{value:.{digits + 2}g}"


MAIN_FIGURES: Mapping[str, Figure] = {
    "class": Figure(key="accuracy", label="accuracy", share=True),
    "tokens": Figure(key="bits_per_token", label="bits per token"),
    "real": Figure(key="rmse", label="RMSE"),
    "labels": Figure(key="accuracy", label="accuracy", share=True),
}
BITS_PER_BYTE = Figure(key="bits_per_byte", label="bits per byte")
"""The figure of tokens that stand for a text."""
LOSS_FIGURE = Figure(key="loss", label="loss")
"""A figure that every target has."""


def main_figure(run: StoredRun) -> Figure:
    """Return the figure that a table shows of a run: that of its target, for a text bits per byte."""
    is_text = "bytes_per_token" in run.facts["data"].get("origin", {})
    return BITS_PER_BYTE if is_text and run.config.loss == "cross-entropy" else MAIN_FIGURES[run.target]


def learning_curves(runs: Sequence[StoredRun], names: Sequence[str]) -> LineChart | None:
    """Draw accuracy against epochs, on validation records if every run held some out, else on training records.

    Runs without class numbers show the figure of their target; runs of different targets show their losses.

    Returns:
        The figure, or None if no run wrote figures (release mode).
    """
    shown = {main_figure(run) for run in runs}
    main = shown.pop() if len(shown) == 1 else LOSS_FIGURE
    held_out = all(f"validation_{main.key}" in record for run in runs for record in run.metrics)
    part = "validation" if held_out else "train"
    if not any(f"{part}_{main.key}" in record for run in runs for record in run.metrics):
        main = LOSS_FIGURE
    key, scale = f"{part}_{main.key}", 100 if main.share else 1
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        drawn = [(record["epoch"], scale * record[key]) for record in run.metrics if key in record]
        if drawn:
            epochs, values = zip(*drawn, strict=True)
            lines.append(Line(x=epochs, y=values, label=name, number=number))
    if not lines:
        return None
    unit = " [%]" if main.share else ""
    chart = LineChart(
        lines=lines,
        x_label="epoch",
        y_label=f"{'validation' if held_out else 'training'} {main.label}{unit}",
    )
    low, high = chart.limits
    if not main.share or high - low >= _MIN_ACCURACY_RANGE:
        return chart
    half = _MIN_ACCURACY_RANGE / 2
    middle = min(max((low + high) / 2, half), 100 - half)
    return LineChart(
        lines=lines, x_label="epoch", y_label=chart.y_label, y_limits=(middle - half, middle + half)
    )


def alignment_curves(run: StoredRun) -> LineChart | None:
    """Draw the cosine between each layer's update and its backpropagation gradient (PDFA paper, Figure 2 right).

    Returns:
        The figure, or None if the run has no observations.
    """
    observed = [record for record in run.metrics if record.get("alignment")]
    if not observed:
        return None
    epochs = [record["epoch"] for record in observed]
    part = "layer" if "layers" in run.facts["network"] else "point"
    lines = [
        Line(
            x=epochs,
            y=[record["alignment"][layer] for record in observed],
            label=f"{part} {layer + 1}",
            number=layer,
        )
        for layer in range(len(observed[0]["alignment"]))
    ]
    lowest = min(min(line.y) for line in lines)
    return LineChart(
        lines=lines,
        x_label="epoch",
        y_label="cosine with the gradient",
        y_limits=(min(_LEAST_ALIGNMENT, 1.1 * lowest), _MOST_ALIGNMENT),
    )


def noise_curves(run: StoredRun) -> LineChart | None:
    """Draw the mean norm of the signal that each hidden layer receives (for bp: of the error), and of its noise.

    Returns:
        The figure, or None if the run has no observations or without noise.
    """
    observed = [record for record in run.metrics if record.get("signal_norm")]
    if not observed or not any(any(record["noise_norm"]) for record in observed):
        return None
    epochs = [record["epoch"] for record in observed]
    lines = []
    for layer in range(len(observed[0]["signal_norm"])):
        place = "error" if run.config.trainer.kind == "bp" else f"layer {layer + 1}"
        for what, key in (("signal", "signal_norm"), ("noise", "noise_norm")):
            values = [record[key][layer] for record in observed]
            lines.append(
                Line(x=epochs, y=values, label=f"{what}, {place}", number=layer, hollow=what == "noise")
            )
    return LineChart(lines=lines, x_label="epoch", y_label="mean norm per record", logarithmic=True)
