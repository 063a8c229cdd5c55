"""Serve LightOn's OPU to opusim from the appliance's own Python (3.6 to 3.9), without opusim.

LightOn's driver is compiled for these versions, which opusim does not run on. Copy this file to the appliance. It needs
lightonml, the driver, numpy and pyzmq, and speaks the protocol of `opusim device serve`, schema 1:

    python lighton_server.py --bind tcp://*:5555 --keys /etc/opusim/keys

The folder of keys is made on another computer by `opusim device keys new` (docs/serving.md). One client is served at a
time; others wait. It takes projections, intensities and readings of nothing; it watches nothing and states no law.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import random
import re
import secrets
import sys
import time

import numpy as np
import zmq
import zmq.utils.z85

SCHEMA, MIB, ZAP = 1, 2**20, "inproc://zeromq.zap.01"
REQUEST_MIB, REPLY_MIB, SILENCE_S = 64.0, 256.0, 20.0
TURN_S, MOST_ROWS = 0.5, 1000
DTYPES = ("|i1", "|u1", "<f4", "<f8")
CAN = ["draw", "intensities", "project"]
FINGERPRINT = 8, 32, 64
"""Vectors, outputs and readings of each, as a server of opusim takes them."""


class Told(Exception):
    """An error that the client raises by its name."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


# Keys


def read_key(path):
    """Return the keys of a TOML file of `opusim device keys new`."""
    with open(path) as file:
        found = dict(re.findall(r'^(\w+) = "?([^"\n]*)"?$', file.read(), re.MULTILINE))
    year, month, day = map(int, found["expires"].split("-"))
    found["expires"] = datetime.date(year, month, day)
    return found


def users(folder):
    """Return the name of the user of each public key that is known and has not expired."""
    known = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".pub") and file != "server.pub":
            key = read_key(os.path.join(folder, file))
            if key["name"] == file[:-4] and key["expires"] >= datetime.datetime.utcnow().date():
                known[key["public"]] = key["name"]
    return known


# The device


class Opu:
    """lightonml's OPU, opened and fitted once for the whole window, with readings as opusim's kind `lighton` has them.

    y = sqrt(n) scale (linear_transform(x+) - linear_transform(x-)), so that entries of B have variance 1.
    """

    def __init__(self, options):
        import lightonml

        self.n_inputs, self.n_outputs, self.period_us = (
            options.inputs,
            options.outputs,
            options.frame_period_us,
        )
        self.factor, self.frames = math.sqrt(options.inputs) * options.scale, 0
        self.opu = lightonml.OPU(
            n_components=self.n_outputs,
            max_n_features=self.n_inputs,
            disable_pbar=True,
            open_at_init=False,
            config_file=options.config_file,
            rescale="variance",
        )
        self.opu.open()
        exposure = {} if options.exposure_us is None else {"exposure_us": options.exposure_us}
        self.opu.fit1d(
            n_features=self.n_inputs, online=False, frametime_us=int(options.frame_period_us), **exposure
        )

    def read(self, act, rows):
        """Return readings of rows, float32; inputs beyond their width stay dark."""
        x = np.zeros((len(rows), self.n_inputs), dtype=np.int8)
        x[:, : rows.shape[1]] = rows
        if act == "intensities":
            self.frames += len(x)
            return np.asarray(self.opu.transform((x > 0).astype(np.uint8)), dtype=np.float32)
        self.frames += 4 * len(x)
        parts = [self.opu.linear_transform((x == sign).astype(np.uint8)) for sign in (1, -1)]
        return np.asarray(np.subtract(*parts) * self.factor, dtype=np.float32)

    def fingerprint(self):
        """Return the signs of mean readings of fixed vectors, in hexadecimal."""
        vectors, outputs, readings = FINGERPRINT
        draw = random.Random(20261128)  # of one sequence in all versions of Python
        width = min(64, self.n_inputs)
        shown = np.array([[2 * int(draw.random() < 0.5) - 1 for _ in range(width)] for _ in range(vectors)])
        taken = self.read("project", np.repeat(shown, readings, axis=0))[:, :outputs]
        means = taken.reshape(vectors, readings, -1).mean(axis=1)
        return np.packbits(means > 0).tobytes().hex()


# Messages


def packed(kind, values, arrays=()):
    """Return the frames of a message: a JSON header, then raw arrays."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    told = [[array.dtype.newbyteorder("<").str, list(array.shape)] for array in arrays]
    header = {"schema": SCHEMA, "kind": kind, "values": values, "arrays": told}
    return [json.dumps(header, allow_nan=False).encode()] + [array.tobytes() for array in arrays]


def unpacked(frames):
    """Return kind, values and arrays of a message, whose sizes are compared before an array is made."""
    if sum(map(len, frames)) > REQUEST_MIB * MIB or not 1 <= len(frames) <= 17 or len(frames[0]) > 2**16:
        raise Told("ValueError", "oversized, or no header; send fewer vectors at once")
    try:
        header = json.loads(frames[0].decode())
        kind, values, told = header["kind"], header["values"], header["arrays"]
        arrays = [
            np.frombuffer(frame, dtype=np.dtype(DTYPES[DTYPES.index(name)])).reshape(shape)
            for (name, shape), frame in zip(told, frames[1:])  # noqa: B905 (strict is of Python 3.10)
        ]
        if header["schema"] != SCHEMA or len(told) != len(frames) - 1 or not isinstance(values, dict):
            raise ValueError("schema")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Told("ValueError", f"garbage: no message of schema 1 ({error})")  # noqa: B904
    return kind, values, arrays


class Session:
    """The one client that has a place."""

    def __init__(self, user, public, values):
        self.user, self.public, self.ticket = user, public, values.get("ticket")
        self.token, self.heard = secrets.token_hex(16), time.monotonic()
        self.n_inputs, self.n_outputs = values["n_inputs"], values["n_outputs"]
        self.first, self.began = values.get("outputs_from", 0), 0
        self.number, self.digest, self.reply = 0, "", None


class Server:
    """Answers messages one after another; amid a long call it answers signs of life between batches."""

    def __init__(self, options):
        self.device, self.options = Opu(options), options
        self.mark = self.device.fingerprint()
        self.session, self.busy = None, False
        own = read_key(os.path.join(options.keys, "server.key"))
        context = zmq.Context()
        self.zap = context.socket(zmq.REP)
        self.zap.bind(ZAP)
        self.router = context.socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = (
            own["public"].encode(),
            own["secret"].encode(),
        )
        self.router.setsockopt(zmq.ZAP_DOMAIN, b"opusim")
        self.router.setsockopt(zmq.MAXMSGSIZE, int(2 * REQUEST_MIB * MIB))
        self.router.setsockopt(zmq.LINGER, 1000)
        self.router.bind(options.bind)
        self.poller = zmq.Poller()
        self.poller.register(self.zap, zmq.POLLIN)
        self.poller.register(self.router, zmq.POLLIN)
        print(
            "serving on {}".format(self.router.getsockopt(zmq.LAST_ENDPOINT).decode().strip("\0")), flush=True
        )

    def serve(self, wait_ms):
        """Answer what comes within a time."""
        ready = dict(self.poller.poll(wait_ms))
        if self.zap in ready:
            version, asked, domain, _, _, mechanism, *rest = self.zap.recv_multipart()
            public = zmq.utils.z85.encode(rest[0]).decode() if mechanism == b"CURVE" and rest else ""
            known = domain == b"opusim" and public in users(self.options.keys)
            told = [b"200", b"OK", public.encode()] if known else [b"400", b"unknown key", b""]
            self.zap.send_multipart([version, asked, *told, b""])
        if self.router in ready:
            route, *frames = self.router.recv_multipart(copy=False)
            public = str(frames[-1].get("User-Id")) if frames else ""
            self.take(route.bytes, public, [frame.bytes for frame in frames])
        if self.session and not self.busy and time.monotonic() - self.session.heard > SILENCE_S:
            self.session = None

    def take(self, route, public, frames):
        """Answer a message, with an error if it is refused."""
        request = ""
        try:
            kind, values, arrays = unpacked(frames)
            request = str(values.get("request", ""))[:64]
            user = users(self.options.keys).get(public)
            if user is None:
                raise Told(
                    "DeviceUnavailable", "this key is not known any more, or expired; ask for a new one"
                )
            answer = getattr(self, "on_" + kind, None)
            if kind not in ("describe", "open", "call", "alive", "close"):
                raise Told("ValueError", f"unknown kind {kind[:40]!r}")
            found = answer(user, public, request, values, arrays, route)
        except Told as error:
            found = self.error(request, error.kind, str(error)) if request else None
        except (KeyError, TypeError, ValueError) as error:
            found = self.error(request, "ValueError", f"garbage: {type(error).__name__} {error}")
        if found:
            self.router.send_multipart([route, *found], copy=False)

    def error(self, request, kind, text):
        """Return the frames of an error."""
        return packed("error", {"request": request, "class": kind, "parts": [" ".join(text.split())[:2000]]})

    def usage(self, frames):
        """Return the account of some frames, as opusim has it."""
        seconds = frames * self.device.period_us * 1e-6
        joules = seconds * self.options.power_w
        return {
            "frames": frames,
            "seconds": seconds,
            "joules": joules,
            "host_seconds": 0.0,
            "programmings": 0,
        }

    def identity(self):
        """Return digest and fingerprint, by which clients know the device."""
        told = json.dumps(self.description(), sort_keys=True).encode()
        return {"digest": hashlib.blake2b(told, digest_size=16).hexdigest(), "fingerprint": self.mark}

    def description(self):
        """Return the served description."""
        given = {"status": "assumed", "source": "given to lighton_server.py"}
        frames = {
            "frame_period_us": float(self.device.period_us),
            "power_w": self.options.power_w,
            "frames_per_projection": 4,
        }
        keys = ["n_inputs", "n_outputs"] + ["frames." + key for key in frames]
        return {
            "schema": 1,
            "name": self.options.name,
            "kind": "lighton",
            "title": "LightOn's OPU (hardware), served from its own Python",
            "n_inputs": self.device.n_inputs,
            "n_outputs": self.device.n_outputs,
            "frames": frames,
            "provenance": dict.fromkeys(keys, given),
        }

    def on_describe(self, user, public, request, values, arrays, route):
        """Tell what is served."""
        about = [
            f"serves by lighton_server.py: {self.device.n_inputs} inputs, {self.device.n_outputs} outputs; "
            "one client at a time",
            "noise: not known; calibrate the device",
        ]
        more = {"description": self.description(), "can": CAN, "about": about, "request": request}
        window = {"n_inputs": self.device.n_inputs, "n_outputs": self.device.n_outputs}
        return packed("described", dict(self.identity(), **more, **window))

    def on_open(self, user, public, request, values, arrays, route):
        """Give a client the place, or let it wait."""
        asked = Session(user, public, values)
        whole = self.device.n_inputs, self.device.n_outputs
        if not (
            1 <= asked.n_inputs <= whole[0] and 0 <= asked.first < asked.first + asked.n_outputs <= whole[1]
        ):
            raise Told(
                "ValueError",
                f"the window exceeds {whole[0]} inputs and {whole[1]} outputs; open a smaller one",
            )
        held = self.session
        if held is not None and (held.public, held.ticket) != (public, asked.ticket):
            reason = f"{held.user} has the device to itself"
            if values.get("waits"):
                return packed("waiting", {"request": request, "position": 1, "reason": reason})
            raise Told("DeviceBusy", reason + "; wait for it with --wait SECONDS or OPUSIM_WAIT")
        if held is None:
            asked.began = self.device.frames
            held = self.session = asked
        more = {
            "request": request,
            "session": held.token,
            "law": None,
            "usage": self.usage(0),
            "repeats": False,
            "request_mib": REQUEST_MIB,
            "silence_s": SILENCE_S,
            "monitored": False,
            "converter": None,
        }
        return packed("opened", dict(self.identity(), **more))

    def own(self, public, values):
        """Return the client's session."""
        held = self.session
        if held is None or (values.get("session"), public) != (held.token, held.public):
            raise Told("SessionLost", "the server does not know this session; open the device again")
        held.heard = time.monotonic()
        return held

    def on_alive(self, user, public, request, values, arrays, route):
        """Tell how far the client's call is."""
        held = self.own(public, values)
        if values.get("has", 0) >= held.number:
            held.reply = None
        if not request:
            return None
        state = {"position": 0, "number": held.number, "answered": held.reply is not None, "held_by": ""}
        return packed("state", dict(state, request=request))

    def on_close(self, user, public, request, values, arrays, route):
        """Free the place."""
        held = self.session
        if (
            held is not None
            and (values.get("session"), public) == (held.token, held.public)
            and not self.busy
        ):
            self.session = None
        return packed("closed", {"request": request})

    def on_call(self, user, public, request, values, arrays, route):
        """Read, or send the answer of a repeated call again."""
        held = self.own(public, values)
        digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode())
        for array in arrays:
            digest.update(array.tobytes())
        number, content = values["number"], digest.hexdigest()
        if number < held.number or (number == held.number and content != held.digest):
            raise Told("ValueError", f"replayed: call {number} of this session was made before")
        if number == held.number:
            return held.reply  # None while it is under way
        if self.busy:
            raise Told("DeviceUnavailable", "the session's earlier call is not finished; wait for it")
        held.number, held.digest, held.reply, self.busy = number, content, None, True
        try:
            found = self.done(held, values, arrays)
            answer = {"request": request, "usage": self.usage(self.device.frames - held.began)}
            if values["act"] == "law":
                answer["law"] = None
            held.reply = packed("answer", answer, found)
        except Told as error:
            held.reply = self.error(request, error.kind, str(error))
        except (KeyError, TypeError, ValueError) as error:
            held.reply = self.error(request, "ValueError", str(error))
        except Exception as error:  # of the driver: the client is told, and the server stays
            held.reply = self.error(request, "DeviceFault", f"the driver failed: {error!r}")
        finally:
            self.busy = False
            held.heard = time.monotonic()
        return held.reply

    def done(self, held, values, arrays):
        """Return what a call reads, in batches that leave room for signs of life."""
        act = values["act"]
        if act in ("seek", "law"):
            return []
        if act not in CAN:
            raise Told(
                "CapabilityMissing",
                "the served device lacks {!r}; it has {}".format(act[:40], ", ".join(CAN)),
            )
        shape = values["shape"] if act == "draw" else None
        if shape is not None:
            count = -(-int(np.prod(shape, dtype=np.int64)) // held.n_outputs)
            rows = np.broadcast_to(np.zeros(held.n_inputs, dtype=np.int8), (count, held.n_inputs))
        else:
            (rows,) = arrays
            if rows.ndim != 2 or rows.shape[1] != held.n_inputs:
                raise ValueError(f"x has the shape {rows.shape}, the window {held.n_inputs} inputs")
        if 4.0 * len(rows) * self.device.n_outputs > REPLY_MIB * MIB:
            raise ValueError(f"the answer would exceed {REPLY_MIB:g} MiB; ask for less at once")
        most, parts, start = 64, [np.zeros((0, held.n_outputs), dtype=np.float32)], 0
        while start < len(rows):
            began = time.monotonic()
            part = self.device.read("project" if act == "draw" else act, rows[start : start + most])
            parts.append(part[:, held.first : held.first + held.n_outputs])
            start += most
            most = max(1, min(MOST_ROWS, int(most * TURN_S / max(time.monotonic() - began, 1e-6))))
            self.serve(0)
        found = np.concatenate(parts)
        return [found if shape is None else found.reshape(-1)[: int(np.prod(shape))].reshape(shape)]


def main():
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bind", default="tcp://*:5555")
    parser.add_argument("--keys", required=True, help="folder with server.key and users' .pub files")
    parser.add_argument("--name", default="lighton_appliance")
    parser.add_argument("--inputs", type=int, default=1000, help="inputs of the window that is fitted")
    parser.add_argument("--outputs", type=int, default=2048)
    parser.add_argument("--config-file", help="of lightonml; by default the appliance's own")
    parser.add_argument("--frame-period-us", type=float, default=500.0)
    parser.add_argument("--exposure-us", type=int)
    parser.add_argument("--power-w", type=float, default=30.0)
    parser.add_argument("--scale", type=float, default=1.0, help="if entries have std 0.5, give 2")
    options = parser.parse_args()
    server = Server(options)
    try:
        while True:
            server.serve(200)
    except KeyboardInterrupt:
        server.device.opu.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
