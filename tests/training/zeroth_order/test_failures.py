"""A failed step leaves the state before it, from which the run resumes as if nothing had happened.

A step log takes no step after a failed one, and none of a forked process; several processes share one log and model.
"""

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.devices.faults import AT_STEP, description_file
from opusim import training
from opusim.devices.kinds import register_device
from opusim.errors import DeviceError, DeviceFault
from opusim.processes.ranks import Ranks
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device
from opusim.training.engine.callbacks import Callback
from opusim.training.errors import RunInterrupted
from opusim.training.networks.record_gradients.probe import require_separate_outputs
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.zeroth_order.perturbation import StepEntry
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent, LogHeader, StepLog, replay
from tests.support.forked import in_forked_process
from tests.support.run_folders import equal, newest
from tests.support.zeroth_order import data

FAULTS = (Fault.UNPLUGGED, Fault.BUSY, Fault.WRONG_SHAPE, Fault.NOT_A_NUMBER)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_device(KIND, faulty_device)
    FaultyDevice.repaired = False
    yield
    FaultyDevice.repaired = False


class Typed(nn.Module):
    """Class scores by parameters of a type of their own; the classes' offsets stay float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head = nn.Linear(6, 3, bias=False).to(dtype)
        self.offset = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.to(self.head.weight.dtype)).float() + self.offset


def config(device: Path | None = None, *, directions: int = 1, settle_every: int = 64) -> dict[str, Any]:
    """30 steps; AT_STEP is none at which a checkpoint is written."""
    protection: dict[str, Any] = {"kind": "record", "noise_multiplier": 2.0}
    return {
        "epochs": 3, "threads": 1, "data": {"n_classes": 3, "validation_fraction": 0.0},
        "sampler": {"scheme": "poisson", "batch_size": 10},
        "trainer": {"kind": "zo", "directions": directions, "settle_every": settle_every},
        "optimizer": {"lr": 0.5, "weight_decay": 0.01},
        "protection": protection | ({} if device is None else {"noise": "device"}), "checkpoint": {"keep": 100},
        "device": {} if device is None else {"name": str(device)},
    }  # fmt: skip


def figures(folder: Path) -> list[dict[str, Any]]:
    """The metrics but what the device used, which a second opening adds to."""
    used = ("frames", "seconds", "joules")
    return [{k: v for k, v in line.items() if k not in used} for line in RunFolder(folder).read_metrics()]


class Snapshots(Callback):
    """A watcher who keeps the parameters behind every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.kept = model, {}

    def on_step(self, *, step: int) -> None:
        self.kept[step] = {f"model.{n}": p.detach().clone() for n, p in self.model.named_parameters()}


@pytest.mark.parametrize("directions", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_device_leaves_the_last_finished_step(tmp_path: Path, fault: Fault, directions: int) -> None:
    """Equal to the bit: the interrupted weights, the end of the log, and the resumed run."""
    model = Typed(torch.float32)
    watcher = Snapshots(model)
    whole = config(description_file(tmp_path, None), directions=directions)
    training.train(whole, data=data(), model=model, folder=tmp_path / "whole", watcher=watcher)
    broken, model = tmp_path / "broken", Typed(torch.float32)
    failing = config(description_file(tmp_path, fault), directions=directions)
    with pytest.raises(DeviceError, match=f"Step {AT_STEP} of 30 was not done, all before it are kept"):
        training.train(failing, data=data(), model=model, folder=broken)
    found = {name: tensor for name, tensor in newest(broken).items() if name.startswith("model.")}
    assert equal(found, watcher.kept[AT_STEP])
    assert not equal(found, watcher.kept[AT_STEP - 1])
    assert equal({f"model.{n}": p.detach() for n, p in model.named_parameters()}, found)
    assert len(LogContent.read(broken / LOG_FILE).entries) == AT_STEP
    assert replay(broken).arrived
    FaultyDevice.repaired = True
    training.train(data=data(), model=Typed(torch.float32), folder=broken, resume=True)
    assert equal(newest(broken), newest(tmp_path / "whole"))
    assert (broken / LOG_FILE).read_bytes() == (tmp_path / "whole" / LOG_FILE).read_bytes()
    assert figures(broken) == figures(tmp_path / "whole")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_on_where_roundings_had_led(tmp_path: Path, dtype: torch.dtype) -> None:
    """The device fails between two settlings; the checkpoint is settled, and the way there is not lost."""
    whole = config(description_file(tmp_path, None), settle_every=9)
    training.train(whole, data=data(), model=Typed(dtype), folder=tmp_path / "whole")
    broken = tmp_path / "broken"
    failing = config(description_file(tmp_path, Fault.UNPLUGGED), settle_every=9)
    with pytest.raises(DeviceError):
        training.train(failing, data=data(), model=Typed(dtype), folder=broken)
    tensors = newest(broken)
    assert replay(broken).arrived
    assert torch.equal(tensors["model.head.weight"], tensors["state.zo.float32.head.weight"].to(dtype))
    assert not torch.equal(tensors["model.head.weight"], tensors["state.zo.drifted.head.weight"])
    FaultyDevice.repaired = True
    training.train(data=data(), model=Typed(dtype), folder=broken, resume=True)
    assert equal(newest(broken), newest(tmp_path / "whole"))
    assert (broken / LOG_FILE).read_bytes() == (tmp_path / "whole" / LOG_FILE).read_bytes()
    assert replay(broken).arrived


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_change_nothing_of_a_run(tmp_path: Path, dtype: torch.dtype, ctrl_c_at: type) -> None:
    """Nor does a stop by Ctrl-C, which writes one where none was due."""
    options = config(settle_every=7)
    training.train(options, data=data(), model=Typed(dtype), folder=tmp_path / "few")
    often = options | {"checkpoint": {"every_steps": 1}}
    training.train(often, data=data(), model=Typed(dtype), folder=tmp_path / "often")
    stopped = tmp_path / "stopped"
    with pytest.raises(RunInterrupted):
        training.train(options, data=data(), model=Typed(dtype), folder=stopped, watcher=ctrl_c_at(12))
    training.train(data=data(), model=Typed(dtype), folder=stopped, resume=True)
    wanted = newest(tmp_path / "few")
    assert equal(newest(tmp_path / "often"), wanted)
    assert equal(newest(stopped), wanted)


class Breaking(Typed):
    """Raises at one of its looks at a batch."""

    def __init__(self, dtype: torch.dtype, error: BaseException, at_look: int) -> None:
        super().__init__(dtype)
        self._error, self._at_look = error, at_look
        self.looks = itertools.count(1)  # a probe puts numbers back, and not this

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = not torch.is_grad_enabled() and len(x) != 2  # the first look at a model is at two records
        if counts and next(self.looks) == self._at_look:
            raise self._error
        return super().forward(x)


@pytest.mark.parametrize("at_look", [51, 52, 53, 54])
@pytest.mark.parametrize("error", [DeviceFault("the layer's own device is gone"), KeyboardInterrupt()])
def test_a_step_that_breaks_off_amid_parameters(tmp_path: Path, error: BaseException, at_look: int) -> None:
    """The newest checkpoint serves, and none is written; in memory float32 is back up to roundings."""
    whole = config(directions=2)
    training.train(whole, data=data(), model=Typed(torch.float32), folder=tmp_path / "whole")
    probed = Breaking(torch.float32, error, 0)
    require_separate_outputs(probed, torch.from_numpy(data()[0][:33]).float())
    looks = next(probed.looks) - 1  # before the first step
    broken, model = tmp_path / "broken", Breaking(torch.float32, error, looks + at_look)
    watcher = Snapshots(model)
    with pytest.raises(type(error)):
        training.train(whole, data=data(), model=model, folder=broken, watcher=watcher)
    assert list_checkpoints(broken / "checkpoints")[-1].stem == "step-0000000010"
    before = watcher.kept[max(watcher.kept)]
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, before[f"model.{name}"], rtol=0, atol=1e-6)  # phi is 1e-3
    again = Breaking(torch.float32, error, 0)  # never
    training.train(data=data(), model=again, folder=broken, resume=True)
    assert equal(newest(broken), newest(tmp_path / "whole"))


HEADER = LogHeader(
    root=1, perturbation=1e-3, directions=1, weight_decay=0.0, settle_every=64, tensors=[], base="base"
)
TENSORS = {"w": torch.zeros(2)}


def entry(number: int) -> StepEntry:
    return StepEntry(rate=0.5, seeds=(number,), scalars=(0.25,))


def append_and_mark(log: StepLog, number: int) -> None:
    log.append(entry(number))
    log.mark(TENSORS)


def require_it_goes_on(log: StepLog, path: Path) -> None:
    append_and_mark(log, 1)
    log.close()
    assert LogContent.read(path).entries == [entry(0), entry(1)]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_step_ends_its_log(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.zo"
    log = StepLog(path, HEADER, steps=0)
    for number in range(3):
        log.append(entry(number))
    log.mark(TENSORS)
    real, calls = os.write, []

    def fail(descriptor: int, *content: memoryview) -> int:
        calls.append(content)
        if content and len(calls) == 1:
            return real(descriptor, bytes(content[0])[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=r"steps\.zo"):
            append_and_mark(log, 3)
    for act in (lambda: log.append(entry(3)), lambda: log.mark(TENSORS)):
        with pytest.raises(OSError, match="takes nothing more in this process"):
            act()
    log.close()
    assert LogContent.read(path).entries == [entry(number) for number in range(3)]
    again = StepLog(path, HEADER, steps=3)
    append_and_mark(again, 3)
    again.close()
    assert LogContent.read(path).entries == [entry(number) for number in range(4)]


def test_ctrl_c_in_a_step_leaves_a_log_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.zo"
    log = StepLog(path, HEADER, steps=0)
    log.append(entry(0))
    real = os.write

    def interrupted(descriptor: int, content: memoryview) -> int:
        real(descriptor, bytes(content)[:7])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append(entry(1))
    require_it_goes_on(log, path)


def test_a_forked_process_writes_no_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.zo"
    log = StepLog(path, HEADER, steps=0)
    log.append(entry(0))
    assert "RuntimeError" in in_forked_process(lambda: log.append(entry(1)))
    require_it_goes_on(log, path)


ROOT = Path(__file__).parents[3]


def run(*command: str) -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", *command]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=settings, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def folders(first: Path, processes: int) -> list[Path]:
    return [first, *(first.with_name(f"{first.name}.rank{rank}") for rank in range(1, processes))]


def parameters(folder: Path) -> torch.Tensor:
    tensors = read_checkpoint(list_checkpoints(folder / "checkpoints")[-1]).tensors
    return torch.cat([t.flatten() for n, t in sorted(tensors.items()) if n.startswith("model.")])


@pytest.mark.slow
def test_one_process_and_four_agree_to_rounding(tmp_path: Path) -> None:
    runs = {str(tmp_path / "one"): "1", str(tmp_path / "four"): "4"}
    triples = [(folder, "experiment", processes) for folder, processes in runs.items()]
    run("tests.support.zo_ranks", *(word for triple in triples for word in triple))
    alone, four = tmp_path / "one", folders(tmp_path / "four", 4)
    logs = [(folder / LOG_FILE).read_bytes() for folder in four]
    assert all(log == logs[0] for log in logs)
    metrics = [(folder / "metrics.jsonl").read_bytes() for folder in four]
    assert all(lines == metrics[0] for lines in metrics)
    assert all(torch.equal(parameters(folder), parameters(four[0])) for folder in four)
    one, many = (LogContent.read(folder / LOG_FILE).entries for folder in (alone, four[0]))
    assert [entry.seeds for entry in one] == [entry.seeds for entry in many]
    for a, b in zip(one, many, strict=True):
        assert a.scalars == pytest.approx(b.scalars, rel=1e-3, abs=1e-3)
    assert torch.allclose(parameters(alone), parameters(four[0]), atol=1e-5)
    assert replay(four[3]).arrived


@pytest.mark.slow
def test_release_mode_draws_shares_apart_and_logs_alike(tmp_path: Path) -> None:
    """No process knows another's generator, nor the first one's noise; the models agree to the bit all the same."""
    program = str(ROOT / "tests" / "support" / "zo_ranks.py")
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(*launcher, program, str(tmp_path / "two"), "release")
    both = folders(tmp_path / "two", 2)
    assert (both[0] / LOG_FILE).read_bytes() == (both[1] / LOG_FILE).read_bytes()
    assert torch.equal(parameters(both[0]), parameters(both[1]))
    assert replay(both[1]).arrived


def test_shares_are_disjoint_and_cover_the_batch() -> None:
    ranks = Ranks()
    records = torch.tensor([3, 8, 1, 12, 6])
    found = []
    for rank in range(4):
        ranks.rank, ranks.world = rank, 4
        found += records[ranks.share(records)].tolist()
    assert sorted(found) == sorted(records.tolist())
