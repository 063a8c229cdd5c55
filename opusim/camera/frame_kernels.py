"""Numba kernels that expose whole frames: from complex fields to digital numbers, or to recovered projections.

Fields are in mirror units (|u|^2 of one mirror has mean 2); `gain_e` takes |u|^2 to expected photo-electrons. Every
pixel is worked on alone, so results depend neither on how rows are split over threads nor on the processor's order.
"""

from __future__ import annotations

import numba
import numpy as np

from opusim.camera.count_kernels import fill_numbers

_PIXELS_AT_ONCE = 1024  # scratch rows of 8 kB stay in the first-level cache
_Sensor = tuple[float, float, float, float, float, float]


@numba.njit(nogil=True, error_model="numpy")
def _fill_rates(
    rates: np.ndarray, re: np.ndarray, im: np.ndarray, gain_e: np.ndarray, dark_e: np.ndarray
) -> None:
    """Expected electrons of fields: gain_e |u|^2 + dark_e."""
    for i in range(rates.size):
        a, b = np.float64(re[i]), np.float64(im[i])
        rates[i] = gain_e[i] * (a * a + b * b) + dark_e[i]


@numba.njit(nogil=True, error_model="numpy")
def _fill_complement_rates(
    rates: np.ndarray,
    re: np.ndarray,
    im: np.ndarray,
    anchor: np.ndarray,
    gain_e: np.ndarray,
    dark_e: np.ndarray,
) -> None:
    """Expected electrons of the complements' fields: gain_e |u_a - u|^2 + dark_e."""
    for i in range(rates.size):
        a, b = np.float64(anchor[0, i] - re[i]), np.float64(anchor[1, i] - im[i])
        rates[i] = gain_e[i] * (a * a + b * b) + dark_e[i]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def expose_fields(
    numbers: np.ndarray, field: np.ndarray, pixel: np.ndarray, noise: np.ndarray, sensor: _Sensor
) -> None:
    """Frames of given fields.

    Args:
        numbers: float32, shape (rows, pixels), is overwritten, DN.
        field: float32, shape (2, rows, pixels): real and imaginary part.
        pixel: float64, shape (3, pixels): gain_e, dark_e and offset_e of each pixel.
        noise: float32, shape (2, rows, pixels): N(0, 1) for counts and for read noise; length 0 on the last axis
            where both are off.
        sensor: as for `opusim.camera.count_kernels.fill_numbers`.
    """
    scratch, rates = np.empty(_PIXELS_AT_ONCE), np.empty(_PIXELS_AT_ONCE)
    for row in range(numbers.shape[0]):
        for start in range(0, numbers.shape[1], _PIXELS_AT_ONCE):
            stop = min(start + _PIXELS_AT_ONCE, numbers.shape[1])
            got, rate = scratch[: stop - start], rates[: stop - start]
            _fill_rates(
                rate,
                field[0, row, start:stop],
                field[1, row, start:stop],
                pixel[0, start:stop],
                pixel[1, start:stop],
            )
            fill_numbers(
                got, rate, pixel[2, start:stop], noise[0, row, start:stop], noise[1, row, start:stop], sensor
            )
            numbers[row, start:stop] = got


@numba.njit(cache=True, nogil=True, error_model="numpy")
def recover_rows(
    y: np.ndarray,
    field: np.ndarray,
    anchor: np.ndarray,
    pixel: np.ndarray,
    decode: np.ndarray,
    shift: np.ndarray,
    noise: np.ndarray,
    sensor: _Sensor,
) -> None:
    """Projections of ternary vectors from four frames each: y = scale (I_p - I_{a-p} - I_n + I_{a-n}) - shift offset.

    Args:
        y: float32, shape (rows, pixels), is overwritten, projection units.
        field: float32, shape (4, rows, pixels): real and imaginary part of the positive frames' fields, then of the
            negative frames'.
        anchor: float32, shape (2, pixels): the anchor's field.
        pixel: float64, shape (3, pixels), as for `expose_fields`.
        decode: float64, shape (2, pixels): scale [1/DN] and offset of each pixel.
        shift: float64, shape (rows,): share of the anchor that each vector holds, sum(x) / mirrors.
        noise: float32, shape (8, rows, pixels): for each of the four frames the numbers of counts and of read noise;
            length 0 on the last axis where both are off.
        sensor: as for `opusim.camera.count_kernels.fill_numbers`.
    """
    scratch, rates, total = np.empty(_PIXELS_AT_ONCE), np.empty(_PIXELS_AT_ONCE), np.empty(_PIXELS_AT_ONCE)
    for row in range(y.shape[0]):
        for start in range(0, y.shape[1], _PIXELS_AT_ONCE):
            stop = min(start + _PIXELS_AT_ONCE, y.shape[1])
            got, rate, signed = scratch[: stop - start], rates[: stop - start], total[: stop - start]
            gain_e, dark_e, offset_e = pixel[0, start:stop], pixel[1, start:stop], pixel[2, start:stop]
            signed[:] = 0.0
            for frame in range(4):
                half = 2 * (frame // 2)
                re, im = field[half, row, start:stop], field[half + 1, row, start:stop]
                if frame % 2 == 0:
                    _fill_rates(rate, re, im, gain_e, dark_e)
                else:
                    _fill_complement_rates(rate, re, im, anchor[:, start:stop], gain_e, dark_e)
                shot, read = noise[2 * frame, row, start:stop], noise[2 * frame + 1, row, start:stop]
                fill_numbers(got, rate, offset_e, shot, read, sensor)
                sign = 1.0 if frame in (0, 3) else -1.0
                for i in range(got.size):
                    signed[i] += sign * got[i]
            for i in range(got.size):
                y[row, start + i] = decode[0, start + i] * signed[i] - shift[row] * decode[1, start + i]
