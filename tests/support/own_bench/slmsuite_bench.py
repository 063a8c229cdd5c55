"""The simulated pair of slmsuite, with opusim's camera noise, as a bench: a diffuser stands before the modulator."""

import numpy as np
from slmsuite.hardware.cameras.simulated import SimulatedCamera
from slmsuite.hardware.slms.simulated import SimulatedSLM

from opusim.description.schema import load_description
from opusim.devices.bench import SlmsuiteCamera, SlmsuiteNoise, SlmsuitePatterns

SIDE, GRAIN = 128, 2
grains = np.random.default_rng(20261128).uniform(0, 2 * np.pi, (SIDE // GRAIN, SIDE // GRAIN))
diffuser = grains.repeat(GRAIN, axis=0).repeat(GRAIN, axis=1)
slm = SimulatedSLM((SIDE, SIDE), source={"amplitude_sim": np.ones((SIDE, SIDE)), "phase_sim": diffuser})
simulated = SimulatedCamera(
    slm, resolution=(48, 48), bitdepth=12, gain=1e6, noise=SlmsuiteNoise(load_description("camera_low_light"))
)
camera = SlmsuiteCamera(simulated)


def open_camera():
    return camera


def open_modulator():
    return SlmsuitePatterns(slm, camera.pulse)
