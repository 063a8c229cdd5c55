"""Release runs under a budget as real processes, stopped by Ctrl-C or killed: they paid for what they did."""

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from opusim.accounting.ledger import LedgerContent
from opusim.training.runs.folder import RunFolder
from tests.support.stop_harness import STEPS

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Story:
    """What became of a run: exit codes of its processes, steps that began, and its ledger."""

    codes: list[int]
    computed: Counter[int]
    ledger: LedgerContent

    @property
    def paid(self) -> Counter[int]:
        """How often each step is paid for."""
        steps = [each for each in self.ledger.payments if each.first_step is not None]
        return Counter(each.first_step + number for each in steps for number in range(each.steps))


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    root = tmp_path_factory.mktemp("stories")
    command = [sys.executable, "-m", "tests.support.stop_harness", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name, told in json.loads(done.stdout).items():
        ledger = RunFolder(root / name).read_ledger()
        found[name] = Story(codes=told["codes"], computed=Counter(told["begun"]), ledger=ledger)
    return found


def test_ctrl_c_costs_nothing(stories: dict[str, Story]) -> None:
    story = stories["record-ctrl-c"]
    assert story.codes == [130, 130, 0]
    assert story.paid == story.computed == Counter(range(STEPS))
    (guarantee,) = story.ledger.guarantees()
    assert 0.99 * 2.0 <= guarantee.epsilon <= 2.0


def test_a_kill_costs_what_was_reserved_and_never_less_than_was_computed(stories: dict[str, Story]) -> None:
    story = stories["record-kill"]
    assert story.codes == [130, -signal.SIGKILL, 130, 4]  # the budget ends before the last epoch
    assert not story.computed - story.paid
    assert story.paid.total() > story.computed.total()  # the rest of a block is lost
    (guarantee,) = story.ledger.guarantees()
    assert guarantee.epsilon <= 2.0
