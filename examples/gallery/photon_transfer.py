"""What noise does a camera have? Variance of its readings against their mean, as EMVA 1288 measures it.

python examples/gallery/photon_transfer.py [FIGURE]
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

import opusim

PHOTONS = (0, 30, 100, 300, 1000, 2000, 3000, 4000)


def main(figure: str = "photon_transfer.png") -> dict[str, float]:
    """Draw the figure, and return gain and dark deviation, measured and described."""
    sensor = opusim.load_description("camera_low_light").camera.sensor
    with opusim.open_device("camera_low_light", n_inputs=10, n_outputs=2000) as device:
        frames = [device.flat_frames(64, photons=photons) for photons in PHOTONS]
    mean = np.array([each.mean() for each in frames])
    # frames are subtracted from each other, so that what pixels have of their own drops out
    variance = np.array([np.diff(each, axis=0).var() / 2 for each in frames])
    gain, dark = np.polyfit(mean - mean[0], variance, 1)
    found = {"gain": gain, "gain described": sensor.gain_dn_per_e, "dark deviation": dark**0.5}
    plt.plot(mean - mean[0], variance, "o", label="64 frames at each light")
    plt.plot(mean - mean[0], dark + gain * (mean - mean[0]), label=f"slope {gain:.3f} DN per electron")
    plt.xlabel("mean above dark [DN]")
    plt.ylabel("variance [DN²]")
    plt.title("Photon transfer curve of camera_low_light")
    plt.legend()
    plt.savefig(figure, dpi=100, bbox_inches="tight")
    print(f"gain {gain:.3f} DN per electron, described {sensor.gain_dn_per_e:g}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
