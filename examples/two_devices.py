"""Train one network by photonic DFA on digits through two devices; only the device's name changes.

python examples/two_devices.py
"""

import tempfile

import opusim

CONFIG = {"epochs": 10, "model": {"hidden": [128]}, "sampler": {"batch_size": 32}}

for device in (
    {"name": "gaussian", "noise": {"sigma": 1.0}},
    {
        "name": "lightonml_simulated",
        "noise": {"sigma": 1.0},
    },  # with the hardware: {"name": "lighton_appliance"}
):
    run = opusim.train({**CONFIG, "device": device}, folder=tempfile.mkdtemp() + "/run")
    summary = run.summary or {}
    print(f"{device['name']}: test accuracy {100 * summary['test_accuracy']:.1f} %")
