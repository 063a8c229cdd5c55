"""Damaged and hostile content for every kind of file, drawn by hypothesis, and the rule that its reader has to keep."""

import copy
import datetime
import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.conftest import FRESH

SECONDS = 20
"""In which each read must end; a sound file takes milliseconds."""
LONGEST = 3000
"""Characters of an error line, at most."""


class TooLong(BaseException):
    """A reader that hangs; no handler of Exception takes it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stop what is still at work after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TooLong(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def examples(number: int) -> Any:
    """Settings of a test: a quarter of so many examples, and twenty times as many in `make nightly`."""
    return settings(max_examples=number * 20 if FRESH else number // 4)


def read_or_refused(
    read: Callable[[], Any], refusal: type[Exception] | tuple[type[Exception], ...], *, names: str = ""
) -> Any:
    """Return what a reader returns, or None if it refuses the file with the error that it documents, in one line.

    The line has to name `names`, such as the file. Any other error fails the test.
    """
    try:
        with within(SECONDS):
            return read()
    except refusal as error:
        text = str(error)
        assert "\n" not in text, text
        assert names in text, text
        assert 0 < len(text) <= LONGEST, text[:LONGEST]
        return None


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400),
    *(0.5, -0.0, 5e-324, 1e-300, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *("", " ", "0", "1e5", "nan", "inf", "true", "gaussian", "a\0b", "a\nb", "\ud800", "é\u202e", "x" * 5000),
    *("../../etc/passwd", "remote:/", "/dev/zero", "/"),
    *([], {}, [[]], [{}], [None], [math.nan], {"": 1}, {"kind": []}, {"kind": "bp"}, {"a": {"b": {}}}),
    [1, 2, 3],
)
"""Values that no reader may trip over."""
DATES = (datetime.date(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59), datetime.time(0))
_NAMES = ("", "kind", "schema", "schema_version", "steps", "a.b", "__class__", "\0", "inf", "x" * 300)


def damaged_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """Random bytes, and a sound file that is cut, has other bytes in it, or is repeated."""
    place = st.integers(0, len(content))
    odd = [b"\0", b"\xff\xfe", b"\n", b'"', b"{", b"[" * 200, b"9" * 5000]
    piece = st.binary(max_size=12) | st.sampled_from(odd)
    return st.one_of(
        st.binary(max_size=200),
        place.map(lambda end: content[:end]),
        st.builds(lambda start, end, new: content[:start] + new + content[end:], place, place, piece),
        st.builds(lambda start, new: content[:start] + new + content[start + len(new) :], place, piece),
        place.map(lambda end: content + content[:end]),
    )


def damaged_values(content: Any, *, odd: tuple[Any, ...] = ODD) -> st.SearchStrategy[Any]:
    """A sound document with one to three changes: values of other types and sizes, keys that are missing or new."""
    places = list(_places(content))
    change = st.tuples(
        st.sampled_from(places),
        st.sampled_from(["replace", "replace", "replace", "remove", "add", "wrap", "nest"]),
        st.sampled_from(odd),
        st.sampled_from(_NAMES),
    )
    return st.lists(change, min_size=1, max_size=3).map(lambda changes: _changed(content, changes))


def to_toml(content: Mapping[str, Any]) -> str:
    """Return a document as TOML, also if it holds infinite numbers, dates or long integers; None leaves a key out."""
    given = {key: value for key, value in content.items() if value is not None}
    return "".join(f"{json.dumps(_writable(key))} = {_toml(value)}\n" for key, value in given.items())


def to_json(content: Any) -> bytes:
    """Return a document as JSON, with NaN and infinity as Python writes them."""
    return json.dumps(content, default=str).encode()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    )
    for key, below in inner:
        yield from _places(below, (*path, key))


def _changed(content: Any, changes: list[tuple[Any, ...]]) -> Any:
    content = copy.deepcopy(content)
    for path, kind, new, name in changes:
        holder = content
        try:
            for key in path[:-1]:
                holder = holder[key]
            value = holder[path[-1]]
        except (KeyError, IndexError, TypeError):  # an earlier change took it away
            continue
        if isinstance(holder, str):
            continue
        if kind == "remove":
            del holder[path[-1]]
        elif kind == "add" and isinstance(holder, dict):
            holder[name] = copy.deepcopy(new)
        elif kind == "wrap":
            holder[path[-1]] = [value]
        elif kind == "nest":
            holder[path[-1]] = _nested(value)
        else:
            holder[path[-1]] = copy.deepcopy(new)
    return content


def _nested(value: Any) -> Any:
    for _ in range(70):
        value = [value]
    return value


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # TOML has no lone surrogates


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(_writable(k))} = {_toml(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
    if isinstance(value, str):
        return json.dumps(_writable(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool | int | datetime.date | datetime.time):
        return json.dumps(value) if isinstance(value, bool | int) else value.isoformat()
    return repr(float(value))
