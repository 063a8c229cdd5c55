"""Compare the OPU kernel with its features, and with a Gaussian kernel, on handwritten digits.

python examples/optical/kernel.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics.pairwise import rbf_kernel

import opusim

SIZES, NOISES = (30, 100, 300, 1000, 3000, 10000), (0.0, 10.0, 30.0)


def accuracy(seen: np.ndarray, unseen: np.ndarray, y: np.ndarray, truth: np.ndarray) -> float:
    """Return the accuracy of kernel ridge regression with given kernel matrices, per cent."""
    unit = np.mean(np.diag(seen))
    scores = (
        KernelRidge(alpha=1e-3, kernel="precomputed").fit(seen / unit, np.eye(10)[y]).predict(unseen / unit)
    )
    return 100 * float(np.mean(scores.argmax(axis=1) == truth))


def main(figure: str = "kernel.png") -> dict[str, float]:
    """Draw the error of features against their number; return the accuracies."""
    digits, labels = load_digits(return_X_y=True)
    x = (digits > 7).astype(np.uint8)
    train, test = slice(0, 800), slice(800, None)
    exact = {"OPU kernel, degree 2": opusim.opu_kernel(x), "degree 4": opusim.opu_kernel(x, degree=4)}
    kernels = exact | {"Gaussian kernel": rbf_kernel(x, gamma=1 / 20)}
    found = {
        name: accuracy(k[train, train], k[test, train], labels[train], labels[test])
        for name, k in kernels.items()
    }
    wanted = exact["OPU kernel, degree 2"]
    for sigma in NOISES:
        with opusim.open_device(
            "gaussian", n_inputs=64, n_outputs=max(SIZES), noise={"sigma": sigma}
        ) as device:
            y = device.intensities(x).astype(np.float64)
        errors = [np.linalg.norm(y[:, :n] @ y[:, :n].T / n - wanted) / np.linalg.norm(wanted) for n in SIZES]
        plt.loglog(SIZES, errors, "o-", label=f"noise of standard deviation {sigma:g}")
        kernel = y @ y.T / max(SIZES)
        found[f"{max(SIZES):,} features, noise {sigma:g}"] = accuracy(
            kernel[train, train], kernel[test, train], labels[train], labels[test]
        )
    print("\n".join(f"{name}: {value:.1f} %" for name, value in found.items()))
    plt.xlabel("optical features")
    plt.ylabel("relative error of the kernel matrix")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
