"""What happens to a run when its device breaks: is each fault noticed, named and survived?

Photonic DFA on digits, three epochs, through a Gaussian device that breaks at step 23 in one way at a time; the monitor
looks every ten steps. Kept: the error, the steps from the fault to the stop, and whether the run that resumes with the
mended device ends like the undisturbed run.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import opusim
from benchmarks.results_file import save_results
from opusim.description.schema import load_description
from opusim.devices.kinds import register_device
from opusim.errors import OpusimError
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.run import Run

NAME = "device_faults"
AT_STEP, EVERY_STEPS, SIGMA = 23, 10, 0.5
CONFIG: dict[str, Any] = {"epochs": 3, "threads": 1, "model": {"hidden": [64]}, "sampler": {"batch_size": 64}}


def description_file(folder: Path, fault: Fault | None, lasts_calls: int | None = None) -> Path:
    """Write a description of the breaking device as TOML; it never breaks if `fault` is None."""
    text = (Path(__file__).parents[2] / "hw_configs" / "gaussian.toml").read_text()
    at_step = AT_STEP if fault is not None else 2**40
    lasts = "" if lasts_calls is None else f"lasts_calls = {lasts_calls}\n"
    options = (
        f'[options]\nkind = "gaussian"\nfault = "{fault or Fault.TIMEOUT}"\nat_step = {at_step}\n{lasts}'
    )
    patience = "[access]\ntimeout_s = 2.0\nattempts = 3\nbackoff_s = 0.01\n"
    sections = f"{patience}[monitor]\nevery_steps = {EVERY_STEPS}\n{options}"
    numbers = ["options.at_step", *(["options.lasts_calls"] if lasts else [])]
    rows = "".join(
        f'"{key}" = {{ status = "assumed", source = "the fault to be injected" }}\n' for key in numbers
    )
    text = text.replace('kind = "gaussian"', f'kind = "{KIND}"').replace(
        "[provenance]\n", f"{sections}[provenance]\n{rows}"
    )
    file = folder / "faulty.toml"
    file.write_text(text)
    load_description(file)
    return file


def train(folder: Path, device: Path, *, resume: bool = False) -> Run:
    """Start the run in `folder`, or resume it."""
    if resume:
        return opusim.train(folder=folder, resume=True)
    return opusim.train({**CONFIG, "device": {"name": str(device), "noise": {"sigma": SIGMA}}}, folder=folder)


def undisturbed(folder: Path) -> dict[str, Any]:
    """The final weights of a run whose device never breaks."""
    return weights(train(folder / "undisturbed", description_file(folder, None)))


def weights(run: Run) -> dict[str, Any]:
    """The model's tensors."""
    tensors = read_checkpoint(list_checkpoints(run.folder.checkpoints)[-1]).tensors
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def inject(
    fault: Fault, folder: Path, wanted: dict[str, Any], lasts_calls: int | None = None
) -> dict[str, Any]:
    """Let one fault happen, mend the device, resume the run; return what was seen."""
    register_device(KIND, faulty_device)
    FaultyDevice.repaired = False
    run_folder = folder / fault.name
    stopped: OpusimError | None = None
    try:
        run = train(run_folder, description_file(folder, fault, lasts_calls))
    except OpusimError as error:
        stopped = error
        FaultyDevice.repaired = True
        run = train(run_folder, run_folder, resume=True)
    finally:
        FaultyDevice.repaired = False
    message = "" if stopped is None else str(stopped)
    found = re.search(r"Step (\d+) of", message)
    final = weights(run)
    return {
        "fault": fault.value + ("" if lasts_calls is None else f", passes after {lasts_calls} calls"),
        "error": "none: survived by reconnecting" if stopped is None else type(stopped).__name__,
        "message": message.split(". Step")[0],
        "steps_until_stop": int(found.group(1)) - AT_STEP if found else None,
        "steps_done": run.step,
        "as_undisturbed": all(bool((final[name] == wanted[name]).all()) for name in wanted),
    }


def main() -> None:
    """Break the device in every way, and save what was seen."""
    register_device(KIND, faulty_device)
    folder = Path(tempfile.mkdtemp())
    wanted = undisturbed(folder)
    rows = [inject(fault, folder, wanted) for fault in Fault]
    shutil.rmtree(folder / Fault.UNPLUGGED.name)
    rows.append(inject(Fault.UNPLUGGED, folder, wanted, lasts_calls=2))
    shutil.rmtree(folder)
    save_results(NAME, {"at_step": AT_STEP, "monitored_every": EVERY_STEPS, "rows": rows})


if __name__ == "__main__":
    main()
