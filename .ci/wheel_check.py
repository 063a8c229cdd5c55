"""Does the wheel work where nothing else is? Install it in an empty environment and run getting-started there.

python .ci/wheel_check.py [WHEEL] [--python PYTHON]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.code_blocks import run_page  # noqa: E402 - found by the line above

PAGE = ROOT / "docs" / "getting-started.md"


def run_in(environment: Path) -> None:
    """Run the commands of the page by the `opusim` of an environment."""
    with tempfile.TemporaryDirectory() as folder:
        for command, _ in run_page(PAGE, Path(folder), str(environment / "bin" / "opusim")):
            print(f"ok  {command}", flush=True)


def main() -> None:
    """Install and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheel", nargs="?", type=Path, help="the newest in dist by default")
    parser.add_argument("--python", default=sys.executable, help="of the environment that is made")
    parser.add_argument("--environment", type=Path, help="take this one, in which the wheel is installed")
    given = parser.parse_args()
    if given.environment is not None:
        run_in(given.environment)
        return
    wheel = given.wheel or max((ROOT / "dist").glob("*.whl"), key=lambda file: file.stat().st_mtime)
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        subprocess.run([given.python, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "--quiet", wheel], check=True)
        run_in(environment)


if __name__ == "__main__":
    main()
