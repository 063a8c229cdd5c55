"""Which law does a device's noise have? All that privacy accounting sees of a device; needs numpy only."""

from opusim.noise.laws import GaussianNoise as GaussianNoise
from opusim.noise.laws import JsonObject as JsonObject
from opusim.noise.laws import NoiseModel as NoiseModel
from opusim.noise.laws import PhotonCountNoise as PhotonCountNoise
