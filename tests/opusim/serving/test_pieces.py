"""The pieces of a served device, each without the network: keys, messages, turns, places, the journal."""

import datetime
import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim import ConfigError, DeviceError
from opusim.devices.usage import Usage
from opusim.errors import DeviceBusy, DeviceFault, DeviceTimeout, NoiseBelowCertificate, NoiseUnknown
from opusim.noise import (
    ConverterLatticeNoise,
    FluctuatingCountNoise,
    GaussianNoise,
    PhotonCountNoise,
    SignalGaussianNoise,
)
from opusim.serving.connections import BadMessage, Message, error_message, read_message, told_error
from opusim.serving.instrument import Window, law_of_outputs, packed_law, unpacked_law
from opusim.serving.journal import Entry, Journal, read_journal, usage_figure, usage_rows
from opusim.serving.keys import Users, make_key, own_key, read_key, server_key
from opusim.serving.server import FairQueue, Places
from tests.opusim.common import refuses
from tests.support.served import expire

# Keys


def test_a_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    key = make_key("alice", tmp_path / "keys")
    secret, public = tmp_path / "keys" / "alice.key", tmp_path / "keys" / "alice.pub"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert read_key(secret, secret=True) == key
    assert key.secret not in public.read_text() + repr(key)
    public.chmod(0o600)
    refuses(ConfigError, "secret: missing; this is a public file", read_key, public, secret=True)
    secret.chmod(0o640)
    refuses(ConfigError, "others may read this secret; run: chmod 600", read_key, secret, secret=True)
    refuses(ConfigError, "alice: is there already", make_key, "alice", tmp_path / "keys")


@pytest.mark.parametrize("name", ["", "../x", "a b", "a" * 65, ".hidden"])
def test_a_key_needs_a_plain_name(tmp_path: Path, name: str) -> None:
    refuses(ValueError, "must be letters, digits", make_key, name, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = ", "syntax: not a key file"),
        ('schema = 1\nname = "a"\npublic = "short"\nexpires = 2030-01-01', "public"),
        ("schema = 2", "schema"),
        ('schema = 1\nname = "a"\nextra = 1', "extra"),
    ],
)
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.pub").write_text(text)
    refuses(ConfigError, message, read_key, tmp_path / "bad.pub", secret=False)


def test_a_user_is_told_which_key_is_missing_or_expired(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "opusim" / "keys"
    refuses(ConfigError, "holds no key; make one with: opusim device keys new NAME", own_key)
    alice = make_key("alice", folder)
    assert own_key() == alice
    make_key("bob", folder, days=1)
    refuses(ConfigError, "holds 2 keys; name one in OPUSIM_KEY", own_key)
    assert own_key("alice") == own_key(str(folder / "alice.key")) == alice
    refuses(ConfigError, "server.pub: is missing; ask the laboratory", server_key, "opu.lab", 5555)
    make_key("server", tmp_path / "one")
    other = make_key("server", tmp_path / "two")
    for source, name in ((tmp_path / "one", "server.pub"), (tmp_path / "two", "opu.lab_5555.pub")):
        (folder / name).write_bytes((source / "server.pub").read_bytes())
    assert server_key("opu.lab", 5555).public == other.public
    assert server_key("opu.lab", 5556).public != other.public
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "old"))
    make_key("alice", tmp_path / "old" / "opusim" / "keys")
    for file in (tmp_path / "old" / "opusim" / "keys").iterdir():
        expire(file)
    refuses(ConfigError, "the key of 'alice' expired on 2020-01-01", own_key)


def test_a_server_leaves_out_what_is_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refuses(ConfigError, "server.key: is missing; make it with: opusim device keys new", Users, tmp_path)
    make_key("server", tmp_path)
    alice = make_key("alice", tmp_path)
    (tmp_path / "bad.pub").write_text("nothing")
    users = Users(tmp_path)
    found = users.find(alice.public)
    assert (found.name, found.secret) == ("alice", None)
    assert users.find(users.own.public) is None
    assert users.find("?" * 40) is None
    assert len([line for line in caplog.messages if "left out a key" in line]) == 1


def test_a_user_cannot_pass_for_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A .pub file that a user sends is the user's text: its name counts only if the laboratory's file has it too."""
    make_key("server", tmp_path)
    alice = make_key("alice", tmp_path)
    eve = make_key("eve", tmp_path)
    text = (tmp_path / "eve.pub").read_text()
    (tmp_path / "eve.pub").write_text(text.replace('name = "eve"', 'name = "alice"'))
    shared = (tmp_path / "alice.pub").read_text().replace('name = "alice"', 'name = "bob"')
    (tmp_path / "bob.pub").write_text(shared)
    users = Users(tmp_path)
    assert users.find(eve.public) is None
    found = users.find(alice.public)
    assert found.name == "alice"
    assert any("eve.pub: name: is 'alice'; rename the file to alice.pub" in line for line in caplog.messages)
    assert any("bob.pub: public: is the key of 'alice' too" in line for line in caplog.messages)
    assert users.admits(alice.public)
    assert not users.admits(eve.public)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_only_the_laboratory_adds_keys(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "keys"
    make_key("server", folder)
    folder.chmod(mode)
    refuses(ConfigError, "mode: others may add keys here; run: chmod go-w", Users, folder)
    folder.chmod(0o755)
    assert Users(folder).own.name == "server"


ARRAYS = np.arange(6, dtype=np.int8).reshape(2, 3), np.arange(4, dtype=">f4")
ARRAYS = *ARRAYS, np.zeros((0, 5), dtype=np.float32), np.float64([[1.5]])


def test_a_message_and_errors_of_other_classes_come_back() -> None:
    message = Message(kind="call", values={"a": 1, "b": [True, None]}, arrays=ARRAYS)
    found = read_message(message.frames(), limit=10_000)
    assert (found.kind, found.values) == (message.kind, message.values)
    assert all(np.array_equal(*pair) for pair in zip(found.arrays, ARRAYS, strict=True))
    assert [array.dtype.str for array in found.arrays] == ["|i1", "<f4", "<f4", "<f8"]
    refuses(TypeError, "array has dtype int64", lambda: Message(kind="call", arrays=(np.arange(3),)).frames())

    class Odd(DeviceError):
        pass

    assert type(told_error(error_message(Odd("odd")))) is DeviceError
    told = told_error(error_message(RuntimeError("a\nb")))
    assert (type(told), str(told)) == (DeviceFault, "the server failed: a b")


def header(arrays: str = "[]", schema: int = 1, rest: str = '"kind": "call", "values": {}') -> bytes:
    return f'{{"schema": {schema}, {rest}, "arrays": {arrays}}}'.encode()


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        *(([], "no header"), ([b""], "not JSON"), ([b"\x00\xff" * 50], "not JSON")),
        *(([b"[" * 100_000], "oversized|no header"), ([b"[" * 5000], "not JSON"), ([b"[]"], "schema")),
        ([header(schema=2)], "schema: this side speaks 1"),
        ([header(rest='"kind": 1, "values": {}')], "lacks kind"),
        ([header('[["|i1", [2]]]')], "1 arrays are announced, 0 came"),
        ([header(), b"x"], "0 arrays are announced, 1 came"),
        ([header('[["|i1", [1099511627777]]]'), b"x"], "impossible shape"),
        ([header('[["|i1", [-1]]]'), b"x"], "impossible shape"),
        ([header('[["|i1", [true]]]'), b"x"], "impossible shape"),
        ([header('[["<f4", [1000000000, 1000000000]]]'), b"xxxx"], "an array of 4 bytes is announced"),
        ([header('[["|O", [1]]]'), b"x" * 8], "unknown dtype"),
        *(([header('["|i1"]'), b"x"], "without dtype and shape"), ([b"x"] * 18, "no header")),
        ([header('[["|i1", [9000]]]'), b"x" * 9000], "oversized: 9,"),
    ],
)
def test_bytes_that_are_no_message_are_refused(frames: list[bytes], message: str) -> None:
    refuses(BadMessage, message, read_message, frames, limit=9000 if len(frames) != 1 else 2**21)


@pytest.mark.parametrize(
    "error",
    [
        *(DeviceFault("broken"), DeviceBusy("taken"), DeviceTimeout("late"), NoiseBelowCertificate("weak")),
        *(NoiseUnknown("no law"), ConfigError("file", "key", "reason"), ValueError("x = 3"), TypeError("x")),
    ],
)
def test_errors_come_back_as_they_were(error: Exception) -> None:
    told = told_error(read_message(error_message(error, request="r1").frames(), limit=9000))
    assert (type(told), str(told)) == (type(error), str(error))


def test_laws_cross_without_loss() -> None:
    rates = np.linspace(1, 2, 8).reshape(2, 4)
    counts = {"rate_low": rates, "rate_high": 2 * rates, "weight": rates, "added_variance": np.arange(4.0)}
    spread = {"std_low": 0.1, "std_high": 0.3, "n_outputs": 4}
    laws = (
        GaussianNoise(std=0.1, n_outputs=4),
        GaussianNoise(std=np.linspace(1, 2, 4), n_outputs=4, beta=1e-6),
        PhotonCountNoise(**counts),
        FluctuatingCountNoise(**counts, power_law="gaussian", power_rms=0.01, beta=1e-6),
        SignalGaussianNoise(**spread),
        ConverterLatticeNoise(**spread, step=0.1, conversions=2, clips=False, beta=1e-6),
    )
    for law in laws:
        assert unpacked_law(*packed_law(law)) == law
        half = law_of_outputs(law, slice(1, 3))
        assert half.n_outputs == 2
        assert (type(half), half.beta) == (type(law), law.beta)
        for whole, part in zip(law.variance_bounds(), half.variance_bounds(), strict=True):
            assert np.array_equal(np.broadcast_to(whole, 4)[1:3], np.broadcast_to(part, 2))
    assert unpacked_law(*packed_law(None)) is None


def test_clients_take_turns_and_one_may_hold_the_queue() -> None:
    queue: Any = FairQueue()
    for client, batches in (("a", [1, 2, 3]), ("b", [4]), ("c", [5, 6])):
        for batch in batches:
            queue.put(client, batch)
    assert [queue.position(client) for client in "abcd"] == [0, 1, 2, None]
    assert [queue.take() for _ in range(6)] == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("c", 6), ("a", 3)]
    queue: Any = FairQueue()
    queue.put("a", 1)
    queue.hold("b")
    assert queue.position("a") == 1
    queue.put("b", 2)
    assert queue.take() == ("b", 2)
    waiting = threading.Thread(target=lambda: found.append(queue.take()))
    found: list[Any] = []
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert queue.drop("b") == []
    waiting.join(10)
    assert found == [("a", 1)]
    assert queue.put("a", 3)
    assert queue.has_next
    assert queue.close() == [3]
    assert queue.take() is None
    assert not queue.put("a", 4)
    assert not queue.has_next


def test_places_are_given_in_the_order_of_asking_and_not_all_to_one_user() -> None:
    places = Places(1, most_of_user=5, patience_s=100)
    window = Window(n_inputs=1, first=0, n_outputs=4, mode="release", seed=0)
    assert places.queued("alice", "t1", None, waits=False) == 0
    assert places.queued("alice", "t2", "full", waits=True) == 1
    assert places.queued("alice", "t3", "full", waits=True) == 2
    assert places.queued("alice", "t3", None, waits=True) == 2  # t2 is first
    refuses(DeviceBusy, "2 clients wait .* with --wait", places.queued, "alice", "t4", None, waits=False)
    assert places.queued("alice", "t2", None, waits=True) == 0
    assert places.queued("alice", "t3", None, waits=True) == 0
    assert places.obstacle(window, reserves=True) is None
    assert places.queued("alice", "t5", "full", waits=True) == 1
    places.forget("bob", "t5")  # of another user
    assert places.queued("bob", "t5", None, waits=True) == 2
    places.forget("alice", "t5")
    assert places.queued("bob", "t5", None, waits=True) == 0
    hasty = Places(1, most_of_user=5, patience_s=-1)
    assert hasty.queued("alice", "t1", "full", waits=True) == 1
    assert hasty.queued("alice", "t2", None, waits=False) == 0  # t1 has not asked again in time
    # Those who wait count, so that the list of them is bounded
    places = Places(100, most_of_user=3, patience_s=100)
    for ticket in ("t1", "t2", "t3"):
        places.queued("alice", ticket, "full", waits=True)
    assert places.queued("alice", "t1", "full", waits=True) == 1
    refuses(DeviceBusy, "alice has 3 clients here", places.queued, "alice", "t4", "full", waits=True)
    assert places.queued("bob", "t1", "full", waits=True) == 4


def entry(user: str, run: str, day: int, frames: int) -> Entry:
    time, used = f"2026-11-{day:02d}T10:00:00+00:00", (frames, frames * 0.5, frames * 15.0, frames * 3.8)
    spent = Usage(**dict(zip(("frames", "seconds", "joules", "host_seconds"), used, strict=True)))
    return Entry(time=time, device="opu", user=user, run=run, calls=2, used=spent, busy_s=0.25)


def test_a_journal_adds_up_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "state" / "usage.jsonl"
    journal = Journal(path)
    entries = [entry("alice", "one", 1, 100), entry("bob", "two", 1, 7), entry("alice", "one", 2, 100)]
    for each in entries[:2]:
        journal.write(each)
    with path.open("a") as file:
        file.write('{"schema": 1, "time": "2026')  # a crash amid a write
    Journal(path).write(entries[2])
    assert read_journal(path) == entries
    rows = usage_rows(entries)
    assert rows[0] == ("alice", "one", "4", "200", "1.7 min", "3,000 J", "14.3 min", "0.5 s")
    assert [row[0] for row in rows] == ["alice", "bob", "all"]
    (axes,) = usage_figure(entries).axes
    assert axes.get_ylabel() == "device time, host included [min]"
    found = [[round(float(bar.get_height()) * 60) for bar in each] for each in axes.containers]
    assert found == [[430, 430], [30, 0]]
    assert "no use" in usage_figure([]).axes[0].texts[0].get_text()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text('{"schema": 1}\n')
    refuses(ConfigError, "line 1: is no entry", read_journal, path)
    now = datetime.datetime.now(datetime.UTC)
    made = Entry(device="opu", user="alice", run="", calls=0, used=Usage(), busy_s=0.0)
    assert abs(datetime.datetime.fromisoformat(made.time) - now) < datetime.timedelta(minutes=1)


def test_a_journal_can_be_read_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says that the entry is lost, and goes on."""
    path = tmp_path / "usage.jsonl"
    journal, real = Journal(path), os.write
    entries = [entry("alice", "one", day, 100) for day in (1, 2, 3)]
    journal.write(entries[0])
    calls: list[object] = []

    def half(descriptor: int, content: memoryview) -> int:
        calls.append(content)
        if len(calls) == 1:
            return real(descriptor, bytes(content)[:40])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        refuses(OSError, r"usage\.jsonl", journal.write, entries[1])
    journal.write(entries[2])
    assert read_journal(path) == [entries[0], entries[2]]
