"""`opusim doctor`: what a report of a problem must say about an installation, and whether the installation works.

It opens only simulated devices, and reads only names and sizes of files. Each section runs separately, so that a
library that does not import fails only its own section.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from opusim.plugins import FOREIGN_ERRORS

SCHEMA = "opusim-doctor"
VERSION = 1

PROJECTION = "577c162850e9336c"
"""BLAKE2b of a tiny projection, rounded to fiftieths: no number is near a rounding edge, so that the last bits of a
processor's arithmetic do not matter."""
_WIDTH = 80
_NUMBERS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMBA_DISABLE_JIT"),
    *("CUDA_VISIBLE_DEVICES", "WORLD_SIZE"),
)
"""Variables that change how a run computes; other variables may hold what a report must not."""


@dataclass(frozen=True)
class Fact:
    """A line of the report; `broken` keeps opusim, or a package that extends it, from working."""

    what: str
    found: str
    broken: bool = False


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Describe this installation for a report of a problem, and check that it works; exit code 1 if it does not."""
    sections = {title: _looked_at(look) for title, look in _SECTIONS.items()}
    broken = [(title, fact) for title, facts in sections.items() for fact in facts if fact.broken]
    if as_json:
        content = {
            "schema": SCHEMA,
            "version": VERSION,
            "broken": [{"section": title, "what": fact.what, "found": fact.found} for title, fact in broken],
            "sections": {title: [asdict(fact) for fact in facts] for title, facts in sections.items()},
        }
        typer.echo(json.dumps(content, indent=2))
    else:
        from opusim.tables import wrapped

        for title, facts in sections.items():
            typer.echo(title)
            for fact in facts:
                mark = "!!" if fact.broken else "  "
                typer.echo(wrapped(f"{mark}{fact.what}: {fact.found}", indent=" " * 6, widest=_WIDTH))
        state = "Nothing is broken." if not broken else f"{len(broken)} broken, marked !! above."
        typer.echo(f"\n{state} Paste this into a report.")
    if broken:
        raise typer.Exit(1)


def _looked_at(look: Callable[[], Iterator[Fact]]) -> list[Fact]:
    """Return a section's facts without the user's folders; a failure becomes the last fact."""
    facts: list[Fact] = []
    try:
        facts.extend(look())
    except FOREIGN_ERRORS as error:  # of a broken library; the other sections still matter
        facts.append(Fact("failed", f"{type(error).__name__}: {error}", broken=True))
    own = [(os.environ.get("OPUSIM_DATA", ""), "$OPUSIM_DATA")]
    for folder, name in ((os.getcwd, "."), (Path.home, "~")):
        with suppress(OSError, RuntimeError):  # a working folder that was removed, a user without a home
            own.append((str(folder()), name))
    lines = [" ".join(fact.found.split()) for fact in facts]
    for path, name in own:
        lines = [line.replace(path, name) if len(path) > 1 else line for line in lines]
    return [Fact(fact.what, line, fact.broken) for fact, line in zip(facts, lines, strict=True)]


def _versions() -> Iterator[Fact]:
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    yield Fact("python", f"{platform.python_version()}, {platform.python_implementation()}")
    yield Fact("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Fact("opusim", version("opusim"))
    absent = []
    listed = [Requirement(text) for text in requires("opusim") or ()]
    for requirement in listed:
        extra = "" if requirement.marker is None else str(requirement.marker)
        if 'extra == "dev"' in extra:
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            if extra:
                absent.append(requirement.name)
            else:
                yield Fact(requirement.name, f"missing; opusim needs {requirement}", broken=True)
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        if not fits and extra:
            try:
                for other in listed:
                    if other.marker == requirement.marker:
                        version(other.name)
            except PackageNotFoundError:
                continue  # an extra that is not installed asks for nothing
        yield Fact(
            requirement.name, found if fits else f"{found}; opusim needs {requirement}", broken=not fits
        )
    if absent:
        yield Fact("optional, not installed", ", ".join(absent))


def _machine() -> Iterator[Fact]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = named[0] if named else platform.processor() or platform.machine()
    yield Fact("processor", f"{processor}, {os.cpu_count()} cores, {usable} for this process")
    yield from (Fact(name, os.environ[name]) for name in _NUMBERS if name in os.environ)
    import numpy as np
    import torch

    from opusim.tables import data_size

    blas: Any = np.show_config(mode="dicts")
    library = " ".join(str(blas["Build Dependencies"]["blas"].get(key, "")) for key in ("name", "version"))
    mkl = "with" if torch.backends.mkl.is_available() else "without"
    yield Fact(
        "threads of torch", f"{torch.get_num_threads()}, {torch.get_num_interop_threads()} between operations"
    )
    yield Fact(
        "linear algebra", f"numpy with {library}, torch {mkl} MKL, {torch.backends.cpu.get_cpu_capability()}"
    )
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield Fact("CUDA devices", f"none; torch is built {built}")
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        yield Fact(
            f"CUDA device {number}",
            f"{facts.name}, {data_size(facts.total_memory)}, CUDA {torch.version.cuda}",
        )


def _kernels() -> Iterator[Fact]:
    import numba

    import opusim

    package, settings = Path(opusim.__path__[0]), cast(Any, numba.config)
    if settings.DISABLE_JIT:
        yield Fact("compiled kernels", "none: NUMBA_DISABLE_JIT is set, and everything is slow")
    elif settings.CACHE_DIR:
        kept = len(list(Path(settings.CACHE_DIR).rglob("*.nbi")))
        yield Fact("compiled kernels", f"{kept} kept in NUMBA_CACHE_DIR")
    elif os.access(package, os.W_OK):
        yield Fact("compiled kernels", f"{len(list(package.rglob('*.nbi')))} kept next to the package")
    else:
        yield Fact("compiled kernels", "kept in the user's folder of caches: the package is read-only")
    digest = projection_digest()
    agrees = "as it must" if digest == PROJECTION else f"which should be {PROJECTION}: results are wrong here"
    yield Fact("test projection", f"gives {digest}, {agrees}", broken=digest != PROJECTION)


def projection_digest() -> str:
    """Return the digest of a tiny projection by the simulated Gaussian device, rounded to fiftieths."""
    import hashlib

    import numpy as np
    import torch

    from opusim.devices.registry import open_device

    x = (torch.arange(128).reshape(2, 64) * 7 % 3 - 1).float()
    with open_device("gaussian", seed=1, n_inputs=64, n_outputs=8, noise={"sigma": 0.5}) as device:
        readings = device.project(x).double().numpy()
    return hashlib.blake2b(np.rint(50 * readings).astype("<i4").tobytes(), digest_size=8).hexdigest()


def _devices() -> Iterator[Fact]:
    from opusim import plugins
    from opusim.description.schema import load_description, packaged_names
    from opusim.devices.access import require_present
    from opusim.devices.kinds import ENTRY_POINT_GROUP, device_factory, device_kinds
    from opusim.errors import DeviceBusy, DeviceUnavailable

    for name in packaged_names():
        try:
            description = load_description(name)
            device_factory(name, description.kind)
            require_present(description)
        except DeviceBusy:
            yield Fact(name, "in use by another process")
        except DeviceUnavailable as error:
            yield Fact(name, str(error))
        except FOREIGN_ERRORS as error:  # check the other devices as well
            yield Fact(name, f"{type(error).__name__}: {error}", broken=True)
        else:
            yield Fact(name, "can be opened")
    for kind, package in device_kinds().items():
        if package == "opusim":
            continue
        try:
            plugins.load(ENTRY_POINT_GROUP, kind)
            found = "can be opened, by a description of its own"
        except plugins.PluginError:
            found = "cannot be used, see Entry points"
        yield Fact(f"kind {kind} of {package}", found)


def _drivers() -> Iterator[Fact]:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    for name, what in (
        ("lightonml", "library of LightOn's devices"),
        ("lightonopu", "driver of the appliance"),
    ):
        if find_spec(name) is None:
            yield Fact(name, f"not installed ({what})")
            continue
        try:
            yield Fact(name, version(name))
        except PackageNotFoundError:
            yield Fact(name, "found, without a version")


def _data() -> Iterator[Fact]:
    from opusim.tables import data_size
    from opusim.training.data.catalogue import CATALOGUE, file_sizes
    from opusim.training.data.formats import VARIABLE

    yield from (Fact(name, "comes with scikit-learn") for name, entry in CATALOGUE.items() if not entry.files)
    if not os.environ.get(VARIABLE):
        yield Fact(VARIABLE, "not set: mnist and fashion-mnist are downloaded, cifar-10 needs it")
        return
    for name, sizes in ((name, file_sizes(name)) for name, entry in CATALOGUE.items() if entry.files):
        absent = [file for file, size in sizes.items() if size is None]
        if len(absent) == len(sizes):
            yield Fact(name, f"not in {VARIABLE}")
        elif absent:
            yield Fact(
                name, f"incomplete: {', '.join(absent)} missing; add it or remove the rest", broken=True
            )
        else:
            yield Fact(name, f"found, {data_size(sum(filter(None, sizes.values())))}")


def _disk() -> Iterator[Fact]:
    from opusim.tables import data_size

    place = Path("runs").absolute()
    there = "./runs" if place.is_dir() else "./runs, which does not exist yet"
    while not place.is_dir():
        place = place.parent
    free = data_size(shutil.disk_usage(place).free)
    writable = os.access(place, os.W_OK)
    yield Fact("free", f"{free} for {there}" + ("" if writable else "; the folder is read-only"))


def _packages() -> Iterator[Fact]:
    """Import every entry point, ours and those of other packages."""
    from importlib.metadata import entry_points

    from opusim import plugins

    for group in sorted(group for group in entry_points().groups if group.startswith("opusim.")):
        names = plugins.names(group)
        failed = []
        for name in names:
            try:
                plugins.load(group, name)
            except plugins.PluginError as error:
                failed.append(Fact(f"{group} {name}", str(error), broken=True))
        others = sorted({plugins.package(group, name) for name in names} - {"opusim"})
        brought = f", of opusim and {', '.join(others)}" if others else ""
        yield Fact(group, f"{len(names) - len(failed)} of {len(names)} import{brought}")
        yield from failed


_SECTIONS: dict[str, Callable[[], Iterator[Fact]]] = {
    "Versions": _versions,
    "Machine": _machine,
    "Kernels": _kernels,
    "Devices": _devices,
    "Drivers": _drivers,
    "Data": _data,
    "Disk": _disk,
    "Entry points": _packages,
}
