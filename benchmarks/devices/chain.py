"""What does the documented way from a camera's frames to a private network reach, command by command?

Runs the commands of docs/calibrate.md, "From frames to a private network", on FashionMNIST: warm the sensor, record,
calibrate, check, account, train at epsilon 8, 3 and 1, statement and audit, for a camera of steady light and for one
whose laser fluctuates, with kept counts and with their argmax. Every command runs as printed, but for the device, what
is kept, and the thread that training takes. Training runs five times: a release draws from the system's entropy, so
every run is another one. Folders are kept under runs/chain; a second call resumes: it repeats no command that ended,
starts one that was stopped again, and trains what the stored runs, under whichever certificate, lack of five. `kept`
then computes what the certificate costs the argmax.

The argmax is randomized response by shot noise, so each accuracy is compared with digital randomized response at the
same epsilon: the row of `benchmarks.pdfa.private`, which has the same records, features, network and settings, through
another device.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

import opusim
from benchmarks.markdown import markdown, with_error
from benchmarks.results_file import load_results, save_results
from opusim.devices.certificate import PhotonCountLaw, load_certificate
from opusim.training.protections.argmax_labels import ArgmaxReadout, LabelFrames
from opusim.training.runs.run import evaluate_run

NAME, FOLDER = "device_chain", Path("runs/chain")
CERTIFICATE = Path("bench") / "warm.certificate.toml"
PAGE = Path(__file__).parents[2] / "docs" / "calibrate.md"
DEVICES, KEPT = ("camera_low_light", "camera_fluctuating"), ("counts", "argmax")
COMPARED = "pdfa_private", "label, randomized response"
"""The results, and their row, of digital randomized response."""
_MAIN = "import sys; sys.argv[0] = 'opusim'; from opusim.training.cli import main; main()"
_SHARED = ("device",)
"""Commands about the device only, which serve both ways of keeping."""
_LENT = ("bench", "warm.toml")
"""What they write and the others read."""
REPEATS = 5
EPSILONS = 8.0, 3.0, 1.0
COLUMN_NAMES = ("device", "kept", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS))


def documented(device: str, kept: str) -> list[list[str]]:
    """Return the page's commands, without `opusim`, for a device and what is kept."""
    section = PAGE.read_text().split("### From frames to a private network")[1]
    block, *_ = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("camera_low_light", device).replace("=counts", f"={kept}"))[1:]
        found.append([kept if word == "counts" else word for word in words])
    return found


def run_command(words: list[str], folder: Path) -> dict[str, Any]:
    """Run one command in a folder, unless it ended there before; return what it wrote."""
    told = re.sub(r"[^\w.=-]+", "_", " ".join(words))[:120]
    digest = hashlib.blake2b(shlex.join(words).encode(), digest_size=8).hexdigest()
    done = folder / "done" / f"{told}-{digest}.txt"
    if not done.exists():
        if "--out" in words:
            unfinished = folder / words[words.index("--out") + 1]
            unfinished.unlink(missing_ok=True) if unfinished.is_file() else shutil.rmtree(unfinished, True)
        more = ["--set", "threads=1"] if words[0] == "train" else []
        called = [sys.executable, "-c", _MAIN, *words, *more]
        ended = subprocess.run(called, cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"opusim {shlex.join(words)} ended with {ended.returncode}:\n{ended.stderr}")
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_text(ended.stdout)
    return {"command": f"opusim {shlex.join(words)}", "output": done.read_text()}


def repeated(words: list[str], repeat: int) -> list[str]:
    """Return a command with another run folder for each repeat but the first."""
    if repeat == 1:
        return words
    place = words.index("--out") + 1
    return [*words[:place], f"{words[place]}-run-{repeat}", *words[place + 1 :]]


def run_facts(folder: Path, device: str, kept: str) -> dict[str, Any]:
    """Return what a finished run under the certificate reached, and on what its statement rests."""
    run = opusim.load_run(folder)
    (guarantee,) = run.guarantees
    public = evaluate_run(folder, data="fashion-mnist")  # a release keeps no accuracies
    certificate = load_certificate(folder.parent / CERTIFICATE)
    epsilon, _, repeat = folder.name.removeprefix("private-").partition("-run-")
    return {
        "device": device,
        "kept": kept,
        "epsilon": float(epsilon),
        "repeat": int(repeat or 1),
        "run": hashlib.sha256((folder / "summary.json").read_bytes()).hexdigest()[:16],
        "test": 100 * public["accuracy"],
        "stated_epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "beta": certificate.beta,
        "certificate": certificate.digest,
        "status": guarantee.status.value,
        "mechanism": guarantee.mechanism,
    }


def measure(
    devices: str = "", kept: str = "", only: str = "", repeats: int = REPEATS, epsilons: str = "8 3 1"
) -> None:
    """Run what is missing of the sequences, in the page's order; `only` names the commands that are run now."""
    results = load_results(NAME)
    runs: list[dict[str, Any]] = results.get("runs", [])
    for repeat in range(1, repeats + 1):
        for device in devices.split() or DEVICES:
            for way in kept.split() or KEPT:
                for words in documented(device, way):
                    if (only and words[0] not in only.split()) or (repeat > 1 and words[0] != "train"):
                        continue
                    words, place = repeated(words, repeat), _place(device, way, words[0])
                    if words[0] == "train" and _enough(runs, device, way, words, repeats, epsilons):
                        continue
                    found = run_command(words, place)
                    print(found["command"], flush=True)
                    if words[0] == "train":
                        _replace(runs, run_facts(place / words[words.index("--out") + 1], device, way))
                    save_results(NAME, {"argmax": results.get("argmax", {}), "runs": runs})


def _enough(
    runs: list[dict[str, Any]], device: str, way: str, words: list[str], repeats: int, epsilons: str
) -> bool:
    """Return whether so many runs of a command are stored, or its epsilon is none of those that are run now."""
    epsilon = words[words.index("--epsilon") + 1]
    if epsilon not in epsilons.split():
        return True
    wanted = (device, way, float(epsilon))
    return sum((run["device"], run["kept"], run["epsilon"]) == wanted for run in runs) >= repeats


def _place(device: str, way: str, command: str) -> Path:
    """Return the folder in which a command runs, with what the device's commands wrote."""
    folder = FOLDER / device
    place = folder if command in _SHARED else folder / way
    place.mkdir(parents=True, exist_ok=True)
    for name in _LENT if place != folder else ():
        if not (place / name).exists():
            (place / name).symlink_to((folder / name).resolve())
    return place


def measure_kept(device: str = DEVICES[0]) -> None:
    """Compute the share of labels that the argmax keeps: as described, and under the sequence's certificate.

    `boxes` is what a certificate without the limits of groups gives: each output has its own limits.
    """
    certificate = load_certificate(FOLDER / device / CERTIFICATE)
    law = certificate.noise
    if not isinstance(law, PhotonCountLaw):
        raise TypeError(f"device {device!r}: its certificate states no steady counts")
    none = dict.fromkeys(("dark_mean_e_low", "dark_mean_e_high", "dark_deviation_e"))
    boxes = certificate.model_copy(update={"noise": law.model_copy(update=none)})
    found: dict[str, dict[str, float]] = {}
    for name, held in (("described", None), ("boxes", boxes), ("groups", certificate)):
        with opusim.open_device(FOLDER / device / "warm.toml", n_inputs=10, n_outputs=128) as opened:
            if held is not None:
                opened.attach_certificate(held)
            frames = LabelFrames.of(opened, 10)
            found[name] = {
                f"{epsilon:g}": ArgmaxReadout.within(frames, epsilon=epsilon, delta=1e-5).keep
                for epsilon in (8.0, 3.0, 1.0)
            }
        print(name, found[name], flush=True)
    results = {key: value for key, value in load_results(NAME).items() if key == "runs"}
    save_results(NAME, {**results, "argmax": {"certificate": certificate.digest, "kept": found}})


def _replace(runs: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Put a run in the place of the same one, in the order of the table.

    One under another certificate is another, and so is one of the same number from another folder, which counts as a
    further repeat. Runs stored without the digest of their summary are told by their accuracy.
    """

    def cell(run: dict[str, Any]) -> tuple[int, int, float, str]:
        place = DEVICES.index(run["device"]), KEPT.index(run["kept"])
        return *place, -run["epsilon"], run["certificate"]

    others = []
    for run in runs:
        by = "run" if "run" in run else "test"
        if cell(run) != cell(found) or run[by] != found[by]:
            others.append(run)
    taken = {run["repeat"] for run in others if cell(run) == cell(found)}
    if found["repeat"] in taken:
        found = {**found, "repeat": max(taken) + 1}
    runs[:] = sorted([*others, found], key=lambda run: (*cell(run), run["repeat"]))


def table_rows(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each device and way of keeping: the accuracy, and its difference, at each epsilon."""
    rows: dict[tuple[str, str], dict[float, str]] = {}
    for (device, kept, epsilon), group in groupby(
        runs, key=lambda run: (run["device"], run["kept"], run["epsilon"])
    ):
        tests = [run["test"] for run in group]
        cell = f"{with_error(tests)} ({_difference(tests, epsilon)})".removesuffix(" ()")
        rows.setdefault((f"`{device}`", kept), {})[epsilon] = cell
    return [(*key, *(cells.get(epsilon, "-") for epsilon in EPSILONS)) for key, cells in rows.items()]


def _difference(values: list[float], epsilon: float) -> str:
    """Return a mean minus that of randomized response, with its standard error; nothing of one run."""
    name, row = COMPARED
    found = [
        cell
        for cell in load_results(name).get("cells", [])
        if (cell["row"], cell["epsilon"]) == (row, epsilon)
    ]
    if len(values) < 2 or not found:
        return ""
    error = (statistics.variance(values) / len(values) + found[0]["test_standard_error"] ** 2) ** 0.5
    return f"{statistics.fmean(values) - found[0]['test']:+.2f} ± {error:.2f}"


def docs_table() -> str:
    """Return the table of docs/calibrate.md: what each run reached; empty without results."""
    runs = load_results(NAME).get("runs", [])
    return markdown(COLUMN_NAMES, table_rows(runs)) if runs else ""


def kept_table() -> str:
    """Return the table of docs/calibrate.md on the labels that a certificate leaves; empty without results."""
    kept = load_results(NAME).get("argmax", {}).get("kept", {})
    rows = [
        (epsilon, *(f"{100 * kept[name][epsilon]:.1f} %" for name in ("described", "boxes", "groups")))
        for epsilon in kept.get("described", {})
    ]
    header = ("epsilon", "without a certificate", "a limit for each output", "limits for groups")
    return markdown(header, rows) if rows else ""


app = typer.Typer(add_completion=False, help=(__doc__ or "").splitlines()[0])
app.command("measure")(measure)
app.command("kept")(measure_kept)

if __name__ == "__main__":
    app()
