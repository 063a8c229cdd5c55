"""Standard mechanisms against published digits, closed forms and a second accountant; one of another package."""

import json
import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dp_accounting
import mpmath
import pytest

from opusim.accounting import Ledger, mechanism_from_json, theorems
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, Guarantee, NoGuarantee, Status, Unit
from opusim.accounting.mechanism import Mechanism, mechanism_class, mechanism_kinds
from opusim.accounting.mechanisms.labels import RandomizedResponse
from opusim.accounting.mechanisms.records import Gaussian, PoissonGaussian, PoissonLaplace, RecordCentral
from opusim.accounting.mechanisms.zeroth_order import composed_pure_epsilon
from opusim.accounting.numerics import gaussian_bounds
from opusim.accounting.theorems import require_poisson, theorem
from opusim.training.data.samplers import SCHEMES
from tests.support.command import ROOT, opusim_process


def only(mechanism: object, delta: float) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


@pytest.mark.parametrize(("sigma", "epsilon"), [(30.9, 0.500), (16.4, 0.999), (4.8, 3.995)])
def test_gaussian_rows_of_dp_zo(sigma: float, epsilon: float) -> None:
    """Zeroth-order paper: q = 16/1000, 75,000 steps, delta 1e-5."""
    mechanism = PoissonGaussian(noise_multiplier=sigma, sampling_probability=0.016, steps=75_000)
    guarantee = only(mechanism, 1e-5)
    assert guarantee.epsilon == pytest.approx(epsilon, abs=3e-3)
    assert guarantee.epsilon_lower is not None
    assert guarantee.epsilon_lower <= guarantee.epsilon <= guarantee.epsilon_lower + 0.01
    assert guarantee.status is Status.PROVEN


def test_gaussian_noise_alone_and_of_a_reference_run() -> None:
    """z 1.13, q 0.034, 292 steps, delta 1e-5: 2.986 in the reference; a device's noise has the same number."""
    run = RecordCentral(
        noise_multiplier=1.13, sampling_probability=0.034, steps=292, clip_norm=0.7, divisor=2048
    )
    found, device = only(run, 1e-5), only(replace(run, device_noise=True), 1e-5)
    assert found.epsilon == device.epsilon == pytest.approx(2.986, abs=1e-3)
    assert (found.unit, found.adjacency) == (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE)
    assert (found.status, device.status) == (Status.PROVEN, Status.PROVEN_UNDER_DEVICE_MODEL)
    guarantee = only(Gaussian(noise_multiplier=2.7, steps=4), 1e-6)
    assert guarantee.epsilon == pytest.approx(dp_accounting.get_epsilon_gaussian(2.7 / 2, 1e-6), rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "n", "epsilon"), [(10.5, 1000, 4), (4.5, 1000, 10), (3.2, 1000, 15), (2.5, 5000, 4)]
)
def test_laplace_rows_of_dp_zo(scale: float, n: int, epsilon: float) -> None:
    """Zeroth-order paper, Table 12: batch 20, 2,000 steps, delta 0: T log(1 + q (e^(1/b) - 1))."""
    mechanism = PoissonLaplace(scale=scale, sampling_probability=20 / n, steps=2000)
    found = only(mechanism, 0.0).epsilon
    exact = 2000 * math.log1p(20 / n * math.expm1(1 / scale))
    assert found == pytest.approx(exact, rel=1e-12)
    assert round(found) == epsilon


@pytest.mark.parametrize(("multiplier", "epsilon"), [(5.0, 4.54), (15.0, 1.32)])
def test_replace_one(multiplier: float, epsilon: float) -> None:
    """q = 1/60, 24,000 steps; the multiplier is over C, and replacing a record moves the sum by 2 C."""
    steps = PoissonGaussian(noise_multiplier=multiplier, sampling_probability=1 / 60, steps=24_000)
    mechanism = replace(steps, adjacency=Adjacency.REPLACE_ONE)
    assert only(mechanism, 1e-5).epsilon == pytest.approx(epsilon, abs=7e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("delta", [1e-300, 1e-12, 1e-5, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("mu", [1e-12, 1e-9, 1e-6, 0.1, 3.0, 1e3, 9e7, 9e8, 1e300])
def test_gaussian_bounds_hold_at_any_mu(mu: float, delta: float) -> None:
    """delta of both bounds in 60 digits lies on its side of delta (a thousandth of it, for the root search below)."""
    bounds = gaussian_bounds(mu, delta)

    def spent(epsilon: float) -> mpmath.mpf:
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first, second = (mpmath.erfc((e / m + sign * m / 2) / mpmath.sqrt(2)) / 2 for sign in (-1, 1))
        return first - mpmath.exp(e) * second

    with mpmath.workdps(60):
        assert math.isinf(bounds.upper) or spent(bounds.upper) <= delta
        lower_holds = math.isinf(bounds.lower) or spent(bounds.lower) >= delta * (1 - 1e-3)
        assert lower_holds or bounds.lower == 0
    assert math.isinf(bounds.upper) == (mu >= 1e8)


@pytest.mark.parametrize("scale", [1e-300, 1e-3, 1.2e-3, 1.5e-3, 1.7e-3])
def test_laplace_noise_too_small_for_a_distribution_has_its_closed_form(scale: float) -> None:
    (guarantee,) = guarantees([PoissonLaplace(scale=scale, sampling_probability=0.5, steps=2)], delta=1e-5)
    assert guarantee.epsilon == pytest.approx(2 * (1 / scale - math.log(2)))


def test_randomized_response_counts_its_repeats_without_memory() -> None:
    one = RandomizedResponse.from_epsilon(0.7, 10)
    assert only(one, 0.0).epsilon == pytest.approx(0.7)
    assert only(one.repeated(10), 0.0).epsilon == pytest.approx(7.0)
    response = RandomizedResponse.from_epsilon(1e-3, 10, steps=10**9)
    assert guarantees([response], delta=1e-5)[0].epsilon == pytest.approx(1e6)


@pytest.mark.parametrize("steps", [1, 100, 20_000, 10**6])
@pytest.mark.parametrize("delta", [1e-5, 1e-12, 1e-14])
def test_many_binary_responses_against_binomial_tails(steps: int, delta: float) -> None:
    """For two labels the loss is that of a pure mechanism, whose tails are summed without a transform."""
    response = RandomizedResponse.from_epsilon(1e-3, 2, steps=steps)
    (guarantee,) = guarantees([response], delta=delta)
    exact = composed_pure_epsilon(response.step_epsilon, steps, delta)
    assert guarantee.epsilon_lower is not None
    assert guarantee.epsilon_lower <= exact
    assert exact * (1 - 1e-5) <= guarantee.epsilon


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_without_a_theorem_is_refused_by_name(scheme: str) -> None:
    by = "protection.kind = 'record'"
    if scheme in ("poisson", "full-batch"):
        require_poisson(scheme, by=by)
        return
    expected = f"^sampler.scheme = '{scheme}': {by} needs Poisson batches; .*. Use 'poisson' or 'full-batch'$"
    with pytest.raises(NoGuarantee, match=expected) as refused:
        require_poisson(scheme, by=by)
    assert "nothing is known" not in str(refused.value)


PACKAGE = ROOT / "tests" / "support" / "third_party_mechanism"
OURS = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1, steps=3)
PARAMETERS = {"noise_multiplier": 4.0, "sampling_probability": 0.1, "steps": 5}


def opusim(*arguments: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which has imported nothing of the package."""
    paths = [str(ROOT), *([str(PACKAGE)] if installed else [])]
    return opusim_process(*arguments, cwd=ROOT, PYTHONPATH=os.pathsep.join(paths))


@pytest.fixture(scope="module")
def theirs() -> Iterator[Mechanism]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theorems, "_KNOWN", dict(theorems._KNOWN))  # no other test finds its theorem
        patch.syspath_prepend(str(PACKAGE))
        yield mechanism_class("two_views")(**PARAMETERS)


@pytest.mark.slow
def test_a_ledger_holds_it_next_to_ours(theirs: Mechanism, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", mode="release", delta=1e-5, enforced=True) as ledger:
        ledger.pay_once("ours", OURS)
        ledger.pay_once("theirs", theirs)
    half = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1, steps=8)
    (together,) = guarantees([OURS, theirs], delta=1e-5)
    assert together.epsilon == pytest.approx(guarantees([half], delta=1e-5)[0].epsilon, rel=1e-3)
    read = json.loads(opusim("account", "run", str(tmp_path), "--json").stdout)
    assert read["guarantees"][0]["epsilon"] == together.epsilon
    missing = opusim("account", "run", str(tmp_path), installed=False)
    assert missing.returncode == 2
    assert "kind = 'two_views': must be one of convex, gaussian" in missing.stderr
    assert missing.stderr.count("\n") == 1


def test_it_survives_json_and_its_theorem_is_known(theirs: Mechanism) -> None:
    assert mechanism_from_json(json.loads(json.dumps(theirs.to_json()))) == theirs
    assert "two_views" in mechanism_kinds()
    assert theorem("two-views").code == "two_views.TwoViews"


@pytest.mark.slow
def test_the_command_line_prices_and_calibrates_it() -> None:
    line = ["two-views", "--sampling-probability", "0.1", "--steps", "5"]
    priced = opusim("account", *line, "--noise-multiplier", "4", "--json")
    half = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1, steps=5)
    found = json.loads(priced.stdout)["guarantees"][0]
    assert found["epsilon"] == guarantees([half], delta=1e-5)[0].epsilon
    calibrated = opusim("account", *line, "--target-epsilon", "1")
    assert "least noise that reaches the target: noise_multiplier = " in calibrated.stdout
