"""The two instruments of a bench, and sequences of patterns whose frames are matched to them.

A laboratory writes `Patterns` and `Grabber` around its own mirror array and camera. `Sequencer` shows patterns and
returns one frame for each, in order, or an error that says why it cannot.

**Which frame belongs to which pattern.** The mirrors give a pulse at the start of every pattern, and the camera takes a
frame at every pulse. Four tests show frames that do not match, and the whole sequence is then shown again; frames are
never averaged, moved or left out:

| test | finds |
| --- | --- |
| as many frames come as patterns were shown | a pulse that the camera missed, a frame that was dropped |
| counters rise by one | dropped frames, frames that were delivered twice |
| marks: a blank and an anchor pattern before and after every 64 patterns look dark and bright | a pulse too many, |
| | frames that come late, light that is gone or has grown |
| successive frames of different patterns differ | a frame whose numbers are those of the frame before |

The first three look at no pattern of the caller's. The last one compares frames for equality only. All four miss a lost
pulse and an extra one between the same two marks, if the camera numbers the frames without a gap.

`MirrorLayout` assigns mirrors to inputs. A window in the middle of the array is cut into square blocks of mirrors that
are switched together. Every input gets the same number of blocks, and a share of the blocks is the reference, which
carries no data. The places are random, so that all inputs get the same mean light of an uneven beam, and the speckle
grains of one input are as small as those of all.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from opusim.errors import ConfigError, DeviceError, DeviceFault, DeviceTimeout, DeviceUnavailable
from opusim.plugins import FOREIGN_ERRORS
from opusim.processes import pause
from opusim.tables import Shown

_SEED = 20261128
"""Seed of the order of blocks, so that equal arguments give equal layouts."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MirrorLayout(Shown):
    """Groups of mirrors: one for each input, and the reference after them.

    Attributes:
        owner: group of each block, int32, shape (block rows, block columns); -1: always off.
        macro_pixel: side of a block, mirrors.
        corner: row and column of the window's first mirror.
        shape: rows and columns of the array.
        n_inputs: groups that carry data.
    """

    owner: np.ndarray
    macro_pixel: int
    corner: tuple[int, int]
    shape: tuple[int, int]
    n_inputs: int

    def _shown(self) -> dict[str, object]:
        return {
            "inputs": self.n_inputs,
            "blocks": " x ".join(map(str, self.owner.shape)),
            "macro_pixel": self.macro_pixel,
            "corner": self.corner,
            "mirrors": " x ".join(map(str, self.shape)),
        }

    @property
    def groups(self) -> int:
        """Number of groups: the inputs and the reference."""
        return self.n_inputs + 1

    @cached_property
    def _blocks(self) -> np.ndarray:
        """Number of blocks of each group."""
        return np.bincount(self.owner[self.owner >= 0], minlength=self.groups)

    @property
    def mirrors_of_anchor(self) -> float:
        """Blocks of the anchor over the blocks of an input: M, the number of inputs that would make the anchor."""
        return float(self._blocks.sum() / self._blocks[0])

    def share_on(self, switches: np.ndarray) -> float:
        """Return the mean share of the anchor's blocks that are on in some patterns."""
        return float(np.mean(switches @ self._blocks) / self._blocks.sum())

    def mirrors(self, switches: np.ndarray) -> np.ndarray:
        """Return patterns of the whole array: uint8, shape (patterns, rows, columns).

        Args:
            switches: boolean, shape (patterns, groups).
        """
        padded = np.zeros((len(switches), self.groups + 1), dtype=np.uint8)
        padded[:, :-1] = switches
        blocks = padded[:, self.owner]  # -1 is the last column
        side = self.macro_pixel
        window = blocks.repeat(side, axis=1).repeat(side, axis=2)
        patterns = np.zeros((len(switches), *self.shape), dtype=np.uint8)
        (row, column), (rows, columns) = self.corner, window.shape[1:]
        patterns[:, row : row + rows, column : column + columns] = window
        return patterns

    def anchor(self) -> np.ndarray:
        """Return the switches of the anchor, every group on: shape (1, groups)."""
        return np.ones((1, self.groups), dtype=bool)

    def reference(self) -> np.ndarray:
        """Return the switches of the reference without data: shape (1, groups)."""
        return ~self.data(np.ones((1, self.n_inputs)))

    def data(self, x: np.ndarray) -> np.ndarray:
        """Return switches of binary vectors: shape (vectors, groups), the reference off.

        Args:
            x: entries 0 and 1, shape (vectors, n), n at most n_inputs.
        """
        switches = np.zeros((len(x), self.groups), dtype=bool)
        switches[:, : x.shape[1]] = x != 0
        return switches

    def ternary(self, x: np.ndarray, anchor: np.ndarray | None = None) -> np.ndarray:
        """Return switches of the four frames of each ternary vector x = p - n: p, a - p, n, a - n, vector by vector.

        Args:
            x: entries -1, 0 and 1, shape (vectors, n), n at most n_inputs.
            anchor: switches of a, shape (1, groups), with every input on; None: all groups on.
        """
        a = self.anchor() if anchor is None else anchor
        p, n = self.data(x > 0), self.data(x < 0)
        return np.stack([p, a & ~p, n, a & ~n], axis=1).reshape(-1, self.groups)

    def marked(self, switches: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
        """Return patterns with marks, blank and anchor, before every `every` of them and at the end, and which are."""
        mark = np.concatenate([np.zeros_like(self.anchor()), self.anchor()])
        parts, is_mark = [], []
        for start in range(0, len(switches), every):
            part = switches[start : start + every]
            parts += [mark, part]
            is_mark += [np.ones(len(mark), dtype=bool), np.zeros(len(part), dtype=bool)]
        parts.append(mark)
        is_mark.append(np.ones(len(mark), dtype=bool))
        return np.concatenate(parts), np.concatenate(is_mark)


def mirror_layout(
    shape: tuple[int, int],
    n_inputs: int,
    *,
    macro_pixel: int,
    reference_share: float,
    name: str,
    window: tuple[int | None, int | None] = (None, None),
) -> MirrorLayout:
    """Assign the blocks of a window in the middle of an array.

    Every input gets k = floor((1 - reference_share) blocks / n_inputs) blocks, at least 1; the reference gets
    k n_inputs reference_share / (1 - reference_share), at least 1; the other blocks stay off.

    Args:
        shape: rows and columns of the array.
        n_inputs: number of inputs.
        macro_pixel: side of a block, mirrors.
        reference_share: share of the blocks of the anchor that are the reference.
        name: of the device, for errors.
        window: rows and columns of mirrors that are used, None for all.

    Raises:
        ConfigError: the window is larger than the array, or has too few blocks.
    """
    used = []
    for length, wanted, key in zip(shape, window, ("window_rows", "window_columns"), strict=True):
        if wanted is not None and wanted > length:
            raise ConfigError(name, f"bench.{key}", f"is {wanted}, the array has {length}; make it smaller")
        used.append((length if wanted is None else wanted) // macro_pixel)
    blocks = used[0] * used[1]
    most_data = blocks - max(1, round(reference_share * blocks))
    each = most_data // n_inputs
    if each < 1:
        raise ConfigError(
            name,
            "bench.macro_pixel",
            f"is {macro_pixel}: the window has {blocks} blocks, {most_data} of them for data at bench.reference_share "
            f"= {reference_share:g}, and {n_inputs} inputs need one each; make it smaller, or open fewer inputs",
        )
    data = each * n_inputs
    reference = min(max(1, round(data * reference_share / (1 - reference_share))), blocks - data)
    groups = np.full(blocks, -1, dtype=np.int32)
    groups[:data] = np.arange(data) % n_inputs
    groups[data : data + reference] = n_inputs
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(_SEED)).numpy()
    owner = np.empty(blocks, dtype=np.int32)
    owner[order] = groups
    corner = [(length - macro_pixel * count) // 2 for length, count in zip(shape, used, strict=True)]
    return MirrorLayout(
        owner=owner.reshape(used[0], used[1]),
        macro_pixel=macro_pixel,
        corner=(corner[0], corner[1]),
        shape=(int(shape[0]), int(shape[1])),
        n_inputs=n_inputs,
    )


MARKED = 64
"""Patterns between two marks; a multiple of the frames of a ternary vector."""
_MARK = 2
"""Patterns of a mark: blank, then anchor."""
_DARK, _BRIGHT, _TOO_BRIGHT = 0.25, 0.5, 3.0
"""A blank mark lies below the first share of the way from blank to anchor, an anchor mark between the other two."""
_FULL = 0.99
"""Share of full scale above which the median of a mark is called saturated; read noise lowers full pixels a little."""
_PILE = 5
"""Numbers pile up at the largest one if it is met more often than this, and than the number below it."""
MOST_FLICKER = 0.05
"""Standard deviation of the anchor's light from frame to frame, over its mean, above which a failure is put to it."""
STABILISE = "stabilise the laser, its current and its temperature, and keep reflections out of it"
_LONGEST_TOLD = 300
"""Characters of another package's message that are shown."""
_LOOK = 2
"""Frames that are asked of the free-running camera after no frame came."""

Roi = tuple[int, int, int, int]
"""First row, first column, rows and columns of a region, pixels of the sensor."""


class Patterns(Protocol):
    """A binary mirror array (or a liquid-crystal modulator that is used as one). It gives a pulse for each pattern.

    A method raises OSError or TimeoutError for what may pass by itself, such as a lost link: opusim opens both
    instruments again and repeats the call (``access.attempts``). Any other exception ends the work as a fault.

    Attributes:
        shape: rows and columns of mirrors.
    """

    shape: tuple[int, int]

    def load(self, bits: np.ndarray) -> None:
        """Store patterns in place of those stored before.

        Args:
            bits: uint8, shape (patterns, rows, columns), 1: the mirror sends its light to the medium, 0: it does not.
        """

    def run(self, period_us: float) -> None:
        """Show the stored patterns once, in order, with a trigger pulse to the camera at the start of each.

        It may return at once or when the last pattern was shown; the camera keeps the frames until `Grabber.grab`.

        Args:
            period_us: time from pattern to pattern, microseconds.
        """

    def close(self) -> None:
        """Give the instrument back."""


class Grabber(Protocol):
    """A camera. Errors are those of `Patterns`.

    Attributes:
        bits: bits of a number, 1 to 16: numbers lie in [0, 2^bits - 1].
        shape: rows and columns of the whole sensor, pixels.
    """

    bits: int
    shape: tuple[int, int]

    def configure(self, *, exposure_us: float, roi: Roi, binning: int, trigger: bool) -> float:
        """Set the camera, forget every frame that was not grabbed, and wait for pulses.

        Automatic exposure, automatic gain and gamma are off; numbers are proportional to light above a black level.

        Args:
            exposure_us: exposure of a frame, microseconds.
            roi: first row, first column, rows and columns, pixels of the sensor.
            binning: pixels that become one along each axis; divides rows and columns.
            trigger: whether a frame is taken at every pulse; otherwise the camera runs by itself.

        Returns:
            The exposure that was set, microseconds; cameras round it.
        """

    def grab(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait for n frames, and return all that have come, the oldest first.

        Args:
            n: how many; the camera's buffer holds them all.

        Returns:
            Frames, unsigned integers, shape (n, rows / binning, columns / binning), and the camera's own number of each
            frame, integers that rise by one from frame to frame, also from one call to the next. Fewer than n if no
            further frame comes for a second or so; TimeoutError may be raised instead.
        """

    def close(self) -> None:
        """Give the instrument back."""


class FramesLost(Exception):  # a state that `Sequencer` repeats, and turns into an error of the device
    """Frames of a sequence do not match its patterns.

    Attributes:
        remedy: what to do.
        looks: whether a look at the camera without pulses tells more.
    """

    def __init__(self, told: str, remedy: str, *, looks: bool = False) -> None:
        super().__init__(told)
        self.remedy, self.looks = remedy, looks


class Sequencer:
    """Shows patterns of a layout of mirrors and returns a frame for each.

    Attributes:
        layout: of the mirrors.
        at_once: patterns of a sequence, marks not counted.
        repeated: sequences that were shown again, because their frames did not match.
        largest_dn: largest number of all frames so far.
        is_cut: whether numbers pile up at it, as they do where a camera's range ends.
        roi: region of the camera, as last configured.

    Args:
        patterns: the open mirror array.
        grabber: the open camera.
        layout: of the mirrors.
        name: the device's name, for messages.
        period_us: time from pattern to pattern, microseconds.
        at_once: patterns of a sequence.
        tries: how often a sequence is shown before lost frames are an error.
        count: called with the patterns of each sequence that is shown, marks and repetitions included.
    """

    def __init__(
        self,
        patterns: Patterns,
        grabber: Grabber,
        layout: MirrorLayout,
        *,
        name: str,
        period_us: float,
        at_once: int,
        tries: int,
        count: Callable[[int], None],
    ) -> None:
        self._patterns, self._grabber, self.layout = patterns, grabber, layout
        self._name, self._period_us, self.at_once, self._tries = name, period_us, at_once, tries
        self._count = count
        self._settings: dict[str, Any] = {}
        self._levels: tuple[float, float] | None = None
        self._last: int | None = None
        self.roi: Roi = (0, 0, 0, 0)
        self.repeated = self.largest_dn = 0
        self.is_cut = False

    @property
    def bits(self) -> int:
        """Bits of the camera's numbers."""
        return int(self._grabber.bits)

    @property
    def top_dn(self) -> int:
        """Largest number that these bits hold."""
        return int(2**self.bits - 1)

    def configure(self, *, exposure_us: float, roi: Roi, binning: int) -> float:
        """Set the camera, return the exposure that it took; marks are not compared until `expect` is called."""
        self._settings = {"exposure_us": exposure_us, "roi": roi, "binning": binning}
        self._levels, self.roi = None, roi
        return self._arm()

    def expect(self, blank_dn: float, anchor_dn: float) -> None:
        """Set the means of blank and anchor over the region, DN, with which marks are compared."""
        self._levels = (blank_dn, anchor_dn)

    def show(self, switches: np.ndarray, outputs: np.ndarray | None = None) -> np.ndarray:
        """Show patterns and return a frame for each.

        Args:
            switches: boolean, shape (patterns, layout.groups): which groups of mirrors are on.
            outputs: flat numbers of the pixels that are wanted, or None for whole frames.

        Returns:
            Unsigned integers: shape (patterns, len(outputs)), or (patterns, rows, columns).

        Raises:
            DeviceFault: frames were lost or doubled in every try, or an instrument broke its protocol.
            DeviceTimeout: no frame came.
            DeviceError: an instrument failed.
        """
        parts = []
        for start in range(0, len(switches), self.at_once):
            pause()
            part = switches[start : start + self.at_once]
            frames = self._shown(part)
            parts.append(frames if outputs is None else frames.reshape(len(part), -1)[:, outputs])
        if not parts:
            raise ValueError("switches holds no pattern; show at least one")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _shown(self, switches: np.ndarray) -> np.ndarray:
        """Show one sequence, again if its frames do not match."""
        marked, is_mark = self.layout.marked(switches, MARKED)
        shown = self.layout.mirrors(marked)
        reason, remedy, looks = "", "", False
        for _ in range(self._tries):
            if reason:
                self.repeated += 1
                self._arm()
            try:
                return self._taken(marked, is_mark, shown)[~is_mark]
            except FramesLost as error:
                reason, remedy, looks = str(error), error.remedy, error.looks
            except TimeoutError:
                reason, remedy, looks = "no frame came in time", self._missed(False), True
        if looks and not self._runs_freely():
            remedy = (
                "the camera gives no frame without pulses either; check its power, its link and its driver"
            )
        with suppress(DeviceError, OSError):
            self._arm()
        kind = DeviceTimeout if reason == "no frame came in time" else DeviceFault
        raise kind(
            f"device {self._name!r}: frames do not match the {len(marked)} patterns of a sequence in {self._tries} "
            f"of {self._tries} tries: {reason}; {remedy}"
        )

    def _taken(self, marked: np.ndarray, is_mark: np.ndarray, shown: np.ndarray) -> np.ndarray:
        """Return the frames of one sequence; FramesLost if they do not match the patterns."""
        self._count(len(shown))
        with instrument_calls(self._name, "Patterns.load"):
            self._patterns.load(shown)
        with instrument_calls(self._name, "Patterns.run"):
            self._patterns.run(self._period_us)
        with instrument_calls(self._name, "Grabber.grab"):
            found = self._grabber.grab(len(shown))
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise TypeError(f"it returned a {type(found).__name__}, not the frames and their numbers")
        frames, counters = self._as_promised(*found)
        last, self._last = self._last, int(counters[-1]) if len(counters) else None
        first = counters[:1] - 1 if last is None else [last]
        steps = np.diff(np.concatenate([first, counters]))
        if np.any(steps < 1):
            where = int(np.argmax(steps < 1))
            how = "stands still" if steps[where] == 0 else f"goes back by {-int(steps[where])}"
            raise FramesLost(
                f"the camera's counter {how} at frame {where}",
                "let Grabber.grab return each frame once, the oldest first, with the camera's own number",
            )
        skipped, missing = int((steps - 1).sum()), len(shown) - len(frames)
        jump = (
            f"the camera's counter jumps by {int(steps.max())} at frame {int(steps.argmax())}"
            if skipped
            else ""
        )
        if skipped and missing >= skipped:
            raise FramesLost(
                f"{jump}: its pulse came, and the frame was lost on the way",
                "check the link and the host's buffer, lower bench.frames_per_sequence, or lengthen "
                f"frames.frame_period_us = {self._period_us:g}",
            )
        if missing > 0 and not skipped:
            told = f"{missing} frames are missing, without a gap in the camera's counter"
            raise FramesLost(
                told if len(frames) else "no frame came", self._missed(len(frames) > 0), looks=True
            )
        if missing or skipped:
            raise FramesLost(
                f"{jump}, and {len(frames)} frames came" if skipped else f"{-missing} frames too many came",
                "the camera takes frames without a pulse, or pulses come twice: check that it waits for pulses, the "
                "trigger's polarity, and reflections on its cable",
            )
        varied = frames.max(axis=(1, 2)) > frames.min(axis=(1, 2))
        other = (marked[1:] != marked[:-1]).any(axis=1)
        same = np.flatnonzero((frames[1:] == frames[:-1]).all(axis=(1, 2)) & varied[1:] & other)
        if len(same):
            raise FramesLost(
                f"frames {int(same[0])} and {int(same[0]) + 1} are equal, and their patterns differ",
                "let Grabber.grab copy each frame out of the camera's buffer",
            )
        self._check_marks(frames[is_mark])
        return frames

    def _check_marks(self, marks: np.ndarray) -> None:
        """Compare blank and anchor marks with what they should look like.

        With w = anchor - blank of the means that `expect` was given, a blank mark must lie below blank + w / 4, and an
        anchor mark above blank + w / 2 and below the lesser of blank + 3 w and the middle of anchor and full scale,
        since full pixels hide how much the light has grown.
        """
        if self._levels is None:
            return
        means, (blank, anchor) = marks.mean(axis=(1, 2), dtype=np.float64), self._levels
        full = np.median(marks, axis=(1, 2)) > _FULL * self.top_dn
        way = anchor - blank
        most = min(blank + _TOO_BRIGHT * way, (anchor + self.top_dn) / 2)
        blanks, anchors = means[0::_MARK], means[1::_MARK]
        stray, gone = blanks > blank + _DARK * way, anchors < blank + _BRIGHT * way
        right = anchors[~gone & (anchors <= most)]
        flicker = float(right.std(ddof=1) / way) if len(right) > 1 and not stray.any() else 0.0
        for wrong, first, cause, remedy in (
            (anchors > most, 1, "there is too much light", "dim the laser, or cover the bench"),
            (
                stray,
                0,
                "frames are shifted, or there is light that no mirror switches",
                "cover the bench, or check the pulses",
            ),
            (gone, 1, "frames are shifted, or the light is gone", "check laser and shutter, then the pulses"),
        ):
            if wrong.any():
                where = int(np.argmax(wrong))
                place = _MARK * where + first
                if stray.any() and gone.any():
                    cause = "frames are shifted"
                    remedy = (
                        "check the pulses, and that Grabber.configure forgets frames that were not grabbed"
                    )
                elif flicker > MOST_FLICKER:
                    cause, remedy = f"the light fluctuates by {flicker:.0%} from frame to frame", STABILISE
                raise FramesLost(
                    f"the {('blank frame', 'anchor')[first]} that marks pattern {where * MARKED} shows "
                    f"{means[place]:.1f} DN{', saturated at full scale,' if full[place] else ''} and not "
                    f"{self._levels[first]:.1f}: {cause}",
                    remedy,
                )

    def _as_promised(self, frames: Any, counters: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return what a camera delivered; refuse what the protocol does not allow."""
        if frames is None or counters is None:
            frames, counters = [], []
        frames, counters = np.asarray(frames), np.asarray(counters)
        binning = int(self._settings["binning"])
        wanted = self.roi[2] // binning, self.roi[3] // binning
        if not frames.size and not counters.size:
            return np.zeros((0, *wanted), dtype=np.uint16), np.zeros(0, dtype=np.int64)
        problem = ""
        if frames.ndim != 3 or frames.shape[1:] != wanted:
            problem = f"frames of shape {frames.shape}, and the region has {wanted}"
        elif frames.dtype.kind != "u":
            problem = f"frames of dtype {frames.dtype}; return unsigned integers"
        elif np.iinfo(frames.dtype).max < self.top_dn:
            problem = (
                f"frames of dtype {frames.dtype}, which cannot hold bits = {self._grabber.bits}; return the camera's "
                "numbers uncut, or set bits"
            )
        elif counters.shape != (len(frames),) or counters.dtype.kind not in "iu":
            problem = (
                f"counters of shape {counters.shape} and dtype {counters.dtype} for {len(frames)} frames; return one "
                "integer for each"
            )
        elif int(frames.max()) >= 2**self._grabber.bits:
            unused = 8 * frames.dtype.itemsize - self._grabber.bits
            high = not (frames & ((1 << unused) - 1)).any()  # all bits in use are the highest
            problem = (
                f"the number {int(frames.max())}, and bits = {self._grabber.bits} end at "
                f"{2**self._grabber.bits - 1}; "
                + (f"shift the numbers right by {unused} bits" if high else "set bits, or unpack the numbers")
            )
        if problem:
            raise DeviceFault(f"device {self._name!r}: Grabber.grab returned {problem}")
        if (largest := int(frames.max())) >= self.largest_dn:
            there, below = int(np.sum(frames == largest)), int(np.sum(frames == largest - 1))
            self.largest_dn, self.is_cut = largest, there > max(below, _PILE)
        return frames, counters.astype(np.int64)

    def _arm(self) -> float:
        with instrument_calls(self._name, "Grabber.configure"):
            found = self._grabber.configure(**self._settings, trigger=True)
            if found is None:
                raise TypeError("it returned None, not the exposure that was set")
            exposure_us = float(found)
        self._last = None
        if not 0 < exposure_us < float("inf"):
            raise DeviceFault(
                f"device {self._name!r}: Grabber.configure returned {exposure_us!r}; return the exposure that was set, "
                "microseconds"
            )
        return exposure_us

    def _missed(self, some_came: bool) -> str:
        """Return what to do if the camera missed pulses, all or some of them."""
        exposure_us, (rows, columns) = self._settings["exposure_us"], self.roi[2:]
        causes = [
            "check the trigger cable" + ("" if some_came else ", its lines and its polarity"),
            f"lengthen frames.frame_period_us = {self._period_us:g}, which must hold the exposure ({exposure_us:g} us) "
            f"and the read-out of {rows} x {columns} pixels",
        ]
        first, second = causes[::-1] if some_came else causes
        return f"the camera delivers when it runs freely, so it missed pulses: {first}, or {second}"

    def _runs_freely(self) -> bool:
        """Return whether the camera gives frames without pulses."""
        with suppress(DeviceError, OSError), instrument_calls(self._name, "Grabber.grab"):
            self._grabber.configure(**self._settings, trigger=False)
            return len(self._grabber.grab(_LOOK)[0]) > 0
        return False


@contextmanager
def instrument_calls(name: str, what: str) -> Iterator[None]:
    """Turn an instrument's OSError into DeviceUnavailable, others but TimeoutError and DeviceError into DeviceFault."""
    try:
        yield
    except (DeviceError, TimeoutError):
        raise
    except OSError as error:
        raise DeviceUnavailable(
            f"device {name!r}: {what} failed ({error}); check its cables, power and driver, or raise "
            "access.attempts if it may pass"
        ) from error
    except FOREIGN_ERRORS as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_TOLD]
        raise DeviceFault(
            f"device {name!r}: {what} raised {told}; correct it, or raise OSError there if it may pass by itself"
        ) from error


Factory = Callable[[], Any]
"""Opens an instrument."""


def factory_of(name: str, key: str, named: str) -> Factory:
    """Return the factory ``module:name`` of an instrument; a module may also lie in the working folder.

    ConfigError if there is no such module or name; DeviceFault if the module raises when it is imported.
    """
    module, _, attribute = named.partition(":")
    folder, added = os.getcwd(), False
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file of the folder replaces no installed module
        added = True
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        own = error.name is None or module.split(".")[0] == error.name.split(".")[0]
        remedy = f"run where {module}.py lies, or install it" if own else f"install {error.name}"
        raise ConfigError(name, key, f"{named!r} does not import ({error}); {remedy}") from error
    except FOREIGN_ERRORS as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise DeviceFault(f"device {name!r}: {key} = {named!r} does not import ({told})") from error
    finally:
        if added:
            sys.path.remove(folder)
    if not callable(found):
        raise ConfigError(name, key, f"{module!r} has no function or class {attribute!r}; correct the name")
    factory: Factory = found
    return factory


def opened(name: str, what: str, factory: Factory, methods: tuple[str, ...]) -> Any:
    """Open an instrument; one that lacks a part of its protocol is closed again, and a DeviceFault."""
    with instrument_calls(name, what):
        found = factory()
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    rows_and_columns = getattr(found, "shape", None)
    problem = f"lacks {', '.join(missing)}" if missing else ""
    if not problem and not _is_shape(rows_and_columns):
        problem = f"has shape = {rows_and_columns!r}; give rows and columns, two integers above 0"
    bits = getattr(found, "bits", None)
    if not problem and "grab" in methods and not (isinstance(bits, int) and 1 <= bits <= 16):
        problem = f"has bits = {bits!r}; give the bits of its numbers, an integer from 1 to 16"
    if problem:
        with instrument_calls(name, what):
            getattr(found, "close", lambda: None)()
        raise DeviceFault(f"device {name!r}: what {what} opened {problem}")
    return found


def _is_shape(value: Any) -> bool:
    try:
        rows, columns = value
    except (TypeError, ValueError):
        return False
    return all(isinstance(length, int | np.integer) and length > 0 for length in (rows, columns))
