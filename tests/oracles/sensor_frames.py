"""Frames of image sensors, drawn pixel by pixel from their physics; no code is shared with opusim's camera.

    electrons = min(Poisson(qe (1 + PRNU_i) photons lamp_f + dark_i t), full well)
    number = clip(round(black + gain (electrons + offset_i + telegraph_if + read_i normal)), 0, 2^bits - 1)

with lamp_f the lamp's power in frame f, and everything with index i drawn once for each pixel.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sensor:
    """A sensor's numbers: electrons, seconds and DN."""

    bits: int = 12  # of the converter
    gain: float = 1.0  # DN per electron
    black: float = 100.0  # DN
    read: float = 2.0  # root mean square over pixels, electrons, without telegraph noise
    read_spread: float = 0.2  # standard deviation of the logarithm of a pixel's read noise
    dark: float = 30.0  # electrons per second
    dark_spread: float = 0.2  # standard deviation over pixels, relative
    well: float = 3500.0  # electrons
    prnu: float = 0.01  # relative
    dsnu: float = 1.5  # electrons
    efficiency: float = 0.6  # electrons per photon
    telegraph_share: float = 0.0  # of pixels whose offset jumps between two values
    telegraph: float = 0.0  # electrons between the two values
    lamp: float = 0.0  # relative standard deviation from frame to frame
    shading: float = 0.0  # relative fall of the light from the centre to an edge

    def truth(self) -> dict[str, float]:
        """What an evaluation should find, under opusim's keys."""
        share, step = self.telegraph_share, self.telegraph
        black = self.black + self.gain * share * step / 2
        top = self.gain * (self.well + share * step / 2) + self.black
        return {
            "gain_dn_per_e": self.gain, "black_level_dn": black,
            "read_noise_e": (self.read**2 + share * step**2 / 4) ** 0.5, "dark_current_e_per_s": self.dark,
            "dark_spread_e_per_s": self.dark * self.dark_spread, "prnu": self.prnu,
            "dsnu_e": (self.dsnu**2 + share * (1 - share) * step**2 / 4) ** 0.5,
            "saturation_e": (min(top, 2**self.bits - 1) - black) / self.gain,
            "quantum_efficiency": self.efficiency, "linearity_error": 0.0, "light_noise": self.lamp,
        }  # fmt: skip


SENSORS = {
    "scientific CMOS, 12 bits": Sensor(),
    "industrial CMOS, 8 bits": Sensor(
        bits=8, gain=0.019, black=8.0, read=45.0, dark=125.0, dark_spread=0.3, well=12_000, prnu=0.012,
        dsnu=40.0,
    ),
    "noise below a code, 8 bits": Sensor(
        bits=8, gain=0.03, black=6.3, read=10.0, dark=50.0, well=7500, prnu=0.01, dsnu=10.0, read_spread=0.1
    ),
    "CCD, 16 bits": Sensor(
        bits=16, gain=0.7, black=1000.0, read=8.0, read_spread=0.0, dark=2.0, dark_spread=0.1, well=60_000,
        dsnu=3.0,
    ),
    "deep well, 14 bits": Sensor(
        bits=14, gain=0.15, black=512.0, read=15.0, dark=400.0, well=95_000, prnu=0.004, dsnu=12.0
    ),
    "high gain, 10 bits": Sensor(bits=10, gain=2.5, black=40.0, read=1.1, dark=15.0, well=380, dsnu=0.6),
    "converter full first, 12 bits": Sensor(gain=1.6, black=64.0, read=3.0, well=9000, dark=100.0),
    "warm, 12 bits": Sensor(gain=0.4, black=200.0, read=5.0, dark=2500.0, dark_spread=0.3, well=9000, dsnu=4.0),
    "telegraph pixels, 14 bits": Sensor(
        bits=14, gain=2.0, black=300.0, read=1.5, telegraph_share=0.05, telegraph=6.0, well=7000,
        read_spread=0.4,
    ),
    "uneven, 12 bits": Sensor(gain=0.5, black=150.0, read=4.0, prnu=0.05, dsnu=20.0, dark_spread=0.5, well=7500),
    "flickering lamp, 12 bits": Sensor(gain=0.8, black=90.0, lamp=0.01, well=4600, read=2.5),
    "shaded, 10 bits": Sensor(bits=10, gain=0.1, black=30.0, read=12.0, shading=0.1, well=9500, dsnu=8.0, dark=800.0),
}  # fmt: skip
"""Twelve sensors of different bits, gains, noises and faults."""


class Pixels:
    """One specimen of a sensor; `rng` draws it and its frames."""

    def __init__(self, sensor: Sensor, rng: np.random.Generator, shape: tuple[int, int] = (40, 50)) -> None:
        self.sensor, self.rng, self.shape = sensor, rng, shape
        spread = sensor.read_spread
        self.response = sensor.efficiency * (1 + sensor.prnu * rng.normal(size=shape))
        self.dark = sensor.dark * rng.gamma(sensor.dark_spread**-2, sensor.dark_spread**2, shape)
        self.offset = sensor.dsnu * rng.normal(size=shape)
        self.read = sensor.read * np.exp(spread * rng.normal(size=shape) - spread**2)
        self.jumps = rng.random(shape) < sensor.telegraph_share
        y, x = np.mgrid[-1 : 1 : shape[0] * 1j, -1 : 1 : shape[1] * 1j]
        light = 1 - sensor.shading * (x * x + 0.5 * y)
        self.light = light / light.mean()

    def electrons(self, photons: float, seconds: float, frames: int) -> np.ndarray:
        """Collected electrons below the well and what the read-out adds, shape (frames, rows, columns)."""
        rng, sensor, size = self.rng, self.sensor, (frames, *self.shape)
        lamp = 1 + sensor.lamp * rng.normal(size=(frames, 1, 1))
        rate = self.response * self.light * photons * lamp + self.dark * seconds
        collected = np.minimum(rng.poisson(np.maximum(rate, 0.0), size), sensor.well)
        jump = self.jumps * sensor.telegraph * (rng.random(size) < 0.5)
        return collected + self.offset + jump + self.read * rng.normal(size=size)

    def take(self, photons: float, seconds: float, frames: int) -> np.ndarray:
        """Frames, DN, whole numbers."""
        sensor = self.sensor
        dn = np.rint(sensor.black + sensor.gain * self.electrons(photons, seconds, frames))
        return np.clip(dn, 0, 2**sensor.bits - 1).astype(np.uint16)


def recording(
    sensor: Sensor,
    rng: np.random.Generator,
    *,
    frames: int = 6,
    levels: int = 10,
    shape: tuple[int, int] = (40, 50),
    longest_s: float | None = None,
) -> dict[str, np.ndarray]:
    """Dark frames and flat frames of rising exposure under a steady lamp, beyond saturation, as named arrays.

    The longest exposure lets the dark charge reach thirty times the dark noise of a pixel, or 0.15 of the range, if
    none is given.
    """
    pixels = Pixels(sensor, rng, shape)
    top = min(sensor.well, (2**sensor.bits - 1 - sensor.black) / sensor.gain)
    noise = (sensor.read**2 + sensor.dsnu**2 + 1 / (12 * sensor.gain**2)) ** 0.5
    longest = longest_s or min(30 * noise, 0.15 * top) / sensor.dark
    shares = np.append(np.linspace(0.05, 0.92, levels - 1), 1.5)
    exposures = longest * shares / shares.max()
    light = shares * top / sensor.efficiency
    return {
        "dark": np.stack([pixels.take(0.0, t, frames) for t in exposures]),
        "flat": np.stack([pixels.take(p, t, frames) for p, t in zip(light, exposures, strict=True)]),
        "dark_exposure_us": 1e6 * exposures, "flat_exposure_us": 1e6 * exposures,
        "bits": np.array(sensor.bits), "flat_photons": light,
    }  # fmt: skip
