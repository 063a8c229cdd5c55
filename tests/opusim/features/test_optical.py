"""Optical features, layers and operators, and the encoders in front of them."""

import pickle
import struct

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import svds
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from opusim import NoisyDevice, OpticalFeatures, OpticalLayer, open_device
from opusim.errors import CapabilityMissing, ConfigError
from opusim.features import OpticalOperator, opu_kernel
from opusim.features.encoders import (
    AutoencoderEncoder,
    BitPlaneEncoder,
    FloatBitsEncoder,
    FrameEncoder,
    IdentityEncoder,
    MultiThresholdEncoder,
    ThresholdEncoder,
)
from tests.opusim.common import refuses

REPEATS = "the device adds fresh noise to every reading"
DIGITS, LABELS = load_digits(return_X_y=True)


def test_it_is_a_scikit_learn_transformer_and_a_noisy_device_does_not_repeat() -> None:
    check_estimator(OpticalFeatures(20), on_skip=None)
    features = OpticalFeatures(20, device="gaussian", linear=True)
    assert features.__sklearn_tags__().non_deterministic
    kinds = ("methods_sample_order_invariance", "methods_subset_invariance", "fit_idempotent")
    expected = {f"check_{kind}": REPEATS for kind in kinds}
    check_estimator(features, expected_failed_checks=expected, on_skip=None)


@pytest.mark.parametrize(
    ("device", "options", "noisy"),
    [
        ("ideal", None, False),
        ("gaussian", {"noise": {"sigma": 0.0}}, False),
        ("lightonml_simulated", {"noise": {"sigma": 0.0}}, False),
        ("lighton_appliance", None, True),
        ("camera_low_light", None, True),
    ],
)
def test_the_tag_follows_the_description(device: str, options: dict | None, noisy: bool) -> None:
    features = OpticalFeatures(20, device=device, options=options)
    assert features.__sklearn_tags__().non_deterministic is noisy


def test_features_are_the_devices_readings_of_the_code() -> None:
    x = DIGITS[:30]
    with open_device("ideal", n_inputs=66, n_outputs=90) as device:
        frames = np.zeros((30, 66), dtype=np.uint8)
        frames[:, :64], frames[:, 64:] = x > np.median(x, axis=0), 1
        wanted, linear = device.intensities(frames)[:, :50], device.project(frames)[:, :50]
        given = OpticalFeatures(50, device=device, bias=2).fit(x)
        np.testing.assert_array_equal(given.transform(x), wanted)
        given.close()
        assert device.is_open
    np.testing.assert_allclose(OpticalFeatures(50, bias=2).fit_transform(x), wanted, rtol=1e-6)
    np.testing.assert_allclose(OpticalFeatures(50, bias=2, degree=4).fit_transform(x), wanted**2, rtol=1e-5)
    found = OpticalFeatures(50, bias=2, linear=True).fit_transform(x)
    np.testing.assert_allclose(found, linear, rtol=1e-5, atol=1e-5)


def test_planes_are_joined_and_blocks_are_the_features_in_parts() -> None:
    features = OpticalFeatures(30, encoder=BitPlaneEncoder(4, layout="separated"), linear=True).fit(DIGITS)
    found = features.transform(DIGITS[:5])
    matrix = features.device_.require("matrix").matrix().numpy()
    found *= features.encoder_.scale_
    np.testing.assert_allclose(found, DIGITS[:5] @ matrix.T, atol=64 * 4 * 16 / 15 / 2)
    wide = clone(features).set_params(encoder=BitPlaneEncoder(4, layout="separated", joined="concatenated"))
    assert wide.fit_transform(DIGITS[:5]).shape == (5, 120)
    assert len(wide.get_feature_names_out()) == 120
    features = OpticalFeatures(30).fit(DIGITS)
    blocks = list(features.blocks(DIGITS[:25], batch_size=10))
    assert [len(block) for block in blocks] == [10, 10, 5]
    np.testing.assert_allclose(np.concatenate(blocks), features.transform(DIGITS[:25]), rtol=1e-6)


def test_a_pickle_holds_no_device_and_opens_it_again() -> None:
    features = OpticalFeatures(40, device="gaussian").fit(DIGITS)
    stored = pickle.dumps(features)
    copied = pickle.loads(stored)
    assert "device_" not in vars(copied)
    fresh = OpticalFeatures(40, device="gaussian").fit(DIGITS)
    np.testing.assert_array_equal(copied.transform(DIGITS[:3]), fresh.transform(DIGITS[:3]))
    with open_device("ideal", n_inputs=64, n_outputs=40) as device:
        held = OpticalFeatures(40, device=device).fit(DIGITS)
        assert clone(held).device is device
        refuses(TypeError, "an open device cannot be pickled; give its name or file", pickle.dumps, held)


def test_it_works_in_pipelines_searches_and_frames() -> None:
    pandas = pytest.importorskip("pandas")
    line = make_pipeline(OpticalFeatures(300), RidgeClassifier())
    search = GridSearchCV(line, {"opticalfeatures__n_components": [20, 300]}, cv=2)
    search.fit(DIGITS[:400], LABELS[:400])
    assert search.best_params_ == {"opticalfeatures__n_components": 300}
    assert search.score(DIGITS[400:800], LABELS[400:800]) > 0.6
    framed = OpticalFeatures(5).set_output(transform="pandas").fit_transform(DIGITS[:6])
    assert isinstance(framed, pandas.DataFrame)
    assert list(framed.columns)[:2] == ["opticalfeatures0", "opticalfeatures1"]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (OpticalFeatures(0), "n_components = 0"),
        (OpticalFeatures(5, degree=3), "degree = 3: must be even"),
        (OpticalFeatures(5, bias=-1), "bias = -1"),
        (OpticalFeatures(5, encoder=IdentityEncoder()), "X holds other numbers than 0 and 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(features: OpticalFeatures, message: str) -> None:
    refuses(ValueError, message, features.fit, DIGITS)


def test_a_device_that_is_too_small_or_lacks_its_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_device("ideal", n_inputs=60, n_outputs=40) as device:
        refuses(ConfigError, "open with 60, and 64", lambda: OpticalFeatures(10, device=device).fit(DIGITS))
    with open_device("ideal", n_inputs=8, n_outputs=4) as device:
        monkeypatch.setattr(type(device), "can", NoisyDevice.can)
        refuses(CapabilityMissing, "capability 'matrix'", lambda: OpticalOperator(device).T @ np.ones(4))


# torch


def test_a_layer_takes_any_leading_shape_and_carries_no_gradient() -> None:
    x = torch.rand(2, 3, 8, requires_grad=True)
    with open_device("ideal", n_inputs=8, n_outputs=11) as device:
        layer = OpticalLayer(device, threshold=0.5)
        found = layer(x)
        assert found.shape == (2, 3, 11)
        assert not found.requires_grad
        assert layer(x[:0]).shape == (0, 3, 11)
        flat = (x.detach() > 0.5).float().view(6, 8)
        torch.testing.assert_close(found.view(6, 11), device.intensities(flat))
        linear = OpticalLayer(device, linear=True)
        torch.testing.assert_close(linear(flat - 1), device.project(flat - 1))
        assert "'ideal', 8, 11, intensities" in repr(layer)
        refuses(ValueError, "x holds 0", lambda: OpticalLayer(device)(torch.rand(2, 8)))
        refuses(ValueError, "threshold = 0.5 is for", OpticalLayer, device, linear=True, threshold=0.5)


@pytest.mark.parametrize("degree", [2, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_products_of_features_have_the_kernel_as_their_mean(degree: int) -> None:
    """Over outputs, at five standard errors, and that of features 1.3 times as large in each factor does not fit."""
    x = np.random.default_rng(2).integers(0, 2, size=(6, 40), dtype=np.uint8)
    with open_device("ideal", n_inputs=40, n_outputs=200_000) as device:
        features = device.intensities(x).astype(np.float64) ** (degree // 2)
    kernel = opu_kernel(x, degree=degree)
    for i in range(6):
        for j in range(i + 1):
            products = features[i] * features[j]
            error = 5 * products.std() / len(products) ** 0.5
            assert abs(products.mean() - kernel[i, j]) < error
            assert abs(products.mean() - 1.3**degree * kernel[i, j]) > error


def test_a_bias_is_mirrors_that_are_always_on() -> None:
    x, y = np.random.default_rng(2).normal(size=(2, 3, 5))
    wide = [np.concatenate([part, np.ones((3, 4))], axis=1) for part in (x, y)]
    np.testing.assert_allclose(opu_kernel(x, y, bias=4.0), opu_kernel(*wide))
    np.testing.assert_allclose(opu_kernel(x, y, degree=4, gain=2.0), 16 * opu_kernel(x, y, degree=4))
    assert opu_kernel(x[0], y[0]).shape == ()
    sizes = np.multiply.outer((x**2).sum(1), (y**2).sum(1))
    np.testing.assert_allclose(opu_kernel(x, y), sizes + (x @ y.T) ** 2)
    refuses(ValueError, "degree = 3: must be even", opu_kernel, x, degree=3)
    refuses(ValueError, "with the same d", opu_kernel, x, y[:, :2])


def test_an_operator_is_the_medium_up_to_its_digits() -> None:
    with open_device("ideal", n_inputs=40, n_outputs=30) as device:
        operator, matrix = OpticalOperator(device, planes=16), device.matrix().numpy()
        x = np.random.default_rng(3).normal(size=(40, 5))
        largest = np.abs(x).max(axis=0)
        bound = 2.0**-16 * np.abs(x).max(axis=0) * np.abs(matrix).sum(axis=1).max()
        assert np.all(np.abs(operator @ x - matrix @ x) < bound)
        assert np.all(np.abs(OpticalOperator(device, planes=4) @ x - matrix @ x) > 0)
        y = np.ones(30)
        assert np.allclose(operator.T @ y, matrix.T @ y, rtol=1e-5)
        assert np.array_equal(operator @ np.zeros(40), np.zeros(30))
        largest = np.linalg.svd(matrix, compute_uv=False)[1::-1]
        assert svds(operator, k=2, return_singular_vectors=False) == pytest.approx(largest, rel=1e-3)
        refuses(TypeError, "complex128: .* its parts", lambda: operator @ np.ones(40, dtype=complex))


def test_the_noise_of_an_operator_is_that_of_its_digits() -> None:
    """sigma s sqrt(sum_k 4^-k), and by planted fault not sigma s."""
    sigma, planes, n = 2.0, 6, 4000
    with open_device("gaussian", n_inputs=8, n_outputs=n, noise={"sigma": sigma}) as device:
        x = np.arange(1.0, 9.0)
        rest = OpticalOperator(device, planes=planes) @ x - device.matrix().numpy() @ x
    expected = sigma * 8 * np.sqrt(np.sum(0.25 ** np.arange(1, planes + 1)))
    five_errors = 5 * expected / np.sqrt(2 * n)
    # the digits err by at most 2^-6 of the largest entry each, which adds below a hundredth of the variance
    assert abs(np.std(rest) - expected) < five_errors + 0.005 * expected
    assert abs(np.std(rest) - sigma * 8) > five_errors


X = np.random.default_rng(3).normal(size=(40, 7)) * [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "encoder",
    [
        *(ThresholdEncoder(), MultiThresholdEncoder(), BitPlaneEncoder(), FloatBitsEncoder()),
        AutoencoderEncoder(12, epochs=1),
    ],
    ids=lambda encoder: type(encoder).__name__,
)
def test_encoders_are_scikit_learn_transformers(encoder: FrameEncoder) -> None:
    check_estimator(encoder, on_skip=None)


@pytest.mark.parametrize(
    ("encoder", "threshold"),
    [
        (ThresholdEncoder(), np.median(X, axis=0)),
        (ThresholdEncoder("mean"), X.mean(axis=0)),
        (ThresholdEncoder("quantile", quantile=0.9), np.quantile(X, 0.9, axis=0)),
        (ThresholdEncoder("mean", per_feature=False), X.mean()),
        (ThresholdEncoder(0.25), 0.25),
    ],
)
def test_a_threshold_is_a_number_or_learnt(encoder: ThresholdEncoder, threshold: np.ndarray | float) -> None:
    np.testing.assert_array_equal(encoder.fit_transform(X), threshold < X)
    other = np.zeros((1, 7))
    np.testing.assert_array_equal(encoder.transform(other), other > threshold)  # what fit learnt stays


def test_thermometer_codes_and_float_bits_are_those_of_numpy_and_the_machine() -> None:
    encoder = MultiThresholdEncoder(5).fit(X)
    levels = encoder.transform(X).reshape(40, 4, 7).sum(axis=1)
    edges = np.linspace(X.min(), X.max(), 6)[1:-1]
    np.testing.assert_array_equal(levels, np.digitize(X, edges, right=True))
    even = MultiThresholdEncoder(4, spacing="quantile", per_feature=True).fit_transform(X)
    np.testing.assert_array_equal(even.reshape(40, 3, 7).sum(axis=0), [[30] * 7, [20] * 7, [10] * 7])
    given = MultiThresholdEncoder(thresholds=[-1.0, 1.0]).fit_transform(X)
    np.testing.assert_array_equal(given.reshape(40, 2, 7).sum(axis=1), np.digitize(X, [-1, 1], right=True))
    frames = FloatBitsEncoder(layout="separated").fit_transform(X).reshape(40, 32, 7)
    word = "".join(str(bit) for bit in frames[5, :, 2])
    assert int(word, 2) == struct.unpack(">I", struct.pack(">f", X[5, 2]))[0]
    few = FloatBitsEncoder(sign=False, exponent_bits=3, mantissa_bits=2).fit_transform(X)
    kept = [word[1], word[2], word[3], word[9], word[10]]
    assert "".join(str(bit) for bit in few.reshape(40, 7, 5)[5, 2]) == "".join(kept)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_bit_planes_give_the_number_back(bits: int) -> None:
    encoder = BitPlaneEncoder(bits, layout="separated").fit(X)
    frames = encoder.transform(X)
    assert frames.shape == (40 * bits, 7)
    assert set(np.unique(frames)) == {0, 1}
    joined = encoder.low_ + encoder.scale_ * encoder.decode(frames)
    step = (X.max() - X.min()) / (2**bits - 1)
    assert np.abs(joined - X).max() <= step / 2 * (1 + 1e-5)
    beside = BitPlaneEncoder(bits).fit_transform(X)
    np.testing.assert_array_equal(beside.reshape(40, 7, bits), frames.reshape(40, bits, 7).transpose(0, 2, 1))


def test_readings_of_planes_join_to_that_of_the_number_or_are_refused() -> None:
    encoder = BitPlaneEncoder(12, layout="separated", low=0.0, high=9.0).fit(X)
    records, matrix = np.abs(X).clip(0, 9), np.random.default_rng(1).normal(size=(7, 5))
    readings = encoder.transform(records) @ matrix
    np.testing.assert_allclose(encoder.scale_ * encoder.decode(readings), records @ matrix, atol=0.05)
    separate = clone(encoder).set_params(joined="concatenated", decay=1.0).fit(X)
    np.testing.assert_allclose(separate.decode(readings).reshape(40, 12, 5), readings.reshape(40, 12, 5))
    eight = BitPlaneEncoder(layout="separated").fit(X)
    refuses(ValueError, "41 rows: must be a multiple of the 8 bits", eight.decode, np.zeros((41, 3)))


def test_an_autoencoder_learns_a_code_that_reconstructs() -> None:
    rng = np.random.default_rng(5)
    records = rng.normal(size=(600, 4)) @ rng.normal(size=(4, 30))
    encoder = AutoencoderEncoder(64, epochs=60).fit(records)
    untrained = AutoencoderEncoder(64, epochs=1, learning_rate=1e-12).fit(records)

    def error(fitted: AutoencoderEncoder) -> float:
        rest = fitted.reconstruct(fitted.transform(records)) - records
        return float(np.mean(np.square(rest)) / np.var(records))

    assert error(encoder) < 0.7 * error(untrained)
    again = AutoencoderEncoder(64, epochs=60).fit(records)
    np.testing.assert_array_equal(again.weights_, encoder.weights_)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (ThresholdEncoder("middle"), "threshold = 'middle': must be one of 'mean', 'median', 'quantile'"),
        (ThresholdEncoder("quantile", quantile=1.5), "quantile = 1.5"),
        *((ThresholdEncoder(np.inf), "threshold = inf"), (MultiThresholdEncoder(1), "n_levels = 1: must be")),
        (MultiThresholdEncoder(spacing="even"), "spacing = 'even'"),
        (MultiThresholdEncoder(thresholds=[1, 0]), "must be increasing numbers; sort them"),
        *((BitPlaneEncoder(0), "n_bits = 0"), (BitPlaneEncoder(layout="mixed"), "layout = 'mixed'")),
        (BitPlaneEncoder(low=1.0, high=0.0), "high = 0: must be at least low = 1"),
        (FloatBitsEncoder(mantissa_bits=24), "mantissa_bits = 24"),
        (FloatBitsEncoder(sign=False, exponent_bits=0, mantissa_bits=0), "leave no bit"),
        *((IdentityEncoder(), "X holds other numbers than 0 and 1"), (AutoencoderEncoder(0), "n_bits = 0")),
    ],
)
def test_wrong_encoders_are_refused_in_one_line(encoder: FrameEncoder, message: str) -> None:
    refuses(ValueError, message, encoder.fit, X)
