"""`opusim account` as a person types it: tables, paragraphs, JSON, calibration, one-line errors."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

from opusim.accounting.explanation import most_hits
from opusim.accounting.ledger import Ledger
from opusim.accounting.mechanisms.records import RecordCentral, Unprotected
from opusim.training.cli import main

DELTA = ["--delta", "1e-5"]
GAUSSIAN = ["gaussian", "--noise-multiplier", "2", *DELTA]
PUBLISHED = (
    "pdfa-published --layer 785,512,0,1,positive --layer 513,10,1,1,silent --batch-size 256 --sigma 0.2 "
    "--tau-b 1 --tau-h-min 1 --tau-h-max 1 --steps 10"
)
RECORD = (
    "record-central --noise-multiplier 1.1 --sampling-probability 0.01 --steps 99 --clip-norm 1 --divisor 9"
)
STEP = RecordCentral(noise_multiplier=2.0, sampling_probability=0.1, clip_norm=1.0, divisor=100)


Account = Callable[..., tuple[int, str, str]]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Account:
    """Runs the command; gives its exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "140")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["opusim", "account", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out, printed.err

    return call


@pytest.mark.parametrize(("line", "words"), [
    (RECORD, "whether any one record was among"),
    (f"{RECORD} --relation zero_out", "- the number of records is public and the same for both data sets"),
    ("label-budget --budget-mu 0.7", "which of two labels a record had"),
    ("label-amplified --noise-multiplier 5 --sampling-probability 0.1 --steps 10", "batches stay secret"),
    ("label-readout --mu 0.7 --device-law", "proven under a device model"),
    ("randomized-response --keep-probability 0.5 --n-classes 10", "randomized response over 10 labels"),
    ("poisson-gaussian --noise-multiplier 5 --sampling-probability 0.1 --steps 10", "add_or_remove_one"),
    ("poisson-laplace --scale 5 --sampling-probability 0.1 --steps 10 --delta 0", "DP-ZO"),
    ("gaussian --noise-multiplier 3 --adjacency zero_out", "or its place was empty"),
    ("gaussian --noise-multiplier 3 --adjacency replace_one", "which of two values a record had"),
    ("gaussian --noise-multiplier 3 --delta 0", "Gaussian noise has no finite epsilon at delta = 0"),
    ("photon-counts --rate-low 5000 --rate-high 5050", "Poisson counts"),
])  # fmt: skip
def test_every_form_prints_a_table_and_a_paragraph(account: Account, line: str, words: str) -> None:
    code, out, _ = account(*line.split())
    assert code == 0
    assert "┃ status" in out
    assert "Taken on trust, not checked:" in out
    assert "Source: " in out
    assert words in " ".join(out.split())


def test_a_published_run_is_none_and_claimed(account: Account) -> None:
    code, out, _ = account(*PUBLISHED.split())
    assert code == 0
    for part in ("None: no finite number bounds", "Claimed: a paper's formula", "- layer 1: gamma_min > 0"):
        assert part in " ".join(out.split())


def test_json_holds_every_assumption(account: Account) -> None:
    code, out, _ = account(*GAUSSIAN, "--json")
    content = json.loads(out)
    assert code == 0
    assert content["guarantees"][0]["epsilon"] == pytest.approx(get_epsilon_gaussian(2.0, 1e-5))
    assert content["guarantees"][0]["assumptions"]
    assert content["mechanisms"][0]["kind"] == "gaussian"


def test_a_target_gives_the_least_noise(account: Account) -> None:
    code, out, _ = account("gaussian", "--target-epsilon", "1.5", *DELTA)
    assert code == 0
    found = float(out.split("noise_multiplier = ")[1].split()[0])
    assert found == pytest.approx(get_sigma_gaussian(1.5, 1e-5), rel=3e-4)
    for line in ("label-budget", "label-readout", "randomized-response --n-classes 10"):
        assert account(*line.split(), "--target-epsilon", "3")[0] == 0


def test_a_run_is_read_from_its_ledger(account: Account, tmp_path: Path) -> None:
    """By folder or file, and at another delta; ledger/test_statement.py compares all of text and JSON."""
    with Ledger(tmp_path / "ledger.jsonl", mode="release", delta=1e-5, enforced=True) as ledger:
        for step in range(3):
            ledger.pay(step, STEP)
        expected = ledger.guarantees()[0].epsilon
    for path in (tmp_path, tmp_path / "ledger.jsonl"):
        code, out, _ = account("run", str(path))
        assert (code, f"{expected:.3f}" in out, "Checked by the code that ran:" in out) == (0, True, True)
    content = json.loads(account("run", str(tmp_path), "--json", "--delta", "1e-6")[1])
    assert content["guarantees"][0]["epsilon"] > expected


@pytest.mark.parametrize(("line", "message"), [
    ("gaussian", "--noise-multiplier is missing: give it, or --target-epsilon to have it computed"),
    ("gaussian --noise-multiplier -1", "--noise-multiplier -1.0: must be finite and above 0"),
    ("gaussian --noise-multiplier 1 --delta 2", "--delta 2.0: must lie in [0, 1)"),
    ("gaussian --target-epsilon 1 --delta 0", "--target-epsilon 1: gaussian with noise up to 1e+06 does not"),
    ("gaussian --noise-multiplier 1 --steps 0", "--steps 0: must be at least 1"),
    ("pdfa-published --layer 1,2,3", "--layer 1,2,3: must be FAN_IN,WIDTH,GMIN,GMAX"),
    ("pdfa-published --batch-size 4", "--layer is missing: give it"),
    ("label-budget --budget-mu 1 --order no", "--order 'no': must be 'published' or 'hardware'"),
    ("randomized-response --target-epsilon 50 --n-classes 10", "so large that the label always stays"),
    ("run nowhere", "nowhere: there is no ledger; give a run folder that has one"),
    ("convex-plan --target-epsilon 3 --batches 0", "--batches 0: must be at least 1"),
    ("convex-plan --target-epsilon 3 --batches 9 --noise-multiplier 0", "--noise-multiplier 0.0: must be finite"),
    ("randomized-response --n-classes 0 --target-epsilon 1", "--n-classes 0: must be at least 2"),
    (PUBLISHED + " --target-epsilon 3", "has no noise that could be set"),
    (RECORD + " --delta -0.1", "--delta -0.1: must lie in [0, 1)"),
    (RECORD + " --relation replace_one", "--relation 'replace_one': must be 'add_or_remove_one' or 'zero_out'"),
])  # fmt: skip
def test_errors_are_one_line_with_exit_code_two(account: Account, line: str, message: str) -> None:
    code, out, err = account(*line.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_a_ledger_of_two_kinds_is_refused(account: Account, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", mode="release", delta=1e-5) as ledger:
        code, _, told = account("run", str(tmp_path))
        assert (code, "no step was paid for yet; train first" in told) == (2, True)
        ledger.pay(0, STEP)
        ledger.pay(1, Unprotected(what="bp without protection"))
    told = account("run", str(tmp_path))[2]
    assert "record_central, unprotected: no accountant covers them together" in told


def test_hits_are_those_of_the_trade_off() -> None:
    assert most_hits(0.0, 0.0, 0.01) == pytest.approx(0.01)
    assert most_hits(1.0, 1e-5, 0.01) == pytest.approx(math.e * 0.01 + 1e-5)
    assert most_hits(6.0, 0.0, 0.01) == pytest.approx(1 - math.exp(-6) * 0.99)
    assert most_hits(math.inf, 0.0, 0.01) == 1.0
