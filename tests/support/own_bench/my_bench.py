"""A Vialux mirror array, by ALP4lib, and a Hamamatsu camera, by pylablib, for opusim."""

from ALP4 import ALP4
from pylablib.devices import DCAM

from opusim.devices.bench import Alp4Patterns, PylablibCamera


class Mirrors(Alp4Patterns):
    def __init__(self):
        dmd = ALP4(version="4.3")
        dmd.Initialize()
        super().__init__(dmd)


class Camera(PylablibCamera):
    def __init__(self):
        super().__init__(DCAM.DCAMCamera(), bits=12)
