"""Decompose a matrix and estimate a trace with the random matrix of a device.

Halko, Martinsson and Tropp, "Finding structure with randomness", 2011; Hutchinson 1990 for the trace.

python examples/optical/linear_algebra.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

import opusim
from opusim.features import OpticalOperator

ROWS, COLUMNS, RANK, SKETCHES = 300, 200, 10, (10, 15, 20, 40, 80)


def matrix(seed: int = 0) -> np.ndarray:
    """Return a matrix of ten large singular values and a tail."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(n, COLUMNS)))[0] for n in (ROWS, COLUMNS))
    return u * (np.arange(1, COLUMNS + 1.0) ** -1.0) @ v.T


def sketch(a: np.ndarray, k: int, device: str) -> np.ndarray:
    """Return A Omega, shape (rows, k), with Omega^T from the device."""
    with opusim.open_device(device, n_inputs=a.shape[1], n_outputs=k) as opened:
        return (OpticalOperator(opened) @ a.T).T


def main(figure: str = "linear_algebra.png") -> dict[str, float]:
    """Draw the error of the decomposition against the size of the sketch; return the last errors."""
    a, found = matrix(), {}
    best = np.linalg.svd(a, compute_uv=False)
    for name in ("ideal", "camera"):
        errors = []
        for k in SKETCHES:
            q = np.linalg.qr(sketch(a, k, name))[0]
            u, s, v = np.linalg.svd(q.T @ a, full_matrices=False)
            errors.append(np.linalg.norm(a - (q @ u[:, :RANK] * s[:RANK]) @ v[:RANK]) / np.linalg.norm(a))
        plt.plot(SKETCHES, errors, "o-", label=f"sketch by {name}")
        found[f"rank {RANK}, {name}"] = float(errors[-1])
    found[f"rank {RANK}, best"] = float(np.linalg.norm(best[RANK:]) / np.linalg.norm(best))
    gram = a.T @ a
    omega = sketch(np.eye(COLUMNS), 2000, "camera")  # (COLUMNS, 2000), entries of variance 1
    found["trace"] = float(np.mean(np.sum(omega * (gram @ omega), axis=0)) / np.trace(gram) - 1)
    print(", ".join(f"{name}: {value:.3f}" for name, value in found.items()))
    plt.axhline(found[f"rank {RANK}, best"], ls="--", c="k", label="best of its rank")
    plt.xlabel("columns of the sketch")
    plt.ylabel("relative error")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
