"""A served device is a device: the contract, and the readings of the local one."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, load_description, open_device
from opusim.crossbar.layers import DeviceLinear
from opusim.errors import CapabilityMissing, ConfigError, DeviceFault, DeviceUnavailable
from opusim.noise import GaussianNoise, PhotonCountNoise
from opusim.serving.instrument import Instrument, same_medium
from opusim.serving.remote import RemoteDevice
from opusim.testing.contract import DeviceContract
from tests.opusim.common import refuses, ternary
from tests.support.served import Laboratory, served_and_local, serving

X = ternary(16, 12, 5)
SIZES = {"n_inputs": 12, "n_outputs": 40}
SHARED = {"access": {"exclusive": True}, **SIZES}


SERVED = [
    pytest.param(("gaussian", None), id="gaussian"),
    pytest.param(("pcm", None), id="pcm"),
    pytest.param(("gaussian", SHARED | {"n_inputs": 20, "n_outputs": 64}), id="shared gaussian"),
]
"""Each client has a device of its own, or sees a part of one, as hardware is."""


class TestServed(DeviceContract):
    @pytest.fixture(autouse=True, scope="class", params=SERVED)
    @classmethod
    def _serve(cls, lab: Laboratory, request: pytest.FixtureRequest) -> Iterator[None]:
        name, overrides = request.param
        cls.replayable = overrides is None
        with serving(lab, name, overrides) as cls.address:
            yield

    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device(self.address, **SIZES, **options)


class TestSharedPcm(DeviceContract):  # a chip that its clients share; one that programs it has it to itself
    replayable = False

    @pytest.fixture(autouse=True)
    def _serve(self, lab: Laboratory) -> Iterator[None]:
        with serving(lab, "pcm", SHARED) as self.address:  # anew for each test: what is programmed stays
            yield

    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device(f"{self.address}?exclusive", **SIZES, **options)


@pytest.mark.parametrize("name", ["gaussian", "camera", "ideal"])
def test_readings_are_those_of_the_local_device(lab: Laboratory, name: str) -> None:
    options: dict[str, Any] = {"n_inputs": 12, "n_outputs": 40, "seed": 7}
    with served_and_local(lab, name, **options) as (remote, local):
        for step in (0, 3, 3):
            remote.seek(step)
            local.seek(step)
            for _ in range(2):
                assert torch.equal(remote.project(X), local.project(X))
            assert torch.equal(remote.draw((2, 40)), local.draw((2, 40)))
            bits = (X > 0).numpy()
            assert np.array_equal(remote.intensities(bits), local.intensities(bits))
        assert torch.equal(remote.require("matrix").matrix(), local.require("matrix").matrix())
        assert remote.noise == local.noise
        assert remote.usage == local.usage


@pytest.mark.parametrize(("name", "law"), [("gaussian", GaussianNoise), ("camera", PhotonCountNoise)])
def test_a_window_reads_the_columns_of_the_whole(lab: Laboratory, name: str, law: type) -> None:
    with (
        serving(lab, name) as address,
        open_device(name, n_inputs=12, n_outputs=50, seed=2) as local,
        open_device(f"{address}?outputs_from=30", n_inputs=12, n_outputs=20, seed=2) as remote,
    ):
        assert torch.equal(remote.project(X), local.project(X)[:, 30:])
        low = np.broadcast_to(local.noise.variance_bounds()[0], 50)[30:]
        assert isinstance(remote.noise, law)
        assert np.array_equal(np.broadcast_to(remote.noise.variance_bounds()[0], 20), low)
        assert torch.equal(remote.draw((3, 20)), local.draw((3, 50))[:, 30:])


def test_a_shared_device_hides_other_outputs_and_returns_long_calls_whole(lab: Laboratory) -> None:
    served = {"access": {"exclusive": True}, "n_inputs": 16, "n_outputs": 64, "noise": {"sigma": 0.0}}
    window = {"n_inputs": 12, "n_outputs": 24}
    with (
        serving(lab, "gaussian", served) as address,
        open_device(f"{address}?outputs_from=40", **window) as remote,
    ):
        read, told = remote.project(X), remote.require("matrix").matrix()
    with open_device("gaussian", n_inputs=12, n_outputs=64, noise={"sigma": 0.0}) as local:
        assert torch.equal(read, local.project(X)[:, 40:])
        assert torch.equal(told, local.require("matrix").matrix()[40:])
    served = {"access": {"exclusive": True}, "n_inputs": 12, "n_outputs": 8, "noise": {"sigma": 0.0}}
    x = torch.randint(-1, 2, (2500, 12), generator=torch.Generator().manual_seed(1))
    with serving(lab, "gaussian", served) as address, open_device(address) as remote:
        found = remote.project(x)
        assert remote.usage.frames == 2 * 2500
    with open_device("gaussian", n_inputs=12, n_outputs=8, noise={"sigma": 0.0}) as local:
        assert torch.equal(found, local.project(x))


def test_a_programmed_shared_device_is_another_one_for_its_other_clients(lab: Laboratory) -> None:
    matrix = torch.linspace(-1, 1, 480).reshape(40, 12)
    with serving(lab, "pcm", SHARED) as address, open_device(address) as other:
        assert other.project(X).shape == (16, 40)
        before = other.description
        programming, waiting = other.require("program"), other.require("wait")
        for act in (lambda: programming.program(matrix), lambda: waiting.wait(60.0)):
            refuses(CapabilityMissing, "changes the device for its other clients", act)
        with open_device(f"{address}?exclusive", n_outputs=30) as part:
            refuses(ValueError, "a whole, 12 inputs and 40 out", part.require("program").program, matrix[:30])
        with open_device(f"{address}?exclusive") as alone:
            realised = alone.require("program").program(matrix)
            assert torch.equal(alone.require("matrix").matrix(), realised)
            low, high = alone.noise.variance_bounds()
            assert 0 <= low < high
        refuses(DeviceUnavailable, "was programmed by another client; open it again", other.project, X)
        refuses(DeviceFault, "its medium is another one now", lambda: type(other)(before).open())
        with open_device(address) as again:
            assert torch.equal(again.require("matrix").matrix(), realised)


def test_what_a_user_programmed_is_not_shown_to_another(lab: Laboratory, monkeypatch: Any) -> None:
    secret, other = torch.linspace(-1, 1, 480).reshape(40, 12), torch.zeros(40, 12)
    with serving(lab, "pcm", SHARED) as address:
        with open_device(f"{address}?exclusive") as device:
            device.require("program").program(secret)
        with open_device(address) as device:
            before = device.description
            assert device.require("matrix").matrix().shape == (40, 12)  # its own, which it finds again
        lab.become("bob", monkeypatch)
        with open_device(f"{address}?exclusive") as device:
            held, former = (str(each.options["fingerprint"]) for each in (device.description, before))
            assert not same_medium(held, former)
            for act in (
                lambda: device.project(X),
                lambda: device.require("matrix").matrix(),
                lambda: device.require("multiply").multiply(X / 2),
                lambda: device.require("multiply_transposed").multiply_transposed(torch.zeros(1, 40)),
                lambda: device.require("wait").wait(1.0),
                lambda: device.draw((1, 40)),
                lambda: device.noise,
            ):
                refuses(DeviceUnavailable, "holds what another user programmed; program it", act)
            written = device.require("program").program(other)
            assert torch.equal(device.require("matrix").matrix(), written)
        lab.become("alice", monkeypatch)
        with open_device(address) as device:
            refuses(DeviceUnavailable, "another user programmed; program it", device.require("matrix").matrix)


def test_a_lost_matrix_is_noticed(lab: Laboratory) -> None:
    """A client whose place is lost gets another device, which holds the random matrix."""
    matrix = torch.linspace(-1, 1, 480).reshape(40, 12)
    with serving(lab, "pcm") as address, open_device(address, n_inputs=12, n_outputs=40) as device:
        device.seek(0)
        device.program(matrix)
        device._session = "lost"
        for _ in range(2):
            refuses(DeviceFault, "another matrix; program it again", device.multiply, torch.zeros(1, 12))
        device.seek(1)
        realised = device.program(matrix)
        assert torch.equal(device.matrix(), realised)


def test_products_are_those_of_the_local_device(lab: Laboratory) -> None:
    options: dict[str, Any] = {"n_inputs": 12, "n_outputs": 40, "seed": 7}
    x, matrix = X / 2, torch.linspace(-1, 1, 480).reshape(40, 12)
    with served_and_local(lab, "pcm", **options) as (remote, local):
        for device in (remote, local):
            device.seek(3)
        assert torch.equal(*(each.require("program").program(matrix) for each in (remote, local)))
        assert remote.noise == local.noise
        assert torch.equal(remote.require("multiply").multiply(x), local.require("multiply").multiply(x))
        rows = torch.linspace(-1, 1, 80).reshape(2, 40)
        turned = (each.require("multiply_transposed") for each in (remote, local))
        assert torch.equal(*(each.multiply_transposed(rows) for each in turned))
        assert torch.equal(remote.require("wait").wait(60.0), local.require("wait").wait(60.0))
        assert remote.noise == local.noise
        assert remote.usage == local.usage


def test_a_served_device_tells_which_products_met_a_bound(lab: Laboratory) -> None:
    """A layer on it shows such inputs again at half their size, as on the local device."""
    overrides: dict[str, Any] = {"crossbar": {"converter": {"adc_bound": 2.0}}}
    overrides |= {"n_inputs": 12, "n_outputs": 40}
    torch.manual_seed(1)
    linear, x = torch.nn.Linear(12, 40), torch.rand(6, 12) * torch.tensor([0.01, 1.0]).repeat(3)[:, None]
    matrix, sizes = torch.ones(40, 12), torch.linspace(0, 1, 2500)[:, None].expand(-1, 12)
    with served_and_local(lab, "pcm", overrides) as (remote, local):
        layers = [DeviceLinear(linear, device) for device in (remote, local)]
        assert torch.equal(layers[0](x), layers[1](x))
        assert remote.usage == local.usage
        assert remote.usage.frames > 64 + 6  # of the reference vectors and of x
    overrides["access"] = {"exclusive": True}
    with serving(lab, "pcm", overrides) as address, open_device(f"{address}?exclusive") as shared:
        shared.require("program").program(matrix)
        shared.require("multiply").multiply(sizes)  # read in three batches
        met = cast(RemoteDevice, shared).saturated
    assert met.shape == (2500,)
    assert not met[:200].any()
    assert met[-1500:].all()


def test_what_a_client_may_not_do_is_one_line(lab: Laboratory) -> None:
    with serving(lab, "gaussian", {"n_outputs": 64}) as address:
        with open_device(address, n_inputs=12, n_outputs=40) as remote:
            refuses(CapabilityMissing, "lacks the capability 'multiply'", remote.require, "multiply")
            refuses(ConfigError, "certificate: belongs to the server", remote.attach_certificate, None)
            assert torch.equal(remote.project(X) * 0, torch.zeros(16, 40))
        refuses(ConfigError, "a window of 65 .* has 64", open_device, address, n_outputs=65)
        refuses(ConfigError, "up to 70 .* 64 are", open_device, f"{address}?outputs_from=30", n_outputs=40)
        refuses(ConfigError, "noise: does nothing: .* 'remote'", open_device, address, noise={"sigma": 0.5})


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("remote://nothing", "is no address; write remote://HOST:PORT"),
        ("remote://h:1/path", "is no address"),
        ("remote://h:99999", "is no address"),
        ("remote://h:1?fast=1", "fast: is no option; known are outputs_from, exclusive"),
        ("remote://h:1?wait_s=long", "wait_s: 'long' is no value for it"),
        ("ftp://h:1", "'ftp' is not installed in opusim.description_schemes"),
    ],
)
def test_a_wrong_address_is_refused(address: str, message: str) -> None:
    refuses(ConfigError, message, open_device, address)


def test_another_description_or_medium_is_noticed(lab: Laboratory) -> None:
    with serving(lab, "gaussian") as address:
        port = address.rpartition(":")[2]
        device = open_device(address, n_inputs=12, n_outputs=40)
        stored = device.description
        device.close()
    bind = f"tcp://127.0.0.1:{port}"
    other = {"noise": {"sigma": 0.2}}
    with serving(lab, "gaussian", other, bind=bind):
        refuses(DeviceFault, "another description now", device.open)
    options = {**stored.options, "fingerprint": "ff" * 32}
    changed = stored.model_copy(update={"options": options})
    with serving(lab, "gaussian", bind=bind):
        refuses(DeviceFault, "medium is another one", type(device)(changed, n_inputs=12, n_outputs=40).open)
    with serving(lab, "gaussian", bind=bind), device.open():
        assert device.project(X).shape == (16, 40)


def test_the_fingerprint_tells_media_apart_and_not_noise() -> None:
    def print_of(seed: int, sigma: float) -> str:
        found = load_description("gaussian", {"medium": {"seed": seed}, "noise": {"sigma": sigma}})
        return Instrument(found).fingerprint

    base = print_of(1, 0.1)
    assert same_medium(base, print_of(1, 3.0))
    assert not same_medium(base, print_of(2, 0.1))
    assert not same_medium(base, "no hexadecimal")
    assert not same_medium(base, base[:-2])
