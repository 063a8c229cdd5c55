"""Encoders of real numbers into binary frames."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

from opusim.features.encoders import (
    AutoencoderEncoder,
    BitPlaneEncoder,
    FloatBitsEncoder,
    FrameEncoder,
    IdentityEncoder,
    MultiThresholdEncoder,
    ThresholdEncoder,
)

X = np.random.default_rng(3).normal(size=(40, 7)) * [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "encoder",
    [
        ThresholdEncoder(),
        MultiThresholdEncoder(),
        BitPlaneEncoder(),
        FloatBitsEncoder(),
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


def test_a_thermometer_code_counts_the_thresholds_below() -> None:
    encoder = MultiThresholdEncoder(5).fit(X)
    levels = encoder.transform(X).reshape(40, 4, 7).sum(axis=1)
    edges = np.linspace(X.min(), X.max(), 6)[1:-1]
    np.testing.assert_array_equal(levels, np.digitize(X, edges, right=True))
    even = MultiThresholdEncoder(4, spacing="quantile", per_feature=True).fit_transform(X)
    np.testing.assert_array_equal(even.reshape(40, 3, 7).sum(axis=0), [[30] * 7, [20] * 7, [10] * 7])
    given = MultiThresholdEncoder(thresholds=[-1.0, 1.0]).fit_transform(X)
    np.testing.assert_array_equal(given.reshape(40, 2, 7).sum(axis=1), np.digitize(X, [-1, 1], right=True))


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


def test_linear_readings_of_planes_join_to_that_of_the_number() -> None:
    encoder = BitPlaneEncoder(12, layout="separated", low=0.0, high=9.0).fit(X)
    records, matrix = np.abs(X).clip(0, 9), np.random.default_rng(1).normal(size=(7, 5))
    readings = encoder.transform(records) @ matrix
    np.testing.assert_allclose(encoder.scale_ * encoder.decode(readings), records @ matrix, atol=0.05)
    separate = clone(encoder).set_params(joined="concatenated", decay=1.0).fit(X)
    np.testing.assert_allclose(separate.decode(readings).reshape(40, 12, 5), readings.reshape(40, 12, 5))


def test_float_bits_are_those_of_the_machine() -> None:
    frames = FloatBitsEncoder(layout="separated").fit_transform(X).reshape(40, 32, 7)
    word = "".join(str(bit) for bit in frames[5, :, 2])
    assert int(word, 2) == struct.unpack(">I", struct.pack(">f", X[5, 2]))[0]
    few = FloatBitsEncoder(sign=False, exponent_bits=3, mantissa_bits=2).fit_transform(X)
    kept = [word[1], word[2], word[3], word[9], word[10]]
    assert "".join(str(bit) for bit in few.reshape(40, 7, 5)[5, 2]) == "".join(kept)


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
        (ThresholdEncoder(np.inf), "threshold = inf"),
        (MultiThresholdEncoder(1), "n_levels = 1: must be"),
        (MultiThresholdEncoder(spacing="even"), "spacing = 'even'"),
        (MultiThresholdEncoder(thresholds=[1, 0]), "must be increasing numbers; sort them"),
        (BitPlaneEncoder(0), "n_bits = 0"),
        (BitPlaneEncoder(layout="mixed"), "layout = 'mixed'"),
        (BitPlaneEncoder(low=1.0, high=0.0), "high = 0: must be at least low = 1"),
        (FloatBitsEncoder(mantissa_bits=24), "mantissa_bits = 24"),
        (FloatBitsEncoder(sign=False, exponent_bits=0, mantissa_bits=0), "leave no bit"),
        (IdentityEncoder(), "X holds other numbers than 0 and 1"),
        (AutoencoderEncoder(0), "n_bits = 0"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(encoder: FrameEncoder, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        encoder.fit(X)
    assert "\n" not in str(caught.value)


def test_readings_of_another_number_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="readings has 41 rows: must be a multiple of the 8 bits"):
        BitPlaneEncoder(layout="separated").fit(X).decode(np.zeros((41, 3)))
