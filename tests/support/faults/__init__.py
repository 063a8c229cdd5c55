"""Planted faults: ways in which a run would release less protection than it accounts for.

A detector of such faults (a self-test, an audit) is tested against all of `FAULTS`; see `Fault` for what each entry
says and how it is planted. A new fault is an entry in the file of its subject.
"""

from tests.support.faults import batches, contributions, labels, noise
from tests.support.faults.base import Fault

FAULTS: tuple[Fault, ...] = (*noise.FAULTS, *contributions.FAULTS, *batches.FAULTS, *labels.FAULTS)

OF_ONE_RUN: tuple[Fault, ...] = (noise.HALVED, *contributions.OF_ONE_RUN)
"""Faults for the audit of one training (benchmarks.attacks.one_run); the self-test finds them as well."""

OF_RELEASES: tuple[Fault, ...] = (noise.LEVERAGE,)
"""Faults of releases that the self-test does not read, for tests of `tests.support.releases`."""

NAMED: dict[str, Fault] = {fault.name: fault for fault in (*FAULTS, *OF_ONE_RUN, *OF_RELEASES)}

__all__ = ["FAULTS", "NAMED", "OF_ONE_RUN", "OF_RELEASES", "Fault"]
