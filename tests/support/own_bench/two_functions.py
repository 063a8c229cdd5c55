from lab import read_frame, show  # yours: the frame is exposed after the pattern stands

from opusim.devices.bench import SteppedCamera


class Camera(SteppedCamera):
    bits, shape = 12, (32, 32)

    def _set(self, exposure_us, roi, binning):
        self.rows, self.columns = slice(roi[0], roi[0] + roi[2]), slice(roi[1], roi[1] + roi[3])
        Mirrors.pulse = self.pulse  # in place of a trigger cable
        return exposure_us  # bench.exposure_us, which you set at the camera

    def _take(self):
        return read_frame()[self.rows, self.columns]

    def close(self): ...


class Mirrors:
    shape = 24, 32

    def load(self, bits):
        self.bits = bits

    def run(self, period_us):
        for pattern in self.bits:
            show(pattern)
            self.pulse()

    def close(self): ...
