"""The kind ``mzi_mesh``: a matrix as two meshes of Mach-Zehnder interferometers, read by homodyne detection.

Interferometers. One acts on two neighbouring modes by

    T = S(b) diag(exp(i theta), 1) S(a) diag(exp(i phi), 1),    S(e) = [[cos, i sin], [i sin, cos]](pi / 4 + e),

which for exact splitters is i exp(i theta / 2) [[exp(i phi) sin, cos], [exp(i phi) cos, -sin]](theta / 2). Any unitary
matrix of N modes is a product of N (N - 1) / 2 of them and N phases at the outputs: in a rectangle of N layers
(Clements et al., Optica 3, 1460, 2016) or a triangle of 2 N - 3 layers (Reck et al., Phys. Rev. Lett. 73, 58, 1994).

Matrices. W = U diag(s) V by singular values, U and V in a mesh each, and between them attenuators of amplitude
s / s_max, so that light is never amplified. W has at most `ports` rows and columns; missing ones are 0. Effects, in the
order in which they act on a setting:

1. heaters: theta, phi, the phases of the outputs and 2 arcsin(s / s_max) of the attenuators are multiples of
   2 pi / 2^bits;
2. thermal cross-talk: a heater's shift is its setting and `heater_crosstalk` times those of the same heater of the next
   interferometers of its layer, on both sides;
3. splitters: a, b ~ N(0, splitter_rad^2), drawn once for a chip;
4. loss: an interferometer takes sqrt(10^(-loss_db / 10)) of both amplitudes. In a triangle paths differ by up to
   2 N - 4 interferometers, and nothing evens that out.

Gain and phase of the read-out are calibrated: the light F of all that is divided by g = <W, F> / <W, W>. Readings are
Re(F / g) x. Errors of phi and of splitters turn light of a real W into the other quadrature to first order, which a
homodyne detector does not read.

Noise. The laser lights N inputs with amplitudes x_j sqrt(P / N); an output of amplitude e gives the current
2 R sqrt(P_lo) e with the shot noise 2 q R (P_lo + |e|^2) bandwidth and the load's thermal noise. With
c = 2 R sqrt(P_lo P / N) |g| / s_max, a reading of x has the variance

    (2 q R P_lo bandwidth + 4 k T bandwidth / load) / c^2 + q bandwidth / (2 R P_lo) |(F / g) x|^2.

For a strong oscillator and no load that is a quarter of a photon on each quadrature, the limit of Hamerly et al.,
Phys. Rev. X 9, 021032 (2019).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np
import torch
from typing_extensions import override

from opusim.crossbar.device import Light, PhotonicDevice
from opusim.description.crossbar import MeshSettings
from opusim.errors import ConfigError
from opusim.randomness.streams import SeededStream


class Mesh(NamedTuple):
    """The interferometers of a mesh, in an order in which light meets them.

    Attributes:
        modes: upper mode of each.
        layers: layer of each, from 0.
        theta: inner phase of each, radians.
        phi: outer phase of each.
        phases: at the outputs.
    """

    modes: np.ndarray
    layers: np.ndarray
    theta: np.ndarray
    phi: np.ndarray
    phases: np.ndarray

    @property
    def depth(self) -> int:
        """Number of layers."""
        return int(self.layers.max(initial=-1)) + 1

    def field(self, splitters: np.ndarray | None = None, amplitude: float = 1.0) -> np.ndarray:
        """Return the matrix, complex128; `splitters` are both errors of each interferometer, radians, (n, 2)."""
        errors = np.zeros((len(self.modes), 2)) if splitters is None else splitters
        cos, sin = np.cos(math.pi / 4 + errors), 1j * np.sin(math.pi / 4 + errors)
        inner, outer = np.exp(1j * self.theta), amplitude * np.exp(1j * self.phi)
        # the rows of each T, by its columns
        (c_a, c_b), (s_a, s_b) = cos.T, sin.T
        upper = (c_b * inner * c_a + s_b * s_a) * outer, (c_b * inner * s_a + s_b * c_a) * amplitude
        lower = (s_b * inner * c_a + c_b * s_a) * outer, (s_b * inner * s_a + c_b * c_a) * amplitude
        field = np.eye(len(self.phases), dtype=np.complex128)
        for layer in range(self.depth):
            each = np.flatnonzero(self.layers == layer)
            mode = self.modes[each]
            above, below = field[mode], field[mode + 1]
            field[mode] = upper[0][each, None] * above + upper[1][each, None] * below
            field[mode + 1] = lower[0][each, None] * above + lower[1][each, None] * below
        return np.exp(1j * self.phases)[:, None] * field


def decomposed(unitary: np.ndarray, layout: str = "rectangular") -> Mesh:
    """Return the mesh that realises a unitary matrix: ``rectangular`` (Clements) or ``triangular`` (Reck)."""
    modes, theta, phi, phases = nulled(np.array(unitary, dtype=np.complex128), layout == "rectangular")
    layers, reached = np.empty(len(modes), dtype=np.int64), np.zeros(len(unitary), dtype=np.int64)
    for number, mode in enumerate(modes):
        layers[number] = reached[mode : mode + 2].max()
        reached[mode : mode + 2] = layers[number] + 1
    return Mesh(modes, layers, theta, phi, phases)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def nulled(
    u: np.ndarray, rectangular: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover  # compiled
    """Take a unitary matrix, in place, to a diagonal of phases: modes, theta and phi of each T, and the phases.

    U T^-1 nulls an element with its right neighbour, T U one with its upper neighbour. A rectangle does both in turn,
    along diagonals from the lower left corner; T^-1 D = D' T then brings all T to one side of the phases D.
    """
    n = len(u)
    count = n * (n - 1) // 2
    modes, theta, phi = np.empty(count, np.int64), np.empty(count), np.empty(count)
    first, last = 0, count
    for i in range(n - 1):
        for j in range(i + 1 if rectangular else n - 1 - i):
            if rectangular and i % 2 == 1:
                row, column = n - 1 - i + j, j
                m = row - 1
                a, b = u[m, column], u[row, column]
                angle, outer = 2 * math.atan2(abs(a), abs(b)), np.angle(b * np.conj(a))
                s, c = math.sin(angle / 2), math.cos(angle / 2)
                common, turned = 1j * np.exp(0.5j * angle), np.exp(1j * outer)
                for k in range(n):
                    above, below = u[m, k], u[row, k]
                    u[m, k] = common * (turned * s * above + c * below)
                    u[row, k] = common * (turned * c * above - s * below)
                last -= 1
                modes[last], theta[last], phi[last] = m, angle, outer
            else:
                row, m = (n - 1 - j, i - j) if rectangular else (n - 1 - i, j)
                a, b = u[row, m], u[row, m + 1]
                angle, outer = 2 * math.atan2(abs(b), abs(a)), np.angle(-a * np.conj(b))
                s, c = math.sin(angle / 2), math.cos(angle / 2)
                common, turned = -1j * np.exp(-0.5j * angle), np.exp(-1j * outer)
                for k in range(n):
                    left, right = u[k, m], u[k, m + 1]
                    u[k, m] = common * (turned * s * left + c * right)
                    u[k, m + 1] = common * (turned * c * left - s * right)
                modes[first], theta[first], phi[first] = m, angle, outer
                first += 1
    phases = np.empty(n, np.complex128)
    for k in range(n):
        phases[k] = u[k, k]
    for number in range(last, count):
        m, angle, outer = modes[number], theta[number], phi[number]
        upper, lower = phases[m], phases[m + 1]
        phi[number] = np.angle(upper * np.conj(lower))
        phases[m] = -np.exp(-1j * (angle + outer)) * lower
        phases[m + 1] = -np.exp(-1j * angle) * lower
    return modes, theta, phi, np.angle(phases)


def rounded(phases: np.ndarray, bits: int | None) -> np.ndarray:
    """Return the nearest multiples of 2 pi / 2^bits in [0, 2 pi), or the phases in that range without bits."""
    if bits is None:
        return np.mod(phases, 2 * math.pi)
    step = 2 * math.pi / 2**bits
    return np.mod(np.round(phases / step), 2**bits) * step


def set_phases(mesh: Mesh, settings: MeshSettings) -> Mesh:
    """Return the mesh as its heaters set it: rounded, with thermal cross-talk."""
    found = [rounded(part, settings.phase_bits) for part in (mesh.theta, mesh.phi, mesh.phases)]
    if settings.heater_crosstalk and len(mesh.modes):
        for index in (0, 1):
            grid = np.zeros((mesh.depth, int(mesh.modes.max()) + 5))  # two empty modes on each side
            grid[mesh.layers, mesh.modes + 2] = found[index]
            neighbours = grid[mesh.layers, mesh.modes] + grid[mesh.layers, mesh.modes + 4]
            found[index] = found[index] + settings.heater_crosstalk * neighbours
    return mesh._replace(theta=found[0], phi=found[1], phases=found[2])


class MeshDevice(PhotonicDevice):
    """Singular vectors in meshes of interferometers, read by homodyne detection: ``[mesh]`` and ``[medium]``.

    The seed of ``[medium]`` says which chip this is: its splitters, and the random matrix before any is programmed.
    """

    section = "mesh"
    _settings: MeshSettings

    @override
    def _require_fitting(self) -> None:
        ports = self._settings.ports
        for key in ("n_inputs", "n_outputs"):
            if getattr(self.description, key) > ports:
                reason = f"must be at most mesh.ports = {ports}; a larger matrix is put on several chips"
                raise ConfigError(self.name, key, reason)

    @override
    def _light(self, matrix: torch.Tensor, settings: MeshSettings, chip: int, number: int) -> Light:
        n, wanted = settings.ports, matrix.cpu().double().numpy()
        padded = np.zeros((n, n))
        padded[: wanted.shape[0], : wanted.shape[1]] = wanted
        left, values, right = np.linalg.svd(padded)
        largest = float(values[0]) or 1.0
        amplitude = 10 ** (-settings.loss_db / 20)
        stream = SeededStream(chip, "splitters of a mesh")
        left_field, right_field = (
            set_phases(decomposed(part, settings.layout), settings).field(
                settings.splitter_rad * stream.normal((n * (n - 1) // 2, 2)).double().numpy(), amplitude
            )
            for part in (left, right)
        )
        shown = np.sin(rounded(2 * np.arcsin(values / largest), settings.phase_bits) / 2)
        field = largest * (left_field * shown) @ right_field
        field = field[: wanted.shape[0], : wanted.shape[1]]
        power = float(np.sum(wanted**2))
        gain = complex(np.sum(wanted * field)) / power if power else amplitude ** (2 * n)
        if abs(gain) < _LEAST_GAIN * amplitude ** (4 * n):
            reason = "with its splitters and cross-talk leaves nothing of the matrix; give more bits, or smaller errors"
            raise ConfigError(self.name, "mesh.phase_bits", reason)
        detector, oscillator = settings.detector, settings.local_oscillator_w
        current = 2 * detector.responsivity_a_per_w * abs(gain) / largest
        squared = current**2 * oscillator * settings.laser_w / n
        return Light(
            weights=(field / gain).real,
            quadrature=(field / gain).imag,
            dark=(detector.shot_a2(oscillator) + detector.thermal_a2(settings.celsius)) / squared,
            by_output=detector.shot_a2(1.0) / (4 * detector.responsivity_a_per_w**2 * oscillator),
        )


_LEAST_GAIN = 1e-3
"""Share of the light that loss leaves, below which a read-out cannot be calibrated."""
