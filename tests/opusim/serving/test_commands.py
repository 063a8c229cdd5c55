"""Commands of served devices, examples of a service, waiting for local devices, many connections and calls."""

import gc
import json
import re
import shlex
import shutil
import subprocess
import sysconfig
import threading
import time
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from opusim import load_description, open_device
from opusim.camera.from_description import noise_line
from opusim.devices.access import FOLDER_VARIABLE, ExclusiveUse
from opusim.errors import DeviceBusy
from opusim.serving.connections import Message, read_message, told_error
from opusim.serving.keys import own_key, require_zmq, server_key
from opusim.serving.remote import about
from opusim.serving.server import Limits
from tests.opusim.common import refuses
from tests.support.command import COMMAND, ROOT, opusim
from tests.support.served import Laboratory, ServerProcess, new_laboratory, serving

EXAMPLES = ROOT / "examples" / "serving"


def test_keys_are_made_by_one_command_which_a_server_without_them_names(tmp_path: Path) -> None:
    done = opusim("device", "keys", "new", "alice", cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    secret = tmp_path / "opusim" / "keys" / "alice.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert str(secret) in done.stdout
    assert secret.read_text().split('secret = "')[1].split('"')[0] not in done.stdout
    again = opusim("device", "keys", "new", "alice", cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "alice: is there already; choose another name" in again.stderr
    words = ("device", "serve", "gaussian", "--bind", "tcp://127.0.0.1:*", "--keys", tmp_path)
    done = opusim(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "server.key: is missing; make it with: opusim device keys new server --folder" in done.stderr


def test_an_address_stands_for_a_device(lab: Laboratory, tmp_path: Path) -> None:
    with serving(lab, "camera") as address:
        shown = opusim("device", "show", address, cwd=tmp_path)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "can: project, draw, intensities, matrix" in shown.stdout
        assert "noise: as the kind 'remote' defines it" not in shown.stdout
        assert noise_line(load_description("camera"))[:60] in shown.stdout
        told = ("serves 'camera' of kind 'camera'", "certificate: none", "medium: simulated, seed 20210603")
        for text in told:
            assert text in shown.stdout
        arguments = ("--out", tmp_path / "refused", "--outputs", 40, "--readings", 60)
        refused = opusim("device", "calibrate", f"{address}?exclusive", *arguments, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "a law of counts needs frames, which only its own machine takes" in refused.stderr


@pytest.mark.slow
def test_a_certificate_made_over_the_network_belongs_to_the_server(lab: Laboratory, tmp_path: Path) -> None:
    with serving(lab, "gaussian") as address:
        out = tmp_path / "calibration"
        words = ("calibrate", f"{address}?exclusive", "--out", out, "--outputs", 40, "--readings", 60)
        done = opusim("device", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        certificate = out / "gaussian.certificate.toml"
        window = {"n_inputs": 12, "n_outputs": 40}
        with open_device("gaussian", certificate=certificate, **window) as local:
            law = local.noise
    served = serving(lab, "gaussian", certificate=certificate)
    with served as address, open_device(address, **window) as remote:
        assert remote.noise == law
        assert law.beta > 0
        (told,) = [line for line in about(address) if line.startswith("certificate: ")]
        assert f"beta = {law.beta:g}, by which the noise is Gaussian" in told
    gone = opusim("train", "pdfa", "--data", "digits", "--device", f"{address}?silence_s=1", cwd=tmp_path)
    assert gone.returncode == 3
    assert re.fullmatch(r"opusim: device .*: no answer from its server for 1 s; check that .*\n", gone.stderr)


@pytest.mark.slow
def test_the_container_and_the_unit_start_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run the same command, which is started here with other paths, used, and stopped as systemd does."""
    container = (EXAMPLES / "Containerfile").read_text()
    words = json.loads(container.split("CMD ")[1])
    unit = (EXAMPLES / "opusim-device.service").read_text()
    (start,) = re.findall(r"^ExecStart=\S+/opusim (.*)$", unit, re.MULTILINE)
    places = {"/etc/opusim/keys": "/keys", "/var/lib/opusim": "/state"}
    for place, other in places.items():
        start = start.replace(place, other)
    assert ["opusim", *start.split()] == words
    assert words[:4] == ["opusim", "device", "serve", "gaussian"]
    assert "STOPSIGNAL SIGTERM" in container
    assert "KillSignal=SIGTERM" in unit

    lab = new_laboratory(tmp_path, "alice")
    lab.become("alice", monkeypatch)
    here = {"tcp://*:5555": "tcp://127.0.0.1:*", "/keys": lab.keys, "/state/usage.jsonl": lab.journal}
    with ServerProcess(lab, "gaussian") as server, open_device(server.address, **WINDOW) as device:
        assert server.process.args[len(COMMAND) :] == [str(here.get(word, word)) for word in words[1:]]
        device.project(torch.zeros(3, 12))
        assert server.terminate() == 0
    assert "alice opened 40 outputs" in server.log.read_text()
    assert json.loads(lab.journal.read_text().splitlines()[-1])["calls"] == 1


@pytest.mark.slow
def test_the_steps_of_the_container_lead_to_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its RUN and CMD in a fresh environment, in which the libraries that it would download are those of this one."""
    container = (EXAMPLES / "Containerfile").read_text()
    assert "COPY . /source" in container
    ignored = shutil.ignore_patterns(".*", "build", "results", "__pycache__", "*.egg-info", "tests")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    (site,) = (place / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    (step,) = re.findall(r"^RUN pip (install .*) && rm -r /source$", container, re.MULTILINE)
    assert "'/source[served]'" in step
    install = shlex.split(step.replace("/source", str(tmp_path / "source")))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    python = place / "bin" / "python"
    subprocess.run([python, "-m", "pip", *install, *offline], check=True, capture_output=True)
    lab = new_laboratory(tmp_path / "lab", "alice")
    lab.become("alice", monkeypatch)
    here = {"/keys": str(lab.keys), "/state/usage.jsonl": str(lab.journal)}
    here["tcp://*:5555"] = "tcp://127.0.0.1:*"
    words = [here.get(word, word) for word in json.loads(container.split("CMD ")[1])]
    variables = dict(re.findall(r"^ENV (\w+)=(.*)$", container, re.MULTILINE))
    environment = {"PATH": f"{place / 'bin'}:/usr/bin:/bin", **variables}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "numba")
    command, settings = [place / "bin" / words[0], *words[1:]], {"env": environment, "cwd": tmp_path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **settings) as server:
        try:
            found = re.search(r"serving gaussian at tcp://(\S+);", server.stdout.readline())
            with open_device(f"remote://{found[1]}", n_inputs=12, n_outputs=40) as device:
                assert device.project(torch.zeros(3, 12)).shape == (3, 40)
        finally:
            server.terminate()
    assert server.returncode == 0


def test_the_unit_is_one(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not here")
    verify = [program, "verify", tmp_path / "opusim-device.service"]
    unit = (EXAMPLES / "opusim-device.service").read_text().replace("/opt/opusim/bin/opusim", "/bin/true")
    (tmp_path / "opusim-device.service").write_text(unit)
    done = subprocess.run(verify, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "opusim-device.service").write_text(unit.replace("RestartSec=2", "RestartSec=soon"))
    bad = subprocess.run(verify, capture_output=True, text=True)
    assert "Failed to parse sec value" in bad.stderr


EXCLUSIVE = {"access": {"exclusive": True}, "n_inputs": 4, "n_outputs": 6}


def test_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    holder = ExclusiveUse("gaussian")
    holder.acquire()
    started = time.monotonic()
    with pytest.raises(DeviceBusy, match="is held by process .*; wait for it with --wait SECONDS, or end it"):
        open_device("gaussian", access={"exclusive": True, "wait_s": 0.6}, n_inputs=4, n_outputs=6)
    assert time.monotonic() - started >= 0.6
    assert any("is held by process" in line and "waiting for up to 0.6 s" in line for line in caplog.messages)
    threading.Timer(0.5, holder.release).start()
    monkeypatch.setenv("OPUSIM_WAIT", "60")
    open_device("gaussian", **EXCLUSIVE).close()
    monkeypatch.setenv("OPUSIM_WAIT", "long")
    refuses(ValueError, "OPUSIM_WAIT = 'long': must be a number", open_device, "gaussian", **EXCLUSIVE)


def test_wait_is_an_option_of_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description = tmp_path / "mine.toml"
    text = (ROOT / "hw_configs" / "gaussian.toml").read_text()
    description.write_text(text.replace("[medium]", "[access]\nexclusive = true\n[medium]"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    holder = ExclusiveUse("gaussian")
    holder.acquire()
    arguments = ("device", "calibrate", description, "--out", tmp_path / "out")
    arguments += ("--outputs", 40, "--readings", 60)
    refused = opusim(*arguments, cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1)
    threading.Timer(0.5, holder.release).start()
    assert opusim(*arguments, "--wait", "60", cwd=tmp_path).returncode == 0
    wrong = opusim(*arguments, "--wait", "soon", cwd=tmp_path)
    assert wrong.returncode == 2
    assert re.fullmatch("opusim: --wait 'soon': must be a number .*; write --wait 600\n", wrong.stderr)


def test_pyzmq_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opusim.serving.keys.zmq", None)
    refuses(Exception, "need pyzmq, which is not installed", require_zmq)


def test_use_is_told_in_a_table_and_a_figure(lab: Laboratory, tmp_path: Path) -> None:
    with serving(lab) as address, open_device(f"{address}?run=seven", n_inputs=12, n_outputs=40) as device:
        device.project(torch.zeros(10, 12))
    figure = tmp_path / "use.png"
    done = opusim("device", "usage", "--journal", lab.journal, "--figure", figure, "--days", 2, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"alice\W+seven\W+1\W+20\W", done.stdout)
    assert figure.read_bytes().startswith(b"\x89PNG")
    none = opusim("device", "usage", cwd=tmp_path)
    assert "NAME: is missing; name the served device, or give --journal FILE" in none.stderr


WINDOW: dict[str, Any] = {"n_inputs": 12, "n_outputs": 40}


@pytest.mark.parametrize("connections", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_connections_at_once_are_served_or_refused_in_one_line(lab: Laboratory, connections: int) -> None:
    places = connections // 10
    with serving(lab, limits=Limits(clients=places, clients_per_user=connections, silence_s=99.0)) as address:
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
            (line,) = lines
            assert line.startswith(f"it serves {places} clients, the most that it takes; wait for it")
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
