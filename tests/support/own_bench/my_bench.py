"""A Vialux mirror array, by ALP4lib, and a Hamamatsu camera, by pylablib, for opusim."""

import contextlib

import numpy as np
from ALP4 import ALP4
from pylablib.devices import DCAM


class Mirrors:
    is_loaded = False

    def __init__(self):
        self.dmd = ALP4(version="4.3")
        self.dmd.Initialize()
        self.shape = (self.dmd.nSizeY, self.dmd.nSizeX)

    def load(self, bits):
        if self.is_loaded:
            self.dmd.Halt()
            self.dmd.FreeSeq()
        self.dmd.SeqAlloc(nbImg=len(bits), bitDepth=1)
        self.is_loaded = True
        self.dmd.SeqPut(imgData=(255 * bits).ravel())

    def run(self, period_us):
        self.dmd.SetTiming(pictureTime=int(period_us))
        self.dmd.Run(loop=False)

    def close(self):
        self.dmd.Halt()
        self.dmd.Free()


class Camera:
    bits = 12

    def __init__(self):
        self.cam = DCAM.DCAMCamera()
        columns, rows = self.cam.get_detector_size()
        self.shape = (rows, columns)

    def configure(self, *, exposure_us, roi, binning, trigger):
        row, column, rows, columns = roi
        self.cam.clear_acquisition()
        self.cam.set_trigger_mode("ext" if trigger else "int")
        self.cam.set_roi(column, column + columns, row, row + rows, binning, binning)
        exposure_s = self.cam.set_exposure(1e-6 * exposure_us)
        self.cam.setup_acquisition(mode="sequence", nframes=512)
        self.cam.start_acquisition()
        return 1e6 * exposure_s

    def grab(self, n):
        with contextlib.suppress(DCAM.DCAMTimeoutError):  # opusim sees how many frames are missing
            self.cam.wait_for_frame(nframes=n, timeout=2.0)
        frames, infos = self.cam.read_multiple_images(return_info=True)
        return np.asarray(frames), np.array([info.framestamp for info in infos])

    def close(self):
        self.cam.close()
