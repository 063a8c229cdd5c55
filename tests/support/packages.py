"""Packages that look installed: metadata with entry points, in a folder on the search path."""

from pathlib import Path

import pytest


def install(
    patch: pytest.MonkeyPatch,
    folder: Path,
    package: str,
    group: str,
    points: dict[str, str],
    source: str = "",
) -> None:
    """Put a package on `sys.path`, for the length of a test.

    Its entry points are "module:object" by the names that it brings; its module is `package.py` if there is a source.
    """
    metadata(folder, package, group, points, source)
    patch.syspath_prepend(str(folder))


def metadata(folder: Path, package: str, group: str, points: dict[str, str], source: str = "") -> None:
    """Write the files of a package, for the search path of another process."""
    facts = folder / f"{package}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (facts / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    if source:
        (folder / f"{package}.py").write_text(source)
