"""Slow, obvious twins of the numba kernels, in plain Python integers and float64."""

import math

MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Ten rounds on Python integers, as the paper writes them."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK, key >> 32
    for round_number in range(10):
        if round_number > 0:
            k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
        high_0, low_0 = divmod(0xD2511F53 * c0, 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
    return c0, c1, c2, c3


def normal_pair(high: int, low: int, angle: int) -> tuple[float, float]:
    """Box-Muller in float64: the arc of +-45 degrees, reflected by bits 30 and 31."""
    u = (high * 2**32 + low + 0.5) / 2**64
    tail = (2**64 - 1 - high * 2**32 - low + 0.5) / 2**64  # 1 - u without cancellation
    radius = math.sqrt(-2.0 * (math.log1p(-tail) if u > 0.5 else math.log(u)))
    point = angle & 0x3FFFFFFF
    if point >= 2**29:
        point -= 2**30
    theta = point / 2**29 * math.pi / 4
    x, y = math.cos(theta), math.sin(theta)
    if angle & 0x40000000:
        x, y = y, x
    if angle & 0x80000000:
        x, y = -x, -y
    return x * radius, y * radius


def normals(length: int, *, reading: int, step: int, key: int) -> list[float]:
    """The first numbers of a reading: 512 cosines, then their 512 sines, chunk by chunk, from 256 blocks each."""
    out: list[float] = []
    block = 0
    while len(out) < length:
        blocks = [philox4x32((block + i, reading, step & MASK, step >> 32), key) for i in range(256)]
        words = [word[:2] for word in blocks] + [word[2:] for word in blocks]
        pairs = [
            normal_pair(high, ((mixed & 0xFF) << 24) + (1 << 23), (mixed >> 8 << 8) + 128)
            for high, mixed in words
        ]
        out += [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        block += 256
    return out[:length]


def medium_entry(table: list, output: int, column: int, seed: int, plane: int = 0, epoch: int = 0) -> float:
    """Entry (output, input) of a medium by its rule."""
    words = philox4x32((output // 8, column, plane, epoch), seed)
    half = output % 8
    return table[(words[half // 2] >> (16 * (half % 2))) & 0xFFFF]
