"""Which mutants does this night try? One in SHARE of those that wait, another part each day; the others are skipped.

python .ci/sample_mutants.py SESSION [--share SHARE] [--day DAY]
"""

from __future__ import annotations

import argparse
import hashlib
import time

from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult


def main() -> None:
    """Mark the others as skipped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("session")
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--day", type=int, default=int(time.time()) // 86_400)
    given = parser.parse_args()
    with use_db(given.session) as database:
        kept = 0
        for item in list(database.pending_work_items):
            mutation = item.mutations[0]
            name = f"{mutation.module_path} {mutation.operator_name} {mutation.occurrence}"
            part = int(hashlib.sha256(name.encode()).hexdigest(), 16) % given.share
            if part == given.day % given.share:
                kept += 1
                continue
            result = WorkResult(output="another night", worker_outcome=WorkerOutcome.SKIPPED)
            database.set_result(item.job_id, result)
    print(f"{kept} mutants tonight")


if __name__ == "__main__":
    main()
