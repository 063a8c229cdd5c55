"""Masked, sparse and nested arrays are refused wherever records or vectors come in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import opusim
from opusim import lightonml
from opusim.devices.base import NoisyDevice
from opusim.features.encoders import ThresholdEncoder
from opusim.features.optical import OpticalFeatures, opu_kernel
from opusim.training.data.arrays import RecordForm, from_arrays
from opusim.training.data.dataset import Standardisation

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


@pytest.mark.parametrize(
    "call",
    [
        lambda y: data(x, y),
        lambda y: data(x, masked(named(y.data), 3)),
        lambda y: data(x, y.data, test=(x, y)),
        lambda y: data(x, y, target="real"),
        lambda y: FORM.records(x, y),
        lambda y: NAMED.records(x, masked(named(y.data), 3)),
    ],
)
def test_masked_labels_are_refused(call: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"has 3 masked values"):
        call(masked(y, 3))


def test_a_mask_that_hides_nothing_is_taken() -> None:
    assert torch.equal(FORM.records(masked(x, 0), masked(y, 0)).x, torch.from_numpy(x))


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.from_numpy(x).to_sparse(), "sparse_coo"),
        (torch.nested.as_nested_tensor(list(torch.from_numpy(x)), layout=torch.jagged), "nested"),
    ],
)
def test_tensors_without_a_number_at_each_place_are_refused(tensor: torch.Tensor, found: str) -> None:
    for call in (lambda: data(tensor, y), lambda: device().project(tensor)):
        with pytest.raises(TypeError, match=rf"x is a {found} tensor: must hold a number at each place"):
            call()
    with pytest.raises(TypeError, match=f"a {found} tensor"):
        opusim.train({"epochs": 1}, data=TensorDataset(tensor, torch.from_numpy(y)))
