"""Many connections and many calls."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import zmq

from opusim import open_device
from opusim.serving.connections import Message, read_message, told_error
from opusim.serving.keys import own_key, server_key
from opusim.serving.server import Limits
from tests.support.served import Laboratory, serving

WINDOW: dict[str, Any] = {"n_inputs": 12, "n_outputs": 40}


@pytest.mark.parametrize("connections", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_connections_at_once_are_served_or_refused_in_one_line(lab: Laboratory, connections: int) -> None:
    places = connections // 10
    with serving(
        lab, limits=Limits(clients=places, clients_per_user=connections, silence_s=120.0)
    ) as address:
        host, _, port = address.removeprefix("remote://").partition(":")
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 2 * connections)
        key, server = own_key(), server_key(host, int(port))
        poller, dealers = zmq.Poller(), []
        try:
            for number in range(connections):
                dealer = context.socket(zmq.DEALER)
                dealer.curve_serverkey, dealer.curve_publickey = server.public.encode(), key.public.encode()
                dealer.curve_secretkey = str(key.secret).encode()
                dealer.connect(f"tcp://{host}:{port}")
                values = {**WINDOW, "mode": "experiment", "ticket": f"t{number}", "request": "o"}
                dealer.send_multipart(Message(kind="open", values=values).frames())
                poller.register(dealer, zmq.POLLIN)
                dealers.append(dealer)
            answers: dict[Any, Message] = {}
            until = time.monotonic() + 300
            while len(answers) < connections and time.monotonic() < until:
                for dealer, _ in poller.poll(1000):
                    answers[dealer] = read_message(dealer.recv_multipart(), limit=2**30)
            kinds = [answer.kind for answer in answers.values()]
            assert (kinds.count("opened"), kinds.count("error")) == (places, connections - places)
            lines = {str(told_error(answer)) for answer in answers.values() if answer.kind == "error"}
            assert lines == {
                f"it serves {places} clients, the most that it takes; wait for it with --wait SECONDS or OPUSIM_WAIT"
            }
        finally:
            context.destroy(linger=0)


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_thousand_calls(lab: Laboratory) -> None:
    """Client and server are in one process; 16 vectors a call, so a leak of each answer would be 250 MiB."""
    x = torch.randint(-1, 2, (16, 12), generator=torch.Generator().manual_seed(1))
    with serving(lab) as address, open_device(address, **WINDOW) as device:
        sizes = []
        for number in range(100_000):
            if number in (10_000, 55_000, 99_999):
                gc.collect()
                sizes.append(resident_mib())
            device.project(x)
    assert sizes[2] - sizes[0] < 10, sizes
    assert device.usage.frames == 2 * 16 * 100_000
