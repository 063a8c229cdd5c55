"""Users as the unit: one clip for the mean gradient of a user's records, users drawn by Poisson, k records a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset, default_collate

import opusim
from opusim.accounting import Unit
from tests.support.faults.users import FAULTS
from tests.support.private_loops import Parts, parts, private_loop, run_epoch

pytestmark = pytest.mark.filterwarnings("ignore:.*records have no ID")

CLIP, EACH, TINY = 0.2, 3, 1e-9
IDS = [None if n % 5 == 0 else f"user {n % 13}" for n in range(60)]
"""Users with up to four records, and records without a user."""


def gradients(module: nn.Module) -> Tensor:
    return parameters_to_vector(p.grad for p in module.parameters())


def of_users(folder: Path, given: Parts | None = None, **options: Any) -> opusim.PrivateTraining:
    settings: dict[str, Any] = {"noise_multiplier": TINY, "max_grad_norm": CLIP, "user_ids": IDS}
    settings |= {"records_per_user": EACH, **options}
    return private_loop(folder, parts(batch_size=6) if given is None else given, **settings)


@pytest.mark.parametrize("limit", [None, 3, 8])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_gradient_sums_users_clipped_means(tmp_path: Path, limit: int | None, fixed: bool) -> None:
    private = of_users(tmp_path, max_physical_batch_size=limit, fixed_batches=fixed)
    model, optimizer, criterion, loader = private
    x, y = loader.dataset.tensors
    for step, batch in enumerate(loader):
        wanted = torch.zeros(sum(p.numel() for p in model.parameters()))
        for user in loader.sampler.indices(step).tolist():
            own = loader.users.chosen(user, step)
            assert 1 <= len(own) <= EACH
            loss = nn.functional.cross_entropy(model._call_impl(x[own]), y[own])
            flat = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
            wanted += flat * min(1.0, CLIP / float(flat.norm()))
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        torch.testing.assert_close(gradients(model), wanted / 6, rtol=1e-4, atol=1e-6)
        optimizer.step()
    assert private.statement().guarantees[0].unit is Unit.USER
    private.close()


def test_the_statement_names_unit_and_k_and_nothing_that_was_left_out(tmp_path: Path) -> None:
    with of_users(tmp_path, noise_multiplier=1.0) as private:
        run_epoch(private)
        statement = private.statement()
    document = statement.to_json()
    assert document["guarantees"][0]["unit"] == "user"
    assert document["mechanisms"][0]["records_per_user"] == EACH
    assert document["guarantees"][0]["theorem"]["name"] == "clipped-users"
    text = " ".join(statement.text().split())
    assert "users (at most 3 records each a step)" in document["mechanisms"][0]["description"]
    assert "whether any one user was among the training data" in text
    options = {"sample_rate": private.settings.sample_rate, "max_grad_norm": CLIP}
    with private_loop(tmp_path / "records", parts(batch_size=6), **options) as record:
        run_epoch(record)
        assert record.epsilon == private.epsilon  # the accountant knows q and z only
        assert record.statement().guarantees[0].unit is Unit.RECORD
    held = "".join(p.read_text(errors="ignore") for p in tmp_path.glob("*.json*"))
    assert "user 7" not in held
    assert "60" not in str(document["mechanisms"])
    assert Unit.USER is type(statement).from_json(document).mechanisms[0].unit


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_a_user_holds_reaches_no_other_user(tmp_path: Path, value: float) -> None:
    """A user whose first record float32 cannot hold contributes nothing, nor do its copies."""
    ends = []
    for name, held in (("plain", 0.0), ("odd", value)):
        model, optimizer, criterion, loader = parts(batch_size=6)
        x, y = (tensor.clone() for tensor in loader.dataset.tensors)  # type: ignore[attr-defined]
        x[[n for n, own in enumerate(IDS) if own == "user 7"]] = held
        given = model, optimizer, criterion, DataLoader(TensorDataset(x, y), batch_size=6)
        with of_users(tmp_path / name, given, records_per_user=6) as private:
            for step, (inputs, labels) in enumerate(private.data_loader):
                numbers = private.data_loader.sampler.indices(step).tolist()
                odd = [u for u in numbers if IDS[int(private.data_loader.users.records[u][0])] == "user 7"]
                private.criterion(model(inputs), labels).backward()
                found = gradients(model).clone()
                assert bool(found.isfinite().all())
                if not odd:
                    ends.append((step, found))
                for parameter in model.parameters():
                    parameter.grad = None
    half = len(ends) // 2
    assert half
    for (step, plain), (again, odd_one) in zip(ends[:half], ends[half:], strict=True):
        assert step == again
        assert torch.equal(plain, odd_one)


def longest(private: opusim.PrivateTraining) -> float:
    """The norm of the largest sum of a person's contributions in a step, over C; one person holds all records."""
    model, optimizer, criterion, loader = private
    found = []
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        found.append(float(gradients(model).double().norm()) * private.settings.batch_size / CLIP)
    private.close()
    return max(found)


def one_person(folder: Path, ids: list[Any], **options: Any) -> opusim.PrivateTraining:
    """A loop that draws everybody, on equal records of one person whose gradient is far longer than the clip."""
    model, _, criterion, _ = parts()
    x, y = torch.full((len(ids), 8), 50.0), torch.ones(len(ids), dtype=torch.int64)
    loader = DataLoader(TensorDataset(x, y), batch_size=1)
    given = model, torch.optim.SGD(model.parameters(), lr=1e-9), criterion, loader
    return of_users(folder, given, sample_rate=1.0, user_ids=ids, **options)


SPELLINGS = ["7"] * 5 + [7, "7 "]


@pytest.mark.parametrize("limit", [None, 3])
def test_a_person_adds_at_most_c_in_a_step(tmp_path: Path, limit: int | None) -> None:
    assert 0.99 < longest(one_person(tmp_path, SPELLINGS, max_physical_batch_size=limit)) <= 1 + 1e-6


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_let_a_person_add_more(tmp_path: Path, fault: str) -> None:
    with FAULTS[fault]():
        assert longest(one_person(tmp_path, SPELLINGS)) > 1.9


def test_batches_of_every_kind_are_joined_user_by_user(tmp_path: Path) -> None:
    """A collate function that sorts, and one that mixes the records that it is called on, cannot mix users."""

    def sorted_by_sum(records: list[Any]) -> dict[str, Any]:
        ordered = sorted(records, key=lambda record: -float(record[0].sum()))
        x, y = torch.stack([each for each, _ in ordered]), torch.stack([each for _, each in ordered])
        return {"x": x, "named": [str(int(label)) for label in y], "y": y.numpy()}

    example = [torch.randn(2, 8)]
    given = parts(batch_size=6, collate_fn=sorted_by_sum)
    first = of_users(tmp_path / "sorted", given, example_inputs=example)
    second = of_users(tmp_path / "plain", example_inputs=example)
    for batch, (x, y) in zip(first.data_loader, second.data_loader, strict=True):
        assert len(batch["x"]) == len(batch["named"]) == len(batch["y"]) == len(x)
        for private, given in ((first, (batch["x"], torch.as_tensor(batch["y"]))), (second, (x, y))):
            private.optimizer.zero_grad()
            private.criterion(private.module(given[0]), given[1]).backward()
            private.optimizer.step()
        torch.testing.assert_close(gradients(first.module), gradients(second.module), rtol=1e-4, atol=1e-6)
    first.close()
    second.close()


@pytest.mark.parametrize("fixed", [False, True])
def test_the_default_collate_function_is_called_once_with_the_same_rows(tmp_path: Path, fixed: bool) -> None:
    """A user's rows are its records, then copies of its first one, as where each user is collated by itself."""
    calls: list[int] = []

    def counted(records: list[Any]) -> Any:
        calls.append(len(records))
        return default_collate(records)

    once = of_users(tmp_path / "once", fixed_batches=fixed)
    each = of_users(tmp_path / "each", parts(batch_size=6, collate_fn=counted), fixed_batches=fixed)
    x, y = once.data_loader.dataset.tensors
    for step, (batch, again) in enumerate(zip(once.data_loader, each.data_loader, strict=True)):
        users = once.data_loader.sampler.indices(step).tolist()
        chosen = [once.data_loader.users.chosen(user, step) for user in users]
        rows = [n for found in chosen for n in found + found[:1] * (EACH - len(found))]
        assert torch.equal(batch[0][: len(rows)], x[rows])
        assert torch.equal(batch[1][: len(rows)], y[rows])
        assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))
        for private, (inputs, labels) in ((once, batch), (each, again)):
            private.criterion(private.module(inputs), labels).backward()
    assert len(calls) > len(users)
    once.close()
    each.close()


def cut(x: Tensor) -> int:
    """How many rows are left of a user's: one is dropped if there are k."""
    return 2 if len(x) == EACH else len(x)


VARIES = "differs from one batch to the next|gives other keys from one"
MEETING: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "padded to a user's longest record": (lambda x, y: (x[:, : 3 + int(y.max())], y), "pad all records to one length"),
    "fewer texts": (
        lambda x, y: {"x": x, "named": [str(int(label)) for label in y[: cut(x)]]}, "gives fewer rows than records",
    ),
    "fewer rows": (lambda x, y: {"x": x[: cut(x)]}, "gives fewer rows than records"),
    "a truth value": (lambda x, y: {"x": x, "y": y, "large": bool((x > 1).any())}, VARIES),
    "a mean": (lambda x, y: {"x": x, "y": y, "mean": x.mean(dim=0)}, "differs from one batch to the next"),
    "a key": (lambda x, y: {"x": x, "y": y, **({"large": None} if bool((x > 1).any()) else {})}, VARIES),
}  # fmt: skip
"""Collate functions of a user's records whose result says something of them to all users of the step."""


@pytest.mark.parametrize("name", MEETING)
def test_a_collate_function_by_which_users_meet_is_refused(tmp_path: Path, name: str) -> None:
    collate, message = MEETING[name]
    given = parts(batch_size=6, collate_fn=lambda own: collate(*default_collate(own)))
    given[3].dataset.tensors[0][:] = 0.0  # type: ignore[attr-defined]
    given[3].dataset.tensors[0][41] = 2.0  # type: ignore[attr-defined]
    with (
        of_users(tmp_path, given, example_inputs=[torch.randn(2, 8)], sample_rate=1.0) as private,
        pytest.raises(ValueError, match=message),
    ):
        next(iter(private.data_loader))


def test_a_resumed_loop_repeats_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, stopped = of_users(tmp_path / "whole"), of_users(tmp_path / "stopped")
    run_epoch(whole)
    run_epoch(stopped, steps=2)
    stopped.save()
    stopped.close()
    with pytest.raises(opusim.RunFolderError, match="records_per_user = 2"):
        of_users(tmp_path / "stopped", records_per_user=2, resume=True)
    with pytest.raises(opusim.RunFolderError, match="records_per_user = None"):
        private_loop(tmp_path / "stopped", parts(batch_size=6), noise_multiplier=TINY, max_grad_norm=CLIP,
                     sample_rate=whole.settings.sample_rate, resume=True)  # fmt: skip
    renamed = [None if each is None else f"{each} of old" for each in IDS]
    again = of_users(tmp_path / "stopped", user_ids=renamed, resume=True)
    run_epoch(again)
    for a, b in zip(whole.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)
    whole.close()
    again.close()


def test_shuffled_rows_name_no_remedy_that_is_given_already(tmp_path: Path) -> None:
    with of_users(tmp_path, fixed_batches=False, sample_rate=1.0) as private:
        x, _ = next(iter(private.data_loader))
        with pytest.raises(ValueError, match="whose they are; keep their order, or sort in the module$"):
            private.module(x.flip(0))


def test_a_release_draws_from_the_system_and_counts_its_sums(tmp_path: Path) -> None:
    with of_users(tmp_path, noise_multiplier=1.0, mode="release", seed=None) as private:
        run_epoch(private)
        stated = private.statement()
        assert private.data_loader.users.seed is None
    texts = [one.text for one in stated.guarantees[0].assumptions if one.holds]
    assert any("what one user changes of the rounding of a step's sum is bounded" in text for text in texts)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([None] * 60, "no user has two records, so that only single records"),
        (list(range(60)), "no user has two records, so that only single records"),
        ([None if n % 3 == 0 else n // 6 for n in range(60)], "20 records have no ID, and each counts as a user"),
        ([each or "nan" for each in IDS], "several records have the text 'nan' as ID"),
        ([each or "None" for each in IDS], "several records have the text 'None' as ID"),
        ([each or "NaT" for each in IDS], "several records have the text 'NaT' as ID"),
    ],
)  # fmt: skip
def test_ids_that_name_no_person_are_told(tmp_path: Path, ids: list[Any], told: str) -> None:
    with pytest.warns(UserWarning, match=f"^user_ids: {told}"):
        of_users(tmp_path, user_ids=ids).close()


def test_blank_ids_are_users_of_one_record_without_a_warning(tmp_path: Path) -> None:
    of_users(tmp_path, user_ids=[each or "" for each in IDS]).close()


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        (["A7", "a7", " a7", "B"], 1),
        (["b 1", "b  1", "B 1", "b1"], 2),
        (["Straße", "STRASSE", "1", 1], 1),
        (["a7", " a7 ", "b", None], 0),
    ],
)
def test_ids_that_differ_in_case_or_blanks_are_told(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, ids: list[Any], count: int
) -> None:
    of_users(tmp_path, user_ids=ids * 15, sample_rate=0.5).close()
    texts = [str(each.message) for each in recwarn if "IDs" in str(each.message)]
    assert len(texts) == (count > 0)
    for text in texts:
        assert text.startswith(f"user_ids: some IDs ({count}) equal another one but for case or blanks")
        assert "a person with two IDs is protected as two users, not as one" in text
