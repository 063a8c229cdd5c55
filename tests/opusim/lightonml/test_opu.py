"""OPU in lightonml's words: what it reads, what it shows, what it returns, on every packaged device."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from opusim import open_device
from opusim.devices.lighton import import_lightonml, quiet
from opusim.errors import ConfigError, DeviceUnavailable
from opusim.lightonml import OPU, set_verbose_level
from opusim.lightonml.context import Context, ContextArray
from opusim.lightonml.inputs import Features, layout_of
from opusim.lightonml.types import FeaturesFormat, InputRoiStrategy, OutputRescaling
from tests.opusim.common import refuses

N, K = 30, 24
SILENT = {"noise": {"sigma": 0.0}}


def bits(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, size=shape, dtype=np.uint8)


def opu(**arguments: Any) -> OPU:
    return OPU(**{"n_components": K, "simulated": "device" not in arguments, **arguments})


def lightonml_with_the_same_matrix(seed: int) -> Any:
    """lightonml's OPU on its simulated device, with the matrix of the device lightonml_simulated."""
    lightonml = import_lightonml()
    from lightonml.internal.simulated_device import SimulatedOpuDevice

    simulated = SimulatedOpuDevice()
    simulated.build_random_matrix(N, K, [seed, 0])
    return lightonml.OPU(K, opu_device=simulated, max_n_features=N, rescale="none")


@pytest.mark.parametrize("seed", [20210603, pytest.param(20210604, marks=pytest.mark.xfail(strict=True))])
def test_lightonmls_own_simulation_gives_the_same_numbers(seed: int) -> None:
    x = bits(7, N)
    with quiet():
        theirs = lightonml_with_the_same_matrix(seed)
        theirs.fit1d(x)
        linear, squared = np.asarray(theirs.linear_transform(x)), np.asarray(theirs.transform(x))
    ours = opu(device="lightonml_simulated", options=SILENT).fit1d(x)
    error = np.abs(ours.linear_transform(x) - linear).max() / np.abs(linear).max()
    assert error < 1e-5
    np.testing.assert_allclose(ours.transform(x), squared, rtol=1e-4)


def test_a_transform_is_the_devices_reading() -> None:
    x = bits(9, N)
    with open_device("ideal", n_inputs=N, n_outputs=K) as device:
        squared, linear = device.intensities(x), device.project(x)
    ours = opu().fit1d(x)
    np.testing.assert_array_equal(ours.transform(x), squared)
    for rescale, divisor in (("variance", N), (OutputRescaling.norm, K), ("None", 1)):
        ours.rescale = rescale
        np.testing.assert_allclose(ours.linear_transform(x), linear / divisor**0.5, rtol=1e-6)
    ours.rescale = "none"
    minus = x.astype(np.int8) - 1
    np.testing.assert_allclose(ours.linear_transform(minus), -ours.linear_transform(1 - x), rtol=1e-6)


@pytest.mark.parametrize("device", ["ideal", "camera", "lightonml_simulated"])
def test_the_batch_keeps_its_shape(device: str) -> None:
    ours = opu(device=device, mirror_shape=(12, 15))
    for shape, batch in (((N,), ()), ((1, N), (1,)), ((4, N), (4,)), ((2, 3, N), (2, 3))):
        for transform in (ours.fit1d(bits(*shape)).transform, ours.linear_transform):
            assert transform(bits(*shape)).shape == (*batch, K)
            found = transform(torch.from_numpy(bits(*shape)))
            assert isinstance(found, torch.Tensor)
            assert found.shape == (*batch, K)
    for shape, batch in (((5, 6), ()), ((1, 5, 6), (1,)), ((4, 5, 6), (4,)), ((2, 3, 5, 6), (2, 3))):
        assert ours.fit_transform2d(bits(*shape)).shape == (*batch, K)
    assert ours.fit_transform1d(bits(4, N).tolist()).shape == (4, K)


def test_every_real_type_is_taken_and_more_outputs_keep_the_first_ones() -> None:
    ours, x = opu().fit1d(n_features=N), bits(4, N)
    for dtype in (bool, np.uint8, np.int8, np.uint16, np.int64, np.uint64, np.float16, np.float64):
        np.testing.assert_array_equal(ours.transform(x.astype(dtype)), ours.transform(x))
        np.testing.assert_array_equal(ours.linear_transform(x.astype(dtype)), ours.linear_transform(x))
    x = bits(4, N)
    ours = opu().fit1d(x)
    before = ours.transform(x)
    ours.n_components = K + 9
    np.testing.assert_allclose(ours.fit_transform1d(x)[:, :K], before, rtol=1e-6)


def test_packed_bits_are_the_same_vectors() -> None:
    x = bits(5, 26)
    packed = np.packbits(x, axis=1)
    ours = opu(max_n_features=64)
    told = ours.fit1d(packed, n_features=26, packed=True)
    np.testing.assert_array_equal(told.transform(packed), opu().fit_transform1d(x))
    expected = opu().fit1d(x).linear_transform(x[0])
    np.testing.assert_array_equal(told.linear_transform(packed[0]), expected, strict=True)
    ours.fit1d(packed, packed=True)
    assert ours.fitted.features.shape == (32,)
    matrices = x.reshape(5, 13, 2)
    found = ours.fit_transform2d(packed, packed=True, n_2d_features=(13, 2))
    np.testing.assert_array_equal(found, opu().fit_transform2d(matrices))


def test_matrices_are_macro_pixels_on_a_mirror_array() -> None:
    x = bits(3, 4, 5)
    frames = np.zeros((3, 14, 17), dtype=np.uint8)
    frames[:, 1:13, 1:16] = np.kron(x, np.ones((1, 3, 3), dtype=np.uint8))
    with open_device("camera", n_inputs=14 * 17, n_outputs=K) as device:
        shown = device.intensities(frames.reshape(3, -1))
    ours = opu(device="camera", mirror_shape=(14, 17))
    found = ours.fit_transform2d(x)
    np.testing.assert_array_equal(found, shown)
    context = found.context
    assert (context.fmt_type, context.fmt_factor) == (FeaturesFormat.macro_2d, 3)
    assert context.input_roi == ((1, 1), (12, 15))
    assert context.n_ones == frames.sum() / 3
    small = ours.fit_transform2d(x, input_roi_strategy=InputRoiStrategy.small).context
    assert (small.fmt_type, small.fmt_factor, small.n_ones) == (FeaturesFormat.lined, 1, x.sum() / 3)
    assert ours.fit_transform2d(x).context.fmt_factor == 3
    assert OPU(K, device="camera").device.input_shape == (912, 1140)
    assert opu().device.input_shape == (1, 1_000_000)


@pytest.mark.parametrize(
    "shape", [(28, 28), (96, 96), (13, 10), (900, 900), (912, 1140), (101, 95), (300, 20)]
)
def test_an_image_stands_where_lightonml_puts_it(shape: tuple[int, int]) -> None:
    import_lightonml()
    from lightonml.internal.input_roi import InputRoi
    from lightonml.internal.types import InputRoiStrategy as Theirs

    wanted = InputRoi((912, 1140), [0, 912 * 1140]).compute_roi(Theirs.full, shape)
    layout = layout_of(Features(shape), (912, 1140), InputRoiStrategy.full)
    assert layout.roi == tuple(tuple(int(number) for number in part) for part in wanted)


def test_the_context_tells_the_circumstances() -> None:
    x = bits(6, N)
    found = opu(device="camera").fit_transform1d(x)
    context = found.context
    assert (context.device, context.unit) == ("camera", "DN")
    assert (context.exposure_us, context.frametime_us) == (400.0, 500.0)
    assert (context.frames, context.n_ones) == (6, x.sum() / 6)
    assert context.start <= context.end
    assert found[2:4].context is (found + 1).context is context
    assert pickle.loads(pickle.dumps(found)).context == context
    assert Context.from_dict(context.as_dict()) == Context.from_dict(context.as_flat_dict()) == context
    assert "input_roi_shape_1" in context.as_flat_dict()
    assert str(context) == str(context.as_dict())
    assert type(np.array(found)) is np.ndarray
    assert ContextArray([1.0], None).context is None
    linear = opu().fit1d(x).linear_transform(x).context
    assert (linear.unit, linear.exposure_us, linear.frames) == ("projection units", None, 12)


def test_exposure_and_frame_time_are_the_devices() -> None:
    x = bits(6, N)
    with open_device("camera", n_inputs=N, n_outputs=K, camera={"light": {"exposure_us": 200.0}}) as device:
        shown = device.intensities(x)
    ours = opu(device="camera")
    by_fit = ours.fit_transform1d(x, exposure_us=200)
    np.testing.assert_array_equal(by_fit, shown)
    assert (by_fit.context.exposure_us, by_fit.context.frametime_us) == (200.0, 500.0)
    assert ours.device.exposure_us == 400.0
    ours.device.exposure_us = 200
    np.testing.assert_array_equal(ours.fit_transform1d(x), shown)
    ours.device.frametime_us = 2000
    assert ours.transform(x).context.frametime_us == 2000.0
    ours = opu(device="camera", open_at_init=False)
    ours.device.exposure_us = 900
    assert (ours.device.exposure_us, ours.device.frametime_us) == (900.0, 950.0)
    refuses(ConfigError, "4.2 % of the outputs are full in the anchor", ours.device.reader, N, K)
    appliance = OPU(open_at_init=False)
    appliance.device.exposure_us = 300
    assert (appliance.device.exposure_us, appliance.device.frametime_us) == (300.0, 500.0)


def test_it_opens_and_closes() -> None:
    x = bits(4, N)
    ours = opu(open_at_init=False)
    assert not ours.active
    ours.fit1d(x)
    refuses(DeviceUnavailable, r"closed; call open\(\)", ours.transform, x)
    with ours:
        before = ours.transform(x)
    assert not ours.active
    ours.open()
    with ours:
        pass
    assert ours.active
    np.testing.assert_array_equal(ours.transform(x), before)
    with opu() as at_init:
        at_init.fit_transform1d(x)
    assert not at_init.active


def test_an_open_device_serves_and_stays_open() -> None:
    x = bits(4, N)
    with open_device("ideal", n_inputs=N + 7, n_outputs=K + 5) as device:
        ours = opu(device=device)
        np.testing.assert_allclose(ours.fit_transform1d(x), opu().fit_transform1d(x), rtol=1e-6)
        np.testing.assert_allclose(ours.linear_transform(-x.astype(np.int8)), -ours.linear_transform(x), 1e-6)
        assert (ours.max_n_components, ours.max_n_features) == (K + 5, N + 7)
        ours.close()
        assert device.is_open
        ours.open()
        refuses(ValueError, "open already, and its times cannot be", ours.fit_transform1d, x, exposure_us=100)
        refuses(ValueError, "open already, and its times", setattr, ours.device, "frametime_us", 100)
        refuses(ValueError, r"n_features = 40: .* max_n_features = 37", ours.fit1d, n_features=40)
        refuses(TypeError, "cannot be pickled; give its name", pickle.dumps, ours)
        refuses(ValueError, "is open already; open it with them", opu, device=device, options=SILENT)


def test_online_takes_vectors_one_by_one() -> None:
    x = bits(4, N)
    batch = opu().fit_transform1d(x)
    ours = opu().fit1d(n_features=N, online=True)
    np.testing.assert_allclose(np.stack([ours.transform(row) for row in x]), batch, rtol=1e-6)
    assert ours.transform(x[:1]).shape == (1, K)
    assert opu().fit2d(n_features=(5, 6), online=True).transform(bits(5, 6)).shape == (K,)
    whole = opu(device="camera", mirror_shape=(12, 15))
    assert whole.fit_transform1d(bits(180)).shape == whole.fit_transform2d(bits(12, 15)).shape == (K,)
    refuses(ValueError, "batch of 4 vectors, and the last fit said online=True; give one", ours.transform, x)


def test_without_arguments_it_is_the_appliance() -> None:
    refuses(DeviceUnavailable, "'lighton_appliance'", OPU)
    appliance = OPU(open_at_init=False)
    assert (appliance.n_components, appliance.max_n_components) == (200_000, 2_228_224)
    assert appliance.device.input_shape == (912, 1140)
    told = OPU(open_at_init=False, config_file="opu.json").device.description
    assert told.lighton.config_file == "opu.json"


def test_noise_is_replayed_in_experiments_only() -> None:
    x = bits(4, N)
    first, again, other = (opu(device="gaussian", seed=seed).fit_transform1d(x) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other)
    first, again = (opu(device="gaussian", mode="release").fit_transform1d(x) for _ in range(2))
    assert np.sum(first == again) <= 2  # of 96; float32 rounds two numbers near 10 to the same one at 3e-6


FIT_REFUSALS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("fit1d", {}, ValueError, "X and n_features are both missing"),
    ("fit2d", {}, ValueError, r"n_features \(rows, columns\) are both missing"),
    ("fit1d", {"X": bits(0, N)}, ValueError, "X is empty"),
    ("fit1d", {"X": ["a"]}, TypeError, "dtype <U1: must be real numbers"),
    ("fit1d", {"X": np.ones((2, 3), dtype=complex)}, TypeError, "must be real numbers"),
    ("fit2d", {"X": bits(N)}, ValueError, "fit2d needs at least 2 axes; use fit1d"),
    ("fit1d", {"n_features": 0}, ValueError, "n_features = 0: must be at least 1"),
    ("fit2d", {"n_features": (2.5, 3)}, TypeError, "n_features = 2.5: must be an integer"),
    ("fit1d", {"n_features": 2.5}, TypeError, "n_features = 2.5: must be an integer"),
    ("fit2d", {"n_features": "ab"}, TypeError, "n_features = a: must be an integer"),
    ("fit1d", {"n_features": (5, 6)}, ValueError, r"must be 1 number\(s\) for fit1d"),
    ("fit2d", {"n_features": 30}, ValueError, r"must be 2 number\(s\) for fit2d"),
    ("fit1d", {"X": bits(2, N), "n_features": 31}, ValueError, "contradict each other"),
    ("fit2d", {"X": bits(2, 4), "packed": True}, ValueError, "packed bits do not tell"),
    ("fit1d", {"X": bits(2, N), "gain": 3}, TypeError, "gain is no override"),
    ("fit1d", {"X": bits(2, N), "exposure_us": 3}, ValueError, "has no camera"),
    ("fit1d", {"n_features": 101}, ValueError, "takes at most max_n_features = 100; raise it"),
    ("fit1d", {"n_features": 9, "input_roi_strategy": "full"}, TypeError, "must be InputRoiStrategy"),
]


@pytest.mark.parametrize(("method", "arguments", "kind", "words"), FIT_REFUSALS)
def test_a_wrong_fit_is_refused(method: str, arguments: dict, kind: type[Exception], words: str) -> None:
    ours = opu(max_n_features=100)
    refuses(kind, words, lambda: getattr(ours, method)(**arguments).transform(bits(2, N)))


X_REFUSALS: list[tuple[Any, type[Exception], str]] = [
    (np.full((2, N), 0.5), ValueError, r"X holds 0.5: a device shows 0 or 1;"),
    (np.full((2, N), -1, dtype=np.int8), ValueError, "X holds -1: .*; linear_transform takes -1"),
    (np.full((2, N), 255, dtype=np.uint8), ValueError, "X holds 255: .*wrap -1"),
    (np.full((2, N), np.nan), ValueError, "X holds NaN, which no encoder takes; fill gaps first"),
    (bits(2, N + 1), ValueError, r"last axes must be the features \(30,\)"),
    (bits(N, 2), ValueError, "must be the features"),
    (bits(0, N), ValueError, r"X is empty, shape \(0, 30\); give at least one vector"),
    (bits(1, 1, 1, N), ValueError, "at most two leading axes; use reshape"),
    ([["0"] * N], TypeError, "must be real numbers"),
    (None, TypeError, "must be real numbers"),
]


@pytest.mark.parametrize(("x", "kind", "words"), X_REFUSALS)
def test_a_wrong_vector_is_refused(x: Any, kind: type[Exception], words: str) -> None:
    ours = opu().fit1d(n_features=N)
    refuses(kind, words, ours.transform, x)


def test_other_bits_shapes_and_times_are_refused() -> None:
    ours = opu().fit1d(n_features=N, packed=True)
    refuses(TypeError, "uint8; use numpy.packbits", ours.transform, np.zeros((2, 4), dtype=np.int64))
    refuses(ValueError, "must be the 4 bytes for 30 features", ours.transform, bits(2, N))
    ours = opu().fit1d(n_features=N)
    refuses(ValueError, "X holds 2: .*SeparatedBitPlanEncoder", ours.linear_transform, 2 * bits(3, N))
    refuses(ValueError, "turn or crop", opu(device="camera", mirror_shape=(12, 15)).fit2d, None, (13, 5))
    refuses(ValueError, "has no camera, and it would do nothing", setattr, opu().device, "exposure_us", 300)
    refuses(ValueError, "exposure_us = 0", setattr, opu(device="camera").device, "exposure_us", 0)
    ours = opu().fit1d(bits(4, N))
    ours.close()
    refuses(DeviceUnavailable, "closed", lambda: pickle.loads(pickle.dumps(ours)).transform(bits(4, N)))
    refuses(ValueError, "verbose_level = 7", set_verbose_level, 7)


def test_a_transform_before_its_fit_is_refused() -> None:
    ours = opu()
    x = bits(3, N)
    refuses(AssertionError, "the OPU was not fitted; call fit1d or fit2d", ours.transform, x)
    ours.fit1d(x)
    ours.n_components = K - 1
    refuses(AssertionError, "n_components was 24 at the last fit and is 23 now; call", ours.transform, x)
    ours.fit1d(x)
    ours.input_roi_strategy = InputRoiStrategy.small
    refuses(AssertionError, "input_roi_strategy was .* call fit1d or fit2d again", ours.linear_transform, x)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"n_components": 0}, ValueError, r"n_components = 0: must be .* \[1, 2000000\]; device 'ideal' has"),
        ({"n_components": 3.5}, TypeError, "n_components = 3.5: must be an integer"),
        ({"n_components": 10**9}, ValueError, "device 'ideal' has 2000000 outputs"),
        ({"max_n_features": 10**9}, ValueError, "device 'ideal' has 1000000 inputs"),
        ({"rescale": "unit"}, ValueError, "rescale = 'unit': must be one of 'variance', 'norm', 'none'"),
        ({"config_override": {}}, ValueError, r"lay sections over the device by options=\{...\}"),
        ({"config_file": "opu.json"}, ConfigError, "lighton"),
        ({"device": "camera", "simulated": True}, ValueError, "each name a device; give one of them"),
        ({"device": "camra"}, ConfigError, "no such device"),
        ({"device": 7}, TypeError, r"device = 7: .*give a name such as 'camera', or open_device"),
        ({"mirror_shape": (2000, 2000)}, ValueError, "has 4000000 mirrors, and device 'ideal' 1000000"),
        ({"device": "camera", "mirror_shape": (0, 5)}, ValueError, "mirror_rows = 0"),
        ({"device": "gaussian", "options": {"noise": {"sigm": 1}}}, ConfigError, "sigm"),
    ],
)
def test_a_wrong_opu_is_refused(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    refuses(kind, words, opu, **arguments)


def test_wide_frames_are_made_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = bits(11, N)
    whole = opu().fit_transform1d(x)
    monkeypatch.setattr("opusim.lightonml.opu._MIRRORS_AT_ONCE", 3 * N)
    np.testing.assert_allclose(opu().fit_transform1d(x), whole, rtol=1e-6)
    refuses(ValueError, "X holds 2", lambda: opu().fit_transform1d(np.concatenate([x, x + 1])))
