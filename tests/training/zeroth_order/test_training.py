"""Zeroth-order runs: the step, guarantees, the step log and its replay, user-supplied modules.

Clipped differences, scalar noise, perturbation in place, and half precision.
"""

import json
import math
import os
import resource
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.bare import zo_trainer
from opusim import training
from opusim.accounting.guarantee import NoGuarantee, Status
from opusim.errors import ConfigError
from opusim.medium.transmission import Direction
from opusim.randomness.rounded import RoundedNoise, toward_zero
from opusim.randomness.streams import SeededStream
from opusim.training.config import load_config
from opusim.training.errors import RunFolderError
from opusim.training.networks.network import FullyConnected
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.storage import sealed, unsealed, write_json
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, MemoryMappedTensors, StepEntry
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent, StepLogCorrupt, mark_file, replay
from opusim.training.zeroth_order.trainer import (
    LARGEST_DIFFERENCE,
    Differences,
    ScalarRelease,
    ZoTrainer,
    jointly_clipped,
    loss_differences,
)
from tests.support.record_models import Custom
from tests.support.zeroth_order import data, require_mean_move

BASE = {
    "epochs": 2, "threads": 1, "seed": 3, "loss": "cross-entropy", "model": {"hidden": [8]},
    "data": {"n_classes": 3, "validation_fraction": 0.1}, "sampler": {"scheme": "poisson", "batch_size": 10},
    "trainer": {"kind": "zo"}, "optimizer": {"lr": 0.05, "weight_decay": 0.01},
}  # fmt: skip
PROTECTED = {**BASE, "protection": {"kind": "record", "noise_multiplier": 2.0}}
RELEASED = {**{key: value for key, value in PROTECTED.items() if key != "seed"}, "mode": "release"}
JOINT = {"kind": "zo", "directions": 4, "clip": "joint"}


def run(tmp_path: Path, config: dict, name: str = "run", **options: object) -> training.Run:
    return training.train(config, data=data(), folder=tmp_path / name, **options)


def final(folder: Path) -> dict[str, torch.Tensor]:
    tensors = read_checkpoint(list_checkpoints(folder / "checkpoints")[-1]).tensors
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def make_trainer(release: ScalarRelease | None = None, **options: object) -> tuple[ZoTrainer, FullyConnected]:
    """A trainer of a linear layer: by a squared error and unclipped differences if nothing is released."""
    torch.manual_seed(0)
    network = FullyConnected(nn.Sequential(nn.Linear(4, 3)))
    loss = "cross-entropy" if release else "squared-error"
    config = load_config({"loss": loss, "trainer": {"kind": "zo", **options}, "optimizer": {"lr": 0.1}})
    return zo_trainer(network, config, release or ScalarRelease(clip=None, divisor=1.0), root=7), network


def test_update_is_the_gradient_seen_along_directions(seed: int) -> None:
    """The mean of many steps' moves at one point is -eta times the gradient, coordinate by coordinate: five standard
    errors of that mean; the opposite sign, the planted fault, is far off."""
    trainer, network = make_trainer(perturbation=1e-2)
    x, y = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed)), torch.tensor([1])
    require_mean_move(trainer, network, x, y, steps=2000)


def test_training_learns_and_makes_neither_gradients_nor_a_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    config = {**BASE, "epochs": 40, "optimizer": {"lr": 0.2}}
    trained = run(tmp_path, config, model=model)
    assert trained.summary["train_accuracy"] > 0.6  # chance is a third
    assert all(parameter.grad is None for parameter in model.parameters())


def test_more_directions_less_variance() -> None:
    """Averaging n moves divides the variance of a step by n: within five standard errors of a ratio of variances."""
    x, y = torch.ones(1, 4), torch.tensor([0])
    spread = {}
    for directions in (1, 8):
        trainer, network = make_trainer(directions=directions)
        start = network.tensors["layer1.weight"].clone()
        moves = []
        for step in range(400):
            trainer.step(x, y, step=step)
            moves.append((network.tensors["layer1.weight"] - start).flatten().double())
            network.tensors["layer1.weight"].copy_(start)
            network.tensors["layer1.bias"].zero_()
        spread[directions] = float(torch.stack(moves).var(dim=0).mean())
    ratio = spread[1] / spread[8]
    assert abs(math.log(ratio / 8)) < 5 * math.sqrt(2 * 2 * 5 / 400)
    assert abs(math.log(ratio)) > 5 * math.sqrt(2 * 2 * 5 / 400)


def test_an_empty_batch_takes_its_noisy_step() -> None:
    noise = SeededStream(1, "scalar-noise")
    trainer, network = make_trainer(ScalarRelease(clip=0.05, divisor=10.0, scale=0.1, noise=noise))
    before = network.tensors["layer1.weight"].clone()
    record = trainer.step(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), step=0, observe=True)
    assert record.n_records == 0
    assert not torch.equal(network.tensors["layer1.weight"], before)


def test_a_model_that_breaks_on_some_records_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    fragile = Custom(lambda m, x: m.f(x) + torch.where(x[:, :1] > 2, torch.nan, 0.0), f=nn.Linear(6, 3))
    trained = training.train(
        {**RELEASED, "data": {"n_classes": 3, "validation_fraction": 0.0}, "epochs": 1},
        data=data(), model=fragile, folder=tmp_path / "run",
    )  # fmt: skip
    assert all(bool(torch.isfinite(t).all()) for t in final(trained.folder.path).values())


def test_the_statement_of_a_protected_run(tmp_path: Path) -> None:
    trained = run(tmp_path, {**BASE, "protection": {"kind": "record", "epsilon": 2.0}})
    (found,) = trained.guarantees
    assert found.status is Status.PROVEN
    assert 1.9 < found.epsilon <= 2.0
    assert "loss differences clipped to 0.05" in found.mechanism
    assert trained.step == 18


def test_pure_privacy_by_laplace_noise(tmp_path: Path) -> None:
    protection = {"kind": "record", "epsilon": 4.0, "delta": 0.0}
    trained = run(tmp_path, {**BASE, "trainer": {"kind": "zo", "law": "laplace"}, "protection": protection})
    (found,) = trained.guarantees
    scale, q = trained.config.protection.noise_multiplier, 10 / 90
    assert found.delta == 0
    assert found.epsilon == pytest.approx(18 * math.log(1 + q * (math.exp(1 / scale) - 1)))
    assert 3.99 < found.epsilon <= 4.0


def test_directions_of_a_step_are_on_the_ledger(tmp_path: Path) -> None:
    one = run(tmp_path, PROTECTED, "one").guarantees[0]
    many = run(tmp_path, {**PROTECTED, "trainer": {"kind": "zo", "directions": 4}}, "many").guarantees[0]
    assert many.epsilon > one.epsilon
    assert "4 directions on each Poisson batch" in many.mechanism


def test_directions_that_are_clipped_jointly_cost_as_much_as_one(tmp_path: Path) -> None:
    one = run(tmp_path, PROTECTED, "one").guarantees[0]
    joint = run(tmp_path, {**PROTECTED, "trainer": JOINT}, "joint")
    assert joint.guarantees[0].epsilon == one.epsilon
    assert "jointly clipped to 0.05" in joint.guarantees[0].mechanism
    assert replay(tmp_path / "joint").steps == joint.step


def test_a_step_releases_jointly_clipped_sums() -> None:
    """The sums of a step's scalars, without noise, are those of every record's scaled differences."""
    x = 3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    release, moves = ScalarRelease(clip=0.02, divisor=1.0, joint=True), []
    for records in (x, *x[:, None]):
        trainer, network = make_trainer(release, directions=3, perturbation=0.01)
        start = {name: tensor.clone() for name, tensor in network.tensors.items()}
        trainer.step(records, torch.zeros(len(records), dtype=torch.int64), step=0)
        moves.append(torch.cat([(t - start[n]).flatten() for n, t in network.tensors.items()]))
    assert torch.allclose(moves[0], sum(moves[1:]), atol=1e-5)
    assert float(moves[0].norm()) > 0


@pytest.mark.parametrize("joint", [False, True])
def test_sums_of_a_step_lie_on_the_lattice_of_all_batches(joint: bool) -> None:
    """Contributions are multiples of a step that 2^22 of them need; finer or unrounded ones, the faults, are not."""
    clip = 0.05
    step = math.ldexp(1.0, math.frexp(clip)[1] + 23 - 52)  # 2^22 times C is below 2^53 steps
    seen: list[torch.Tensor] = []

    class Seen(RoundedNoise):
        def added_to(self, values: torch.Tensor) -> torch.Tensor:
            seen.append(values)
            return values

    class Stream(SeededStream):
        def rounded(self, count: int, scale: float, law: str = "gaussian") -> RoundedNoise:
            assert (count, scale, law) == (4, 0.1, "gaussian")
            return Seen()

    release = ScalarRelease(clip=clip, divisor=1.0, scale=0.1, noise=Stream(1, "x"), joint=joint)
    trainer, _ = make_trainer(release, directions=4)
    trainer.step(torch.randn(30, 4), torch.arange(30) % 3, step=0)
    (sums,) = seen
    assert (sums / step).frac().abs().max() == 0
    assert (sums != 0).all()


def test_noise_of_a_gaussian_device(tmp_path: Path) -> None:
    protection = {**PROTECTED["protection"], "noise": "device"}
    device = {"name": "gaussian", "noise": {"sigma": 0.7}}
    config = {**PROTECTED, "protection": protection, "device": device}
    trained = run(tmp_path, config)
    assert trained.guarantees[0].status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert trained.summary["frames"] > 0
    with pytest.raises(ConfigError, match="'laplace' cannot come from a device"):
        run(tmp_path, {**config, "trainer": {"kind": "zo", "law": "laplace"}}, "refused")
    with pytest.raises(ConfigError, match="takes a Gaussian law"):
        run(tmp_path, {**config, "device": {"name": "camera"}}, "camera")


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"sampler": {"scheme": "shuffled-epochs", "batch_size": 10}}, NoGuarantee, "shuffled-epochs"),
    ({"optimizer": {"averaged_tail": 0.5}}, ConfigError, "second copy of the parameters"),
    ({"optimizer": {"momentum": 0.9}}, ConfigError, "neither momentum nor moments"),
    ({"optimizer": {"name": "adam"}}, ConfigError, "neither momentum nor moments"),
    ({"trainer": {**JOINT, "law": "laplace"}}, ConfigError, "bounds a Euclidean norm"),
    ({"trainer": {**JOINT, "directions": 1}}, ConfigError, "trainer.directions above 1"),
    ({"protection": {"kind": "label-amplified", "epsilon": 1.0}}, ConfigError, "it takes none, record"),
    ({"protection": {"kind": "record", "epsilon": 1.0, "delta": 0.0}}, NoGuarantee, "use trainer.law"),
])  # fmt: skip
def test_unproven_runs_are_refused(tmp_path: Path, change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, {**PROTECTED, **change})


def test_noise_and_directions_do_not_share_a_seed(tmp_path: Path) -> None:
    """Another noise stream leaves the directions; without noise the same seeds give other scalars."""
    quiet, noisy = run(tmp_path, BASE, "quiet"), run(tmp_path, PROTECTED, "noisy")
    one, two = (LogContent.read(r.folder.path / LOG_FILE).entries for r in (quiet, noisy))
    assert [e.seeds for e in one] == [e.seeds for e in two]
    assert all(a.scalars != b.scalars for a, b in zip(one, two, strict=True))


def test_release_mode_keeps_no_secret(tmp_path: Path) -> None:
    first, second = (run(tmp_path, RELEASED, name) for name in ("a", "b"))
    logs = [LogContent.read(r.folder.path / LOG_FILE) for r in (first, second)]
    assert logs[0].header.root != logs[1].header.root
    assert "seed" not in first.facts["config"]
    state = read_checkpoint(list_checkpoints(first.folder.path / "checkpoints")[-1]).tensors
    assert state["state.zo.counts"].tolist() == [18, 0]
    assert replay(first.folder.path).arrived


@pytest.mark.parametrize("directions", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_replay_in_another_process_and_with_other_threads(tmp_path: Path, directions: int) -> None:
    trained = run(tmp_path, {**PROTECTED, "trainer": {"kind": "zo", "directions": directions}})
    out = tmp_path / "again.safetensors"
    code = "import torch; torch.set_num_threads(2)\nfrom opusim.training.cli import main; main()"
    command = [sys.executable, "-c", code, "zo", "replay", str(trained.folder.path), "--out", str(out)]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert "18 steps replayed" in printed.stdout
    assert "to the bit" in printed.stdout
    from safetensors.torch import load_file

    rebuilt, expected = load_file(out), final(trained.folder.path)
    assert rebuilt.keys() == expected.keys()
    assert all(torch.equal(rebuilt[name], expected[name]) for name in expected)


def _flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_tampering_is_found(tmp_path: Path) -> None:
    folder = run(tmp_path, PROTECTED).folder.path
    log = folder / LOG_FILE
    content = log.read_bytes()
    start = len(content) - 18 * 24
    third, fourth = content[start + 48 : start + 72], content[start + 72 : start + 96]
    moved = content[: start + 48] + fourth + third + content[start + 96 :]
    changes = {
        "step 1: its digest": _flip(content, start + 5),
        "step 7: its digest": _flip(content, start + 6 * 24 + 13),
        "step 18: its digest": _flip(content, len(content) - 1), "step 3: its digest": moved,
        "step 2: its digest": content[: start + 24] + content[start + 48 :],
        "ends after step 17": content[:-24], "header was changed": _flip(content, 40),
        "is not a step log": b"something else",
    }  # fmt: skip
    for message, changed in changes.items():
        log.write_bytes(changed)
        with pytest.raises(StepLogCorrupt, match=message):
            replay(folder)
    log.write_bytes(content)
    mark = mark_file(log)
    kept = mark.read_text()
    mark.write_text(kept.replace('"parameters": "', '"parameters": "0'))
    with pytest.raises(StepLogCorrupt, match="was changed since it was written"):
        replay(folder)
    facts, _ = unsealed(mark, json.loads(kept), remedy="")
    write_json(mark, sealed({**facts, "parameters": "0"}))
    with pytest.raises(StepLogCorrupt, match="lead to parameters"):
        replay(folder)
    mark.write_text(kept)
    with pytest.raises(ValueError, match="not readable as safetensors"):
        replay(folder, base=folder / "config.json")
    assert replay(folder).arrived
    mark.unlink()
    assert replay(folder).arrived is None


def test_another_base_is_refused(tmp_path: Path) -> None:
    one, two = run(tmp_path, PROTECTED, "one"), run(tmp_path, {**PROTECTED, "seed": 4}, "two")
    with pytest.raises(StepLogCorrupt, match="is not what the log starts from"):
        replay(one.folder.path, base=two.folder.path / "base.safetensors")


def own() -> nn.Module:
    """A module of one's own: a frozen part, no Sequential."""
    frozen = nn.Linear(6, 5).requires_grad_(False)
    parts = {"embed": frozen, "norm": nn.LayerNorm(5), "head": nn.Linear(5, 3)}
    return Custom(lambda m, x: m.head(m.norm(torch.relu(m.embed(x)))), **parts)


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = own()
    frozen = model.embed.weight.clone()
    trained = run(tmp_path, PROTECTED, model=model)
    assert torch.equal(model.embed.weight, frozen)
    assert set(final(trained.folder.path)) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert replay(trained.folder.path).arrived
    with pytest.raises(RunFolderError, match=r"load_run\(path, model=...\)"):
        training.load_run(trained.folder.path)
    again = training.load_run(trained.folder.path, model=model)
    x = data()[0]
    assert (again.predict(x) == trained.predict(x)).all()


def test_modules_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives \(2, 4\) for two records.*outputs of shape \(2, 3\)"):
        run(tmp_path, BASE, model=nn.Sequential(nn.Linear(6, 4)))
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        run(tmp_path, BASE, model=own().requires_grad_(False))


NAN, INF = math.nan, math.inf


def test_differences_are_clipped_each_by_itself() -> None:
    found = loss_differences(torch.tensor([1.0, 5.0, 0.0]), torch.tensor([0.9, 0.0, 7.0]), 0.5)
    assert found.values.tolist() == pytest.approx([0.1, 0.5, -0.5], abs=1e-7)
    assert (found.clipped, found.non_finite) == (2, 0)


@pytest.mark.parametrize(("plus", "minus", "expected"), [
    (NAN, 1.0, 0.5), (INF, 1.0, 0.5), (-INF, 1.0, 0.5), (1.0, NAN, -0.5), (1.0, INF, -0.5),
    (NAN, NAN, 0.0), (INF, -INF, 0.0),
])  # fmt: skip
def test_losses_that_are_not_finite_count_as_the_bound(plus: float, minus: float, expected: float) -> None:
    found = loss_differences(torch.tensor([plus]), torch.tensor([minus]), 0.5)
    assert found.values.tolist() == [expected]
    assert found.non_finite == 1
    assert loss_differences(torch.tensor([plus]), torch.tensor([minus]), None).values.tolist() == [0.0]


def test_one_record_moves_a_steps_sums_together_by_at_most_the_joint_clip(seed: int) -> None:
    """Whatever the losses along seven directions; clipped one by one, the planted fault, they move by more."""
    generator = np.random.default_rng(seed)
    special = [NAN, INF, -INF, 3e38, -3e38, 1e-45, 0.0]
    plus, minus = (
        torch.tensor(generator.choice([*special, *generator.normal(size=20)], (7, 200)), dtype=torch.float32)
        for _ in range(2)
    )
    pairs = list(zip(plus, minus, strict=True))
    found = jointly_clipped([loss_differences(p, m, LARGEST_DIFFERENCE) for p, m in pairs], 0.05)
    moves = torch.stack([each.values for each in found])
    assert torch.isfinite(moves).all()
    assert float(moves.norm(dim=0).max()) <= 0.05 * (1 + 1e-12)
    assert {int(each.clipped) for each in found} == {int((moves.norm(dim=0) > 0.05 * (1 - 1e-12)).sum())}
    alone = torch.stack([loss_differences(p, m, 0.05).values for p, m in pairs])
    assert float(alone.norm(dim=0).max()) > 0.05 * 2


@pytest.mark.parametrize("clip", [0.05, 1 / 3, 1e-12, 1e12])
def test_a_joint_clip_bounds_the_exact_norm(seed: int, clip: float) -> None:
    """In rational arithmetic, whatever the magnitudes; clipped without a margin, the fault, some norms are above C."""
    generator = np.random.default_rng(seed)
    raw = generator.normal(size=(9, 60)) * 10.0 ** generator.uniform(-20, 20, size=60)
    raw[:, :10] = generator.choice([1e100, -1e100, 2.0**-149, 0.0, 3e38], size=(9, 10))
    raw[:, 10] = clip / 3  # a norm of C
    raw[:, 11] = np.nextafter(clip / 3, math.inf)
    zero = torch.tensor(0)
    rows = [Differences(values=torch.from_numpy(row), non_finite=zero, clipped=zero) for row in raw]
    found = jointly_clipped(rows, clip)

    def most(records: np.ndarray) -> Fraction:
        return max(sum(Fraction(float(x)) ** 2 for x in record) for record in records)

    rounded = [toward_zero(each.values, bound=clip, count=2**22).numpy() for each in found]
    for moves in (np.stack([each.values.numpy() for each in found]), np.stack(rounded)):
        assert most(moves.T) <= Fraction(clip) ** 2
    careless = raw * (clip / np.maximum(np.linalg.norm(raw, axis=0), clip))
    assert most(careless.T) > Fraction(clip) ** 2


def test_a_joint_clip_keeps_small_records_and_the_direction_of_large_ones() -> None:
    rows = [torch.tensor([0.1, 3.0, NAN, 0.0]), torch.tensor([0.2, 4.0, 1.0, 0.0])]
    found = jointly_clipped([loss_differences(r, torch.zeros(4), LARGEST_DIFFERENCE) for r in rows], 1.0)
    first, second = (each.values.tolist() for each in found)
    assert first == pytest.approx([0.1, 0.6, 1.0, 0.0], abs=1e-7)
    assert second == pytest.approx([0.2, 0.8, 0.0, 0.0], abs=1e-7)
    assert [each.non_finite for each in found] == [1, 0]


def test_an_empty_batch_has_no_differences() -> None:
    found = loss_differences(torch.zeros(0), torch.zeros(0), 1.0)
    assert (float(found.values.sum()), found.clipped, found.non_finite) == (0.0, 0, 0)


def _entries(count: int, directions: int = 1) -> list[StepEntry]:
    generator = np.random.default_rng(0)
    return [
        StepEntry.rounded(
            rate=0.01,
            seeds=tuple(int(s) for s in generator.integers(2**60, size=directions)),
            scalars=tuple(generator.normal(size=directions)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("directions", [1, 3])
def test_a_step_goes_along_its_directions(directions: int) -> None:
    """Against the update in exact arithmetic; a move of the other sign, the planted fault, is far off."""
    start = [torch.linspace(-1, 1, 5000), torch.ones(7)]
    moved = [tensor.clone() for tensor in start]
    perturbation = InPlacePerturbation(moved, perturbation=1e-3, weight_decay=0.1)
    (entry,) = _entries(1, directions)
    perturbation.replay(entry)
    for number, (before, after) in enumerate(zip(start, moved, strict=True)):
        expected = before.double() * (1 - 0.01 * 0.1)
        for seed, scalar in zip(entry.seeds, entry.scalars, strict=True):
            z = Direction(seed).entries(number, 0, before.numel()).double()
            expected -= 0.01 * scalar / directions * z
        assert torch.allclose(after.double(), expected, rtol=0, atol=5e-6)
        assert not torch.allclose(after.double(), 2 * before.double() - expected, rtol=0, atol=5e-6)


def test_float32_returns_to_within_its_last_digits() -> None:
    """A thousand perturbations at phi 1e-3: the drift is a random walk of roundings, far below phi."""
    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 0.05
    start = tensor.clone()
    perturbation = InPlacePerturbation([tensor], perturbation=1e-3)
    for seed in range(1000):
        perturbation.shift(seed, 1)
        perturbation.shift(seed, -2)
        perturbation.shift(seed, 1)
    drift = float((tensor - start).double().square().mean().sqrt())
    assert drift < 2e-7
    assert drift > 0  # it is there, and a log repeats it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_what_the_entries_say(dtype: torch.dtype) -> None:
    """Settled parameters are the float32 recursion, rounded once; unsettled ones, the planted fault, drift off."""
    start = (torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 0.05).to(dtype)
    entries = _entries(150)
    settled, drifting = start.clone(), start.clone()
    for tensor, settle_every in ((settled, 50), (drifting, 10**6)):
        perturbation = InPlacePerturbation([tensor], perturbation=1e-3, weight_decay=0.01)
        for step, entry in enumerate(entries, start=1):
            perturbation.shift(entry.seeds[0], 1)
            perturbation.shift(entry.seeds[0], -2)
            perturbation.update(entry)
            if step % settle_every == 0:
                perturbation.settle()
    exact = start.float()
    for entry in entries:
        keep = 1.0 - entry.rate * 0.01
        Direction(entry.seeds[0]).return_and_move(exact, 0, back=0.0, keep=keep, move=entry.moves[0])
    assert torch.equal(settled, exact.to(dtype))
    assert not torch.equal(drifting, exact.to(dtype))
    replayed = start.clone()
    again = InPlacePerturbation([replayed], perturbation=1e-3, weight_decay=0.01)
    for entry in entries:
        again.replay(entry)
    again.settle()
    assert torch.equal(replayed, settled)


def test_copies_on_disk_keep_what_is_written_and_give_their_memory_back() -> None:
    """Of 64 MiB at least half is resident after writing, and next to nothing after paging out."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    like = {0: torch.ones(2**20, dtype=torch.bfloat16), 3: torch.ones(2**23 - 5, 2, dtype=torch.bfloat16)}
    paged = MemoryMappedTensors(like, dtype=torch.float32)
    assert paged.tensors[3].shape == (2**23 - 5, 2)
    assert paged.tensors[3].dtype == torch.float32
    empty = resident()
    paged.tensors[3].mul_(3)
    full = resident()
    paged.release_memory()
    assert full - empty > 32
    assert resident() - empty < 8
    assert bool((paged.tensors[3] == 3).all())
    assert bool((paged.tensors[0] == 1).all())
    assert MemoryMappedTensors({}).tensors == {}
