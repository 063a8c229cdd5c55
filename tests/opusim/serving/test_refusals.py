"""What a server refuses, in one line each, while it serves the others."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from opusim import open_device
from opusim.errors import ConfigError, DeviceBusy, DeviceFault, DeviceUnavailable
from opusim.serving.messages import Message, told_error
from opusim.serving.server import Limits, Server
from tests.support.served import Laboratory, expire, new_laboratory, serving
from tests.support.wire import WINDOW, X, answer, call, opened_session, raw_socket


def still_serves(address: str) -> None:
    with open_device(address, **WINDOW) as device:
        assert device.project(X).shape == (16, 40)


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def test_keys_decide_who_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    lab = new_laboratory(tmp_path, "alice", "old")
    lab.add_user("eve", known=False)
    expire(lab.keys / "old.pub")
    with serving(lab) as address:
        lab.become("eve", monkeypatch)
        with pytest.raises(
            DeviceUnavailable, match="the server does not know the key of 'eve'; have its .pub"
        ):
            open_device(address, **WINDOW)
        assert eventually(lambda: "refused a connection: its key is not known" in caplog.messages)
        lab.become("old", monkeypatch)
        with pytest.raises(DeviceUnavailable, match="the key of 'old' expired on 2020-01-01"):
            open_device(address, **WINDOW)
        assert any("refused old: the key of 'old' expired" in line for line in caplog.messages)
        lab.become("alice", monkeypatch)
        with open_device(address, **WINDOW) as device:
            (lab.keys / "alice.pub").rename(tmp_path / "alice.pub")
            assert eventually(
                lambda: any("alice has no valid key any more" in each for each in caplog.messages)
            )
            with pytest.raises(DeviceUnavailable, match="this key is not known any more"):
                device.project(X)
            (tmp_path / "alice.pub").rename(lab.keys / "alice.pub")
            time.sleep(1.1)
            assert device.project(X).shape == (16, 40)
        assert all("\n" not in line for line in caplog.messages)


def test_a_server_with_another_key_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, other = new_laboratory(tmp_path / "one", "alice"), new_laboratory(tmp_path / "two")
    lab.become("alice", monkeypatch)
    shutil.copy(other.keys / "server.pub", lab.config_of("alice") / "opusim" / "keys")
    with (
        serving(lab) as address,
        pytest.raises(DeviceUnavailable, match="no answer from its server for 1 s; what"),
    ):
        open_device(f"{address}?silence_s=1", **WINDOW)


def test_a_missing_server_is_one_line(lab: Laboratory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"remote://127.0.0.1:{taken.getsockname()[1]}?silence_s=1"
        with pytest.raises(DeviceUnavailable, match="no answer from its server for 1 s; check that it runs"):
            open_device(address)


def test_garbage_on_the_wire_disturbs_no_client(lab: Laboratory, caplog: pytest.LogCaptureFixture) -> None:
    with serving(lab) as address:
        host, _, port = address.removeprefix("remote://").partition(":")
        for garbage in (
            b"GET / HTTP/1.0\r\n\r\n",
            bytes(range(256)) * 40,
            b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53),
        ):
            with socket.create_connection((host, int(port))) as wire:
                wire.sendall(garbage)
        assert eventually(lambda: "refused a connection: it spoke no CURVE" in caplog.messages)
        still_serves(address)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b""], "garbage"),
        ([b"\x80\x04\x95 pickle"], "not JSON"),
        ([b"{}"], "schema: this side speaks 1"),
        (Message(kind="steal").frames(), "unknown kind 'steal'"),
        (Message(kind="call").frames(), "call: session is missing"),
        (Message(kind="open", values={"ticket": "x"}).frames(), "open: mode is missing"),
        (Message(kind="open", values={"ticket": "y", "mode": "fast"}).frames(), "mode = 'fast'"),
        (Message(kind="open", values={"ticket": "z", "mode": "release", "seed": -1}).frames(), "seed = -1"),
        ([*Message(kind="describe").frames(), *[b""] * 30], "garbage"),
        (
            [Message(kind="call").frames()[0].replace(b"[]", b'[["|i1", [5]]]'), b"1234"],
            "4 bytes is announced",
        ),
        ([b'{"schema": 1}', bytes(3 * 2**20)], "oversized: 3,145,741 bytes, at most 2,097,152"),
    ],
)
def test_a_message_that_is_none_is_refused(
    lab: Laboratory, caplog: pytest.LogCaptureFixture, frames: list[bytes], message: str
) -> None:
    with serving(lab, limits=Limits(request_mib=2)) as address:
        with raw_socket(address) as dealer:
            told = told_error(answer(dealer, frames))
        assert message in str(told)
        assert any(line.startswith("refused alice: ") and message in line for line in caplog.messages)
        still_serves(address)


def test_a_flood_is_cut_off(lab: Laboratory) -> None:
    with serving(lab, limits=Limits(request_mib=1)) as address:
        with raw_socket(address) as dealer:
            dealer.setsockopt(zmq.RCVTIMEO, 1500)
            dealer.send_multipart([b"{}", bytes(20 * 2**20)])
            with pytest.raises(zmq.Again):
                dealer.recv_multipart()
        still_serves(address)


def test_a_repeated_call_has_one_reading_and_a_replayed_one_none(lab: Laboratory) -> None:
    with serving(lab) as address, raw_socket(address) as dealer:
        session = opened_session(dealer).values["session"]
        first = answer(dealer, call(session, 1, step=4).frames())
        again = answer(dealer, call(session, 1, step=4).frames())
        assert np.array_equal(first.arrays[0], again.arrays[0])
        assert first.values["usage"] == again.values["usage"]
        second = answer(dealer, call(session, 2).frames())
        assert not np.array_equal(first.arrays[0], second.arrays[0])
        for replayed in (call(session, 1, step=4), call(session, 2, step=4), call(session, 0)):
            told = told_error(answer(dealer, replayed.frames()))
            assert "replayed: call" in str(told)
        with open_device("gaussian", seed=1, **WINDOW) as local:
            local.seek(4)
            expected = [local.project(X).numpy() for _ in range(3)]
        third = answer(dealer, call(session, 3).frames())
        found = [each.arrays[0] for each in (first, second, third)]
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_session_is_its_users_only(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lab) as address, raw_socket(address) as alice:
        session = opened_session(alice).values["session"]
        lab.become("bob", monkeypatch)
        with raw_socket(address) as bob:
            assert answer(bob, call(session, 1).frames()).values["class"] == "SessionLost"
            assert (
                opened_session(bob, ticket="t").values["session"] != session
            )  # the same ticket, another user
        assert answer(alice, call(session, 1).frames()).kind == "answer"


def test_a_server_takes_no_more_clients_than_it_may(lab: Laboratory) -> None:
    with (
        serving(lab, limits=Limits(clients=1)) as address,
        open_device(address, **WINDOW),
        pytest.raises(
            DeviceBusy, match="it serves 1 clients, the most that it takes; wait for it with --wait"
        ),
    ):
        open_device(address, **WINDOW)


def test_a_user_has_a_limited_number_of_clients(lab: Laboratory) -> None:
    with (
        serving(lab, limits=Limits(clients_per_user=1)) as address,
        open_device(address, **WINDOW),
        pytest.raises(
            DeviceBusy, match="alice has 1 clients here, the most that a user may; close one of them"
        ),
    ):
        open_device(f"{address}?wait_s=5", **WINDOW)


def test_a_message_that_fails_in_an_unforeseen_way_ends_no_server(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The planted fault: a handler that raises what no handler should."""

    def broken(*_: object) -> None:
        raise KeyError("unforeseen")

    with serving(lab) as address:
        with monkeypatch.context() as patch:
            patch.setattr(Server, "_describe", broken)
            with pytest.raises(DeviceFault, match="the server failed: 'unforeseen'"):
                open_device(address, **WINDOW)
        still_serves(address)
    assert "a message of alice failed" in caplog.messages


def test_a_revoked_client_leaves_its_place_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    lab = new_laboratory(tmp_path, "alice", "bob")
    lab.become("alice", monkeypatch)
    with serving(lab) as address:
        device = open_device(f"{address}?exclusive", **WINDOW)
        expire(lab.keys / "alice.pub")
        lab.become("bob", monkeypatch)
        with open_device(f"{address}?wait_s=10", **WINDOW) as other:  # long before the 20 s of silence
            assert other.project(X).shape == (16, 40)
        assert any("alice has no valid key any more" in each for each in caplog.messages)
        with pytest.raises(DeviceUnavailable, match="the key of 'alice' expired on 2020-01-01"):
            device.project(X)
        device.close()


def test_a_call_that_is_too_large_is_refused_before_it_is_sent(lab: Laboratory) -> None:
    limits = Limits(request_mib=0.01, reply_mib=0.1)
    with serving(lab, limits=limits) as address, open_device(address, **WINDOW) as device:
        with pytest.raises(
            ValueError, match="x has 0.02289 MiB, the server of device .* takes 0.01 at once; give fewer"
        ):
            device.project(torch.zeros(2000, 12))
        with pytest.raises(
            ValueError, match="the answer would have 0.1221 MiB, the server sends 0.1 at most"
        ):
            device.draw((800, 40))
        assert device.project(X).shape == (16, 40)


def test_reserved_outputs_are_read_by_one_client(lab: Laboratory) -> None:
    with serving(lab) as address:
        with open_device(f"{address}?outputs_from=40", **WINDOW):
            with pytest.raises(DeviceBusy, match="alice reads outputs 40 to 79; wait for it"):
                open_device(address, n_inputs=12, n_outputs=41)
            with (
                open_device(address, **WINDOW),
                pytest.raises(DeviceBusy, match="alice reads outputs 0 to 39"),
            ):
                open_device(f"{address}?outputs_from=39", n_inputs=12, n_outputs=1)
            with pytest.raises(DeviceBusy, match="outputs 40 to 79"):
                open_device(f"{address}?outputs_from=79", n_inputs=12, n_outputs=1)
        with open_device(f"{address}?outputs_from=39", n_inputs=12, n_outputs=1):
            pass


def test_options_of_an_address_are_checked(lab: Laboratory) -> None:
    with serving(lab) as address:
        with pytest.raises(ConfigError, match="options.silence_s"):
            open_device(f"{address}?silence_s=0", **WINDOW)
        with pytest.raises(ConfigError, match="options.speed"):
            open_device(address, options={"speed": 3}, **WINDOW)
        with open_device(address, options={"outputs_from": 3, "run": "seven"}, **WINDOW) as device:
            assert device.description.options["run"] == "seven"
