"""Are wheel and sdist the same bytes each time? Build both from tracked files, with nothing of this machine.

python .ci/dist.py [FOLDER]            # builds into FOLDER, dist by default, and prints names and SHA-256
python .ci/dist.py --check             # builds twice and compares

The time in the archives is SOURCE_DATE_EPOCH, else that of the last commit. Owners, modes and the order of files are
fixed. Same versions of setuptools, wheel and zlib are needed for same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def epoch() -> int:
    """Return the time that goes into the archives, seconds since 1970."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is not None:
        return int(given)
    command = ["git", "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def copy_tracked(target: Path) -> None:
    """Copy the tracked files of the repository, with fixed modes, and its links."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            file.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, file)
            file.chmod(0o644)


def normalised(archive: Path, seconds: int) -> bytes:
    """Return a .tar.gz with sorted members, one time, one owner and fixed modes."""
    packed = io.BytesIO()
    with (
        tarfile.open(archive) as old,
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=seconds, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def build(folder: Path) -> dict[str, str]:
    """Build wheel and sdist into a folder, and return their SHA-256 by name."""
    seconds = epoch()
    with tempfile.TemporaryDirectory() as temporary:
        source, made = Path(temporary) / "source", Path(temporary) / "made"
        copy_tracked(source)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(source)]
        settings = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds), "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(made.iterdir()):
            content = normalised(file, seconds) if file.suffix == ".gz" else file.read_bytes()
            (folder / file.name).write_bytes(content)
        names = sorted(file.name for file in made.iterdir())
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def main() -> None:
    """Build once, or twice to compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", action="store_true", help="build twice and compare")
    given = parser.parse_args()
    found = build(given.folder)
    for name, digest in found.items():
        print(f"{digest}  {name}")
    if given.check:
        with tempfile.TemporaryDirectory() as temporary:
            again = build(Path(temporary))
        if again != found:
            raise SystemExit(
                f"not reproducible: {sorted(name for name in found if again[name] != found[name])}"
            )
        print("a second build gives the same bytes")


if __name__ == "__main__":
    main()
