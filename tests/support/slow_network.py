"""A network between client and server that delays what it carries, and breaks on demand."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class SlowNetwork:
    """Carries bytes between its own port and a server's on this host; each chunk waits for a delay, both ways.

    `carried` counts the connections.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self._server, self.delay_s = port, delay_s
        self._wires: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port, self.carried = self._listening.getsockname()[1], 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._server))
                except OSError:
                    near.close()
                    continue
                self.carried += 1
                self._wires += [near, far]
                for start, end in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(start, end), daemon=True).start()

    def _carry(self, start: socket.socket, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := start.recv(65_536):
                time.sleep(self.delay_s)
                end.sendall(chunk)
        for wire in (start, end):
            wire.close()

    def cut(self) -> None:
        """Break all connections; what is under way is lost."""
        wires, self._wires = self._wires, []
        for wire in wires:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break all connections and carry no more."""
        self._listening.close()
        self.cut()


@contextlib.contextmanager
def slow_network(address: str, delay_s: float) -> Iterator[tuple[SlowNetwork, str]]:
    """Put a slow network before a server; yields it and the address behind it."""
    network = SlowNetwork(int(address.rpartition(":")[2]), delay_s)
    try:
        yield network, f"remote://127.0.0.1:{network.port}"
    finally:
        network.close()
