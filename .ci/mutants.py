"""Which mutants does this night try, and how many were killed?

python .ci/mutants.py sample SESSION [--share SHARE] [--day DAY]   # one in SHARE, another part each day
python .ci/mutants.py rate SESSION [--least PERCENT]               # prints survivors; exit code 1 below it

cosmic-ray's own `cr-rate` counts skipped mutants as killed, so it cannot judge a sample.
"""

from __future__ import annotations

import argparse
import hashlib
import time

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult


def sample(database: WorkDB, share: int, day: int) -> int:
    """Mark all waiting mutants but one in `share` as skipped; return how many are left."""
    kept = 0
    for item in list(database.pending_work_items):
        mutation = item.mutations[0]
        name = f"{mutation.module_path} {mutation.operator_name} {mutation.occurrence}"
        if int(hashlib.sha256(name.encode()).hexdigest(), 16) % share == day % share:
            kept += 1
        else:
            result = WorkResult(output="another night", worker_outcome=WorkerOutcome.SKIPPED)
            database.set_result(item.job_id, result)
    return kept


def killed(database: WorkDB) -> tuple[int, list[str]]:
    """Return how many of the mutants that were tried were killed, and what changed in each that survived."""
    tried = [result for _, result in database.results if result.worker_outcome != WorkerOutcome.SKIPPED]
    survivors = [result for result in tried if result.test_outcome == TestOutcome.SURVIVED]
    dead = sum(result.test_outcome == TestOutcome.KILLED for result in tried)
    return dead, [str(result.diff) for result in survivors]


def main() -> None:
    """Sample or judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=("sample", "rate"))
    parser.add_argument("session")
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--day", type=int, default=int(time.time()) // 86_400)
    parser.add_argument("--least", type=float, default=85.0)
    given = parser.parse_args()
    with use_db(given.session) as database:
        if given.task == "sample":
            print(f"{sample(database, given.share, given.day)} mutants tonight")
            return
        dead, survivors = killed(database)
    print(*survivors, sep="\n")
    tried = dead + len(survivors)
    percent = 100 * dead / tried if tried else 0.0
    print(f"{dead} of {tried} mutants killed, {percent:.1f} %; at least {given.least:g} % are needed")
    if percent < given.least:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
