"""User-supplied arrays, the split, the standardisation, the digits; masked, sparse and nested arrays are refused."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from torch.utils.data import TensorDataset

import opusim
from opusim import lightonml
from opusim.devices.base import NoisyDevice
from opusim.features.encoders import ThresholdEncoder
from opusim.features.optical import OpticalFeatures, opu_kernel
from opusim.training.data import Dataset, Split, from_arrays, load_dataset
from opusim.training.data.arrays import RecordForm, seeded_permutation, split_by_index
from opusim.training.data.dataset import Standardisation

X = np.arange(60, dtype=np.float64).reshape(20, 3)
Y = np.arange(20) % 4


def _load(x: Any = X, y: Any = Y, **changes: Any) -> Dataset:
    return from_arrays(x, y, **({"validation_fraction": 0.25, "split_seed": 1} | changes))


LIMIT = float(norm.isf(norm.sf(5.0) / 20))
"""5 standard errors for one record, moved outwards for the largest of 20."""


def _held_out_deviation(draw: Callable[[int], torch.Tensor]) -> float:
    """Largest deviation of 20 records' frequencies of being among the 5 held out, in standard errors."""
    repeats, share = 4000, 0.25
    counts = np.zeros(20)
    for seed in range(repeats):
        counts[draw(seed).numpy()] += 1
    return float(np.abs(counts - repeats * share).max() / np.sqrt(repeats * share * (1 - share)))


class TestArrays:
    def test_divides_all_records_and_keeps_labels_with_features(self) -> None:
        data = _load()
        assert (len(data.train), len(data.validation), data.test) == (15, 5, None)
        assert (data.name, data.n_classes, data.n_features) == ("arrays", 4, 3)
        x = torch.cat([data.train.x, data.validation.x])
        y = torch.cat([data.train.y, data.validation.y])
        assert sorted(x[:, 0].tolist()) == X[:, 0].tolist()
        assert torch.equal((x[:, 0] / 3).long() % 4, y)

    @pytest.mark.parametrize(
        "dtype", ["float16", "float64", "int8", "uint8", "uint16", "int64", "bool", ">f4", ">i4"]
    )
    def test_numpy_and_torch_of_any_real_type_agree(self, dtype: str) -> None:
        x = (X % 2).astype(dtype)
        data = _load(x, Y.astype("uint8"))
        native = torch.from_numpy(x.astype(x.dtype.newbyteorder("=")))
        twin = _load(native, torch.from_numpy(Y).to(torch.int32))
        assert torch.equal(data.train.x, twin.train.x)
        assert torch.equal(data.train.y, twin.train.y)
        assert data.train.x.dtype == torch.float32

    def test_awkward_memory_is_read_right(self) -> None:
        frozen = X.copy()
        frozen.flags.writeable = False
        for x in (frozen, X[::-1][::-1], np.asfortranarray(X), X[:, ::-1][:, ::-1]):
            assert torch.equal(_load(x).train.x, _load().train.x)

    def test_later_changes_of_the_arrays_do_not_reach_the_data(self) -> None:
        x, y = torch.from_numpy(X.copy()).float(), torch.from_numpy(Y.copy())
        data = _load(x, y, test=(x, y))
        x.zero_()
        y.zero_()
        assert data.test is not None
        assert torch.equal(data.test.x, torch.from_numpy(X).float())
        assert torch.equal(data.test.y, torch.from_numpy(Y))

    def test_gradients_are_left_behind(self) -> None:
        x = torch.from_numpy(X).requires_grad_()
        assert not _load(x).train.x.requires_grad

    def test_no_validation_leaves_an_empty_split(self) -> None:
        data = _load(validation_fraction=0)
        assert (len(data.train), data.validation.x.shape, data.validation.y.shape) == (20, (0, 3), (0,))

    def test_one_standardisation_for_all_parts(self) -> None:
        standardisation = Standardisation(mean=2.5, std=3.0, source="chosen")
        data, plain = (_load(test=(X, Y), standardise=s) for s in (standardisation, None))
        for part in ("train", "validation", "test"):
            torch.testing.assert_close(getattr(data, part).x, (getattr(plain, part).x - 2.5) / 3)
        assert data.standardisation is standardisation
        assert plain.standardisation == Standardisation.identity()

    @pytest.mark.parametrize(("changes", "error", "message"), [
        ({"x": X.tolist()}, TypeError, "x must be a numpy array or a torch tensor, got list.*numpy.asarray"),
        ({"x": X.astype(str)}, TypeError, "x must hold numbers, got dtype <U"),
        ({"x": X.astype(np.longdouble)}, TypeError, "torch lacks.*astype"),
        ({"x": X + 1j}, TypeError, "x must be real"),
        ({"x": X[0]}, ValueError, "x must have shape (n, d) with d at least 1, got (3,)"),
        ({"x": np.array(1.0), "y": np.array(0)}, ValueError, "x must have shape (n, d)"),
        ({"x": X[:, :0]}, ValueError, "with d at least 1, got (20, 0)"),
        ({"x": X[:0], "y": Y[:0]}, ValueError, "x is empty"),
        ({"x": np.where(X == 7, np.nan, X)}, ValueError, "1 of 20 records.*first at position 2: remove"),
        ({"x": np.where(X > 50, np.inf, X)}, ValueError, "3 of 20 records.*first at position 17"),
        ({"x": X * 1e38}, ValueError, "must be finite as float32.*too large"),
        ({"x": X[:19]}, ValueError, "x has 19 records and y 20 labels"),
        ({"y": Y.astype(float)}, TypeError, "y must hold whole numbers, got torch.float64.*astype('int64')"),
        ({"y": Y.reshape(-1, 1)}, ValueError, "y must have shape (n,).*y.reshape(-1).*argmax(1)"),
        ({"y": Y - 1}, ValueError, "y holds 4 different labels from -1 to 2: .*numpy.unique"),
        ({"y": Y + 1, "n_classes": 4}, ValueError, "labels from 0 to 3, got 1 to 4: number the classes from 0"),
        ({"y": Y * 0}, ValueError, "n_classes = 1: must be at least 2; it counts all classes"),
        ({"n_classes": 1}, ValueError, "n_classes = 1: must be at least 2"),
        ({"n_classes": 4.0}, TypeError, "n_classes = 4.0: must be an integer, not float"),
        ({"test": X}, TypeError, "test must be a pair (features, labels), got ndarray"),
        ({"test": (X[:, :2], Y)}, ValueError, "test[0] has 2 features per record; the training records have 3"),
        ({"test": (X, Y[:3])}, ValueError, "test[0] has 20 records and test[1] 3 labels"),
        ({"test": (X, Y + 1)}, ValueError, "test[1] must hold labels from 0 to 3, got 1 to 4"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction must be at least 0 and below 1, got 1.0"),
        ({"validation_fraction": float("nan")}, ValueError, "validation_fraction must be at least 0"),
        ({"validation_fraction": 0.01}, ValueError, "of 20 records holds out 0 and leaves 20"),
        ({"validation_fraction": 0.99}, ValueError, "of 20 records holds out 20 and leaves 0"),
        ({"split_seed": -1}, ValueError, "split_seed = -1: must be an integer in [0, "),
        (
            {"standardise": Standardisation(mean=(0.0, 0.0), std=1.0, source="")}, ValueError,
            "the constants () are for 2 features, x has shape (20, 3)",
        ),
    ])  # fmt: skip
    def test_bad_input_has_a_remedy(self, changes: dict[str, Any], error: type, message: str) -> None:
        pattern = ".*".join(re.escape(part) for part in message.split(".*"))
        with pytest.raises(error, match=pattern):
            _load(**changes)


class TestHoldingOut:
    @given(n=st.integers(0, 200), seed=st.integers(0, 2**64))
    def test_a_permutation_has_each_position_once(self, n: int, seed: int) -> None:
        assert seeded_permutation(n, seed).sort().values.tolist() == list(range(n))

    def test_the_parts_are_disjoint_and_complete(self) -> None:
        kept, held_out = split_by_index(1000, 0.1, seed=3)
        assert (len(kept), len(held_out)) == (900, 100)
        assert sorted(kept.tolist() + held_out.tolist()) == list(range(1000))

    def test_the_split_does_not_look_at_labels_or_features(self) -> None:
        rows = np.arange(20.0).reshape(20, 1)
        one = _load(rows, Y)
        other = _load(-rows, Y[::-1].copy(), n_classes=4)
        assert torch.equal(one.train.x, -other.train.x)

    def test_the_seed_decides(self) -> None:
        assert torch.equal(_load().train.x, _load().train.x)
        assert not torch.equal(_load().train.x, _load(split_seed=2).train.x)

    def test_the_order_is_the_same_for_ever(self) -> None:
        # The first words of PCG64 with seed 0, a stream that NumPy does not change.
        assert seeded_permutation(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]

    def test_every_record_is_held_out_equally_often(self) -> None:
        assert _held_out_deviation(lambda seed: split_by_index(20, 0.25, seed)[1]) < LIMIT

    def test_a_last_record_that_is_never_held_out_is_caught(self) -> None:
        assert _held_out_deviation(lambda seed: seeded_permutation(19, seed)[:5]) > 2 * LIMIT


class TestStandardisation:
    def test_of_the_data_is_exact_and_not_public(self) -> None:
        x = np.array([[1.0, 5.0], [3.0, 5.0]])
        standardisation = Standardisation.from_data(x)
        assert standardisation.mean == (2.0, 5.0)
        assert standardisation.std == (1.0, 1.0)
        assert not standardisation.public
        assert "2 records" in standardisation.source
        assert standardisation.apply(torch.from_numpy(x)).tolist() == [[-1, 0], [1, 0]]

    def test_of_the_data_gives_mean_0_and_standard_deviation_1(self) -> None:
        x = torch.from_numpy(np.random.default_rng(0).normal(7, 2.7, size=(500, 4)))
        result = Standardisation.from_data(x).apply(x)
        torch.testing.assert_close(result.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
        torch.testing.assert_close(result.std(dim=0, correction=0), torch.ones(4), atol=1e-5, rtol=0)

    def test_a_constant_that_rounds_becomes_zero_and_stated_constants_are_public(self) -> None:
        assert Standardisation(mean=0.1, std=2.7, source="a paper").public
        assert Standardisation.identity().public
        x = np.full((7, 1), 0.1)
        assert Standardisation.from_data(x).apply(torch.from_numpy(x)).abs().max() < 1e-7

    @pytest.mark.parametrize(("changes", "message"), [
        ({"std": 0.0}, "std must be above 0 everywhere"),
        ({"std": (1.0, -1.0)}, "std must be above 0 everywhere"),
        ({"mean": float("nan")}, "mean must be finite"),
        ({"mean": (0.0,), "std": (1.0, 1.0)}, "one entry per feature"),
    ])  # fmt: skip
    def test_refuses_constants_that_are_no_scale(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Standardisation(**({"mean": 0.0, "std": 1.0, "source": "test"} | changes))

    @pytest.mark.parametrize("x", [np.zeros(3), np.zeros((0, 3)), np.full((2, 2), np.nan)])
    def test_refuses_data_without_statistics(self, x: np.ndarray) -> None:
        with pytest.raises(ValueError, match="must"):
            Standardisation.from_data(x)


def test_a_split_refuses_other_types_and_lengths() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="x must be float32"):
        Split(x.double(), y)
    with pytest.raises(ValueError, match=r"y must be int64 of shape \(4,\)"):
        Split(x, y[:3])


def test_digits_have_a_range_a_fixed_test_split_and_public_constants() -> None:
    raw = load_dataset("digits", split_seed=0, standardise=False)
    data, other = (load_dataset("digits", split_seed=seed) for seed in (0, 1))
    assert (len(raw.train), len(raw.validation), len(raw.test)) == (1294, 144, 359)
    x, scaled = (torch.cat([each.train.x, each.validation.x, each.test.x]) for each in (raw, data))
    assert (float(x.min()), float(x.max())) == (0, 1)
    assert torch.equal(data.test.x, other.test.x)
    assert max(abs(float(scaled.mean())), abs(float(scaled.std()) - 1)) < 5e-4
    assert data.standardisation.public


@pytest.mark.parametrize(("name", "hint"), [
    ("minst", "; did you mean 'mnist'"),
    ("Fashion_MNIST", "; did you mean 'fashion-mnist'"),
    ("iris.csv", ", or package.module:function; did you mean 'csv:iris.csv'"),
    ("imagenet", ""),
])  # fmt: skip
def test_an_unknown_name_lists_the_known_ones(name: str, hint: str) -> None:
    expected = f"data.name = '{name}': must be one of digits, mnist, fashion-mnist, cifar-10.*{hint}"
    with pytest.raises(ValueError, match=expected):
        load_dataset(name, split_seed=0)


class TestCodes:
    """Labels are class numbers; other whole numbers would make a class of every number below them."""

    @pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
    @pytest.mark.parametrize(("codes", "message"), [
        ((0, 2024), "2 different labels from 0 to 2024: .*numpy.unique.*data.classes.*n_classes = 2025"),
        ((0, 10**7), "2 different labels from 0 to 10000000"),
        ((0, 1, 3), "3 different labels from 0 to 3: .*n_classes = 4"),
        ((5, 9), "2 different labels from 5 to 9"),
        ((-1, 1), "2 different labels from -1 to 1: .*data.classes$"),
        ((0, 2**62), "2 different labels"),
        ((1, 2), "must hold labels from 0, got 1 to 2: subtract 1"),
    ])  # fmt: skip
    def test_codes_are_refused_with_a_remedy(self, kind: Callable, codes: tuple, message: str) -> None:
        x, y = np.eye(12, 3), np.array(codes)[np.arange(12) % len(codes)]
        with pytest.raises(ValueError, match=message):
            from_arrays(x, kind(y), validation_fraction=0.0, split_seed=0)
        numbered = np.unique(y, return_inverse=True)[1]
        data = from_arrays(x, kind(numbered), validation_fraction=0.0, split_seed=0)
        assert data.n_classes == len(codes)
        data = from_arrays(x, y.astype(str), validation_fraction=0.0, split_seed=0)
        assert set(data.classes) == set(map(str, codes))

    def test_a_stated_number_of_classes_leaves_classes_without_a_record(self) -> None:
        x, y = np.eye(12, 3), np.arange(12) % 2 * 3
        assert from_arrays(x, y, n_classes=6, validation_fraction=0.0, split_seed=0).n_classes == 6


x = np.random.default_rng(1).integers(0, 2, size=(20, 5)).astype(np.float32)
y = np.arange(20) % 2
FORM = RecordForm(target="class", n_classes=2, n_features=5)
NAMED = RecordForm(target="class", n_classes=2, n_features=5, classes=("a", "b"))


def masked(values: np.ndarray, n: int) -> Any:
    mask = np.zeros(values.shape, bool)
    mask.reshape(-1)[:n] = True
    return np.ma.array(values, mask=mask)


def data(x: Any, y: Any, **options: Any) -> object:
    return from_arrays(x, y, validation_fraction=0.1, split_seed=0, **options)


def device() -> NoisyDevice:
    return opusim.open_device("gaussian", n_inputs=5, n_outputs=4).open()


def named(y: np.ndarray) -> np.ndarray:
    return np.where(y == 0, "a", "b")


PLACES: dict[str, Callable[[Any], object]] = {
    "x": lambda x: data(x, y),
    "test": lambda x: data(x.data, y, test=(x, y)),
    "predict": lambda x: FORM.features(x, "x"),
    "evaluate": lambda x: FORM.records(x, y),
    "standardisation": lambda x: Standardisation.from_data(x),
    "device": lambda x: device().project(x),
    "crossbar": lambda x: opusim.open_device("pcm", n_inputs=5, n_outputs=2).open().multiply(x),
    "intensities": lambda x: device().intensities(x),
    "features": lambda x: OpticalFeatures(4, device="ideal", encoder=ThresholdEncoder()).fit(x),
    "encoder": lambda x: ThresholdEncoder().fit(x),
    "kernel": lambda x: opu_kernel(x),
    "OPU": lambda x: lightonml.OPU(4, simulated=True).fit_transform1d(x.astype(np.uint8)),
}


@pytest.mark.parametrize("place", PLACES)
def test_masked_values_are_no_numbers(place: str) -> None:
    with pytest.raises(ValueError, match="has 3 masked values: every entry must be a number; fill them, as"):
        PLACES[place](masked(x, 3))


@pytest.mark.parametrize("call", [
    lambda y: data(x, y),
    lambda y: data(x, masked(named(y.data), 3)),
    lambda y: data(x, y.data, test=(x, y)),
    lambda y: data(x, y, target="real"),
    lambda y: FORM.records(x, y),
    lambda y: NAMED.records(x, masked(named(y.data), 3)),
])  # fmt: skip
def test_masked_labels_are_refused(call: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"has 3 masked values"):
        call(masked(y, 3))


def test_a_mask_that_hides_nothing_is_taken() -> None:
    assert torch.equal(FORM.records(masked(x, 0), masked(y, 0)).x, torch.from_numpy(x))


@pytest.mark.parametrize(("tensor", "found"), [
    (torch.from_numpy(x).to_sparse(), "sparse_coo"),
    (torch.nested.as_nested_tensor(list(torch.from_numpy(x)), layout=torch.jagged), "nested"),
])  # fmt: skip
def test_tensors_without_a_number_at_each_place_are_refused(tensor: torch.Tensor, found: str) -> None:
    for call in (lambda: data(tensor, y), lambda: device().project(tensor)):
        with pytest.raises(TypeError, match=rf"x is a {found} tensor: must hold a number at each place"):
            call()
    with pytest.raises(TypeError, match=f"a {found} tensor"):
        opusim.train({"epochs": 1}, data=TensorDataset(tensor, torch.from_numpy(y)))
