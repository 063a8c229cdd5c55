"""Noise that a card draws itself: its words, its numbers, and their exact rounding, by torch's operations and kernels.

Without a card, torch's operations run on the processor and the kernels of Triton in its interpreter.
"""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NoReturn

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from opusim.files import OwnProcess
from opusim.randomness import cards, kernels, streams
from opusim.randomness.cards import CardCipher, chacha_words, normal_pairs
from opusim.randomness.rounded import ExactNoise, grid_of, turn_of_pair
from opusim.randomness.streams import NoiseStream, SeededStream, SystemStream, noise_stream, rounds_exactly

CARD = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STD = 1.7
GRID = grid_of(STD)
EXTREME = (0, 1, 2**15, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1)


@pytest.fixture(scope="module", name="compiled")
def _compiled() -> Any:
    """The kernels, in the interpreter unless there is a card (tests/conftest.py)."""
    pytest.importorskip("triton")
    return import_module("opusim.randomness.card_kernels")


def key_of(content: bytes) -> torch.Tensor:
    """The words of a key, on the card."""
    return torch.from_numpy(np.frombuffer(content, dtype="<u4").astype(np.int64)).to(CARD)


def words_for(numbers: int, nonce: int = 3) -> torch.Tensor:
    """Blocks under a fixed key for some numbers, on the card."""
    return chacha_words(key_of(bytes(range(32))), nonce, torch.arange(-(-numbers // 8), device=CARD))


def planted(high: int, low: int, angle: int, more: int) -> torch.Tensor:
    """A block whose four pairs have the same words."""
    return torch.tensor([high, low, angle, more] * 4, device=CARD).view(16, 1)


def test_blocks_are_those_of_the_standard() -> None:
    """RFC 8439, section 2.3.2, and the blocks of another implementation under random keys."""
    nonce = int.from_bytes(bytes.fromhex("000000090000004a00000000"), "little")
    (block,) = chacha_words(key_of(bytes(range(32))), nonce, torch.tensor([1], device=CARD)).t().cpu().numpy()
    assert block.astype("<u4").tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    generator = np.random.default_rng(0)
    for first in (0, 1, 2**32 - 3):
        key, nonce_bytes = generator.bytes(32), generator.bytes(12)
        start = first.to_bytes(4, "little") + nonce_bytes
        other = Cipher(algorithms.ChaCha20(key, start), None).encryptor().update(bytes(3 * 64))
        counters = torch.arange(first, first + 3, device=CARD)
        own = chacha_words(key_of(key), int.from_bytes(nonce_bytes, "little"), counters).t().cpu().numpy()
        assert own.astype("<u4").tobytes() == other


@pytest.mark.parametrize("angle", EXTREME)
@pytest.mark.parametrize("high", EXTREME)
def test_numbers_keep_their_bound_against_exact_arithmetic(high: int, angle: int) -> None:
    for low, more in ((1, 0), (2**32 - 1, 2**31 + 5)):
        numbers, (error, *_) = normal_pairs(planted(high, low, angle, more))
        u, v = (high << 32) | low, (angle << 32) | more
        for value, sine in zip(numbers[:, 0].tolist(), (False, True), strict=True):
            assert abs(value - exact(u, turn_of_pair(v, sine=sine))) <= error


def exact(u: int, v: int) -> float:
    """X of the middles of the digits that were not drawn."""
    with mpmath.workdps(50):
        middles = ((mpmath.mpf(word) + 0.5) / 2**64 for word in (u, v))
        radius, turn = (-2 * mpmath.log(next(middles))) ** 0.5, next(middles)
        return float(radius * mpmath.cos(2 * mpmath.pi * turn))


def test_rounding_is_that_of_the_processor() -> None:
    """Equal digits give the same multiple of the grid, whichever code rounds."""
    chunks = 3
    words = words_for(chunks * kernels.CHUNK)
    y = torch.randn(chunks * kernels.CHUNK, generator=torch.Generator().manual_seed(0)) * 50
    own = y.clone().to(CARD)
    assert not cards.add_rounded(own, GRID, STD / GRID, words).any()
    # the processor's chunks: 512 pairs, first their cosine halves
    order = torch.arange(len(y)).view(2, chunks, kernels.PAIRS).transpose(0, 1).reshape(-1)
    drawn = words.cpu().view(4, 4, -1).transpose(0, 1).reshape(4, chunks, kernels.PAIRS).transpose(0, 1)
    other, opened = y[order].numpy(), np.empty((len(y), 3), np.uint64)
    drawn_words = np.ascontiguousarray(drawn.numpy().astype(np.uint32))
    assert kernels.add_rounded_from_words(other, GRID, STD / GRID, opened, drawn_words) == 0
    np.testing.assert_array_equal(own.cpu()[order].numpy(), other)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter: infinity less infinity
@pytest.mark.parametrize("count", [1, 9, 3001])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_kernels_give_the_numbers_of_the_operations(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, count: int, kind: torch.dtype
) -> None:
    monkeypatch.setattr(compiled, "_BLOCKS", 512)  # fewer programs for the interpreter
    key, words = key_of(bytes(range(32))), words_for(count)
    expected, errors = normal_pairs(words)
    found = torch.empty(count, dtype=torch.float64, device=CARD)
    compiled.fill(found, key, 3)
    bound = errors.repeat(2)[:count]
    assert ((found - expected.view(-1)[:count]).abs() <= bound).all()
    y = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=kind).to(CARD) * 1e3
    y[0] = torch.inf
    y[1:2] = -GRID / 4
    own, other = y.clone(), y.clone()
    cards.add_rounded(own, GRID, STD / GRID, words)
    assert compiled.add_rounded(other, GRID, STD / GRID, key, 3) == []
    assert torch.equal(own, other)
    assert torch.equal(own.signbit(), other.signbit())


@pytest.mark.parametrize("fused", [False, True])
def test_open_numbers_are_settled_by_more_digits(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """A draw whose bound reaches every edge: all numbers are open, and interval arithmetic decides them."""
    monkeypatch.setattr(cards, "ERROR", 1.0)
    monkeypatch.setattr(compiled, "_ERROR", compiled.tl.constexpr(1.0))
    monkeypatch.setattr(cards, "_agrees", lambda *args, **given: True)
    cipher, count = CardCipher(CARD, fused=fused), 13
    y = torch.linspace(-5, 5, count, dtype=torch.float64, device=CARD)
    noisy = y.clone()
    cipher.add_rounded(noisy, STD, lambda: 2**63)
    words = chacha_words(cipher._key, 0, torch.arange(2, device=CARD)).view(4, 4, -1).transpose(0, 1)
    high, low, angle, more = words.reshape(4, -1).tolist()
    for place, value in enumerate(y.tolist()):
        half, pair = divmod(place, 8)
        v = turn_of_pair((angle[pair] << 32) | more[pair], sine=bool(half))
        digits = np.array([[(high[pair] << 32) | low[pair], v]], dtype=np.uint64)
        expected = ExactNoise(digits, lambda _: 2**63, STD, "gaussian")._exact(0, value) * GRID
        assert noisy[place] == expected


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_cards(capability: int) -> None:
    """Also without a card: to PTX in which every constant is a float64, roots and quotients are rounded to nearest."""
    pytest.importorskip("triton")
    given = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(capability)],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    for name, text in json.loads(found.stdout).items():
        assert "0d3FA8618618618618" in text, name  # 1 / 21
        for operation in ("div", "sqrt"):
            kinds = set(re.findall(rf"\b{operation}[\w.]*f64", text))
            assert kinds == {f"{operation}.rn.f64"}, name
        assert not re.findall(r"\b(?:add|sub|mul|fma|div|sqrt|sin|cos|lg2|ex2)\b[\w.]*f32", text), name


_COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from opusim.randomness import card_kernels as kernels

sizes = {"nonce": "i32", "count": "i32", "blocks": "i32", "size": "constexpr"}
kinds = {"_fill": {"out": "*fp32", "key": "*i64"}}
kinds["_add_rounded"] = {"out": "*fp32", "scale": "*fp64", "key": "*i64", "opened": "*i64"}
found = {}
for name, given in kinds.items():
    kernel = getattr(kernels, name)
    kind = {argument: (given | sizes)[argument] for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=kind, constexprs={"size": 128})
    found[name] = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["ptx"]
print(json.dumps(found))
"""


def test_each_draw_has_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[tuple[int, ...], int]] = []

    def noting(key: torch.Tensor, nonce: int, counters: torch.Tensor) -> torch.Tensor:
        used.append((tuple(key.tolist()), nonce))
        return chacha_words(key, nonce, counters)

    monkeypatch.setattr(cards, "chacha_words", noting)
    monkeypatch.setattr(cards, "_agrees", lambda *args, **given: True)
    monkeypatch.setattr(cards, "_DRAWS", 3)
    monkeypatch.setattr(cards, "_PART", 16)
    for _ in range(2):
        cipher = CardCipher(CARD, fused=False)
        cipher.normal(40)
        cipher.add_rounded(torch.zeros(40, device=CARD), STD, lambda: 0)
        cipher.normal(0)
    assert len(set(used)) == len(used) >= 12
    assert len({key for key, _ in used}) >= 4  # a key makes three draws here


@pytest.fixture(name="on_card")
def _on_card(monkeypatch: pytest.MonkeyPatch) -> str:
    """The type of a device that draws itself: a card, or the processor in its place."""
    monkeypatch.setattr(streams, "CARDS", (CARD.type,))
    return CARD.type


def first_of(stream: SystemStream) -> float:
    return float(stream.normal((1,), device=CARD))


def test_a_fork_and_a_copied_stream_draw_with_other_keys(
    on_card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SystemStream()
    first_of(stream)
    assert float(stream.normal((1,), device=on_card)) != 0  # the same card without its number
    assert len(stream._cards) == 1
    key = stream._cards[CARD]._key.tolist()
    copied = pickle.loads(pickle.dumps(stream))
    first_of(copied)
    assert copied._cards[CARD]._key.tolist() != key
    assert copy.deepcopy(stream._cards[CARD])._key.tolist() != key
    if on_card == "cpu":  # no card survives a fork
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            assert pool.submit(_key_after_fork, stream).result() != key
    monkeypatch.setattr(OwnProcess, "is_this", False)  # as after a fork, also into the same process number
    first_of(stream)
    assert stream._cards[CARD]._key.tolist() != key


def _key_after_fork(stream: SystemStream) -> list[int]:
    first_of(stream)
    return list(stream._cards[CARD]._key.tolist())


def test_numbers_have_the_moments_of_the_law(on_card: str) -> None:
    """Mean, variance, fourth moment and neighbours' product of n numbers, each within five standard errors."""
    n = 200_000
    x = SystemStream().normal((n,), device=on_card).double().cpu()
    noise = SystemStream().add_rounded(torch.zeros(n, device=on_card), STD).double().cpu()
    assert ((noise / GRID).frac() == 0).all()
    for numbers in (x, noise / STD):
        for found, expected, std in (
            (numbers.mean(), 0, 1),
            (numbers.square().mean(), 1, 2**0.5),
            (numbers.pow(4).mean(), 3, 96**0.5),
            ((numbers[1:] * numbers[:-1]).mean(), 0, 1),
        ):
            assert abs(float(found) - expected) < 5 * std * n**-0.5


@pytest.mark.parametrize("fused", [False, True])
def test_tensors_with_gaps_get_noise_in_their_own_places_only(
    on_card: str, compiled: Any, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    stream = SystemStream()
    monkeypatch.setattr(cards, "_agrees", lambda *args, **given: True)
    stream._current_cipher()
    stream._cards[CARD] = CardCipher(CARD, fused=fused)
    for view in (lambda whole: whole.t(), lambda whole: whole[:, :1], lambda whole: whole.view(-1)[::2]):
        whole = torch.zeros(6, 4, device=on_card)
        y = view(whole)
        assert stream.add_rounded(y, STD) is y
        assert (y != 0).float().mean() > 0.9
        assert (whole != 0).sum() == (y != 0).sum()
        before = y.clone()
        assert torch.equal(stream.add_rounded(y, 0.0), before)
    with pytest.raises(ValueError, match="give a vector"):
        compiled.fill(torch.zeros(20, device=on_card)[::2], stream._cards[CARD]._key, 0)
    with pytest.raises(TypeError, match="float32 or torch.float64"):
        stream.add_rounded(torch.zeros(3, dtype=torch.float16, device=on_card), STD)


def drawn(out: torch.Tensor, key: torch.Tensor, nonce: int, *, blocks: int | None = None) -> None:
    """What a kernel fills in, or the same of some blocks, again and again."""
    counters = torch.arange(-(-len(out) // 8), device=CARD) % (blocks or 2**32)
    out.copy_(normal_pairs(chacha_words(key, nonce, counters))[0].view(-1)[: len(out)])


def rounded(y: torch.Tensor, grid: float, ratio: float, key: torch.Tensor, nonce: int) -> list[int]:
    cards.add_rounded(y, grid, ratio, chacha_words(key, nonce, torch.arange(-(-len(y) // 8), device=CARD)))
    return []


def minus_zero(y: torch.Tensor, *given: Any) -> list[int]:
    rounded(y, *given)
    y[y == 0] *= -1.0
    return []


def missing(*_: Any) -> NoReturn:
    raise RuntimeError("no compiler")


FAULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "none": (drawn, rounded, False),
    "float32": (lambda out, *given: drawn(half := out.float(), *given) or out.copy_(half), rounded, True),
    "one nonce": (lambda out, key, nonce: drawn(out, key, 0), rounded, True),
    "repeated blocks": (lambda *given: drawn(*given, blocks=1024), rounded, True),
    "no noise": (drawn, lambda *_: [], True),
    "minus zero": (drawn, minus_zero, True),
    "no compiler": (missing, missing, True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_card_that_computes_otherwise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, add, faulty = FAULTS[name]
    monkeypatch.setattr(cards, "card_kernels", SimpleNamespace(fill=fill, add_rounded=add))
    cards._agrees.cache_clear()
    told = pytest.warns(UserWarning, match="torch's operations draw it") if faulty else nullcontext()
    with told:
        assert CardCipher(CARD, fused=True)._fused is not faulty
    cards._agrees.cache_clear()


def test_a_kernel_that_leaves_many_numbers_open_releases_none(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MOST_OPEN", 3)
    monkeypatch.setattr(compiled, "_MOST_OPEN", compiled.tl.constexpr(3))
    monkeypatch.setattr(compiled, "_ERROR", compiled.tl.constexpr(1.0))
    y = torch.zeros(40, device=CARD)
    with pytest.raises(RuntimeError, match="all are NaN now"):
        compiled.add_rounded(y, GRID, STD / GRID, key_of(bytes(32)), 0)
    assert y.isnan().all()


def test_no_graph_repeats_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    cipher = CardCipher(CARD)
    monkeypatch.setattr(cipher, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured CUDA graph would repeat"):
        cipher._next()


@pytest.mark.parametrize("stream", [SeededStream(1, "noise"), SystemStream()], ids=["seeded", "system"])
@pytest.mark.parametrize("on_a_card", [False, True])
def test_no_zero_tells_the_sign_of_a_number(
    stream: SeededStream | SystemStream, on_a_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minus zero would stand only where s + sigma G is just below 0, or s itself."""
    if on_a_card:
        monkeypatch.setattr(streams, "CARDS", (CARD.type,))
    for s in (-GRID / 4, GRID / 4):
        for kind in (torch.float32, torch.float64):
            y = stream.add_rounded(torch.full((400_000,), s, dtype=kind), STD)
            zeros = y[y == 0]
            assert len(zeros) > 5  # 92 are expected
            assert not zeros.signbit().any()
        found = stream.rounded(20_000, STD).added_to(torch.full((20_000,), s))
        assert not found[found == 0].signbit().any()
    other = NoiseStream.rounded(stream, 20_000, STD).added_to(torch.full((20_000,), -GRID / 4))
    assert not other[other == 0].signbit().any()


def test_a_stream_of_a_mode_says_where_it_rounds_exactly() -> None:
    table = {("cpu", "experiment"): True, ("cpu", "release"): True, ("cuda", "release"): True}
    for device in ("cpu", "cuda", "mps"):
        for mode in ("experiment", "release"):
            assert rounds_exactly(device, mode) is table.get((device, mode), False)
    assert isinstance(noise_stream("release", None, "noise"), SystemStream)
