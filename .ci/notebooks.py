"""Execute the notebooks of docs/notebooks, and keep their outputs.

python .ci/notebooks.py [NAME ...]                      # in place
python .ci/notebooks.py --install dist/opusim-0.3.0-py3-none-any.whl    # copies that install this first; keeps nothing

Each notebook runs in an empty folder, in a kernel of this Python. Its seconds of processor time are printed.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
INSTALL = "opusim"
"""What the first code cell of every notebook installs: a name, or the address of a wheel or a repository."""
SKIPPED = "skip-execution"
"""Tag of that cell, which a checkout does not need."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def install_line(address: str) -> str:
    """Return the line that installs opusim in a hosted notebook."""
    return f"%pip install --quiet {address}"


def with_install(notebook: Any, address: str) -> Any:
    """Return a notebook whose first code cell installs opusim from an address."""
    (cell,) = [cell for cell in notebook.cells if SKIPPED in cell.metadata.get("tags", [])]
    cell.source = install_line(address)
    return notebook


def executed(notebook: Any, *, installs: bool = False) -> Any:
    """Return a notebook with new outputs, and without what differs from one execution to the next."""
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=900,
            startup_timeout=300,
            kernel_name="python3",
            skip_cells_with_tag="" if installs else SKIPPED,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # a progress bar removes itself and leaves an empty output
            cell.outputs = [out for out in cell.outputs if out.get("data", {}).get("text/html") != ""]
    return notebook


def main() -> None:
    """Execute."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="of notebooks, all by default")
    parser.add_argument("--install", help="execute copies that install this first, and keep nothing")
    given = parser.parse_args()
    for file in sorted(FOLDER.glob("*.ipynb")):
        if given.names and file.stem not in given.names:
            continue
        notebook = with_install(nbformat.read(file, as_version=4), given.install or INSTALL)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        notebook = executed(notebook, installs=given.install is not None)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{file.stem}: {spent:.0f} s of processor time", flush=True)
        if given.install is None:
            nbformat.write(notebook, file)


if __name__ == "__main__":
    main()
