"""One network, two devices, one line changed: photonic DFA on digits.

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
    },  # or {"name": "lighton_appliance"}, on the appliance
):
    run = opusim.train({**CONFIG, "device": device}, folder=tempfile.mkdtemp() + "/run")
    summary = run.summary or {}
    print(f"{device['name']}: test accuracy {100 * summary['test_accuracy']:.1f} %")
