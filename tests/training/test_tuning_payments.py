"""A search is paid for before it is drawn, each time one is drawn; its folder holds nothing else and has one writer."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opusim import training
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.selection import PrivateSelection
from opusim.training.config import load_config
from opusim.training.config.run import RunConfig
from opusim.training.errors import FolderBusy, RunFolderError
from opusim.training.runs import storage
from opusim.training.runs.storage import only_writer
from opusim.training.sweeps import tuning as searching
from opusim.training.sweeps.execution import run_sweep
from opusim.training.sweeps.sweep import SweepFolder
from opusim.training.sweeps.tuning import Draw, Search
from tests.support.command import opusim

CONFIG: dict[str, Any] = {
    "epochs": 1, "threads": 1, "mode": "release", "data": {"name": "digits", "validation_fraction": 0.2},
    "trainer": {"kind": "convex", "hyperplanes": 4}, "optimizer": {"lr": 1.5, "momentum": 0.0},
    "sampler": {"scheme": "disjoint-cyclic", "batch_size": 400},
    "protection": {"kind": "last-iterate", "epsilon": 8.0},
}  # fmt: skip
CHOICES = {"trainer.clip": ["0.3", "0.6"]}
TRIALS = (("trainer.clip=0.3",), ("trainer.clip=0.6",))


def release() -> RunConfig:
    return load_config(CONFIG)


def search(folder: Path) -> Search:
    return Search(release(), CHOICES, mean=3.0, folder=folder)


@pytest.fixture(scope="module")
def priced() -> tuple[PrivateSelection, dict[tuple[str, ...], searching.Trial]]:
    """The price of every search here, computed once."""
    return searching.priced_trials(release(), CHOICES, 3.0)


@pytest.fixture(autouse=True)
def two_trials(monkeypatch: pytest.MonkeyPatch, priced: object) -> None:
    """Every draw gives two trials, so that no test depends on the system's entropy."""
    monkeypatch.setattr(searching, "draw_trials", lambda *_, **__: Draw(trials=TRIALS, seed=None))
    monkeypatch.setattr(searching, "priced_trials", lambda *_: priced)


def stop_in_trial(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """Let Ctrl-C come when a trial's training begins."""
    train, calls = training.engine.session.train, []

    def stopping(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == which:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(searching, "train", stopping)


def epsilon(folder: Path) -> float:
    (guarantee,) = read_ledger(folder).guarantees()
    return guarantee.epsilon


def test_the_payment_precedes_the_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paid = []

    def drawing(*arguments: Any, **options: Any) -> Draw:
        paid.append([payment.name for payment in read_ledger(tmp_path / "search").payments])
        return Draw(trials=(), seed=None)

    monkeypatch.setattr(searching, "draw_trials", drawing)
    prepared = search(tmp_path / "search")
    assert not (tmp_path / "search").exists()  # nothing is drawn, and nothing written, before `run`
    prepared.run()
    assert paid == [["search"]]


def test_a_search_whose_draw_is_gone_is_paid_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_in_trial(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path).run()
    one = epsilon(tmp_path)
    (tmp_path / "tuning.json").unlink()
    shutil.rmtree(tmp_path / "trial-0")
    found = search(tmp_path).run()
    assert found.searches == 2
    assert found.guarantee.epsilon == epsilon(tmp_path)
    assert found.guarantee.epsilon > 1.9 * one
    assert found.run.guarantees[0].epsilon == found.guarantee.epsilon


@pytest.mark.parametrize("left", ["trial-0", "best", "result.json"])
def test_what_an_earlier_search_left_is_not_searched_over(tmp_path: Path, left: str) -> None:
    search(tmp_path).run()
    if left == "trial-0":
        (tmp_path / "best").rename(tmp_path / "trial-0")
    for path in tmp_path.iterdir():
        if path.name not in (left, "ledger.jsonl", "ledger.head", "lock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = epsilon(tmp_path)
    with pytest.raises(RunFolderError, match=r"its tuning\.json is missing.*costs again"):
        search(tmp_path).run()
    assert epsilon(tmp_path) == before


def test_a_stopped_release_search_keeps_its_payment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_in_trial(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path).run()
    kept = json.loads((tmp_path / "tuning.json").read_text())
    assert kept["started"] == [0, 1]
    found = search(tmp_path).run()
    assert found.searches == len(read_ledger(tmp_path).payments) == 1
    assert found.score is not None
    assert found.score >= kept["scores"]["0"]  # the finished trial kept its score
    again = search(tmp_path).run()
    assert (again.score, again.settings, again.searches) == (found.score, found.settings, 1)
    assert found.trials is again.trials is None


def test_an_edited_score_of_a_stopped_release_search_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_in_trial(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path).run()
    file = tmp_path / "tuning.json"
    sound, kept = file.read_text(), json.loads(file.read_text())
    for change in ({"scores": {"0": 0.999}}, {"draw": {**kept["draw"], "seed": 4}}, {"started": []}):
        file.write_text(json.dumps({**kept, **change}))
        with pytest.raises(RunFolderError, match=r"tuning\.json was changed since it was written"):
            search(tmp_path)
    file.write_text(sound)
    found = search(tmp_path).run()
    assert storage.unsealed(tmp_path, json.loads((tmp_path / "result.json").read_text()), remedy="")[0] == {
        "schema_version": 1,
        "score": found.score,
        "settings": list(found.settings),
    }


def test_a_trial_is_not_trained_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_in_trial(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path).run()
    shutil.rmtree(tmp_path / "trial-1")
    with pytest.raises(RunFolderError, match="trial-1 is missing, although its training was started"):
        search(tmp_path).run()


def test_a_search_at_another_price_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by a version whose trials have other noise than the payment was for."""
    with monkeypatch.context() as patch:
        stop_in_trial(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path).run()
    selection, trials = searching.priced_trials(release(), CHOICES, 3.0)
    cheaper = replace(selection, mu=1.1 * selection.mu)
    monkeypatch.setattr(searching, "priced_trials", lambda *_: (cheaper, trials))
    with pytest.raises(RunFolderError, match="paid for at another price"):
        search(tmp_path).run()


@pytest.mark.parametrize("kept", ["best", "result.json"])
def test_an_old_state_behind_a_result_is_refused(tmp_path: Path, kept: str) -> None:
    """Put back, it would have every trial trained and scored anew, and another result stated at the same cost."""
    old: list[bytes] = []
    search(tmp_path).run(lambda done, total: old.append((tmp_path / "tuning.json").read_bytes()))
    result = (tmp_path / "result.json").read_bytes()
    (tmp_path / "tuning.json").write_bytes(old[0])
    if kept == "best":
        (tmp_path / "result.json").unlink()
    else:
        shutil.rmtree(tmp_path / "best")
    with pytest.raises(RunFolderError, match=f"tuning.json is older than {kept}"):
        search(tmp_path).run()
    assert kept == "best" or (tmp_path / "result.json").read_bytes() == result
    (tmp_path / "tuning.json").write_bytes(old[-1])  # all scores, before the result was written
    if kept == "best":
        assert search(tmp_path).run().score == json.loads(result)["score"]


def test_a_search_without_its_payment_is_refused(tmp_path: Path) -> None:
    search(tmp_path).run()
    for name in ("ledger.jsonl", "ledger.head"):
        (tmp_path / name).unlink()
    with pytest.raises(RunFolderError, match="does not hold the payment of this search"):
        search(tmp_path).run()


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"schema_version": 1}', '{"schema_version": 2, "asked": 1}', ""]
)
def test_a_changed_state_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tuning.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"tuning\.json: "):
        search(tmp_path)


def test_one_process_searches_in_a_folder(tmp_path: Path) -> None:
    waiting = search(tmp_path / "search")
    with (
        only_writer(tmp_path / "search", "search folder"),
        pytest.raises(FolderBusy, match=f"search folder .* is being written by process {os.getpid()}"),
    ):
        waiting.run()
    assert not (tmp_path / "search" / "ledger.jsonl").exists()


def test_a_search_is_its_owners(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        search(tmp_path / "search").run()
    finally:
        os.umask(before)
    found = [tmp_path / "search", *(tmp_path / "search").rglob("*")]
    assert len(found) > 8
    assert not [path for path in found if path.stat().st_mode & 0o077]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds") / "run"
    training.train({**CONFIG, "protection": {"kind": "last-iterate", "epsilon": 2.0}}, folder=folder)
    return folder


def test_the_command_prints_no_other_runs_epsilon(run_folder: Path) -> None:
    before = sorted(run_folder.rglob("*"))
    line = f"tune convex --data digits --epsilon 8 --trials 2 --epochs 1 --release --out {run_folder}"
    told = opusim(*line.split(), cwd=run_folder.parent)
    error = f"opusim: search folder {run_folder} holds a run; choose an empty folder\n"
    assert (told.returncode, told.stdout, told.stderr) == (2, "", error)
    assert sorted(run_folder.rglob("*")) == before


def test_a_folder_holds_one_kind_of_work(run_folder: Path, tmp_path: Path) -> None:
    search(tmp_path / "search").run()
    with pytest.raises(RunFolderError, match="run folder .* holds a search; choose an empty folder"):
        training.train(release(), folder=tmp_path / "search")
    for folder, held in ((run_folder, "run"), (tmp_path / "search", "search")):
        with pytest.raises(RunFolderError, match=f"sweep folder .* holds a {held}; choose an empty folder"):
            run_sweep([], SweepFolder(folder), jobs=1)
    (tmp_path / "sweep" / "rows").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="search folder .* holds a sweep; choose an empty folder"):
        search(tmp_path / "sweep")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").touch()
    with pytest.raises(RunFolderError, match=r"holds other files \(readme.txt\)"):
        search(tmp_path / "notes").run()
