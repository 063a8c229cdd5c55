"""Which licences do the packages have that opusim needs? Write THIRD_PARTY.md from their installed metadata.

python .ci/third_party.py
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """# Third parties

opusim contains no code of others: wheel and sdist hold only this project's files, under the
[Apache License 2.0](LICENSE). It needs the packages below, which pip installs next to it, each under its own licence.
`make dist` writes the same list as a software bill of materials (CycloneDX), and `.ci/third_party.py` writes this page.

Constants of devices come from published papers and data sheets, which each device description names. The data sets
MNIST, Fashion-MNIST and CIFAR-10 are not included; `digits` is that of scikit-learn.

| package | version | licence |
| --- | --- | --- |
"""


def licence_of(name: str) -> str:
    """Return the licence that a package states: its SPDX expression, else its classifiers, else a short text."""
    found = importlib.metadata.metadata(name)
    classifiers = [
        each.split(" :: ")[-1]
        for each in found.get_all("Classifier") or []
        if each.startswith("License :: OSI")
    ]
    text = (found.get("License") or "").strip()
    stated = found.get("License-Expression") or ", ".join(classifiers)
    return stated or (text if "\n" not in text else "") or "see its files"


def page() -> str:
    """Return the page."""
    pinned = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    rows = [
        f"| [{name}](https://pypi.org/project/{name}/) | {version} | {licence_of(name)} |"
        for name, version in pinned
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (ROOT / "THIRD_PARTY.md").write_text(page())
