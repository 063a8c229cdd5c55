"""Speak to a server without a client: messages of an authenticated socket that sends what it likes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import zmq

from opusim.serving.connections import Message, read_message
from opusim.serving.keys import own_key, server_key

X = torch.randint(-1, 2, (16, 12), generator=torch.Generator().manual_seed(5))
WINDOW: dict[str, Any] = {"n_inputs": 12, "n_outputs": 40}


@contextlib.contextmanager
def raw_socket(address: str) -> Iterator[Any]:
    """An authenticated socket that sends what it likes."""
    host, _, port = address.removeprefix("remote://").partition(":")
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    key, server = own_key(), server_key(host, int(port))
    dealer.curve_serverkey, dealer.curve_publickey = server.public.encode(), key.public.encode()
    dealer.curve_secretkey = str(key.secret).encode()
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, 20_000)
    dealer.connect(f"tcp://{host}:{port}")
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


def answer(dealer: Any, frames: list[bytes]) -> Message:
    """Send frames; return what comes back."""
    dealer.send_multipart(frames)
    return read_message(dealer.recv_multipart(), limit=2**30)


def opened_session(dealer: Any, ticket: str = "t", **values: Any) -> Message:
    """Open the window; return the answer."""
    wanted = {"mode": "experiment", "seed": 1, **WINDOW, **values, "ticket": ticket, "request": "o"}
    found = answer(dealer, Message(kind="open", values=wanted).frames())
    while found.kind == "state":
        found = read_message(dealer.recv_multipart(), limit=2**30)
    return found


def call(session: str, number: int, **values: Any) -> Message:
    """Return a call that projects `X`."""
    wanted = {"act": "project", "session": session, "number": number, "request": f"c{number}", **values}
    return Message(kind="call", values=wanted, arrays=(X.to(torch.int8).numpy(),))
