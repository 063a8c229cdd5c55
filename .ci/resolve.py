"""Is there a wheel of everything that setup.cfg requires, for each of these Python versions?

python .ci/resolve.py [VERSION ...]

Resolves the requirements, and each extra with them, on Linux (x86-64) without building anything; exit code 1 if a
version has no answer. It asks the package index and installs nothing: that the code runs there is for the tests to say.
"""

from __future__ import annotations

import argparse
import configparser
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
SHOWN = ("torch", "numpy", "scipy", "numba")


def requirements() -> dict[str, list[str]]:
    """Return the requirements under "", and those of each extra."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    texts = {"": settings["options"]["install_requires"], **{name: extras[name] for name in extras}}
    return {name: [line for line in text.splitlines() if line] for name, text in texts.items()}


def resolved(version: str, wanted: list[str]) -> tuple[dict[str, str], str]:
    """Return the versions that were found by package, none if there is no answer, and in one line why not."""
    call = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"]
    call += ["--python-version", version, "--python-platform", "x86_64-manylinux_2_28"]
    call += ["--only-binary", ":all:"]
    done = subprocess.run(call, input="\n".join(wanted), capture_output=True, text=True, check=False)
    found = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return (found if done.returncode == 0 else {}), " ".join(done.stderr.partition("\nhint:")[0].split())


def main() -> None:
    """Resolve and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    given = parser.parse_args()
    parts, failed = requirements(), []
    for version in given.versions:
        for name, more in parts.items():
            found, said = resolved(version, [*parts[""], *(more if name else [])])
            where = f"Python {version}{f', extra {name}' if name else ''}"
            if not found:
                failed.append(where)
            shown = ", ".join(f"{package} {found[package]}" for package in SHOWN if package in found)
            print(f"{where}: {f'{len(found)} packages, {shown}' if found else said}", flush=True)
            if not found and not name:
                break  # an extra needs all of these
    if failed:
        raise SystemExit(f"not resolved, for the reasons above: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
