"""A step of every trainer of `train` waits for no card and stays below its ceiling of operators, without a card."""

import pytest
import torch

from benchmarks.speed import run_steps
from opusim import checks
from opusim.errors import ConfigError
from opusim.training.data.public_maps import Augmentation
from opusim.training.engine.algorithm import require_float64
from opusim.training.feedback import closed_form
from tests.support.shared_checks import with_marks

SLOW = (
    *("tdfa", "pdfa, published order", "pdfa, bit planes", "ulr, orthogonal", "ulr, published"),
    *("bp, module", "dfa, module", "tdfa, amplified labels"),
)
EVERY = pytest.mark.parametrize("name", with_marks(run_steps.CASES, SLOW))
SINGLE = ("bp", "dfa", "tdfa", "pdfa", "pdfa, bit planes", "ulr", "ulr, orthogonal")
SINGLE_MODULES = ("bp, module", "dfa, module", "pdfa, module")


@EVERY
def test_a_step_waits_for_no_card(name: str) -> None:
    """Apple's GPU also: the trainers that it takes make no float64 tensor there."""
    single = name in SINGLE + SINGLE_MODULES
    with run_steps.without_float64() if single else run_steps.nullcontext():
        waits, doubles = run_steps.on_card(name)
    assert sum(waits.values()) == run_steps.WAITS.get(name, 0) <= (2 if "record" in name else 3)
    assert bool(doubles) != single


@EVERY
def test_a_step_stays_below_its_ceiling_of_operators(name: str) -> None:
    assert run_steps.operators(name) <= run_steps.CEILINGS[name]


def test_random_copies_of_images_are_made_on_the_card() -> None:
    augmentation = Augmentation(copies=2, mirror=True, shift=2)
    with run_steps.HostNumbers() as numbers, run_steps.OnCard() as found:
        images = augmentation.copy_of(torch.empty(4, 3, 8, 8, device="meta"))
    assert images.is_meta
    assert (+found.waits, numbers.count) == ({}, 0)


def test_planted_fault_reads_copies_and_the_hosts_numbers_are_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks.require

    def impatient(value: torch.Tensor, refusal: checks.Refusal) -> None:
        value.tolist()
        torch.tensor(1.0, device=value.device)
        torch.zeros(2).to(value.device)
        found(value, refusal)

    monkeypatch.setattr(closed_form.checks, "require", impatient)
    waits, _ = run_steps.on_card("bp")
    assert waits == {"copy": 2, "numbers of the host": 1}
    monkeypatch.setattr(closed_form.checks, "require", lambda value, refusal: float(value))
    assert run_steps.on_card("bp")[0] == {"_local_scalar_dense": 1}
    monkeypatch.setattr(closed_form.checks, "require", lambda value, refusal: torch.unique(value))
    with pytest.raises(NotImplementedError):  # a hidden wait
        run_steps.on_card("bp")


@pytest.mark.parametrize(("name", "reason"), [
    ("zo", "trainer.kind = 'zo'"),
    ("convex", "trainer.kind = 'convex'"),
    ("pdfa, published order", "trainer.tau_b"),
    ("bp, record", "protection.kind = 'record'"),
])  # fmt: skip
def test_what_needs_float64_is_refused_on_apples_gpu(name: str, reason: str) -> None:
    algorithm = run_steps.plan_of(name, "mps").algorithm
    told = f"torch_device: 'mps' has no float64, .*{reason} computes; use 'cpu'"
    with pytest.raises(ConfigError, match=told):
        require_float64(algorithm)
    require_float64(run_steps.plan_of(name, "cpu").algorithm)
    require_float64(run_steps.plan_of("ulr", "mps").algorithm)
