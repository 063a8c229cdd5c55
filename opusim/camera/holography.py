"""Phase-shifting holography: the linear product from frames in which a reference beam meets the field.

A reference of amplitude r and phase phi_k falls on every pixel together with the field u of a frame,
    I_k = |u + r e^(i phi_k)|^2,      phi_k = phi_0 + 2 pi k / K,   K = 3 or 4 steps,
so that sum over k of cos(phi_k) I_k = K r Re u exactly: |u|^2, r^2, dark charge and black level drop out. A ternary
x = p - n takes 2 K frames, first those of p, and reads
    y = Re(u_p) - Re(u_n),
of which the entries are those of P, the real part of the medium, N(0, 1) at every pixel; no pixel is masked. The
imaginary part, which the same frames tell, is left: an output is one real number.
Sources: Yamaguchi and Zhang, Opt. Lett. 22, 1268 (1997); Creath, Progress in Optics 26, 349 (1988) for the errors.

**Noise.** Given the phases, counts are independent Poisson counts of rate g |u + r e^(i phi)|^2 + d. With weights
w_f = cos(phi_f), and -cos(phi_f) for the frames of n,
    Var[y] = scale^2 sum over frames f of w_f^2 Var[DN_f],    Cov[y_i, y_j] = 0 for outputs i != j,
which depends on x. At a strong reference it tends to 1 / (K g), for every x: p and n add 1 / (2 K g) each.

**Errors.** Steps that are too long by a share e, phi_k' = phi_0 + 2 pi k (1 + e) / K, change B and nothing else:
    y = Re(conj(c) (u_p - u_n)),    c = 2/K sum over k of cos(phi_k) e^(i phi_k').
A path that vibrates adds a phase psi_f to every frame, stationary, N(0, s^2), common to its pixels and correlated from
frame to frame: B shrinks by e^(-s^2 / 2), and each reading gets noise that all outputs share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from opusim import checks
from opusim.camera.exposure import Recovery
from opusim.camera.stages import frame_normals
from opusim.randomness.streams import NoiseStream

_FIRST_PHASE = {3: 0.0, 4: 0.25 * math.pi}
"""phi_0: with four steps an eighth of a turn, so that all four frames read the real part."""


@dataclass(frozen=True, kw_only=True)
class ReferenceBeam:
    """The reference on the sensor.

    Attributes:
        amplitude: r in mirror units, in which |u|^2 of one mirror has mean 2; above 0.
        steps: K, 3 or 4.
        step_error: e, relative error of the steps, in [-0.5, 0.5].
        phase_rms: s, standard deviation of a frame's phase, rad, at least 0.
        correlation: of the phases of successive frames, in [0, 1).
    """

    amplitude: float
    steps: int
    step_error: float = 0.0
    phase_rms: float = 0.0
    correlation: float = 0.0

    def __post_init__(self) -> None:
        checks.positive(amplitude=self.amplitude)
        checks.integer(steps=self.steps, minimum=3, maximum=4)
        checks.in_range(-0.5, 0.5, step_error=self.step_error)
        checks.non_negative(phase_rms=self.phase_rms)

    @cached_property
    def weights(self) -> np.ndarray:
        """w: weight of each frame in a reading, float64, shape (2 steps,)."""
        cosines = np.cos(self._phases(0.0))
        return np.concatenate([cosines, -cosines])

    @property
    def carrier(self) -> np.ndarray:
        """K r c / 2 and e^(-s^2 / 2): what B takes of the real and the imaginary field, float64, shape (2,)."""
        shown = np.exp(1j * self._phases(self.step_error))
        total = (
            self.amplitude * math.exp(-0.5 * self.phase_rms**2) * np.sum(self.weights[: self.steps] * shown)
        )
        return np.array([total.real, total.imag])

    def _phases(self, step_error: float) -> np.ndarray:
        turn = 2 * math.pi * np.arange(self.steps) / self.steps
        return np.asarray(_FIRST_PHASE[self.steps] + turn * (1 + step_error))

    def fields(self) -> np.ndarray:
        """Return the reference's field in each step, float64, shape (2, steps)."""
        phases = self._phases(self.step_error)
        return self.amplitude * np.stack([np.cos(phases), np.sin(phases)])

    def shown(self, field: torch.Tensor, stream: NoiseStream | None = None) -> torch.Tensor:
        """Return the fields of all frames of some vectors.

        Args:
            field: shape (2, 2 rows, pixels): real and imaginary part, of the positive frames, then of the negative.
            stream: source of the path's vibration, of which a reading is taken if there is any; None: the path rests.

        Returns:
            Shape (2, 2 steps, rows, pixels), of the field's type; rows are shown in turn, each by its frames in order.
        """
        rows, phases = field.shape[1] // 2, np.tile(self._phases(self.step_error), 2)
        turned = np.broadcast_to(phases, (rows, phases.size))
        if stream is not None and self.phase_rms > 0:
            psi = frame_normals(turned.size, self.correlation, stream)
            turned = turned + self.phase_rms * psi.reshape(turned.shape)
        beam = torch.from_numpy(self.amplitude * np.stack([np.cos(turned), np.sin(turned)])).to(field.dtype)
        signs = field.view(2, 2, 1, rows, -1).expand(-1, -1, self.steps, -1, -1)
        shown = signs + beam.transpose(1, 2).reshape(2, 2, self.steps, rows, 1)
        return shown.reshape(2, 2 * self.steps, rows, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class HologramRecovery(Recovery):
    """How digital numbers of holograms become projections: y = scale sum over frames of w_f DN_f.

    `anchor_dn` is the reference's measured intensity K_dn g_j r^2, and the scale 1 / (K r g_j K_dn) follows with the
    nominal g, so that a pixel's response is part of B, as with the anchor.

    Attributes:
        beam: the reference.
    """

    beam: ReferenceBeam

    @property
    def weights(self) -> np.ndarray:
        """See `ReferenceBeam.weights`."""
        return self.beam.weights

    def decode(self) -> np.ndarray:
        """Return the scale [projection units per DN] and no offset, float64, shape (2, n_outputs)."""
        root = np.sqrt(np.asarray(self.anchor_dn, dtype=np.float64))
        scale = math.sqrt(2 * self.mirrors / self.unit_dn) / (self.beam.steps * root)
        return np.stack([scale, np.zeros_like(scale)])
