"""What do settings beside those of a row change, on held-out training records?

Each line is one run with one seed on 90 % of the training records; accuracies are of the others. Runs resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from benchmarks.markdown import command, markdown, section
from benchmarks.private_accuracy.records import TABLE
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import private_accuracy, train_or_read
from benchmarks.tuned_rows import shown_point

MODULE, NAME = "benchmarks.private_accuracy.variants", "private_accuracy_variants"
EPSILON, AS_IT_IS = 3.0, "as in the row"
_LONGER = {"epochs": 80, "sampler.batch_size": 16384}
_QUICK = {"optimizer.lr": 4.0, "sampler.batch_size": 2048, "epochs": 20}
_COPIES = {"trainer.augmented_copies": 2, "trainer.augment_mirror": False, "trainer.augment_shift": 1}
CHANGES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "cifar-10, linear on mirrored components, DP-SGD": (
        {},
        {"optimizer.lr": 4.0},
        _LONGER,
        {**_LONGER, "optimizer.lr": 16.0},
        {"data.components": 2000},
        {"data.components": 500},
        {"data.whitening": 0.7},
        {"data.whitening": 0.3},
        {"protection.epsilon": 1000.0},
    ),
    "mnist, tuned convolutions, DP-SGD": (
        _QUICK,
        {**_QUICK, **_COPIES},
        {**_QUICK, "optimizer.averaged_tail": 0.5},
        {**_QUICK, "model.options.widths": [16, 16]},
        {**_QUICK, "model.options.widths": [32, 32]},
    ),
}
"""Changes to rows of `benchmarks.private_accuracy.records`."""


def main(rows: str = "") -> None:
    """Train what is missing of the rows with a text in their name, and print each accuracy."""
    chosen = [row for row in CHANGES if rows in row]
    found = [one for one in load_results(NAME).get("variants", []) if one["row"] not in chosen]
    for row in chosen:
        for number, change in enumerate(CHANGES[row]):
            config = TABLE.configuration(row, EPSILON, change, TABLE.tuning_seed)
            folder = TABLE.folder / f"{row.replace(', ', '-').replace(' ', '-')}-variant-{number}"
            validation = private_accuracy(train_or_read(config, folder))["validation"]
            found.append({"row": row, "change": change, "validation": validation})
            print(f"{row}, {shown_point(change) or AS_IT_IS}: {validation:.2f}", flush=True)
            save_results(NAME, {"variants": found})


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    rows = [
        (found["row"], shown_point(found["change"]) or AS_IT_IS, f"{found['validation']:.2f}")
        for found in results.get("variants", [])
    ]
    if not rows:
        return ""
    text = (
        f"Settings beside those of rows that miss their target, at epsilon {EPSILON:g} ({results['date']}, "
        f"{command(MODULE)}): one run with one seed each. The standard error over held-out records is 0.7 points for "
        "CIFAR-10 and 0.2 for MNIST, and less for the difference of two runs, which share the records."
    )
    return section("What was tried besides", text, markdown(("row", "change", "held-out [%]"), rows))


if __name__ == "__main__":
    typer.run(main)
