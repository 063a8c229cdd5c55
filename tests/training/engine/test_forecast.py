"""What a run is told before its first step, against what its device counts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opusim import open_device, training
from opusim.devices.usage import DeviceWork, Usage
from opusim.training.config.run import RunConfig
from opusim.training.engine.callbacks import Callback
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.protections.noisy_labels import LabelReadoutProtection
from opusim.training.reports.run_report import write_report

RECORDS, FEATURES, CLASSES = 96, 6, 3
WHOLE = {"scheme": "fixed-size", "batch_size": 16}


class Told(Callback):
    """Keeps what it is told, and when."""

    def __init__(self) -> None:
        self.expected: list[tuple[Usage, int, bool]] = []
        self.features: list[Usage] = []
        self.steps = 0

    def on_usage(self, expected: Usage, *, steps: int, is_mean: bool) -> None:
        assert self.steps == 0, "told after the first step"
        self.expected.append((expected, steps, is_mean))

    def on_features(self, expected: Usage) -> None:
        self.features.append(expected)

    def on_step(self, *, step: int) -> None:
        self.steps = step


def records() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    y = np.arange(RECORDS) % CLASSES
    return generator.normal(size=(RECORDS, FEATURES)).astype(np.float32) + y[:, None], y


def module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, CLASSES))


def protected(kind: str = "record", **keys: Any) -> dict[str, Any]:
    return {"kind": kind, "noise": "device", **keys}


def configuration(kind: str, **sections: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "epochs": 2, "threads": 1, "data": {"validation_fraction": 0.25, "n_classes": CLASSES}, "device": NOISY,
    }  # fmt: skip
    if kind == "ridge":
        del defaults["epochs"]
    elif kind == "convex":
        defaults["sampler"] = {"scheme": "disjoint-cyclic", "batch_size": 16}
    else:
        defaults |= {"sampler": WHOLE, "model": {"hidden": [5]}}
    return {**defaults, **sections, "trainer": {"kind": kind, **sections.pop("trainer", {})}}


DP = {"noise_multiplier": 2.0, "epsilon": 10.0}
NOISY = {"name": "gaussian", "noise": {"sigma": 1.0}}
CHECKED = {"device": NOISY | {"monitor": {"every_steps": 1}}}
ALL_RECORDS = {"protection": protected(noise_multiplier=1.0, divisor=72.0)}
ALL_RECORDS["sampler"] = {"scheme": "poisson", "sampling_probability": 1.0}
LABELS = {"protection": protected("label-readout", epsilon=3.0), "sampler": WHOLE | {"batch_size": 12}}
START = {"model": {"hidden": [5], "initial_output": "feedback"}}
PARAMETERS = {"noise": "device", "form": "published", "remedy": "parameters", "copies": 2}
LAST = protected("last-iterate", noise_multiplier=1.0)
FIXED: dict[str, dict[str, Any]] = {
    "pdfa": configuration("pdfa"),
    "planes": configuration("pdfa", trainer={"encoding": "planes", "planes": 3}),
    "published": configuration("pdfa", trainer={"order": "published"}),
    "from feedback": configuration("pdfa", **START),
    "shuffled": configuration("pdfa", sampler={"scheme": "shuffled-epochs", "batch_size": 16}),
    "ulr": configuration("ulr", trainer={"noise": "device", "copies": 3}),
    "ulr orthogonal": configuration("ulr", trainer={"noise": "device", "copies": 11, "directions": "orthogonal"}),
    "ulr published": configuration("ulr", trainer={"noise": "device", "form": "published"}),
    "ulr parameters": configuration("ulr", trainer=PARAMETERS),
    "convex gates": configuration("convex", trainer={"gates": "device", "hyperplanes": 7, "gate_readings": 3}),
    "convex noise": configuration("convex", trainer={"hyperplanes": 7}, protection=LAST),
    "ridge": configuration("ridge", protection=protected("label-release", epsilon=3.0)),
    "labels once": configuration("pdfa", **LABELS),
    "record noise": configuration("pdfa", **ALL_RECORDS),
    "calibrated and monitored": configuration("pdfa", **START, **CHECKED),
    "labels once, monitored": configuration("pdfa", **LABELS, **CHECKED),
    "camera": configuration("pdfa", device={"name": "camera", "monitor": {"every_steps": 3}}),
    "monitored": configuration("pdfa", device=NOISY | {"monitor": {"every_steps": 3}}),
}  # fmt: skip


def play(config: dict[str, Any], folder: Path, model: nn.Module | None = None) -> tuple[Told, training.Run]:
    told = Told()
    run = training.train(config, data=records(), folder=folder, model=model, callbacks=[told])
    return told, run


@pytest.mark.parametrize("name", FIXED)
def test_a_run_of_fixed_batches_takes_what_it_was_told(tmp_path: Path, name: str) -> None:
    told, run = play(FIXED[name], tmp_path / "run")
    ((expected, steps, is_mean),) = told.expected
    found = run.summary
    assert (expected.frames, steps) == (found["frames"], found["steps"])
    assert is_mean is (name == "record noise")  # of probability 1
    assert expected.frames > 0
    for key in ("seconds", "joules", "host_seconds"):
        assert getattr(expected, key) == pytest.approx(found[key], abs=1e-6)
    assert run.facts["expected"] == expected.to_json()


MODULES = {
    f"{rows}, {encoding}, {readout}": {"trainer": {"encoding": encoding, "rows": rows, "readout_every": readout}}
    for rows in ("each", "sum") for encoding in ("stochastic", "planes") for readout in (0, 5)
} | {"checked": ALL_RECORDS | CHECKED}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_module_takes_what_it_was_told(tmp_path: Path, name: str) -> None:
    """A checked one names each step up to three times: for its noise, its reading and its diagnostics."""
    trainer = {"points": "1", **MODULES[name].get("trainer", {})}
    config = configuration("pdfa", **MODULES[name] | {"trainer": trainer})
    del config["model"]
    told, run = play(config, tmp_path, module())
    assert [expected.frames for expected, _, _ in told.expected] == [run.summary["frames"]]


@pytest.mark.parametrize(("kind", "follows"), [("pdfa", True), ("ulr", True), ("zo", False)])
def test_random_batches_are_told_as_a_mean(tmp_path: Path, kind: str, follows: bool) -> None:
    """Within five standard errors of the number of records; a draw of noise rounds up to a whole reading."""
    trainer = {"noise": "device"} if kind == "ulr" else {}
    protection = {"kind": "none"} if kind in ("pdfa", "ulr") else protected(**DP)
    chosen = {"protection": protection, "sampler": {"scheme": "poisson", "batch_size": 12}, "epochs": 20}
    config = configuration(kind, trainer=trainer, **chosen)
    told, run = play(config, tmp_path)
    ((expected, steps, is_mean),) = told.expected
    assert is_mean is follows
    if not follows:
        assert expected.frames == run.summary["frames"]
        return
    records_of_training = run.facts["data"]["n_train"]
    q = 12 / records_of_training
    error = 5 * math.sqrt(steps * records_of_training * q * (1 - q))
    rounded = steps * 2 if kind == "ulr" else 0
    tolerance = 2 * (error + rounded)  # one reading a record: of the error, or of the outputs of all modules
    assert abs(expected.frames - run.summary["frames"]) <= tolerance
    assert expected.frames > tolerance, "the tolerance would pass a run without a device"


def test_a_resumed_run_is_told_what_is_left(tmp_path: Path, ctrl_c_at: type) -> None:
    config = configuration("pdfa")
    with pytest.raises(training.RunInterrupted):
        training.train(config, data=records(), folder=tmp_path, watcher=ctrl_c_at(3))
    told = Told()
    run = training.train(data=records(), folder=tmp_path, resume=True, callbacks=[told])
    ((expected, steps, _),) = told.expected
    assert steps == run.summary["steps"] - 3
    assert expected.frames == steps * 16 * 2


def test_release_runs_keep_what_they_were_told_and_not_what_they_took(tmp_path: Path) -> None:
    told, run = play({**configuration("pdfa"), "mode": "release"}, tmp_path)
    ((expected, _, _),) = told.expected
    assert "frames" not in run.summary
    assert run.facts["expected"] == expected.to_json()
    assert f">{expected.frames:,}<" in write_report(run).read_text()


@pytest.mark.parametrize("fault", [False, True])
def test_no_release_tells_a_private_number_of_records(tmp_path: Path, monkeypatch: Any, fault: bool) -> None:
    """The planted fault: a forecast from the true mean batch, which tells one record more or less."""
    if fault:
        monkeypatch.setattr(RunConfig, "tells_records", True)
    protection = protected(noise_multiplier=2.0, relation="add_or_remove_one", divisor=14.0)
    sampler = {"scheme": "poisson", "sampling_probability": 0.2}
    config = configuration("pdfa", protection=protection, sampler=sampler, mode="release")
    config["data"] = {"n_classes": CLASSES, "validation_fraction": 0.0}
    x, y = records()
    found = []
    for count in (RECORDS, RECORDS - 40):
        run = training.train(config, data=(x[:count], y[:count]), folder=tmp_path / str(count))
        found.append(run.facts["expected"])
    assert (found[0] == found[1]) is not fault


def test_optical_features_are_told_before_they_are_read(tmp_path: Path) -> None:
    config = configuration("ridge", data={"features": "optical:gaussian", "n_features": 32})
    del config["device"]
    told, run = play(config, tmp_path)
    (expected,) = told.features
    assert expected.frames == 256 + RECORDS
    assert run.facts["expected_of_features"] == expected.to_json()
    assert told.expected == []
    assert f">{expected.frames:,}<" in write_report(run).read_text()


@pytest.mark.parametrize(("first", "end"), [(0, 10), (3, 10), (4, 9), (5, 6)])
def test_a_medium_that_drifts_is_anchored_as_often_as_it_was_told(first: int, end: int) -> None:
    drift = {"decorrelation_s": 1e9, "seconds_per_step": 1.0, "reanchor_steps": 4}
    with open_device("camera", n_inputs=6, n_outputs=8, camera={"drift": drift}) as device:
        told = device.usage + device.upkeep(first, end).usage(device.description.frames, n_outputs=8)
        for step in range(first, end):
            device.seek(step)
        assert device.usage.frames == told.frames


def test_points_tell_a_users_own_loop_what_a_pass_takes() -> None:
    net = module()
    points = FeedbackAlignment(net, "1", encoding="planes", planes=2)
    assert points.work(torch.zeros(2, FEATURES), times=32) == DeviceWork(projections=128, calls=1)
    inputs, outputs = points.shape(torch.zeros(2, FEATURES))
    with open_device("gaussian", n_inputs=inputs, n_outputs=outputs) as device:
        points.noisy_device = device
        nn.functional.cross_entropy(points(torch.randn(64, FEATURES)), torch.arange(64) % CLASSES).backward()
        assert points.usage.frames == 128 * device.description.frames.frames_per_projection


def test_a_forgotten_reading_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a forecast without the readings of labels."""
    monkeypatch.setattr(LabelReadoutProtection, "work_before", lambda self: DeviceWork())
    told, run = play(FIXED["labels once"], tmp_path)
    assert [expected.frames for expected, _, _ in told.expected] != [run.summary["frames"]]
