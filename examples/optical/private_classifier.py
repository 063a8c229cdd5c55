"""Train a private classifier on optical features: the map is public, DP-SGD behind it is proven.

python examples/optical/private_classifier.py [FIGURE] [DATA]
"""

import sys
import tempfile

import matplotlib.pyplot as plt

import opusim

EPSILONS = (1.0, 3.0, 8.0)


def main(figure: str = "private_classifier.png", data: str = "digits") -> dict[str, list[float]]:
    """Draw accuracy against epsilon; return it for pixels and for features."""
    found: dict[str, list[float]] = {}
    for name, features in (
        ("pixels", {}),
        ("optical features", {"features": "optical:camera", "n_features": 500}),
    ):
        found[name] = []
        for epsilon in EPSILONS:
            config = {
                "data": {"name": data, **features},
                "model": {"hidden": []},
                "trainer": {"kind": "bp"},
                "protection": {"kind": "record", "epsilon": epsilon, "delta": 1e-5, "clip_norm": 1.0},
                "sampler": {"scheme": "poisson", "batch_size": 128},
                "optimizer": {"lr": 1.0, "momentum": 0.0},
                "epochs": 10,
            }
            run = opusim.train(config, folder=tempfile.mkdtemp() + "/run")
            proven = [each for each in run.guarantees if each.status == "proven"]
            found[name].append(100 * run.summary["test_accuracy"])
            print(f"{name}: {found[name][-1]:.1f} % at epsilon {proven[0].epsilon:.2f}, proven")
        plt.plot(EPSILONS, found[name], "o-", label=name)
    plt.xlabel("epsilon at delta 1e-5")
    plt.ylabel("test accuracy [%]")
    plt.title(f"A linear classifier on {data} by DP-SGD")
    plt.legend()
    plt.savefig(figure, dpi=150, bbox_inches="tight")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
