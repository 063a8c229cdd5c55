"""What does the JPEG copy of CIFAR-10 cost a linear model on scattering features, and what does a run need?

The copy holds JPEG files of quality 75 with halved colours, some 886 bytes an image; no lossless original was at hand.
- `probe`: the linear model without protection on all features, for the figures that papers state of the original.
- `encoded`: the images encoded once more, as the copy was, on a grid of blocks that lies 4 pixels aside, so that the
  second encoding meets blocks that the first one did not. A ridge classifier on components of invented images learns
  from 10,000 training images and is tested on all 10,000 test images, both before and after. The first encoding has
  already removed part of what the second one would, so the fall is less than what the first one cost.
- `run`: processor time and peak memory of one protected run of the table, in a process of its own, whose features are
  in the cache.
"""

from __future__ import annotations

import io
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from opusim.training.data.public_maps import ScatteringMap, public_features, synthetic_components
from PIL import Image
from sklearn.linear_model import RidgeClassifier
from torch import Tensor

from benchmarks.markdown import command, markdown, section
from benchmarks.private_accuracy.records import BASE, COMPONENTS, TABLE
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from opusim.training.data import Dataset, load_dataset

MODULE, NAME = "benchmarks.private_accuracy.cifar", "private_accuracy_cifar"
DATA, ROW, EPSILON = "cifar-10", "cifar-10, linear on components, DP-SGD", 3.0
_PARTS = ("probe", "encoded", "run")
QUALITY, ASIDE, RECORDS, RIDGE = 75, 4, 10_000, 100.0
MOST_SECONDS, MOST_GIB = 180, 4
PUBLISHED = "67.0 on the original, at epsilon 3 (Tramer and Boneh 2021)"
PROBE: dict[str, Any] = {
    "threads": 1,
    "epochs": 10,
    "data": {**BASE["data"], "name": DATA, "validation_fraction": 0.0},
    "model": {"hidden": []},
    "optimizer": {"name": "adam", "lr": 3e-4, "schedule": "linear"},
    "sampler": {"batch_size": 512},
    "trainer": {"kind": "bp"},
}

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def probe() -> None:
    """Train the linear model without protection, or read it back."""
    run = train_or_read(PROBE, Path("runs/private_accuracy/cifar-10-probe"))
    _save(probe=100 * (run.summary or {})["test_accuracy"])


@app.command()
def encoded() -> None:
    """Compare the images with what one more encoding leaves of them."""
    data = load_dataset(DATA, validation_fraction=0.0, split_seed=0)
    public = ScatteringMap(record_shape=data.record_shape, groups=BASE["data"]["features_groups"], scale=2)
    components = synthetic_components(
        replace(data, public_map=public.facts),
        COMPONENTS["components"],
        whitening=COMPONENTS["whitening"],
        cached=True,
    )
    chosen = np.random.default_rng(0).permutation(len(data.train))[:RECORDS]
    if data.test is None:
        raise ValueError(f"{DATA} has no test records")
    whole = [public_features(public, x, cached=True) for x in (data.train.x, data.test.x)]
    again = [encoded_again(data, x) for x in (data.train.x[chosen], data.test.x)]
    features = {
        "once": [whole[0][chosen], whole[1]],
        "twice": [public_features(public, x, cached=True) for x in again],
    }
    found = {}
    for name, parts in features.items():
        train, test = (components.apply(part).numpy() for part in parts)
        model = RidgeClassifier(alpha=RIDGE).fit(train, data.train.y[chosen].numpy())
        found[name] = model.predict(test) == data.test.y.numpy()
    fall = 100 * (found["once"].astype(float) - found["twice"])
    _save(
        encoded={
            **{name: 100 * float(right.mean()) for name, right in found.items()},
            "fall": float(fall.mean()),
            "fall_standard_error": float(fall.std(ddof=1) / len(fall) ** 0.5),
        }
    )


@app.command()
def run(seed: int = 0) -> None:
    """Measure one protected run; a finished one is read back, so give a seed that has not run."""
    TABLE.run_once(ROW, EPSILON, TABLE.best_point(ROW, EPSILON), seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    _save(run={"seconds": time.process_time(), "peak_gib": peak, "seed": seed})


def encoded_again(data: Dataset, x: Tensor) -> Tensor:
    """Return standardised images as one more JPEG encoding leaves them, on a grid of blocks `ASIDE` pixels aside.

    Args:
        data: Its constants, and the shape of its images.
        x: Shape (n, 3 * 32 * 32).
    """
    constants, (channels, height, width) = data.standardisation, data.record_shape
    pixels = (255 * (x * constants.std + constants.mean)).round().clamp(0, 255).byte()
    images = pixels.view(-1, channels, height, width).permute(0, 2, 3, 1).numpy()
    left = np.stack([_encoded(image) for image in images])
    flat = torch.from_numpy(left).permute(0, 3, 1, 2).flatten(1)
    return constants.apply(flat.float() / 255)


def _encoded(image: np.ndarray) -> np.ndarray:
    padded = np.pad(image, ((ASIDE, ASIDE), (ASIDE, ASIDE), (0, 0)), mode="edge")
    stream = io.BytesIO()
    Image.fromarray(padded).save(stream, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return np.asarray(Image.open(stream).convert("RGB"))[ASIDE:-ASIDE, ASIDE:-ASIDE]


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    rows = []
    if "probe" in results:
        text = "linear model without protection, test accuracy [%]"
        rows.append((text, f"{results['probe']:.2f}", PUBLISHED))
    if "encoded" in results:
        found = results["encoded"]
        figure = f"{found['fall']:.2f} ± {found['fall_standard_error']:.2f}"
        text = "fall of a ridge classifier on 10,000 records if images are encoded once more [points]"
        rows.append((text, figure, f"{found['once']:.2f} % before"))
    if "run" in results:
        found = results["run"]
        rows.append(
            (
                "processor time of a run on cached features [s]",
                f"{found['seconds']:.0f}",
                f"at most {MOST_SECONDS}",
            )
        )
        rows.append(("its peak memory [GiB]", f"{found['peak_gib']:.2f}", f"below {MOST_GIB}"))
    if not rows:
        return ""
    text = (
        f"The copy holds JPEG files of quality {QUALITY} with halved colours ({results['date']}, "
        f"{command(MODULE, 'probe')}, `encoded`, `run`). The second encoding lies on another grid of "
        "blocks; the first one has already removed part of what it would, so it costs less than the first one did."
    )
    return section("CIFAR-10 in JPEG", text, markdown(("what", "figure", "compare"), rows))


def _save(**found: Any) -> None:
    kept = {key: value for key, value in load_results(NAME).items() if key in _PARTS}
    save_results(NAME, {**kept, **found})
    print(found)


if __name__ == "__main__":
    app()
