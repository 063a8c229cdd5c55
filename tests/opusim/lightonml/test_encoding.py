"""Encoders under lightonml's names: compared with lightonml's own, and what is refused here."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch.utils.data import DataLoader, TensorDataset

from opusim.devices.lighton import import_lightonml, quiet
from opusim.lightonml import OPU
from opusim.lightonml.encoding import base, models
from tests.opusim.common import refuses

RNG = np.random.default_rng(8)
REALS = RNG.normal(size=(9, 7)).astype(np.float32)
BYTES = RNG.integers(0, 256, size=(9, 7), dtype=np.uint8)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """lightonml's encoders, with the names of numpy that they need and that it no longer has."""
    import_lightonml()
    with quiet():
        import lightonml.encoding.base

    monkeypatch.setattr(np, "float", float, raising=False)
    return lightonml.encoding.base


SAME: list[tuple[str, dict[str, Any], np.ndarray]] = [
    *(("BinaryThresholdEncoder", {}, REALS), ("BinaryThresholdEncoder", {"threshold_enc": 25}, BYTES)),
    ("BinaryThresholdEncoder", {"threshold_enc": 25, "greater_is_one": False}, BYTES),
    *(("BinaryThresholdEncoder", {"greater_is_one": False}, REALS), ("MultiThresholdEncoder", {}, REALS)),
    ("MultiThresholdEncoder", {"n_bins": 5, "columnwise": True}, REALS.astype(np.float64)),
    ("MultiThresholdEncoder", {"thresholds": [-0.5, 0.1, 1.0]}, REALS),
    ("MultiThresholdEncoder", {"thresholds": np.arange(14).reshape(7, 2) / 9, "columnwise": True}, REALS),
    ("ConcatenatedBitPlanEncoder", {}, BYTES),
    *(("ConcatenatedBitPlanEncoder", {"n_bits": 3, "starting_bit": 2}, BYTES), ("Float32Encoder", {}, REALS)),
    ("Float32Encoder", {"sign_bit": False, "exp_bits": 2, "mantissa_bits": 0}, REALS),
    ("ConcatenatedFloat32Encoder", {"exp_bits": 3, "mantissa_bits": 4}, REALS),
    ("SequentialBaseTwoEncoder", {}, REALS),
    ("SequentialBaseTwoEncoder", {"n_gray_levels": 8}, BYTES.astype(np.int64)),
    ("SeparatedBitPlanEncoder", {}, REALS),
    ("SeparatedBitPlanEncoder", {"precision": 8}, BYTES.astype(np.int64)),
    ("SeparatedBitPlanEncoder", {"precision": 3}, BYTES.astype(np.int64) - 99),
    ("SeparatedBitPlanEncoder", {"precision": 4}, np.abs(REALS)),
    *(("SeparatedBitPlanEncoder", {"precision": 4}, -np.abs(REALS)), ("NoEncoding", {}, BYTES)),
]


@pytest.mark.parametrize(("name", "arguments", "x"), SAME, ids=range(len(SAME)))
def test_the_code_is_lightonmls(theirs: Any, name: str, arguments: dict[str, Any], x: np.ndarray) -> None:
    with quiet():
        oracle = getattr(theirs, name)(
            **arguments
        )  # with thresholds of its own, its fit fails on today's numpy
        wanted = (oracle if "thresholds" in arguments else oracle.fit(x)).transform(x)
    encoder = getattr(base, name)(**arguments)
    found = encoder.fit(x).transform(x)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.uint8
    tensor = clone(encoder).fit(torch.from_numpy(x)).transform(torch.from_numpy(x))
    np.testing.assert_array_equal(tensor.numpy(), wanted)


def test_a_given_constant_needs_no_fit_and_a_second_fit_learns_again() -> None:
    for encoder, x in (
        (base.BinaryThresholdEncoder(threshold_enc=25), BYTES),
        (base.MultiThresholdEncoder([0.1, 0.2]), REALS),
        (base.MultiThresholdEncoder(np.zeros((7, 1)), columnwise=True), REALS),
        (base.Float32Encoder(), REALS),
    ):
        np.testing.assert_array_equal(encoder.transform(x), clone(encoder).fit(x).transform(x))
    images = BYTES.reshape(3, 3, 7)
    np.testing.assert_array_equal(base.BinaryThresholdEncoder(25).transform(images), images > 25)
    encoder = base.BinaryThresholdEncoder().fit(REALS)
    np.testing.assert_array_equal(encoder.fit(REALS + 3).threshold_, np.median(REALS + 3, axis=0))
    assert encoder.threshold_enc == "auto"


@pytest.mark.parametrize("sides", [1, 2])
def test_decoders_are_lightonmls(theirs: Any, sides: int) -> None:
    readings = RNG.normal(size=(24, 5)).astype(np.float32)
    told = {"precision": 4, "magnitude_p": 1.5, "magnitude_n": 0.7 * (sides - 1)}
    with quiet():
        joined = theirs.SeparatedBitPlanDecoder(**told).transform(readings)
        wide = theirs.ConcatenatingBitPlanDecoder(n_bits=8, decoding_decay=0.3).transform(readings)
    found = base.SeparatedBitPlanDecoder(**told).transform(readings)
    np.testing.assert_allclose(found, joined, rtol=1e-4, atol=1e-5)
    decoder = base.ConcatenatingBitPlanDecoder(n_bits=8, decoding_decay=0.3)
    found = decoder.transform(torch.from_numpy(readings))
    np.testing.assert_allclose(found.numpy(), wide, rtol=1e-5)


def test_bit_planes_return_the_numbers_they_came_from() -> None:
    """The example of lightonml's bit plane tutorial; its digits are now in rows from the most significant down."""
    sample = np.array([[204, 180, 73], [133, 11, 39]], dtype=np.uint8)
    encoder = base.SeparatedBitPlanEncoder(precision=8)
    rows = encoder.transform(sample)
    assert rows.shape == (16, 3)
    np.testing.assert_array_equal(rows[:8, 0], [1, 1, 0, 0, 1, 1, 0, 0])
    np.testing.assert_allclose(128 * base.MixingBitPlanDecoder(n_bits=8).transform(rows), sample)
    decoder = base.SeparatedBitPlanDecoder(**encoder.get_params())
    np.testing.assert_allclose(decoder.transform(rows), sample, rtol=1e-6)
    mixed = np.array([[-3.0, 0.5], [1.25, 2.0]])
    coder = base.SeparatedBitPlanEncoder(precision=16)
    again = base.SeparatedBitPlanDecoder(**{**coder.get_params(), **_coded(coder, mixed)})
    np.testing.assert_allclose(again.transform(coder.transform(mixed)), mixed, atol=3 / 2**16)


def _coded(coder: base.SeparatedBitPlanEncoder, x: np.ndarray) -> dict[str, Any]:
    coder.transform(x)
    return coder.get_params()


def test_a_decoder_class_is_made_with_what_the_encoder_knows() -> None:
    opu = OPU(n_components=40, simulated=True).fit1d(REALS)
    encoder = base.Float32Encoder(sign_bit=False, exp_bits=2, mantissa_bits=1)
    joined = opu.transform(REALS, encoder_cls=encoder, decoder_cls=base.MixingBitPlanDecoder)
    planes = opu.transform(encoder.transform(REALS))
    np.testing.assert_array_equal(joined, base.MixingBitPlanDecoder(n_bits=3).transform(planes))
    assert joined.context.frames == 27


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (base.BinaryThresholdEncoder(300), BYTES, ValueError, "threshold_enc = 300: must lie in"),
    (base.BinaryThresholdEncoder("median"), BYTES, ValueError, "must be one of 'auto'"),
    (base.BinaryThresholdEncoder(), REALS * np.nan, ValueError, "contains NaN"),
    (base.MultiThresholdEncoder([2.0, 1.0]), REALS, ValueError, "increasing numbers"),
    (base.MultiThresholdEncoder([1.0, 2.0], columnwise=True), REALS, ValueError, r"must be \(d, t\)"),
    (base.MultiThresholdEncoder("quantile"), REALS, ValueError, "'linspace', 'quantiles'"),
    (base.ConcatenatedBitPlanEncoder(), REALS, TypeError, "must be uint8 or uint16"),
    (base.ConcatenatedBitPlanEncoder(), BYTES.astype(np.int8), TypeError, "SeparatedBitPlanEnc"),
    (base.ConcatenatedBitPlanEncoder(6, 3), BYTES, ValueError, "uint8 has 8; lower n_bits"),
    (base.SequentialBaseTwoEncoder(12), REALS, ValueError, "must be a power of 2"),
    (base.SeparatedBitPlanEncoder(0), REALS, ValueError, r"precision = 0: must be .* \[1, 16\]"),
    (base.SeparatedBitPlanEncoder(), REALS[0], ValueError, r"must be \(n, d\), not empty"),
    (base.SeparatedBitPlanEncoder(), REALS * np.nan, ValueError, "must be finite"),
    (base.MixingBitPlanDecoder(4), REALS, ValueError, "must be a multiple of the 4 bits"),
    (base.SeparatedBitPlanDecoder(3, 1, 1), REALS, ValueError, "must be even"),
]


@pytest.mark.parametrize(("encoder", "x", "kind", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_lightonml_encodes_in_silence_is_refused(encoder: Any, x: Any, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):  # scikit-learn takes several lines
        encoder.fit(x).transform(x)


LEARNT = [base.BinaryThresholdEncoder(), base.MultiThresholdEncoder(), base.SequentialBaseTwoEncoder()]


@pytest.mark.parametrize("encoder", LEARNT)
def test_learnt_codes_need_a_fit(encoder: Any) -> None:
    refuses(NotFittedError, "learns its constants from data; call fit", encoder.transform, REALS)
    refuses(ValueError, "7 features as input", lambda: encoder.fit(REALS).transform(REALS[:, :5]))


def test_the_largest_byte_does_not_wrap_and_512_levels_are_distinct() -> None:
    """lightonml adds 1 to it in uint8, and returns ones for every number."""
    x = np.array([[0, 1, 128, 255]], dtype=np.uint8)
    np.testing.assert_array_equal(base.SeparatedBitPlanEncoder(8).transform(x), np.unpackbits(x.T, axis=1).T)
    ramp = np.linspace(0, 1, 512)[:, None]
    ones = base.SequentialBaseTwoEncoder(512).fit(ramp).transform(ramp).sum(axis=1)
    np.testing.assert_array_equal(ones, np.arange(512))


def test_an_autoencoder_learns_a_code() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 4) @ torch.randn(4, 12)
    x /= x.std()
    loader = DataLoader(TensorDataset(x, x), batch_size=64)
    for model in (models.EncoderDecoder(12, 48), models.LinearAE(12, 48, beta=1.0)):
        assert model.training
        before = F.mse_loss(model(x), x).item()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        trained = models.train(model, loader, optimizer, epochs=12, beta_interval=6, device="cpu")
        assert F.mse_loss(trained(x), x).item() < 0.8 * before
        code = trained.eval()(x)
        assert (code.shape, code.dtype) == ((128, 48), torch.uint8)
        assert set(code.unique().tolist()) == {0, 1}
    assert model.beta == 10
    assert OPU(n_components=30, simulated=True).fit_transform1d(code).shape == (128, 30)


def test_a_convolutional_autoencoder_flattens_its_code() -> None:
    images = torch.randn(8, 1, 6, 6)
    model = models.ConvAE(1, 3, 3, 1.0, padding=1, flatten=True)
    assert model(images).shape == images.shape
    models.train(model, [images], torch.optim.SGD(model.parameters(), lr=0.1), epochs=1, device="cpu")
    assert model.eval()(images).shape == (8, 3 * 36)
    model.flatten = False
    assert model(images).shape == (8, 3, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(ValueError, "dataloader gives no batch", models.train, model, [], optimizer, device="cpu")
