"""Principal components: the map, its file, and runs that still take raw features."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim import training
from opusim.accounting.guarantee import NoGuarantee
from opusim.description.section import merged
from opusim.errors import ConfigError
from opusim.training.data import from_arrays
from opusim.training.data.dataset import PrincipalComponents, reduced
from opusim.training.data.public_maps import random_shapes, synthetic_components
from opusim.training.runs.run import evaluate_run
from opusim.training.runs.storage import read_array, write_array
from tests.support.run_folders import require_resumed_alike

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


def test_components_of_invented_images_do_not_hide_private_ones() -> None:
    x, y = np.random.default_rng(2).random((80, 16), dtype=np.float32), np.arange(80) % 2
    dataset = from_arrays(x, y, n_classes=2, validation_fraction=0.1, split_seed=0)
    private = reduced(dataset, PrincipalComponents.fit(dataset.train.x, 9, whitening=0.5))
    for own, is_public in ((dataset, True), (private, False)):
        side = round(own.n_features**0.5)
        images = replace(own, record_shape=(1, side, side))
        invented = synthetic_components(images, 4, whitening=0.5, cached=False)
        found = reduced(images, invented).components
        assert invented.public
        assert found.public is is_public


def test_too_many_components_are_refused() -> None:
    with pytest.raises(ValueError, match="data.components = 8 exceeds the 7 features"):
        PrincipalComponents.fit(records(), 8, whitening=0.5)
    flat = records()
    flat[:, 3:] = flat[:, :1]
    with pytest.raises(ValueError, match="vary only in 3 directions"):
        PrincipalComponents.fit(flat, 4, whitening=0.5)


CONFIG = {
    "epochs": 3, "threads": 1, "model": {"hidden": [8]}, "data": {"components": SMALL, "n_classes": 3},
    "sampler": {"batch_size": 30}, "trainer": {"kind": "dfa"},
}  # fmt: skip
PRIVATE = {
    "sampler": {"scheme": "poisson", "batch_size": 30},
    "protection": {"kind": "record", "epsilon": 3.0},
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
    assert evaluate_run(tmp_path)["accuracy"] == run.summary["test_accuracy"]


def test_a_resumed_run_takes_the_stored_components(tmp_path: Path, stop_at: type) -> None:
    """The records' fingerprint is that of the components, so a map that came back otherwise would be refused."""
    require_resumed_alike(tmp_path, CONFIG, data(), stop_at(13))


def test_private_records_have_no_components(tmp_path: Path) -> None:
    with pytest.raises(NoGuarantee, match="data.components = 4: principal components.*private records"):
        training.train({**CONFIG, **PRIVATE}, data=data(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    labels = {**CONFIG, **PRIVATE, "protection": {"kind": "label-amplified", "epsilon": 3.0}}
    assert training.train(labels, data=data(), folder=tmp_path / "run").guarantees[0].status == "proven"


def test_components_of_fewer_records_than_features_are_the_same() -> None:
    """The smaller of the two matrices is decomposed."""
    x = records()[: D - 2]
    doubled = torch.cat([x, x])  # the same mean and covariance
    few = PrincipalComponents.fit(x, SMALL, whitening=0.5)
    many = PrincipalComponents.fit(doubled, SMALL, whitening=0.5)
    np.testing.assert_allclose(few.mean, many.mean, rtol=1e-9)
    np.testing.assert_allclose(few.axes, many.axes, rtol=1e-6, atol=1e-9)


SYNTHETIC = {"components": SMALL, "components_from": "synthetic", "n_classes": 3}
OF_IMAGES = {**CONFIG, **PRIVATE, "data": {**SYNTHETIC, "mean": 0.5, "std": 0.3}}


def images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.random((N, 1, 8, 8), dtype=np.float32), np.arange(N) % 3


def test_synthetic_components_hold_nothing_of_the_records(tmp_path: Path) -> None:
    """A run with whole records protected takes them, and other records of that shape give the same ones."""
    runs = [training.train(OF_IMAGES, data=images(seed), folder=tmp_path / str(seed)) for seed in (1, 2)]
    assert [run.guarantees[0].status for run in runs] == ["proven", "proven"]
    first, second = (read_array(run.folder.components_file) for run in runs)
    assert np.array_equal(first, second)
    again = training.load_run(tmp_path / "1")
    assert runs[0].evaluate(*images(1))["accuracy"] == again.evaluate(*images(1))["accuracy"]
    unprotected = {**CONFIG, "data": {**OF_IMAGES["data"], "components_from": "records"}}
    fitted = training.train(unprotected, data=images(1), folder=tmp_path / "fitted")
    assert not np.array_equal(read_array(fitted.folder.components_file), first)


def test_a_protected_run_resumes_with_synthetic_components(tmp_path: Path, stop_at: type) -> None:
    with pytest.raises(KeyboardInterrupt):
        training.train(OF_IMAGES, data=images(1), folder=tmp_path, watcher=stop_at(5))
    assert training.train(data=images(1), folder=tmp_path, resume=True).guarantees[0].status == "proven"


@pytest.mark.parametrize(("keys", "message"), [
    (SYNTHETIC, r"data.components_from: 'synthetic' is for images.*\(7,\)"),
    ({"components": SMALL, "components_mirrored": True}, "data.components_mirrored.*does nothing here"),
])  # fmt: skip
def test_what_is_of_images_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training.train(merged(CONFIG, {"data": keys}), data=data(), folder=tmp_path / "run")


def test_mirrored_components_are_the_same_for_mirror_images(tmp_path: Path) -> None:
    x, y = images(1)
    turned = np.ascontiguousarray(x[..., ::-1])
    found = {}
    for mirrored in (False, True):
        config = merged(OF_IMAGES, {"data": {"components_mirrored": mirrored}})
        run = training.train(config, data=(x, y), folder=tmp_path / str(mirrored))
        assert run.guarantees[0].status == "proven"
        rows = read_array(run.folder.components_file)
        components = PrincipalComponents.from_array(rows, public=True)
        parts = [components.apply(torch.from_numpy(each.reshape(N, -1))) for each in (x, turned)]
        found[mirrored] = float((parts[0] - parts[1]).abs().max())
    assert found[True] < 1e-5
    assert found[False] > 0.1


def test_random_shapes_are_images_in_the_unit_interval() -> None:
    found = random_shapes((3, 16, 20), 400)
    assert found.shape == (400, 3, 16, 20)
    assert float(found.min()) == 0.0
    assert 0.9 < float(found.max()) <= 1.0
    assert torch.equal(found, random_shapes((3, 16, 20), 400))
    corners = found[:, :, 0, 0].mean(dim=1).view(-1, 2).mean(dim=0)  # shapes in the middle, others
    assert float(corners[0]) < 0.05 < float(corners[1])
