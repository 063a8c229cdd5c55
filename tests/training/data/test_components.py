"""Principal components: the map, its file, and runs that still take raw features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import training
from accounting.errors import NoGuarantee
from training.data import from_arrays
from training.data.dataset import PrincipalComponents, reduced
from training.runs.checkpoints import list_checkpoints, read_checkpoint
from training.runs.run import evaluate_run
from training.runs.storage import read_array, write_array

N, D, SMALL = 300, 7, 4


def records(seed: int = 1, n: int = N) -> torch.Tensor:
    """Correlated features of very different size around a mean that is not 0."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(D, D, generator=torch.Generator().manual_seed(9)) * torch.logspace(0, 1.5, D)
    return torch.randn(n, D, generator=generator) @ mixing + 3.7


@pytest.mark.parametrize("whitening", [0.0, 0.5, 1.0])
def test_components_are_those_of_the_singular_value_decomposition(whitening: float) -> None:
    x = records()
    centred = x.double().numpy() - x.double().numpy().mean(axis=0)
    _, singular, right = np.linalg.svd(centred, full_matrices=False)
    stds = singular[:SMALL] / N**0.5
    scaled = stds ** (1 - whitening) / np.sqrt(np.mean(stds ** (2 - 2 * whitening)))
    found = PrincipalComponents.fit(x, SMALL, whitening=whitening).apply(x).double().numpy()
    expected = centred @ right[:SMALL].T / stds * scaled
    signs = np.sign(np.sum(found * expected, axis=0))  # a singular vector is known up to its sign
    np.testing.assert_allclose(found * signs, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.std(axis=0), scaled, rtol=1e-5)
    assert np.mean(found.var(axis=0)) == pytest.approx(1.0, rel=1e-5)


def test_axes_are_orthogonal_and_their_sign_is_settled() -> None:
    components = PrincipalComponents.fit(records(), D, whitening=0.3)
    gram = components.axes.T @ components.axes
    np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-9 * gram.max())
    largest = np.abs(components.axes).argmax(axis=0)
    assert (components.axes[largest, np.arange(D)] > 0).all()
    assert components.n_features == D


def test_components_come_back_from_their_file_bit_for_bit(tmp_path: Path) -> None:
    components = PrincipalComponents.fit(records(), SMALL, whitening=0.5)
    assert components.to_array().shape == (SMALL + 1, D)
    write_array(tmp_path / "components.safetensors", components.to_array())
    back = PrincipalComponents.from_array(read_array(tmp_path / "components.safetensors"))
    assert np.array_equal(back.mean, components.mean)
    assert np.array_equal(back.axes, components.axes)
    for n in (1, 3, 100, N):
        assert torch.equal(back.apply(records(5, n)), components.apply(records(5, n)))


def test_only_training_records_shape_the_map() -> None:
    """Validation and test records are carried along by the map of the training records."""
    x, y = records().numpy(), np.arange(N) % 3
    dataset = from_arrays(x, y, n_classes=3, validation_fraction=0.2, split_seed=0)
    components = PrincipalComponents.fit(dataset.train.x, SMALL, whitening=0.5)
    small = reduced(dataset, components)
    assert torch.equal(small.validation.x, components.apply(dataset.validation.x))
    assert torch.equal(small.train.y, dataset.train.y)
    assert small.n_features == SMALL
    assert small.components is components


def test_too_many_components_are_refused() -> None:
    with pytest.raises(ValueError, match="data.components = 8 exceeds the 7 features"):
        PrincipalComponents.fit(records(), 8, whitening=0.5)
    flat = records()
    flat[:, 3:] = flat[:, :1]
    with pytest.raises(ValueError, match="vary only in 3 directions"):
        PrincipalComponents.fit(flat, 4, whitening=0.5)


CONFIG = {
    "epochs": 3,
    "threads": 1,
    "model": {"hidden": [8]},
    "data": {"components": SMALL, "n_classes": 3},
    "sampler": {"batch_size": 30},
    "trainer": {"kind": "dfa"},
}


def data() -> tuple[np.ndarray, np.ndarray]:
    y = np.arange(N) % 3
    return records().numpy() + 30.0 * y[:, None], y


def test_a_run_with_components_takes_raw_features(tmp_path: Path) -> None:
    run = training.train(CONFIG, data=data(), folder=tmp_path)
    x, y = data()
    assert run.n_features == D
    assert run.facts["network"]["n_inputs"] == SMALL
    stored = PrincipalComponents.from_array(read_array(run.folder.components_file))
    expected = run.model(stored.apply(torch.from_numpy(x))).argmax(dim=1).numpy()
    assert np.array_equal(run.predict(x), expected)
    assert run.evaluate(x, y)["accuracy"] == pytest.approx((expected == y).mean())
    back = training.load_run(tmp_path)
    assert np.array_equal(back.predict(x), expected)
    with pytest.raises(ValueError, match="4 features per record; the training records have 7"):
        run.predict(x[:, :SMALL])


def test_a_known_data_set_is_evaluated_through_the_runs_own_components(tmp_path: Path) -> None:
    config = {**CONFIG, "data": {"name": "digits", "components": 10}, "sampler": {"batch_size": 128}}
    run = training.train(config, folder=tmp_path)
    assert run.summary is not None
    assert evaluate_run(tmp_path)["accuracy"] == run.summary["test_accuracy"]


def test_a_resumed_run_takes_the_stored_components(tmp_path: Path, stop_at: type) -> None:
    """The records' fingerprint is that of the components, so a map that came back otherwise would be refused."""
    training.train(CONFIG, data=data(), folder=tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        training.train(CONFIG, data=data(), folder=tmp_path / "broken", watcher=stop_at(13))
    training.train(data=data(), folder=tmp_path / "broken", resume=True)
    expected, found = (
        read_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[-1]).tensors
        for name in ("unbroken", "broken")
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_private_records_have_no_components(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "sampler": {"scheme": "poisson", "batch_size": 30},
        "protection": {"kind": "record", "epsilon": 3.0},
    }
    with pytest.raises(NoGuarantee, match="data.components = 4: principal components.*private records"):
        training.train(config, data=data(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    labels = {**config, "protection": {"kind": "label-amplified", "epsilon": 3.0}}
    assert training.train(labels, data=data(), folder=tmp_path / "run").guarantees[0].status == "proven"
