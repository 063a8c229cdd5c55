"""Let a device drive a node of ReservoirPy (pip install reservoirpy), here to predict a chaotic series.

python examples/reservoir_node.py
"""

import numpy as np
from reservoirpy.datasets import mackey_glass
from reservoirpy.node import Node
from reservoirpy.nodes import Reservoir, Ridge

import opusim
from opusim.features import OpticalOperator


class OpticalReservoir(Node):
    """s <- (1 - lr) s + lr tanh(B [sr s / sqrt(units), input_scaling u]), with B and its noise from a device.

    Entries of B have variance 1, so that `sr` is the spectral radius of the recurrent part. Each step shows the vector
    in binary digits, `planes` of them: with eight, their rounding is felt in this example.
    """

    def __init__(
        self, units, lr=1.0, sr=1.0, input_scaling=1.0, device="ideal", planes=12, seed=0, name=None
    ):
        self.units, self.lr, self.sr, self.input_scaling = units, lr, sr, input_scaling
        self.device, self.planes, self.seed, self.name = device, planes, seed, name
        self.output_dim, self.state = units, {"out": np.zeros(units)}

    def initialize(self, x, y=None):
        """Open the device, once the width of the input is known."""
        self._set_input_dim(x)
        opened = opusim.open_device(
            self.device, n_inputs=self.units + self.input_dim, n_outputs=self.units,
            medium={"seed": self.seed}, seed=self.seed,
        )  # fmt: skip
        self.operator = OpticalOperator(opened, planes=self.planes)
        self.initialized = True

    def _step(self, state, x):
        shown = np.concatenate([self.sr / self.units**0.5 * state["out"], self.input_scaling * x])
        return {"out": (1 - self.lr) * state["out"] + self.lr * np.tanh(self.operator @ shown)}


def error(reservoir: Node, steps: int = 800, ahead: int = 5) -> float:
    """Return the error of predictions some steps ahead over the deviation of the series."""
    series = mackey_glass(steps + ahead)
    x, y, half = series[:-ahead], series[ahead:], steps // 2
    model = (reservoir >> Ridge(ridge=1e-5)).fit(x[:half], y[:half], warmup=50)
    return float(np.std(model.run(x[half:]) - y[half:]) / np.std(y))


def main(units: int = 200, steps: int = 800) -> dict[str, float]:
    """Return the errors of reservoirs on a device without noise and on one with noise, and of ReservoirPy's own."""
    how = {"lr": 0.5, "sr": 0.9, "input_scaling": 0.5}
    dense = {"input_connectivity": 1.0, "rc_connectivity": 1.0}
    reservoirs = {
        "ideal": OpticalReservoir(units, **how),
        "gaussian": OpticalReservoir(units, device="gaussian", **how),
        "ReservoirPy": Reservoir(units, seed=0, **how, **dense),
    }
    found = {name: error(each, steps) for name, each in reservoirs.items()}
    print(", ".join(f"error of {name}: {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
