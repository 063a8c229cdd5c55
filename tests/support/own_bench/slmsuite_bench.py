"""The simulated pair of slmsuite, with opusim's camera noise, as a bench: a diffuser stands before the modulator."""

import numpy as np
from slmsuite.hardware.cameras.simulated import SimulatedCamera
from slmsuite.hardware.slms.simulated import SimulatedSLM

from opusim.description.schema import load_description
from opusim.devices.bench import SlmsuiteCamera, SlmsuiteNoise, SlmsuitePatterns

SIDE, GRAIN = 128, 2


def diffuser(seed):
    grains = np.random.default_rng(seed).uniform(0, 2 * np.pi, (SIDE // GRAIN, SIDE // GRAIN))
    return grains.repeat(GRAIN, axis=0).repeat(GRAIN, axis=1)


source = {"amplitude_sim": np.ones((SIDE, SIDE)), "phase_sim": diffuser(20261128)}
slm = SimulatedSLM((SIDE, SIDE), source=source)
simulated = SimulatedCamera(
    slm, resolution=(48, 48), bitdepth=12, gain=1e6, noise=SlmsuiteNoise(load_description("camera_low_light"))
)
camera = SlmsuiteCamera(simulated)


def open_camera():
    return camera


def open_modulator():
    return SlmsuitePatterns(slm, camera.pulse)


FLAT_US = [2e3, 5e3, 1e4, 1.5e4, 2e4, 2.5e4, 3e4, 3.5e4, 3.9e4, 4.4e4, 5e4]
DARK_US = [1e3, 5e4, 2e5, 1e6, 4e6]


def even_frames(exposures_us, electrons_per_us):
    """Frames of even light, for which one point of the modulator is lit."""
    amplitude, gain = slm.source["amplitude_sim"], simulated.gain
    point = np.zeros_like(amplitude)
    point[SIDE // 2, SIDE // 2] = 1
    slm.source["amplitude_sim"], simulated.gain = point, 1e6 * electrons_per_us * SIDE**2
    simulated.set_woi(None)
    taken = []
    for exposure_us in exposures_us:
        simulated.set_exposure(1e-6 * exposure_us)
        taken.append([simulated.get_image() for _ in range(16)])
    slm.source["amplitude_sim"], simulated.gain = amplitude, gain
    return np.array(taken, dtype=np.uint16)


def record(path):
    """Save what `opusim device calibrate --recorded` reads."""
    frames = {"flat": even_frames(FLAT_US, 0.1), "dark": even_frames(DARK_US, 0.0)}
    np.savez(path, **frames, flat_exposure_us=FLAT_US, dark_exposure_us=DARK_US, bits=12)
