"""What a server refuses, in one line each, while it serves the others."""

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from opusim import open_device
from opusim.errors import ConfigError, DeviceBusy, DeviceFault, DeviceUnavailable
from opusim.serving.connections import _LINES, Message, Refusals, ServerSocket, told_error
from opusim.serving.keys import Users, own_key
from opusim.serving.server import Limits, Server
from tests.opusim.common import refuses
from tests.support.killing import start_child
from tests.support.patience import eventually
from tests.support.served import Laboratory, expire, new_laboratory, serving
from tests.support.wire import WINDOW, X, answer, call, opened_session, raw_socket


def still_serves(address: str) -> None:
    with open_device(address, **WINDOW) as device:
        assert device.project(X).shape == (16, 40)


def test_keys_decide_who_is_served(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    lab = new_laboratory(tmp_path, "alice", "old")
    lab.add_user("eve", known=False)
    expire(lab.keys / "old.pub")
    with serving(lab) as address:
        lab.become("eve", monkeypatch)
        refuses(DeviceUnavailable, "does not know the key of 'eve'", open_device, address, **WINDOW)
        assert eventually(lambda: "refused a connection: its key is not known" in caplog.messages)
        lab.become("old", monkeypatch)
        refuses(DeviceUnavailable, "the key of 'old' expired on 2020-01-01", open_device, address, **WINDOW)
        assert any("refused old: the key of 'old' expired" in line for line in caplog.messages)
        lab.become("alice", monkeypatch)
        with open_device(address, **WINDOW) as device:
            (lab.keys / "alice.pub").rename(tmp_path / "alice.pub")
            assert eventually(lambda: "alice has no valid key any more" in " ".join(caplog.messages))
            refuses(DeviceUnavailable, "this key is not known any more", device.project, X)
            (tmp_path / "alice.pub").rename(lab.keys / "alice.pub")
            time.sleep(1.1)
            assert device.project(X).shape == (16, 40)
        assert all("\n" not in line for line in caplog.messages)


def test_each_server_has_its_own_key_and_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, other = new_laboratory(tmp_path / "one", "alice"), new_laboratory(tmp_path / "two")
    lab.become("alice", monkeypatch)
    shutil.copy(other.keys / "server.pub", lab.config_of("alice") / "opusim" / "keys")
    with serving(lab) as address:
        refuses(DeviceUnavailable, "no answer .* 1 s; what", open_device, f"{address}?silence_s=1", **WINDOW)
    one, two = new_laboratory(tmp_path / "three", "alice"), new_laboratory(tmp_path / "four", "bob")
    one.become("alice", monkeypatch)
    shutil.copy(one.keys / "server.pub", two.keys / "server.pub")
    shutil.copy(one.keys / "server.key", two.keys / "server.key")  # so that only the users differ
    with serving(one) as first, serving(two) as second:
        still_serves(first)
        refuses(DeviceUnavailable, "the server does not know the key of 'alice'", still_serves, second)
        still_serves(first)


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN", "CURVE"])
def test_only_encrypted_messages_are_answered(lab: Laboratory, mechanism: str) -> None:
    with serving(lab) as address, raw_socket(address) as known:
        context = zmq.Context()
        other = context.socket(zmq.DEALER)
        other.setsockopt(zmq.LINGER, 0)
        try:
            if mechanism == "PLAIN":
                other.setsockopt(zmq.PLAIN_USERNAME, b"alice")
                other.setsockopt(zmq.PLAIN_PASSWORD, b"secret")
            elif mechanism == "CURVE":  # a key that is not known
                public, secret = zmq.curve_keypair()
                other.setsockopt(zmq.CURVE_PUBLICKEY, public)
                other.setsockopt(zmq.CURVE_SECRETKEY, secret)
                other.setsockopt(zmq.CURVE_SERVERKEY, Users(lab.keys).own.public.encode())
            other.connect(address.replace("remote", "tcp"))
            frames = Message(kind="describe", values={"request": "d"}).frames()
            other.send_multipart(frames)
            assert answer(known, frames).kind == "described"
            assert other.poll(300) == 0
        finally:
            context.destroy(linger=0)


def test_a_missing_server_and_wrong_options_are_one_line(lab: Laboratory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"remote://127.0.0.1:{taken.getsockname()[1]}?silence_s=1"
        refuses(DeviceUnavailable, "no answer .* for 1 s; check that it runs", open_device, address)
    with serving(lab) as address:
        refuses(ConfigError, "options.silence_s", open_device, f"{address}?silence_s=0", **WINDOW)
        refuses(ConfigError, "options.speed", open_device, address, options={"speed": 3}, **WINDOW)
        with open_device(address, options={"outputs_from": 3, "run": "seven"}, **WINDOW) as device:
            assert device.description.options["run"] == "seven"


def test_garbage_and_floods_disturb_no_client(lab: Laboratory, caplog: pytest.LogCaptureFixture) -> None:
    with serving(lab) as address:
        host, _, port = address.removeprefix("remote://").partition(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53)
        for garbage in (b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 40, greeting):
            with socket.create_connection((host, int(port))) as wire:
                wire.sendall(garbage)
        assert eventually(lambda: "refused a connection: it spoke no CURVE" in caplog.messages)
        still_serves(address)
    with serving(lab, limits=Limits(request_mib=1)) as address:
        with raw_socket(address) as dealer:
            dealer.setsockopt(zmq.RCVTIMEO, 1500)
            dealer.send_multipart([b"{}", bytes(20 * 2**20)])
            with pytest.raises(zmq.Again):
                dealer.recv_multipart()
        still_serves(address)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"\x80\x04\x95 pickle"], "not JSON"),
        (Message(kind="steal").frames(), "unknown kind 'steal'"),
        (Message(kind="call").frames(), "call: session is missing"),
        (Message(kind="open", values={"ticket": "y", "mode": "fast"}).frames(), "mode = 'fast'"),
        (Message(kind="open", values={"ticket": "z", "mode": "release", "seed": -1}).frames(), "seed = -1"),
        ([b'{"schema": 1}', bytes(3 * 2**20)], "oversized: 3,145,741 bytes, at most 2,097,152"),
    ],
)
def test_a_message_that_is_none_is_refused(lab: Laboratory, caplog: Any, frames: list, message: str) -> None:
    with serving(lab, limits=Limits(request_mib=2)) as address:
        with raw_socket(address) as dealer:
            told = told_error(answer(dealer, frames))
        assert message in str(told)
        assert any(line.startswith("refused alice: ") and message in line for line in caplog.messages)
        still_serves(address)


def test_the_log_gets_few_lines_about_each_cause(lab: Laboratory, caplog: Any, monkeypatch: Any) -> None:
    with serving(lab) as address, raw_socket(address) as dealer:
        for _ in range(200):
            assert "garbage" in str(told_error(answer(dealer, [b""])))
        still_serves(address)
    assert len([line for line in caplog.messages if line.startswith("refused alice: ")]) == _LINES
    caplog.clear()
    refusals, now = Refusals(every_s=60.0), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(_LINES + 7):
        refusals.tell("eve", "garbage")
    refusals.tell("bob", "garbage")
    now[0] += 59.0
    refusals.sum_up()
    assert caplog.messages[-1] == "refused bob: garbage"
    now[0] += 2.0
    refusals.sum_up()
    assert caplog.messages[-2] == "refused bob: garbage"
    assert caplog.messages[-1] == "refused eve: 7 more within 61 s"


def test_few_large_messages_are_taken_at_once(lab: Laboratory) -> None:
    own = ServerSocket(Users(lab.keys), "tcp://127.0.0.1:*", largest=2**20, silence_s=20.0)
    try:
        with raw_socket(own.endpoint.replace("tcp", "remote")) as dealer:
            dealer.send(b"hello")
            while not own.wait(100):
                pass
            for _ in range(4):
                dealer.send(bytes(600_000))
            time.sleep(0.5)
            found = []
            while sum(found) < 4:
                found.append(len(own.wait(1000)))
            assert max(found) <= 2
    finally:
        own.close()


def test_a_user_who_floods_a_busy_server_and_hangs_up_does_not_end_it(lab: Laboratory) -> None:
    told, tell = os.pipe()

    def be_busy() -> None:
        own = ServerSocket(Users(lab.keys), "tcp://127.0.0.1:*", largest=2**20, silence_s=0.4)
        os.write(tell, own.endpoint.encode())
        while not own.wait(50):
            pass
        os.write(tell, b"x")
        time.sleep(2.0)  # libzmq's heartbeats, were they on, would come every 0.2 s
        own.close()

    child = start_child(be_busy)
    with raw_socket(os.read(told, 100).decode().replace("tcp", "remote")) as dealer:
        dealer.send(b"hello")
        os.read(told, 1)
        for _ in range(400):  # its queue holds 8 messages
            dealer.send(bytes(1000))
        time.sleep(0.3)
    assert os.waitpid(child, 0)[1] == 0


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
            own = opened_session(bob, ticket="t").values["session"]  # the same ticket, another user
            assert own != session
        assert answer(alice, call(session, 1).frames()).kind == "answer"


def test_a_session_ends_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new user of an earlier one's name is another user."""
    lab = new_laboratory(tmp_path, "alice")
    lab.become("alice", monkeypatch)
    with serving(lab) as address, raw_socket(address) as earlier:
        session = opened_session(earlier).values["session"]
        shutil.rmtree(lab.config_of("alice"))
        lab.add_user("alice")
        time.sleep(1.1)
        with raw_socket(address) as later:
            assert answer(later, call(session, 1).frames()).values["class"] == "SessionLost"
            assert opened_session(later).values["session"] != session
        assert "not known any more" in str(told_error(answer(earlier, call(session, 1).frames())))


def test_no_client_sets_what_the_monitor_of_a_shared_device_compares_with(lab: Laboratory) -> None:
    served = {"access": {"exclusive": True}, "n_inputs": 12, "n_outputs": 40, "monitor": {"every_steps": 1}}
    with open_device("gaussian", n_inputs=12, n_outputs=40, monitor={"every_steps": 1}) as local:
        forged = 3 * local.monitor.baseline.to_array()
    with serving(lab, "gaussian", served) as address, raw_socket(address) as dealer:
        session = opened_session(dealer).values["session"]
        values = {"act": "compare", "session": session, "number": 1, "request": "c1"}
        told = answer(dealer, Message(kind="call", values=values, arrays=(forged,)).frames())
        assert "the server watches the device itself" in str(told_error(told))
        still_serves(address)


def test_a_client_that_keeps_others_out_must_use_the_device(lab: Laboratory, caplog: Any) -> None:
    caplog.set_level("INFO")
    with (
        serving(lab, limits=Limits(idle_s=0.4)) as address,
        open_device(f"{address}?exclusive", **WINDOW) as idle,
        open_device(f"{address}?wait_s=30", **WINDOW) as other,
    ):
        assert other.project(X).shape == (16, 40)
        assert "alice made no call for 0.4 s while it kept others out" in " ".join(caplog.messages)
        assert idle.project(X).shape == (16, 40)  # it gets in again
        time.sleep(0.8)
        assert other.project(X).shape == (16, 40)  # which keeps none out, and stays


FULL = {"clients": "it serves 1 clients", "clients_per_user": "alice has 1 clients here"}


@pytest.mark.parametrize(("limit", "message"), FULL.items())
def test_a_server_takes_no_more_clients_than_it_may(lab: Laboratory, limit: str, message: str) -> None:
    with serving(lab, limits=Limits(**{limit: 1})) as address, open_device(address, **WINDOW):
        wait = "?wait_s=5" if limit == "clients_per_user" else ""
        refuses(DeviceBusy, message, open_device, address + wait, **WINDOW)


def test_an_unforeseen_failure_of_a_message_ends_no_server(
    lab: Laboratory, monkeypatch: Any, caplog: Any
) -> None:
    """The planted fault: a handler that raises what no handler should."""

    def broken(*_: object) -> None:
        raise KeyError("unforeseen")

    with serving(lab) as address:
        with monkeypatch.context() as patch:
            patch.setattr(Server, "_describe", broken)
            refuses(DeviceFault, "the server failed: 'unforeseen'", open_device, address, **WINDOW)
        still_serves(address)
    assert "a message of alice failed" in caplog.messages


def test_a_revoked_client_leaves_its_place_at_once(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
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
        refuses(DeviceUnavailable, "the key of 'alice' expired on 2020-01-01", device.project, X)
        device.close()


def test_a_call_that_is_too_large_is_refused_before_it_is_sent(lab: Laboratory) -> None:
    limits = Limits(request_mib=0.01, reply_mib=0.1)
    with serving(lab, limits=limits) as address, open_device(address, **WINDOW) as device:
        refuses(ValueError, "x has 0.02289 MiB, .* takes 0.01 at once", device.project, torch.zeros(2000, 12))
        refuses(ValueError, "would have 0.1221 MiB, the server takes 0.1 at most", device.draw, (800, 40))
        assert device.project(X).shape == (16, 40)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_small_answer_that_is_cut_from_a_large_reading_is_refused(lab: Laboratory, is_shared: bool) -> None:
    """A window of one output behind 999 others is read with them, and noise is drawn for all outputs."""
    served = {"access": {"exclusive": is_shared}, "n_inputs": 12, "n_outputs": 1000}
    with serving(lab, "gaussian", served, n_outputs=1000) as address, raw_socket(address) as dealer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("opusim.serving.instrument.View.draw", lambda *_: pytest.fail("it was drawn"))
            session = opened_session(dealer, outputs_from=999, n_outputs=1).values["session"]
            for number, shape in enumerate([[100_000], [1, -100_000], [10, 10, 1000], [0.5, 1e9]], start=1):
                drawn = call(session, number, act="draw", shape=shape)
                told = str(told_error(answer(dealer, drawn.frames())))
                assert "would have 381.5 MiB" in told or "must be int" in told
        assert answer(dealer, call(session, 9).frames()).kind == "answer"


ONE = {"n_inputs": 12, "n_outputs": 1}


def test_reserved_outputs_are_read_by_one_client(lab: Laboratory) -> None:
    with serving(lab) as address:
        with open_device(f"{address}?outputs_from=40", **WINDOW):
            refuses(DeviceBusy, "outputs 40 to 79; wait", open_device, address, n_inputs=12, n_outputs=41)
            with open_device(address, **WINDOW):
                told = "alice reads outputs 0 to 39"
                refuses(DeviceBusy, told, open_device, f"{address}?outputs_from=39", **ONE)
            refuses(DeviceBusy, "outputs 40 to 79", open_device, f"{address}?outputs_from=79", **ONE)
        with open_device(f"{address}?outputs_from=39", **ONE):
            pass


@contextlib.contextmanager
def deaf_socket(door: ServerSocket, users: Users) -> Iterator[None]:
    """A client that says a word and never reads; every one has the same name."""
    context = zmq.Context()
    dealer, key = context.socket(zmq.DEALER), own_key()
    dealer.curve_serverkey, dealer.curve_publickey = users.own.public.encode(), key.public.encode()
    dealer.curve_secretkey = str(key.secret).encode()
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.RCVBUF, 4096)
    dealer.setsockopt(zmq.ROUTING_ID, b"name")
    dealer.connect(door.endpoint)
    dealer.send(b"word")
    heard: list[bytes] = []

    def is_heard() -> bool:
        heard.extend(route for route, _, _ in door.wait(100))
        return heard == [b"name"]

    assert eventually(is_heard)
    try:
        yield
    finally:
        context.destroy(linger=0)


def test_a_server_ends_although_a_connection_broke_with_answers_waiting(lab: Laboratory) -> None:
    """The server's end hangs up first, then the client's; libzmq has this order now and then when a server ends.

    Here a second client that takes over the name of the first one makes it.
    """
    users = Users(lab.keys)
    door = ServerSocket(users, "tcp://127.0.0.1:*", largest=2**20, silence_s=20.0)
    door._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    with contextlib.ExitStack() as second:
        with deaf_socket(door, users):
            for _ in range(8):
                door.send(b"name", [bytes(2**20)])
            second.enter_context(deaf_socket(door, users))
        time.sleep(0.3)  # libzmq takes note of the broken connection
        ending = threading.Thread(target=door.close, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive(), "libzmq waits for a queue that nobody empties"
    ServerSocket(users, door.endpoint, largest=2**20, silence_s=20.0).close()  # the port is free
