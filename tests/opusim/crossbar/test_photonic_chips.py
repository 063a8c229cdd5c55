"""Meshes of interferometers and banks of rings against published laws; larger matrices are put on several chips."""

import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, convert, noise_aware, train
from opusim.crossbar.mesh import decomposed, rounded, set_phases
from opusim.crossbar.programmable import SeveralChips
from opusim.crossbar.rings import detuned, dropped
from opusim.description.schema import AccessSettings, load_description
from opusim.devices import kinds
from opusim.devices.registry import open_described, open_device
from opusim.errors import CapabilityMissing, ConfigError
from opusim.training.runs.run import evaluate_run
from tests.opusim.common import EXACT, refuses

SURE = 5.0
BOLTZMANN, CHARGE = 1.380649e-23, 1.602176634e-19  # SI of 2019, written out again

PERFECT = {"phase_bits": None, "splitter_rad": 0.0, "heater_crosstalk": 0.0, "loss_db": 0.0}
PERFECT_CHIP = {**PERFECT, "ports": 16, "converter": EXACT["converter"]}
ONE_CHIP = {"heater_crosstalk": 0.0, "tuning_std": 0.0, "phase_bits": None, "converter": EXACT["converter"]}
PACKAGE = Path(__file__).parents[2] / "support" / "third_party_crossbar"
sys.path.insert(0, str(PACKAGE))
from lab_crossbar import LabCrossbar  # noqa: E402

sys.path.remove(str(PACKAGE))


def mesh_of(n_inputs: int, n_outputs: int, **changes: Any) -> NoisyDevice:
    """Open a chip of 16 ports without errors, but for the changes."""
    ports = {"n_inputs": 16, "n_outputs": 16}
    described = load_description("mzi_mesh", {**ports, "mesh": {**PERFECT_CHIP, **changes}})
    return open_described(described, n_inputs=n_inputs, n_outputs=n_outputs)


def unitary(n: int, rng: np.random.Generator, *, real: bool = False) -> np.ndarray:
    """Return a matrix that is uniform over the unitary, or the orthogonal, group."""
    drawn = rng.normal(size=(n, n)) + (0 if real else 1j * rng.normal(size=(n, n)))
    q, r = np.linalg.qr(drawn)
    return q * (np.diag(r) / np.abs(np.diag(r)))


def splitter(error: float) -> np.ndarray:
    angle = math.pi / 4 + error
    return np.array([[math.cos(angle), 1j * math.sin(angle)], [1j * math.sin(angle), math.cos(angle)]])


@pytest.mark.parametrize(("layout", "depth"), [("rectangular", 9), ("triangular", 15)])
def test_a_mesh_realises_any_unitary_matrix(layout: str, depth: int) -> None:
    """To 1e-12, in N layers (Clements) or 2 N - 3 (Reck), with N (N - 1) / 2 interferometers."""
    rng = np.random.default_rng(1)
    matrices = [unitary(9, rng), unitary(9, rng, real=True), np.eye(9), np.eye(9)[::-1], -np.eye(9)]
    for wanted in matrices:
        mesh = decomposed(wanted, layout)
        assert np.abs(mesh.field() - wanted).max() < 1e-12
        assert (mesh.depth, len(mesh.modes)) == (depth, 36)
        for layer in range(depth):
            modes = np.sort(mesh.modes[mesh.layers == layer])
            assert np.all(np.diff(modes) >= 2)  # no two of a layer share a mode
    large = unitary(64, rng)
    assert np.abs(decomposed(large, layout).field() - large).max() < 1e-12


@pytest.mark.parametrize("layout", ["rectangular", "triangular"])
def test_imperfect_interferometers_are_those_of_the_plain_product(layout: str) -> None:
    rng = np.random.default_rng(2)
    mesh = decomposed(unitary(6, rng), layout)
    errors, amplitude = 0.1 * rng.normal(size=(15, 2)), 0.97
    expected = np.eye(6, dtype=complex)
    for mode, theta, phi, (a, b) in zip(mesh.modes, mesh.theta, mesh.phi, errors, strict=True):
        whole = np.eye(6, dtype=complex)
        inner, outer = np.diag([np.exp(1j * theta), 1]), np.diag([np.exp(1j * phi), 1])
        whole[mode : mode + 2, mode : mode + 2] = amplitude * splitter(b) @ inner @ splitter(a) @ outer
        expected = whole @ expected
    expected = np.exp(1j * mesh.phases)[:, None] * expected
    assert np.allclose(mesh.field(errors, amplitude), expected, atol=1e-12)


def mean_errors(draw: Any, wanted: float, planted: float, n: int = 24, count: int = 40) -> None:
    """Check |U' - U|^2 / N of several matrices, U' what `draw` makes of the mesh, up to 2 % of its second order."""
    rng = np.random.default_rng(3)
    matrices = [unitary(n, rng) for _ in range(count)]
    found = np.array([np.linalg.norm(draw(decomposed(u), rng) - u) ** 2 / n for u in matrices])
    error = SURE * found.std(ddof=1) / len(found) ** 0.5 + 0.02 * wanted
    assert abs(found.mean() - wanted) < error < abs(found.mean() - planted)


@pytest.mark.parametrize("bits", [8, 10])
def test_rounded_phases_err_as_uniform_phases_do(bits: int) -> None:
    """Each of N^2 phases moves its mode by its error: |dU|^2 / N = N (2 pi / 2^bits)^2 / 12."""

    def draw(mesh: Any, rng: np.random.Generator) -> np.ndarray:
        parts = {name: rounded(getattr(mesh, name), bits) for name in ("theta", "phi", "phases")}
        return mesh._replace(**parts).field()

    wanted = 24 * (2 * math.pi / 2**bits) ** 2 / 12
    mean_errors(draw, wanted, planted=1.2 * wanted)


def test_splitters_err_as_published() -> None:
    """|dU| / sqrt(N) = sqrt(2 N) sigma: Hamerly et al., Nature Communications 13, 6831 (2022); exactly 2 (N - 1)."""
    sigma = 0.004
    wanted = 2 * 23 * sigma**2  # planted: one splitter for each
    mean_errors(lambda m, rng: m.field(sigma * rng.normal(size=(len(m.modes), 2))), wanted, wanted / 2)


def test_loss_harms_a_triangle_more() -> None:
    """Its paths differ by up to 2 N - 4 interferometers; F = |tr(U* V)|^2 / (N tr(V* V)) as Clements et al. take it."""
    rng, n, amplitude = np.random.default_rng(4), 20, 10 ** (-0.2 / 20)
    fidelities: dict[str, list[float]] = {"rectangular": [], "triangular": []}
    for _ in range(10):
        wanted = unitary(n, rng)
        for layout, found in fidelities.items():
            mesh = decomposed(wanted, layout)
            field = mesh.field(amplitude=amplitude)
            power = np.square(np.abs(field)).sum(0)
            fewest = 1 if layout == "triangular" else n // 2
            assert np.all(power <= amplitude ** (2 * fewest) + 1e-12)
            assert np.all(power >= amplitude ** (2 * mesh.depth) - 1e-12)
            found.append(abs(np.vdot(wanted, field)) ** 2 / (n * float(power.sum())))
    assert min(fidelities["rectangular"]) > max(fidelities["triangular"])
    assert np.mean(fidelities["rectangular"]) > 0.995


def test_thermal_cross_talk_moves_the_neighbours_of_a_layer() -> None:
    settings = load_description("mzi_mesh").mesh
    settings = settings.model_copy(update={"phase_bits": None, "heater_crosstalk": 0.03})
    mesh = decomposed(unitary(7, np.random.default_rng(5)))
    found = set_phases(mesh, settings)
    for number, (mode, layer) in enumerate(zip(mesh.modes, mesh.layers, strict=True)):
        beside = [k for k in range(21) if mesh.layers[k] == layer and abs(mesh.modes[k] - mode) == 2]
        for own, moved in ((mesh.theta, found.theta), (mesh.phi, found.phi)):
            expected = own[number] % (2 * math.pi) + 0.03 * sum(own[k] % (2 * math.pi) for k in beside)
            assert moved[number] == pytest.approx(expected, abs=1e-12)


def matrix(n_outputs: int, n_inputs: int, seed: int = 6) -> torch.Tensor:
    return torch.rand((n_outputs, n_inputs), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_a_perfect_chip_holds_the_matrix_and_the_error_halves_with_every_bit() -> None:
    """Loss of 0.5 dB in each interferometer bends it, in a triangle more: edges of a rectangle pass half as many."""
    wanted, errors = matrix(14, 9), []
    for changes in ({}, {"loss_db": 0.5}, {"loss_db": 0.5, "layout": "triangular"}):
        with mesh_of(9, 14, **changes) as device:
            errors.append(float((device.require("program").program(wanted) - wanted).abs().max()))
            assert not device.require("program").program(torch.zeros(14, 9)).any()
    assert errors[0] < 1e-6 < errors[1] < errors[2]
    # Re(F): half of the first-order error of theta stays in phase, of phi nothing
    wanted, found = matrix(16, 16), []
    for bits in (6, 7, 8, 9, 10, 11):
        with mesh_of(16, 16, phase_bits=bits) as device:
            found.append(off_by(device, wanted))
            told = device.programming_std(wanted)
        assert float(told[0, 0]) == pytest.approx(found[-1], rel=1e-6)  # rounding, the same on every chip
    slope = np.polyfit(range(6, 12), np.log2(found), 1)[0]
    assert slope == pytest.approx(-1.0, abs=0.1)
    assert all(late < early for early, late in pairwise(found))


def test_the_noise_of_a_mesh_is_shot_noise_and_the_loads() -> None:
    """2 q R P_lo b + 4 k T b / r over (2 R)^2 P_lo P / N |g|^2 / s^2, and q b |F x|^2 / (2 R P_lo)."""
    detector = {"responsivity_a_per_w": 0.8, "bandwidth_hz": 2e9, "load_ohm": 50.0}
    light = {"laser_w": 2e-4, "local_oscillator_w": 1e-3, "temperature_c": 60.0, "loss_db": 0.3}
    wanted, x = matrix(10, 16), torch.ones(1, 16)
    with mesh_of(16, 10, **light, detector=detector) as device:
        realised = device.program(wanted).double()
        gain = transmission(wanted, 10 ** (-0.3 / 20))
        squared = 1.6**2 * 1e-3 * 2e-4 / 16 * gain**2 / float(torch.linalg.svdvals(wanted.double())[0]) ** 2
        shot, thermal = 2 * CHARGE * 0.8 * 1e-3 * 2e9, 4 * BOLTZMANN * 333.15 * 2e9 / 50.0
        in_phase = realised.sum(1).square()
        least = (shot + thermal) / squared + CHARGE * 2e9 / (2 * 0.8 * 1e-3) * in_phase
        told = device.reading_variance(x)[0]
        assert torch.allclose(told, least, rtol=2e-2)  # loss turns a little light into the other quadrature
        readings = device.multiply(x.repeat(20_000, 1)).double()
    assert scatter_fits(readings, told)
    assert not scatter_fits(readings, told - shot / squared / 2)  # planted: one sideband forgotten


def transmission(wanted: torch.Tensor, amplitude: float) -> float:
    """Return <W, F> / <W, W> of exact meshes with loss, by the fields of both."""
    padded = np.zeros((16, 16))
    padded[: wanted.shape[0], : wanted.shape[1]] = wanted.double().numpy()
    left, values, right = np.linalg.svd(padded)
    left, right = (decomposed(each).field(amplitude=amplitude) for each in (left, right))
    field = left @ np.diag(values) @ right
    return float(np.real(np.sum(padded * field)) / np.sum(padded**2))


def scatter_fits(readings: torch.Tensor, told: Any) -> bool:
    """Whether readings have these variances, at five standard errors each."""
    return bool(torch.all((readings.var(0) / told - 1).abs() < SURE * (2 / len(readings)) ** 0.5))


def bank_of(n_outputs: int, **changes: Any) -> NoisyDevice:
    """Open a bank of 8 inputs without errors, but for the changes."""
    rings = {**ONE_CHIP, **changes}
    return open_device("microring_bank", n_inputs=8, n_outputs=n_outputs, rings=rings)


def off_by(device: NoisyDevice, wanted: torch.Tensor) -> float:
    """Program a matrix; return the root mean square error of what is realised."""
    return float((device.require("program").program(wanted) - wanted).square().mean().sqrt())


def test_the_limit_is_a_quarter_of_a_photon_in_each_quadrature() -> None:
    """Var of an amplitude in square roots of photons, with bandwidth 1 / (2 t) and a quantum efficiency of 1."""
    seconds, photon_j = 1e-9, 6.62607015e-34 * 299_792_458.0 / 1550e-9
    detector = {"responsivity_a_per_w": CHARGE / photon_j, "bandwidth_hz": 0.5 / seconds, "load_ohm": None}
    light = {"laser_w": 1e-6, "local_oscillator_w": 1.0, "detector": detector}
    with mesh_of(16, 16, **light) as device:
        device.require("program").program(torch.eye(16))
        variance = float(device.reading_variance(torch.zeros(1, 16))[0, 0])
    photons = 1e-6 / 16 * seconds / photon_j  # of an input of 1
    assert variance * photons == pytest.approx(0.25, rel=1e-6)


def test_a_ring_drops_what_an_add_drop_filter_does() -> None:
    """Symmetric couplers of amplitude r without loss: Bogaerts et al. (2012); near resonance a Lorentzian."""
    r = 0.97
    finesse = math.pi * r / (1 - r**2)
    phase = np.linspace(-math.pi, math.pi, 501)
    expected = (1 - r**2) ** 2 / (1 - 2 * r**2 * np.cos(phase) + r**4)
    assert np.allclose(dropped(phase, finesse), expected, rtol=1e-12)
    near = np.linspace(-0.1, 0.1, 51)
    width = 2 * math.pi / finesse
    assert np.allclose(dropped(near, finesse), 1 / (1 + (2 * near / width) ** 2), rtol=1e-2)
    shares = np.linspace(0.02, 1, 40)
    assert np.allclose(dropped(detuned(shares, finesse), finesse), shares, rtol=1e-12)


def banks(wanted: np.ndarray, channels: int, finesse: float, crosstalk: float, moved: float) -> np.ndarray:
    """Weights of banks, one ring after the other, over their reach."""
    spacing, (rows, columns) = 2 * math.pi / channels, wanted.shape

    def share(phase: float) -> float:
        return 1 / (1 + (2 * finesse / math.pi) ** 2 * math.sin(phase / 2) ** 2)

    reach, found = 1 - 2 * share(spacing / 2), np.zeros_like(wanted)
    for i in range(rows):
        shares = [(1 + reach * w) / 2 for w in wanted[i]]
        set_to = [2 * math.asin(math.pi / (2 * finesse) * math.sqrt(1 / each - 1)) for each in shares]
        around = [sum(set_to[n] for n in (k - 1, k + 1) if 0 <= n < columns) for k in range(columns)]
        shifts = [set_to[k] + crosstalk * around[k] + moved for k in range(columns)]
        for j in range(columns):
            through = math.prod(1 - share(spacing * (j - k) - shifts[k]) for k in range(columns))
            found[i, j] = (1 - 2 * through) / reach
    return found


@pytest.mark.parametrize(("finesse", "kelvin", "crosstalk"), [(133.0, 0.0, 0.0), (60.0, 0.3, 0.02)])
def test_weights_are_drop_minus_through(finesse: float, kelvin: float, crosstalk: float) -> None:
    wanted = matrix(5, 8)
    warm = {"shift_ghz_per_k": 10.0, "temperature_c": 25.0 + kelvin, "free_spectral_range_ghz": 1000.0}
    with bank_of(5, **warm, finesse=finesse, heater_crosstalk=crosstalk) as device:
        found = device.require("program").program(wanted).double().numpy()
    moved = 2 * math.pi * 10.0 * kelvin / 1000.0
    assert np.allclose(found, banks(wanted.double().numpy(), 8, finesse, crosstalk, moved), atol=1e-6)


def test_channel_cross_talk_grows_as_the_channels_near_the_finesse() -> None:
    wanted, errors = matrix(5, 8), []
    for finesse in (2000.0, 400.0, 80.0, 16.0):
        with bank_of(5, finesse=finesse) as device:
            errors.append(off_by(device, wanted))
    assert all(later > 2 * former for former, later in pairwise(errors))
    assert errors[0] < 1e-4
    with pytest.raises(ConfigError, match="rings.finesse: 7: resonances of 8 channels overlap"):
        open_device("microring_bank", rings={"finesse": 7.0}).noise  # noqa: B018


def test_the_error_of_tuning_halves_with_every_bit_down_to_the_controls() -> None:
    wanted, found = matrix(64, 8), []
    with bank_of(64) as device:
        exact = device.require("program").program(wanted)
    for bits in (9, 11, 13):
        with bank_of(64, phase_bits=bits) as device:
            found.append(float((device.require("program").program(wanted) - exact).square().mean().sqrt()))
    assert all(early / late == pytest.approx(4.0, rel=0.25) for early, late in pairwise(found))
    with bank_of(64, finesse=5000.0, tuning_std=0.02) as device:
        first, second = (device.require("program").program(wanted) for _ in range(2))
    for realised in (first, second):
        squares = (realised - wanted).double().square()
        error = SURE * float(squares.std()) / squares.numel() ** 0.5
        assert abs(float(squares.mean()) - 0.02**2) < error < abs(float(squares.mean()) - 0.03**2)
    assert not torch.equal(first, second)


def test_the_noise_of_a_bank_is_that_of_all_its_light() -> None:
    """2 q R P b sum |x| in two frames together, and 4 k T b / r in each, over (R P r)^2."""
    detector = {"responsivity_a_per_w": 0.9, "bandwidth_hz": 1e9, "load_ohm": 1e4}
    x = torch.linspace(-1, 1, 8)[None]
    with bank_of(6, detector=detector, laser_w=2e-6, loss_db=3.0, temperature_c=0.0) as device:
        device.program(matrix(6, 8))
        told = device.reading_variance(x)[0]
        readings = device.multiply(x.repeat(20_000, 1)).double()
    power, reach = 2e-6 * 10**-0.3, 1 - 2 * float(dropped(np.array(math.pi / 8), 133.0))
    shot = 2 * CHARGE * 0.9 * power * 1e9 * float(x.abs().sum())
    thermal = 2 * 4 * BOLTZMANN * 273.15 * 1e9 / 1e4
    assert torch.allclose(told, told.new_full((6,), (shot + thermal) / (0.9 * power * reach) ** 2), rtol=1e-6)
    assert scatter_fits(readings, told)
    assert not scatter_fits(readings, (shot + thermal / 2) / (0.9 * power * reach) ** 2)


def test_temperature_warms_the_load_of_a_mesh_and_moves_the_rings_of_a_bank() -> None:
    x = torch.zeros(1, 8)
    with mesh_of(8, 6) as mesh:
        law = mesh.temperature_law(x)
        with mesh_of(8, 6, temperature_c=60.0) as warm:
            assert float(warm.reading_variance(x)[0, 0]) ** 0.5 == pytest.approx(law.std(60.0), rel=1e-4)
    cold, hot = (np.square(law.std(t)) for t in (-40.0, 85.0))
    slope, shot = (hot - cold) / 125.0, 2 * CHARGE * 1e-3 * 1e9  # 1 A/W, 1 mW and 1 GHz
    assert slope * shot / (cold - 233.15 * slope) == pytest.approx(4 * BOLTZMANN * 1e9 / 1000.0, rel=1e-3)
    assert law.size(-40.0) == law.size(85.0)
    with open_device("microring_bank", n_inputs=8, n_outputs=64) as bank:
        found = bank.temperature_law(x)
    assert found.std(85.0) > found.std(-40.0)
    assert found.size(22.5) != pytest.approx(found.size(28.75), rel=0.01)  # 2.5 K below and above


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mzi_mesh", {"n_inputs": 65}, "n_inputs: must be at most mesh.ports = 64"),
        ("microring_bank", {"n_inputs": 9}, "n_inputs: must be at most rings.channels = 8"),
        ("microring_bank", {"frames": {"frames_per_projection": 1}}, "positive and negative inputs .* write"),
        ("mzi_mesh", {"mesh": {"temperature_c": 90.0}}, "must be at least -40 and at most 85"),
        ("mzi_mesh", {"mesh": None}, r'section \[mesh\] and kind = "mzi_mesh" belong together'),
        ("pcm", {"mesh": {"ports": 2}}, "mesh"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(name: str, changes: dict, message: str) -> None:
    refuses(ConfigError, message, lambda: open_described(load_description(name, changes)))


def test_light_goes_one_way_and_an_instrument_is_not_opened_several_times() -> None:
    with open_device("mzi_mesh", n_inputs=4, n_outputs=4) as device:
        for capability in ("multiply_transposed", "wait"):
            with pytest.raises(CapabilityMissing):
                device.require(capability)
    small = load_description(PACKAGE / "lab_crossbar.toml", {"n_inputs": 64})
    refuses(ConfigError, "window of 100 .* 64", Instrument.for_window, small, n_inputs=100, n_outputs=10)
    locked = small.model_copy(update={"access": AccessSettings(exclusive=True)})
    with LabCrossbar.for_window(locked, n_inputs=100, n_outputs=10) as device:  # one lock for all chips
        assert device.project(torch.ones(2, 100)).shape == (2, 10)


@pytest.mark.parametrize("name", ["mzi_mesh", "microring_bank"])
def test_a_chip_continues_where_its_state_was_taken(name: str) -> None:
    """Also on several chips: 100 inputs are more than a chip has."""
    wanted, x = matrix(20, 100), torch.ones(3, 100)
    with open_device(name, n_inputs=100, n_outputs=20, seed=3) as first:
        assert isinstance(first, SeveralChips)
        first.program(matrix(20, 100, seed=9))
        first.program(wanted)
        first.multiply(x)
        state = {key: value.clone() for key, value in first.held_state().items()}
        expected = first.matrix(), first.multiply(x)
        with open_device(name, n_inputs=100, n_outputs=20, seed=3) as second:
            assert second.restore(wanted, state)
            assert torch.equal(second.matrix(), expected[0])
            assert torch.equal(second.multiply(x), expected[1])


def test_a_foreign_chip_is_tiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 100 x 130 on chips of 64 ports; entries in steps of 1/16, noise by the inputs of each chip."""
    monkeypatch.setattr(kinds, "_registered", {"lab_crossbar": LabCrossbar})
    own = tmp_path / "ports.toml"
    text = (PACKAGE / "lab_crossbar.toml").read_text()
    text = text.replace("n_inputs = 512", "n_inputs = 64")
    own.write_text(text.replace("n_outputs = 2048", "n_outputs = 64"))
    torch.manual_seed(1)
    layer = torch.nn.Linear(130, 100)
    with convert(layer, own, compensate_drift=False) as analog:
        (placed,) = analog.layers
        device = placed.device
        assert isinstance(device, SeveralChips)
        wanted = layer.weight.detach() / layer.weight.detach().abs().amax(dim=1, keepdim=True)
        assert torch.equal(device.matrix(), (wanted * 16).round() / 16)
        x = torch.rand(1, 130) * 2 - 1
        y = device.multiply(x.repeat(20_000, 1)).double()
        assert device.usage.frames == 20_000
        assert device.description.frames.power_w == 6 * 5.0
    variance = 3 * 0.02**2 + 0.05**2 * float(x.square().sum())  # three chips side by side
    assert scatter_fits(y, variance)
    error = SURE * (variance / 20_000) ** 0.5
    assert float((y.mean(0) - (x @ device.matrix().T)[0]).abs().max()) < error


class Instrument(LabCrossbar):  # connects to a chip of which there is one
    def _open(self) -> None:
        self.connected = True


def test_noise_for_a_mesh_is_that_of_its_chips(seed: int) -> None:
    """A layer in training mode scatters by as much as chips err on it."""
    torch.manual_seed(2)
    layer = torch.nn.Linear(32, 24, bias=False)
    wanted = layer.weight.detach() / layer.weight.detach().abs().amax(dim=1, keepdim=True)
    with open_device("mzi_mesh", n_inputs=32, n_outputs=24) as device:
        told = float(device.require("program").programming_std(wanted)[0, 0])
    model = noise_aware(torch.nn.Sequential(layer), "mzi_mesh", seed=seed).train()
    scale = layer.parametrizations["weight"].original.detach().abs().amax(dim=1, keepdim=True)
    scatter = torch.stack([(model[0].weight.detach() / scale - wanted) for _ in range(30)])
    assert float(scatter.square().mean().sqrt()) == pytest.approx(told, rel=0.15)
    assert float(scatter.mean().abs()) < SURE * told / scatter.numel() ** 0.5


def test_a_run_takes_as_many_chips_as_its_network_needs(tmp_path: Path) -> None:
    """A bank of 8 inputs projects the errors of 10 classes."""
    config = {"epochs": 1, "data": {"name": "digits"}, "model": {"hidden": [8]}, "trainer": {"kind": "pdfa"}}
    found = train({**config, "device": {"name": "microring_bank"}}, folder=tmp_path / "run")
    assert found.summary["frames"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mzi_mesh", "microring_bank"])
def test_networks_run_on_chips_and_train_through_them(name: str, tmp_path: Path) -> None:
    """A layer of 64 x 128 takes two or more chips; photonic DFA projects through as many."""
    base = {"epochs": 15, "data": {"name": "digits"}, "model": {"hidden": [128]}}
    train({**base, "trainer": {"kind": "bp"}}, folder=tmp_path / "bp")
    assert evaluate_run(tmp_path / "bp", device=name)["accuracy"] > 0.9
    pdfa = {**base, "trainer": {"kind": "pdfa"}, "device": {"name": name}}
    found = train(pdfa, folder=tmp_path / "pdfa")
    assert found.summary["test_accuracy"] > 0.85
