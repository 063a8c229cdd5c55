"""Keys of users and servers: who may use a served device, and until when.

A key pair is two TOML files: ``NAME.key`` with the secret (mode 0600, it stays where it was made) and ``NAME.pub``,
which the other side gets. The pairs are CurveZMQ's (rfc.zeromq.org/spec/26): X25519 for the key exchange, XSalsa20
with Poly1305 for every message, new keys for every connection. Only served devices need pyzmq (the extra ``served``).
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from opusim import checks
from opusim.description.section import StrictSection, readable
from opusim.errors import ConfigError, DeviceUnavailable
from opusim.files import make_private_folder, parse_toml, quoted, read_text

try:
    import zmq
    import zmq.utils.monitor
    import zmq.utils.z85
except ModuleNotFoundError:  # an extra; `require_zmq` says so when it is needed
    zmq = None  # type: ignore[assignment]


def require_zmq() -> None:
    """Refuse to work without pyzmq, or without encryption in its libzmq."""
    if zmq is None:
        raise DeviceUnavailable(
            "served devices need pyzmq, which is not installed: pip install 'opusim[served]'"
        )
    if not zmq.has("curve"):
        raise DeviceUnavailable(
            "this libzmq has no CURVE encryption; install pyzmq's own wheel: pip install pyzmq"
        )


def notice_dead_peers(socket: Any, silence_s: float) -> None:
    """Have the kernel close an unbound socket's connections whose peer's host is gone, after about `silence_s` seconds.

    libzmq's own heartbeats must stay off: if a peer hangs up while its messages fill the queue of this side, the next
    heartbeat meets the assertion ``!_io_error`` of stream_engine_base.cpp (4.3.5), which aborts the process.
    """
    probes = 3
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, probes)
    for option in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL):
        socket.setsockopt(option, max(1, math.ceil(silence_s / (probes + 1))))


KEY_VARIABLE = "OPUSIM_KEY"
SERVER_NAME = "server"
"""The name of a server's own pair: ``server.key`` in its folder, ``server.pub`` in those of its users."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_Z85 = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$"
_FRESH_S = 1.0
_LOG = logging.getLogger("opusim.serving")


class Key(StrictSection):
    """The content of a key file.

    Attributes:
        schema_version: version of the keys' meaning; ``schema`` in files.
        name: the user's name, or the server's.
        public: the public key, 40 characters in Z85.
        secret: the secret key, or None in a public file.
        expires: last day on which it is accepted.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str = Field(pattern=f"^{_NAME}$")
    public: str = Field(pattern=_Z85)
    secret: str | None = Field(default=None, pattern=_Z85, repr=False)
    expires: datetime.date

    @property
    def has_expired(self) -> bool:
        """Whether its last day is over, by this machine's clock in UTC."""
        return datetime.datetime.now(datetime.UTC).date() > self.expires

    def text(self, *, with_secret: bool) -> str:
        """Return the file's content."""
        lines = ["schema = 1", f'name = "{self.name}"', f'public = "{self.public}"']
        if with_secret:
            lines.append(f'secret = "{self.secret}"')
        return "\n".join([*lines, f"expires = {self.expires.isoformat()}", ""])


def keys_folder() -> Path:
    """Return where a user's keys are: opusim/keys in $XDG_CONFIG_HOME, or in ~/.config."""
    chosen = os.environ.get("XDG_CONFIG_HOME")
    return (Path(chosen) if chosen else Path.home() / ".config") / "opusim" / "keys"


def make_key(name: str, folder: Path, *, days: int = 365) -> Key:
    """Make a key pair of a user, or of the "server", valid for some days, and write its two files, which are new."""
    checks.instance(str, name=name)
    checks.integer(days=days, minimum=1, maximum=36_500)
    if not re.fullmatch(_NAME, name):
        raise ValueError(
            f"name = {name!r}: must be letters, digits, '.', '-' and '_', at most 64; rename the key"
        )
    public, secret = (part.decode() for part in zmq.curve_keypair())
    expires = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=days)
    key = Key(name=name, public=public, secret=secret, expires=expires)
    try:
        if not folder.is_dir():
            make_private_folder(folder)
        _write_new(folder / f"{name}.key", key.text(with_secret=True), 0o600)
        _write_new(folder / f"{name}.pub", key.text(with_secret=False), 0o644)
    except FileExistsError as error:
        reason = "is there already; choose another name, or remove both its files"
        raise ConfigError(str(folder), name, reason) from error
    except OSError as error:
        raise ConfigError(str(folder), name, f"cannot be written ({error.strerror})") from error
    return key


def read_key(path: Path, *, secret: bool) -> Key:
    """Read a key file; one that must hold the secret may be readable by its owner only (ConfigError otherwise)."""
    file = str(path)
    remedy = "make one with: opusim device keys new NAME"
    with readable(file, Key, whole="key", what="a key file", remedy=remedy):
        if secret and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(file, "mode", f"others may read this secret; run: chmod 600 {quoted(file)}")
        key = Key.model_validate(parse_toml(read_text(path, at_most=4096)))
    if secret and key.secret is None:
        raise ConfigError(file, "secret", "missing; this is a public file, give the one that ends in .key")
    return key


def own_key(chosen: str | None = None) -> Key:
    """Return the user's pair: of a path or a name in `keys_folder`, else of $OPUSIM_KEY, else the only one there."""
    wanted, folder = chosen or os.environ.get(KEY_VARIABLE), keys_folder()
    if wanted:
        path = Path(wanted) if "/" in wanted or wanted.endswith(".key") else folder / f"{wanted}.key"
    else:
        found = sorted(path for path in folder.glob("*.key") if path.stem != SERVER_NAME)
        if len(found) != 1:
            many = f"holds {len(found)} keys; name one in {KEY_VARIABLE}"
            none = "holds no key; make one with: opusim device keys new NAME"
            raise ConfigError(str(folder), "key", many if found else none)
        path = found[0]
    key = read_key(path, secret=True)
    if key.has_expired:
        raise ConfigError(
            str(path), "expires", f"the key of {key.name!r} expired on {key.expires}; make a new one"
        )
    return key


def server_key(host: str, port: int) -> Key:
    """Return the public key of a server: ``HOST_PORT.pub`` in `keys_folder`, else ``server.pub``."""
    folder = keys_folder()
    path = next(
        (file for file in (folder / f"{host}_{port}.pub", folder / f"{SERVER_NAME}.pub") if file.exists()),
        None,
    )
    if path is None:
        reason = f"is missing; ask the laboratory for its server.pub and save it as {host}_{port}.pub"
        raise ConfigError(str(folder), "server.pub", reason)
    key = read_key(path, secret=False)
    if key.has_expired:
        raise ConfigError(
            str(path), "expires", f"the server's key expired on {key.expires}; ask for its new one"
        )
    return key


class Users:
    """The users that a server accepts: every ``*.pub`` of its folder except its own, read again every second.

    A file is left out, with a line in the log, if it is no key, if its name inside differs from the file's (a user
    could pass for another), or if it holds the public key of an earlier file. Only the server's owner may write there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if folder.is_dir() and folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                str(folder), "mode", f"others may add keys here; run: chmod go-w {quoted(folder)}"
            )
        path = folder / f"{SERVER_NAME}.key"
        if not path.exists():
            command = f"opusim device keys new {SERVER_NAME} --folder {quoted(folder)}"
            raise ConfigError(str(folder), path.name, f"is missing; make it with: {command}")
        self.own = read_key(path, secret=True)
        if self.own.has_expired:
            raise ConfigError(str(path), "expires", f"expired on {self.own.expires}; make a new pair")
        self._known: dict[str, Key] = {}
        self._read_at = -float("inf")
        self._unusable: set[str] = set()

    def find(self, public: str) -> Key | None:
        """Return the user of a public key, expired or not; None if the key is unknown."""
        if time.monotonic() - self._read_at > _FRESH_S:
            self._known = self._read()
            self._read_at = time.monotonic()
        return self._known.get(public)

    def admits(self, public: str) -> bool:
        """Whether a public key is known and has not expired."""
        key = self.find(public)
        return key is not None and not key.has_expired

    def _read(self) -> dict[str, Key]:
        known: dict[str, Key] = {}
        for path in sorted(self._folder.glob("*.pub")):
            if path.stem == SERVER_NAME:
                continue
            try:
                key = read_key(path, secret=False)
                if key.name != path.stem:
                    raise ConfigError(
                        str(path), "name", f"is {key.name!r}; rename the file to {key.name}.pub"
                    )
                if key.public in known:
                    reason = f"is the key of {known[key.public].name!r} too; have the user make another one"
                    raise ConfigError(str(path), "public", reason)
            except ConfigError as error:
                if str(path) not in self._unusable:
                    self._unusable.add(str(path))
                    _LOG.warning("left out a key: %s", error)
                continue
            known[key.public] = key
        return known


def _write_new(path: Path, text: str, mode: int) -> None:
    """Write a new file with a mode from the first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
