"""Laws of a device's noise: all that privacy accounting sees of a device. Needs numpy only."""

from opusim.noise.laws import GaussianNoise as GaussianNoise
from opusim.noise.laws import JsonObject as JsonObject
from opusim.noise.laws import NoiseModel as NoiseModel
from opusim.noise.laws import PhotonCountNoise as PhotonCountNoise
