"""How many features are enough? The error of features against the OPU kernel, and accuracies next to a Gaussian kernel.

python examples/optical/kernel.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics.pairwise import rbf_kernel

from opusim import open_device
from opusim.features import opu_kernel

SIZES, MOST, TRAIN, TEST = np.array([30, 100, 300, 1000, 3000, 10000]), 10000, slice(0, 800), slice(800, None)
DIGITS, LABELS = load_digits(return_X_y=True)
X, HOT = (DIGITS > 7).astype(np.uint8), np.eye(10)[LABELS]
EXACT, DEGREE_4, SIZE = opu_kernel(X), opu_kernel(X, degree=4), np.linalg.norm(opu_kernel(X))


def accuracy(k: np.ndarray) -> float:
    """Return the accuracy of kernel ridge regression with a kernel matrix, per cent."""
    model = KernelRidge(alpha=np.diag(k).mean() / 10, kernel="precomputed").fit(k[TRAIN, TRAIN], HOT[TRAIN])
    return 100 * float(np.mean(model.predict(k[TEST, TRAIN]).argmax(axis=1) == LABELS[TEST]))


def law(sigma: float) -> np.ndarray:
    """Return the root mean square error for each size, from the variance of a product, whose square has degree 4."""
    noise = sigma**2 * np.add.outer(np.diag(EXACT), np.diag(EXACT)) + sigma**4
    return np.sqrt(np.sum(DEGREE_4 + noise - EXACT**2) / SIZES + len(X) * sigma**4) / SIZE


def readings(name: str, **options: object) -> np.ndarray:
    """Return intensities less the mean of blank frames, in units in which their mean is that of |x|^2."""
    with open_device(name, n_inputs=64, n_outputs=MOST, **options) as device:
        y = device.intensities(X) - device.intensities(np.zeros((500, 64), dtype=np.uint8)).mean(axis=0)
    return y * (X.sum() / y.sum(dtype=np.float64) * MOST)


def main(figure: str = "kernel.png") -> dict[str, float]:
    """Draw the error of features against their number; return the accuracies."""
    kernels = {"OPU kernel": EXACT, "degree 4": DEGREE_4, "Gaussian kernel": rbf_kernel(X, gamma=0.05)}
    for label, sigma in (("noise of 0", 0.0), ("noise of 30", 30.0), ("camera", None)):
        y = readings("camera") if sigma is None else readings("gaussian", noise={"sigma": sigma})
        errors = [np.linalg.norm(y[:, :n] @ y[:, :n].T / n - EXACT) / SIZE for n in SIZES]
        (points,) = plt.loglog(SIZES, errors, "o", label=f"features, {label}")
        if sigma is not None:
            plt.loglog(SIZES, law(sigma), color=points.get_color(), label=f"law, {label}")
        kernels[f"{MOST:,} features, {label}"] = y @ y.T / MOST
    plt.gca().set(xlabel="optical features", ylabel="relative error of the kernel matrix")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    found = {name: accuracy(kernel) for name, kernel in kernels.items()}
    print("\n".join(f"{name}: {value:.1f} %" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
