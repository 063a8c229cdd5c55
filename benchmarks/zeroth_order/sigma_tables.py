"""Does the accountant give the privacy parameters of the DP-ZO paper (Tables 12, 13, 15 to 18), digit by digit?

Every row states a noise level, a batch size, a number of records and steps, and an epsilon. Next to the paper's figure
stand our epsilon at that noise, and the least noise that reaches the printed epsilon. A row agrees if our epsilon
rounds to the printed one, or if our least noise, rounded up at the last printed digit, is the printed noise; else the
row says by how much it differs.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.results_file import save_results
from opusim.accounting import ZoGaussian, ZoLaplace, calibrate_noise, guarantees
from opusim.accounting.mechanisms.zeroth_order import composed_pure_epsilon, sampled_pure_epsilon

DELTA, CLIP = 1e-5, 0.05
PURE = "pure"
PRV_ERROR = 0.01
"""The paper names no error for its Table 13, right column; prv_accountant's own examples use 0.001 to 0.1."""
# table, law, printed noise, records, batch, steps, delta, printed epsilon
ROWS = (
    ("12", "laplace", "10.5", 1000, 20, 2000, 0.0, "4"),
    ("12", "laplace", "4.5", 1000, 20, 2000, 0.0, "10"),
    ("12", "laplace", "3.2", 1000, 20, 2000, 0.0, "15"),
    ("12", "laplace", "2.5", 5000, 20, 2000, 0.0, "4"),
    ("13", "laplace", "30.8", 1000, 16, 75000, DELTA, "0.5"),
    ("13", "laplace", "16.3", 1000, 16, 75000, DELTA, "1"),
    ("13", "laplace", "4.6", 1000, 16, 75000, DELTA, "4"),
    ("13", PURE, "30.8", 1000, 16, 75000, DELTA, "0.51"),
    ("13", PURE, "16.3", 1000, 16, 75000, DELTA, "1.04"),
    ("13", PURE, "4.6", 1000, 16, 75000, DELTA, "4.70"),
    ("15", "gaussian", "15.9", 1000, 16, 10000, DELTA, "0.35"),
    ("16", "gaussian", "30.9", 1000, 16, 75000, DELTA, "0.5"),
    ("16", "gaussian", "16.4", 1000, 16, 75000, DELTA, "1"),
    ("16", "gaussian", "4.8", 1000, 16, 75000, DELTA, "4"),
    ("17", "gaussian", "11.47", 1000, 16, 10000, DELTA, "0.5"),
    ("17", "gaussian", "6.08", 1000, 16, 10000, DELTA, "1"),
    ("17", "gaussian", "1.88", 1000, 16, 10000, DELTA, "4"),
    ("18", "gaussian", "6.60", 1000, 64, 200, DELTA, "0.5"),
    ("18", "gaussian", "3.59", 1000, 64, 200, DELTA, "1"),
    ("18", "gaussian", "1.28", 1000, 64, 200, DELTA, "4"),
)


def mechanism(law: str, noise: float, records: int, batch: int, steps: int) -> ZoGaussian | ZoLaplace:
    common: dict[str, Any] = {
        "sampling_probability": batch / records,
        "clip_norm": CLIP,
        "divisor": batch,
        "steps": steps,
    }
    if law == "gaussian":
        return ZoGaussian(noise_multiplier=noise, **common)
    return ZoLaplace(scale=noise, **common)


def row(
    table: str, law: str, printed: str, records: int, batch: int, steps: int, delta: float, epsilon: str
) -> dict[str, Any]:
    """Return a row of the paper with our figures."""
    noise, target = float(printed), float(epsilon)
    found: dict[str, Any] = {"table": table, "law": law, "noise": printed, "records": records, "batch": batch}
    found |= {"steps": steps, "delta": delta, "paper_epsilon": epsilon}
    if law == PURE:
        ours = composed_pure_epsilon(sampled_pure_epsilon(1 / noise, batch / records), steps, delta)
        found |= {"our_epsilon": ours, "our_lower": None, "our_least_noise": None}
    else:
        ran = mechanism(law, noise, records, batch, steps)
        (guarantee,) = guarantees([ran], delta=delta)
        least, _ = calibrate_noise(ran, target_epsilon=target, delta=delta)
        found |= {
            "our_epsilon": guarantee.epsilon,
            "our_lower": guarantee.epsilon_lower,
            "our_least_noise": least.noise,
        }
    return found | {"verdict": verdict(found)}


def verdict(found: dict[str, Any]) -> str:
    """Say whether the row agrees, and if not, why not."""
    digits = _decimals(found["paper_epsilon"])
    if round(found["our_epsilon"], digits) == float(found["paper_epsilon"]):
        return "epsilon agrees to the printed digits"
    unit = 10.0 ** -_decimals(found["noise"])
    least = found["our_least_noise"]
    if least is not None and math.isclose(math.ceil(least / unit) * unit, float(found["noise"])):
        return "least noise, rounded up, is the printed one"
    difference = found["our_epsilon"] - float(found["paper_epsilon"])
    if found["law"] == PURE and abs(difference) < PRV_ERROR:
        return (
            f"differs by {difference:+.4f}: ours is exact up to 1e-9, the paper prints the upper end of a numerical "
            "accountant's interval, rounded up"
        )
    remark = "" if least is None else f"; least noise for the printed epsilon is {least:.4f}"
    return f"differs by {difference:+.4f} in epsilon{remark}"


def _decimals(text: str) -> int:
    return len(text.partition(".")[2])


if __name__ == "__main__":
    save_results("zo_sigma_tables", {"rows": [row(*values) for values in ROWS]})
