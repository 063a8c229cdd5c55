"""How long should the MLP of `benchmarks.analog.lifetimes` train with noise, and with which limit of weights?

Chosen on images held out of the training set: 10,000 of the 60,000 training images of FashionMNIST, with another
training seed and other chips than in the tables. Accuracies are those one day after programming, means over three
chips; the clean network of each row was trained for as long.

Results are written after each training; a second call measures what is missing.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch

from benchmarks.analog.lifetimes import TIMES_S, accuracy, trained, trained_clean
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim import convert
from opusim.tables import print_table
from training.config.sections import DataConfig
from training.data import Dataset, Split
from training.data.catalogue import build_dataset

MODULE, NAME = "benchmarks.analog.held_out", "analog_held_out"
HELD_OUT, SPLIT_SEED, SEED, CHIPS = 10_000, 2024, 11, range(100, 103)
CLEAN = "clean"
CELLS = (
    *((CLEAN, device, epochs, None) for epochs in (6, 15) for device in ("hermes", "reram")),
    *(("device noise", device, 6, clip) for clip in (None, 2.5) for device in ("hermes", "reram")),
    ("device noise", "hermes", 15, None),
    ("device noise", "reram", 15, None),
)
"""Training, device, further epochs, and limit of weights."""
HEADER = ("device", "epochs", "limit of weights", "digital [%]", "1 d [%]", "regained [%]")


def held_out(data: Dataset) -> Dataset:
    """Return the data set with some of the training images in place of the test images."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = [
        Split(data.train.x[rows], data.train.y[rows])
        for rows in order.split([HELD_OUT, len(order) - HELD_OUT])
    ]
    return replace(data, test=parts[0], train=parts[1])


def measure() -> list[dict[str, Any]]:
    """Return a row for each cell; those of an earlier call are kept."""
    torch.set_num_threads(1)
    rows = list(load_results(NAME).get("rows", []))
    known = [[row[key] for key in ("training", "device", "epochs", "clip")] for row in rows]
    data = held_out(build_dataset(DataConfig(name="fashion-mnist")))
    begun = None
    for training, device, epochs, clip in CELLS:
        if [training, device, epochs, clip] in known:
            continue
        begun = begun or trained_clean("mlp", data, SEED)
        model = trained(
            begun, data, None if training == CLEAN else device, epochs=epochs, clip=clip, seed=SEED
        )
        row = {"training": training, "device": device, "epochs": epochs, "clip": clip}
        row |= {"digital": round(accuracy(model, data), 2), "chips": []}
        for chip in CHIPS:
            with convert(model, device, seed=chip) as analog:
                analog.wait(TIMES_S["1 d"])
                row["chips"].append(round(accuracy(analog, data), 2))
        rows.append(row)
        print(row, flush=True)
        save_results(NAME, {"rows": rows})
    return rows


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each training: what it regains of the loss of the clean network that trained as long."""
    clean = {(row["device"], row["epochs"]): row for row in rows if row["training"] == CLEAN}
    lines = []
    for row in sorted(rows, key=lambda row: (row["device"], row["epochs"])):
        found, regained = statistics.mean(row["chips"]), "–"
        other = clean.get((row["device"], row["epochs"]))
        if other is not None and row is not other:
            least = statistics.mean(other["chips"])
            regained = f"{100 * (found - least) / (other['digital'] - least):.0f}"
        limit = "clean" if row["training"] == CLEAN else "none" if row["clip"] is None else f"{row['clip']:g}"
        lines.append(
            (row["device"], str(row["epochs"]), limit, f"{row['digital']:.2f}", f"{found:.2f}", regained)
        )
    return lines


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    text = (
        f"The MLP on {HELD_OUT:,} held-out images of the training set, one training seed, {len(CHIPS)} chips, one day "
        f"after programming ({found['date']}, {command(MODULE)}); the epochs of the MLP above were chosen by "
        f"`hermes` without a limit; the rows with a limit, and `reram` with noise for 15 epochs, were measured later."
    )
    return section(
        "Epochs and limit of weights, held-out images", text, markdown(HEADER, table(found["rows"]))
    )


def main() -> None:
    """Measure and print."""
    print_table("Held-out accuracy", HEADER, table(measure()))


if __name__ == "__main__":
    main()
