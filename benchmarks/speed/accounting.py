"""What does the epsilon of 75,000 composed steps cost, and does it agree with Microsoft's prv_accountant?

Rows of the DP-ZO paper: the Poisson-sampled Gaussian, q = 16/1000, 75,000 steps, delta 1e-5, add_or_remove_one.
prv_accountant runs at eps_error 0.001 and its own delta_error of delta / 1000. Both times contain everything from the
parameters to the answer (distributions built, composed, inverted); imports are excluded. Cold: the first call of a
fresh process. Warm: later calls in one process, in turn, medians, also against prv_accountant's answer from an
accountant that is built already. Required: 100 times faster, and intervals that overlap. `make bench` installs
prv_accountant.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from benchmarks.results_file import save_results
from benchmarks.timing import interleaved, printed

MODULE, NAME = "benchmarks.speed.accounting", "accounting_speed"
Q, STEPS, DELTA, EPS_ERROR, BAR = 16 / 1000, 75_000, 1e-5, 0.001, 100
SIGMAS = (30.9, 16.4, 4.8)
Bounds = tuple[float, float]
OURS, THEIRS, BUILT = "opusim", "prv_accountant", "prv_accountant, built before"


def ours(sigma: float) -> Bounds:
    """Lower and upper bound on epsilon."""
    from opusim.accounting import PoissonGaussian, guarantees

    mechanism = PoissonGaussian(noise_multiplier=sigma, sampling_probability=Q, steps=STEPS)
    (guarantee,) = guarantees([mechanism], delta=DELTA)
    if guarantee.epsilon_lower is None:
        raise ValueError(f"sigma = {sigma}: no lower bound came with the answer; the benchmark needs one")
    return guarantee.epsilon_lower, guarantee.epsilon


def built(sigma: float) -> Any:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    return PRVAccountant(
        prvs=PoissonSubsampledGaussianMechanism(sampling_probability=Q, noise_multiplier=sigma),
        max_self_compositions=STEPS,
        eps_error=EPS_ERROR,
        delta_error=DELTA / 1000,
    )


def asked(accountant: Any) -> Bounds:
    low, _, high = accountant.compute_epsilon(delta=DELTA, num_self_compositions=STEPS)
    return float(low), float(high)


CALLS: dict[str, Callable[[float], Bounds]] = {OURS: ours, THEIRS: lambda sigma: asked(built(sigma))}


def print_first_call(name: str, sigma: float) -> None:
    """Print answer and seconds of the first call in this process: imports first, then the clock."""
    if name == OURS:
        import opusim.accounting.numerics.sampled_noise  # noqa: F401  # loads dp_accounting and scipy
    else:
        import prv_accountant  # noqa: F401
    started = time.perf_counter()
    low, high = CALLS[name](sigma)
    print(json.dumps({"low": low, "high": high, "seconds": time.perf_counter() - started}))


def cold_row(sigma: float) -> dict[str, Any]:
    found = {name: printed(MODULE, "--cold", name, sigma) for name in CALLS}
    overlap = found[OURS]["low"] <= found[THEIRS]["high"] and found[THEIRS]["low"] <= found[OURS]["high"]
    ratio = found[THEIRS]["seconds"] / found[OURS]["seconds"]
    return {"sigma": sigma, "calls": found, "speed_ratio": ratio, "intervals_overlap": overlap}


def warm_row(sigma: float, repeats: int) -> dict[str, Any]:
    accountant = built(sigma)
    work: dict[str, Callable[[], object]] = {
        OURS: lambda: ours(sigma),
        THEIRS: lambda: asked(built(sigma)),
        BUILT: lambda: asked(accountant),
    }
    seconds = interleaved(work, repeats=repeats, warm_up=0)
    ratios = {name: seconds[name] / seconds[OURS] for name in (THEIRS, BUILT)}
    return {"sigma": sigma, "seconds": seconds, "speed_ratio": ratios}


def main(
    repeats: int = 3, cold: Annotated[tuple[str, float] | None, typer.Option(hidden=True)] = None
) -> None:
    """Time both accountants, in fresh processes and in this one."""
    if cold is not None:
        print_first_call(*cold)
        return
    setting = {"q": Q, "steps": STEPS, "delta": DELTA, "eps_error": EPS_ERROR, "repeats": repeats}
    rows = {"cold": [cold_row(sigma) for sigma in SIGMAS], "warm": warm_row(SIGMAS[1], repeats)}
    save_results(NAME, {"setting": setting, "bar": BAR, **rows})


if __name__ == "__main__":
    typer.run(main)
