"""Fixed physical batches in `opusim train`: the same rows in every step, weight zero for those that only fill."""

from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import opusim
from opusim.description.section import merged
from opusim.training.data.samplers import OVERFLOW, PhysicalBatches
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.networks.contributions.sums import Contributions

N, BATCH = 270, 30
CONFIG: dict[str, Any] = {
    "epochs": 1, "data": {"n_classes": 3, "standardise": False}, "sampler": {"batch_size": BATCH},
    "optimizer": {"lr": 0.5}, "protection": {"kind": "record", "noise_multiplier": 1e-6, "delta": 1e-5},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"bp": {}, "dfa": {}, "tdfa": {}, "pdfa": {"device": {"name": "gaussian"}}}
X = np.random.default_rng(0).normal(size=(300, 12)).astype(np.float32)
DATA = X, (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def trained(folder: Path, *changes: dict[str, Any], fixed: bool | None, model: Any = None) -> opusim.Run:
    built = {} if model is not None else {"model": {"hidden": [16]}}
    config = reduce(merged, (CONFIG, {"protection": {"fixed_batches": fixed}}, built, *changes))
    return opusim.train(config, data=DATA, folder=folder, model=model)


def parameters(run: opusim.Run) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in run.model.parameters()])


@pytest.mark.parametrize("is_module", [False, True], ids=["closed form", "module"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_is_learnt(tmp_path: Path, kind: str, is_module: bool) -> None:
    own = {"trainer": {"kind": kind}, **KINDS[kind]}
    plain, fixed = (
        trained(tmp_path / str(how), own, fixed=how, model=module() if is_module else None)
        for how in (False, True)
    )
    torch.testing.assert_close(parameters(fixed), parameters(plain), rtol=1e-4, atol=1e-5)
    for name in ("train_loss", "train_accuracy"):
        assert fixed.metrics[-1][name] == pytest.approx(plain.metrics[-1][name], rel=1e-5)


def test_rows_that_fill_would_be_learnt_without_their_weight(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", {"trainer": {"kind": "bp"}}, fixed=False)
    with patch.object(Contributions, "leave_out", lambda self, padding: None):
        fixed = trained(tmp_path / "fixed", {"trainer": {"kind": "bp"}}, fixed=True)
    assert not torch.allclose(parameters(fixed), parameters(plain), rtol=1e-2, atol=1e-2)


def rows_of(folder: Path, *changes: dict[str, Any], fixed: bool | None) -> set[int]:
    """The rows that the steps of a run of bp ran."""
    with patch.object(ClosedForm, "learn", autospec=True, side_effect=ClosedForm.learn) as learn:
        trained(folder, {"trainer": {"kind": "bp"}}, *changes, fixed=fixed)
    return {len(call.args[1].x) for call in learn.call_args_list}


def test_every_step_runs_one_public_number_of_rows(tmp_path: Path) -> None:
    assert len(rows_of(tmp_path / "drawn", fixed=None)) > 1  # too few records for it to be the default
    assert rows_of(tmp_path / "fixed", fixed=True) == {int(stats.binom(N, BATCH / N).isf(OVERFLOW))}
    private = {"protection": {"relation": "add_or_remove_one"}}
    private["sampler"] = {"sampling_probability": 0.1, "batch_size": 20}
    hidden = merged(private, {"data": {"split": "content"}, "protection": {"divisor": 20.0}})
    rows = rows_of(tmp_path / "private", hidden, fixed=True)
    assert rows == {int(stats.poisson(20).isf(OVERFLOW))}
    rare = {"sampler": {"batch_size": 4}}  # no record in one step of 55
    assert 0 in rows_of(tmp_path / "rare", rare, fixed=False)
    assert len(rows_of(tmp_path / "filled", rare, fixed=True)) == 1


@pytest.mark.parametrize("kind", ["zo", "ulr"])
def test_trainers_that_fill_no_batches_refuse_it_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(opusim.ConfigError, match=f"fixed_batches: True is for bp.*'{kind}'.*leave"):
        trained(tmp_path / "run", {"trainer": {"kind": kind}}, fixed=True)


def test_large_batches_are_fixed_by_default() -> None:
    of = {"records": 60_000, "processes": 1, "on_card": False}
    assert PhysicalBatches.of_steps(1023, **of) == PhysicalBatches()
    assert PhysicalBatches.of_steps(1024, **of).count == 1
    assert PhysicalBatches.of_steps(32, **{**of, "on_card": True}).count == 1
    assert PhysicalBatches.of_steps(1024, **of, fixed=False) == PhysicalBatches()
