"""Train on a device whose class this script registers; no package is installed."""

from lab_bench import BenchDevice

import opusim

opusim.register_device("lab_bench", BenchDevice)
run = opusim.train(
    {"epochs": 1, "data": {"name": "digits"}, "trainer": {"kind": "pdfa"}, "device": {"name": "bench.toml"}},
    folder="runs/bench",
)
print(run)
