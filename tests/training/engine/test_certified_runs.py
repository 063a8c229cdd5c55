"""Runs whose guarantee rests on a certificate: third-party devices, resumption, refusals, alarms of the monitor."""

import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import NoGuarantee, Status
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanism import CertifiedMechanism
from opusim.calibration.calibrate import calibrate
from opusim.description.schema import DeviceDescription, load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import GaussianLaw, PhotonCountLaw
from opusim.devices.kinds import register_device
from opusim.devices.registry import open_described
from opusim.errors import ConfigError, DeviceFault, NoiseBelowCertificate, NoiseUnknown
from opusim.noise import GaussianNoise
from opusim.randomness.streams import noise_stream
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device
from opusim.training import train as trained
from opusim.training.config.run import load_config
from opusim.training.errors import RunFolderError
from opusim.training.protections.base import creditable_law
from opusim.training.runs.listing import list_runs
from opusim.training.runs.run import Run, load_run
from opusim.training.sweeps.tuning import Search
from tests.support.certificates import certificate_of

TODAY, BETA, SIGMA, OUTPUTS = datetime.date.today(), 1e-7, 0.5, 64


class OneDay(datetime.date):
    """A calendar on which no midnight comes between the import of these tests and their end."""

    @classmethod
    def today(cls) -> datetime.date:  # type: ignore[override]
        return TODAY


DATA = np.random.default_rng(1).normal(size=(133, 5)), np.arange(133) % 3
"""Of which 120 are trained on: 40 steps of 6 in two epochs."""


def train(configuration: dict[str, Any] | None = None, *, folder: Path, **options: Any) -> Run:
    return trained(configuration, data=DATA, folder=folder, **options)


class BenchDevice(NoisyDevice):
    """A third party's device: hardware that cannot tell its matrix and states no law for its noise."""

    can: ClassVar = frozenset({"project"})

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._stream = noise_stream(self.mode, self._seed, "bench")
        self._matrix = torch.randn(self.n_inputs, self.n_outputs, generator=torch.Generator().manual_seed(3))

    @property
    def described_noise(self) -> GaussianNoise:
        raise NoiseUnknown(f"device {self.name!r}: its noise is not known")

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._stream.add_to(x @ self._matrix, SIGMA)

    def _seek(self, step: int) -> None:
        self._stream.seek(step)


class DrawingBench(BenchDevice):
    can: ClassVar = frozenset({"project", "draw"})


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register_device(KIND, faulty_device)
    register_device("drawing_bench", DrawingBench)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opusim.training.engine.plan.date", OneDay)
        yield
    FaultyDevice.repaired = False


def description_file(
    folder: Path, kind: str, *, every_steps: int = 1, fault: Any = None, amount: Any = 1
) -> Path:
    """A description as TOML; a fault begins at step 23."""
    text = (Path(__file__).parents[3] / "hw_configs" / "gaussian.toml").read_text()
    text = text.replace('name = "gaussian"\nkind = "gaussian"', f'name = "mine"\nkind = "{kind}"')
    text = text.replace("sigma = 0.1", f"sigma = {SIGMA}")
    if kind == "drawing_bench":
        left_out = ("sigma", '"noise', "[noise]")
        text = "\n".join(line for line in text.splitlines() if not line.startswith(left_out))
    if kind == KIND:
        options = f'[options]\nkind = "gaussian"\nfault = "{fault}"\nat_step = 23\namount = {amount}\n'
        row = '"options.{}" = {{ status = "assumed", source = "test" }}\n'.format
        rows = row("at_step") + row("amount")
        text = text.replace("[provenance]\n", f"{options}\n[provenance]\n{rows}")
    text = text.replace("[provenance]\n", f"[monitor]\nevery_steps = {every_steps}\n[provenance]\n")
    file = folder / f"{kind}.toml"
    file.write_text(text)
    return file


def certify(folder: Path, name: Path | str, **changes: Any) -> Path:
    """A certificate of a device, as a calibration would write it, of 99 % of the noise that is there."""
    description = load_description(name)
    law, remarks = GaussianLaw(std=0.99 * SIGMA), ["outputs are independent"]
    made = certificate_of(
        description, law, n_inputs=10, n_outputs=OUTPUTS, date=TODAY.isoformat(), beta=BETA, remarks=remarks
    )
    path = folder / "certificate.toml"
    made.model_copy(update=changes).write(path)
    return path


def config(name: Path | str, certificate: Path | None, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "epochs": 2, "threads": 1, "trainer": {"kind": "pdfa"}, "model": {"hidden": [OUTPUTS]},
        "data": {"n_classes": 3}, "sampler": {"batch_size": 6},
        "protection": {"kind": "record", "noise_multiplier": 2.0, "noise": "device"}, "device": {"name": str(name)},
    }  # fmt: skip
    if certificate is not None:
        base["device"]["certificate"] = str(certificate)
    for name, values in changes.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return base


def certified(folder: Path, *, every_steps: int = 1, certificate: Any = None, **changes: Any) -> dict:
    """The configuration of a run on a Gaussian device under a certificate, with changes of both."""
    device = description_file(folder, "gaussian", every_steps=every_steps)
    return config(device, certify(folder, device, **certificate or {}), **changes)


@pytest.mark.parametrize("mode", [pytest.param("experiment", marks=pytest.mark.slow), "release"])
def test_a_third_partys_device_gets_a_statement(tmp_path: Path, mode: str) -> None:
    device = description_file(tmp_path, "drawing_bench")
    with open_described(load_description(device), n_inputs=3, n_outputs=OUTPUTS, seed=4) as opened:
        made = calibrate(opened, readings=2000, beta=BETA).certificate
    made = made.model_copy(update={"date": TODAY.isoformat()})
    assert isinstance(made.noise, GaussianLaw)
    assert 0.7 * SIGMA < made.noise.std < SIGMA
    path = tmp_path / "certificate.toml"
    made.write(path)
    strength = {"noise_multiplier": None, "epsilon": 3.0} if mode == "experiment" else {}
    run = train(config(device, path, mode=mode, protection=strength), folder=tmp_path / "run")
    (found,) = run.guarantees
    assert found.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert mode == "release" or 2.9 < found.epsilon <= 3.0
    (mechanism,) = read_ledger(run.folder.path).mechanisms
    assert isinstance(mechanism, CertifiedMechanism)
    assert (mechanism.beta, mechanism.certificate) == (BETA, made.digest)
    plain = replace(mechanism, beta=0.0, certificate="")
    assert found.epsilon == guarantees([plain], delta=1e-5 - BETA)[0].epsilon
    assert found.epsilon > guarantees([plain], delta=1e-5)[0].epsilon  # what a forgotten beta would state
    texts = " ".join(assumption.text for assumption in found.assumptions)
    assert f"certificate {made.digest[:12]} of device 'mine', dated {made.date}, 0 days old" in texts
    assert "only the tests support the Gaussian one" in texts
    assert load_run(run.folder.path).facts["certificate"] == made.dump()


def test_the_checks_of_a_certified_run_are_told_before_it_starts(tmp_path: Path) -> None:
    whole = {"sampling_probability": 1.0}  # so that no batch is random
    run = train(certified(tmp_path, every_steps=2, sampler=whole, epochs=3), folder=tmp_path / "run")
    assert run.facts["expected"]["frames"] == run.summary["frames"]


def test_the_credited_noise_is_the_certified_one(tmp_path: Path) -> None:
    """Readings divided by the certified deviation have at least a deviation of 1; here 1 / 0.99."""
    device = description_file(tmp_path, "gaussian")
    certificate = certify(tmp_path, device)
    window = {"n_inputs": 3, "n_outputs": OUTPUTS}
    with open_described(load_description(device), **window, certificate=certificate) as opened:
        law = creditable_law(opened, credit={"beta": BETA})
        assert law.min_std == 0.99 * SIGMA
        with pytest.raises(ConfigError, match=r"beta = 1e-07 is not the one that the guarantee counts \(0\)"):
            creditable_law(opened)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_resumed_run_spends_beta_once(tmp_path: Path, mode: str, stop_at: type) -> None:
    device = description_file(tmp_path, "gaussian")
    certificate = certify(tmp_path, device)
    folder = tmp_path / "run"
    begun = config(device, certificate, mode=mode, checkpoint={"every_steps": 5})
    with pytest.raises(KeyboardInterrupt):
        train(begun, folder=folder, watcher=stop_at(5))
    kept = certificate.read_bytes()
    certify(tmp_path, device, frames=2000)
    with pytest.raises(RunFolderError, match="started under the certificate of .* now holds another"):
        train(folder=folder, resume=True)
    certificate.write_bytes(kept)
    if mode == "release":
        certificate.unlink()  # the folder keeps it
    run = train(folder=folder, resume=True)
    (found,) = run.guarantees
    content = read_ledger(folder)
    assert len(content.certificates) == 1
    plain = [replace(one, beta=0.0, certificate="") for one in content.mechanisms]  # type: ignore[type-var]
    assert found.epsilon == guarantees(plain, delta=1e-5 - BETA)[0].epsilon


def stale(days: int) -> str:
    return (TODAY - datetime.timedelta(days=days)).isoformat()


@pytest.mark.parametrize(("changes", "message"), [
    ({"device": "other"}, "certificate: is that of 'other'; calibrate this device"),
    ({"description_digest": "0" * 32}, "was made for another description; calibrate the device again"),
    ({"date": stale(31)}, "is 31 days ago, and a certificate holds for device.certificate_days = 30"),
    ({"date": stale(-5)}, "lies after today"),
    ({"date": "yesterday"}, "'yesterday' is no date such as"),
    ({"n_outputs": OUTPUTS - 1}, "covers 63 outputs, the window has 64; calibrate with --outputs 64"),
    ({"noise": None}, "certifies no law, the device has 'gaussian'"),
    (
        {"noise": PhotonCountLaw(dark_e_low=1.0, dark_e_high=2.0, light_ratio_low=0.9, light_ratio_high=1.1)},
        "certifies the law 'photon_count', the device has 'gaussian'",
    ),
    ({"beta": 1e-5}, "leaves nothing of protection.delta = 1e-05; calibrate with --beta 1e-06"),
])  # fmt: skip
def test_a_certificate_that_does_not_fit_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        train(certified(tmp_path, certificate=changes), folder=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_older_certificate_is_used_if_its_age_is_allowed(tmp_path: Path) -> None:
    old = certified(tmp_path, certificate={"date": stale(40)}, device={"certificate_days": 60}, epochs=1)
    run = train(old, folder=tmp_path / "run")
    assert "40 days old when first used" in " ".join(one.text for one in run.guarantees[0].assumptions)


@pytest.mark.parametrize(("changes", "message"), [
    ({"protection": {"noise": "digital"}}, "device.certificate: .*it needs a guarantee that rests on"),
    ({"device": {"certificate": None, "certificate_days": 3}}, "certificate_days: 3 does nothing here"),
    ({"device": {"certificate_days": -1}}, "certificate_days"),
])  # fmt: skip
def test_a_key_without_effect_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(certified(tmp_path, **changes), folder=tmp_path / "run")


def broken(
    tmp_path: Path, *, every_steps: int, amount: float = 1.0, fault: Fault = Fault.NOISE_HALVED,
    certified: float = 0.99, **changes: Any,
) -> Path:  # fmt: skip
    """Train on a device that breaks at step 23; return the run folder."""
    FaultyDevice.repaired = False
    device = description_file(tmp_path, KIND, every_steps=every_steps, fault=fault, amount=amount)
    certificate = certify(tmp_path, device, noise=GaussianLaw(std=certified * SIGMA))
    folder = tmp_path / "run"
    train(config(device, certificate, **changes), folder=folder)
    return folder


@pytest.mark.parametrize(("every_steps", "stop", "since"), [(1, 23, 22), (10, 30, 20)])
@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_tenth_less_noise_ends_it(
    tmp_path: Path, every_steps: int, stop: int, since: int, mode: str
) -> None:
    with pytest.raises(NoiseBelowCertificate, match=f"weaker than certified from step {since} on; see what"):
        broken(tmp_path, amount=0.9, every_steps=every_steps, mode=mode)
    content = read_ledger(tmp_path / "run")
    (alarm,) = content.alarms
    assert (alarm.step, alarm.since, alarm.covered) == (stop, since, False)
    rest, early = content.guarantees()
    (listed,) = list_runs(tmp_path, lambda path: {})
    assert listed.guarantee == rest
    assert early.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert f"released before step {since}" in early.mechanism
    assert f"{since} steps" in early.mechanism
    assert rest.status is Status.NONE
    FaultyDevice.repaired = True
    with pytest.raises(RunFolderError, match="cannot be resumed under its guarantee: the monitor stopped"):
        train(folder=tmp_path / "run", resume=True)


def test_a_change_at_noise_above_the_certified_one_is_covered(tmp_path: Path) -> None:
    with pytest.raises(DeviceFault, match="resume with"):
        broken(tmp_path, amount=0.9, every_steps=1, certified=0.7)
    content = read_ledger(tmp_path / "run")
    assert [(alarm.step, alarm.covered) for alarm in content.alarms] == [(23, True)]
    (found,) = content.guarantees()
    assert found.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert content.alarms[0].text in [assumption.text for assumption in found.assumptions]
    FaultyDevice.repaired = True
    run = train(folder=tmp_path / "run", resume=True)
    assert run.guarantees[0].is_proven


@pytest.mark.parametrize(("fault", "alarm"), [(Fault.FROZEN, True), (Fault.NOT_A_NUMBER, False)])
def test_only_an_alarm_of_the_monitor_casts_doubt(tmp_path: Path, fault: Fault, alarm: bool) -> None:
    """A camera that repeats its frames has no noise at all; a reading that is refused was never used."""
    with pytest.raises(DeviceFault):
        broken(tmp_path, fault=fault, every_steps=1 if alarm else 1000)
    content = read_ledger(tmp_path / "run")
    assert [(one.step, one.since) for one in content.doubts] == ([(23, 22)] if alarm else [])


def test_weak_noise_after_the_last_check_is_found_at_the_end(tmp_path: Path) -> None:
    """The fault begins at step 23, and the last check was that before the checkpoint of step 20: the one at the end
    finds it."""
    with pytest.raises(NoiseBelowCertificate, match="weaker than certified from step 20 on"):
        broken(tmp_path, amount=0.9, every_steps=1000)
    assert not load_run(tmp_path / "run").folder.finished
    assert [(alarm.step, alarm.since) for alarm in read_ledger(tmp_path / "run").alarms] == [(40, 20)]


def test_a_device_weaker_than_its_certificate_does_not_open(tmp_path: Path) -> None:
    weak = certified(tmp_path, certificate={"noise": GaussianLaw(std=SIGMA / 0.9)})
    with pytest.raises(NoiseBelowCertificate, match="stop private work and calibrate it again"):
        train(weak, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("trainer", "protection"), [
    ({"kind": "pdfa"}, {"kind": "label-readout", "epsilon": 2.0, "noise": "device"}),
    ({"kind": "pdfa"}, {"kind": "label-amplified", "noise_multiplier": 2.0, "noise": "device"}),
    ({"kind": "zo"}, {"kind": "record", "noise_multiplier": 2.0, "noise": "device"}),
    ({"kind": "convex"}, {"kind": "last-iterate", "epsilon": 3.0, "noise": "device"}),
    ({"kind": "convex"}, {"kind": "record", "noise_multiplier": 2.0, "noise": "device"}),
], ids=lambda one: one["kind"])  # fmt: skip
def test_every_mechanism_counts_the_certificate(tmp_path: Path, trainer: Any, protection: dict) -> None:
    chosen = certified(tmp_path, every_steps=5, certificate={"n_outputs": 10_000}, epochs=1)
    chosen |= {"trainer": trainer, "protection": protection}
    if trainer["kind"] == "convex":
        del chosen["model"]
    run = train(chosen, folder=tmp_path / "run")
    content = read_ledger(run.folder.path)
    paid = {(one.beta, one.certificate) for one in content.mechanisms}  # type: ignore[attr-defined]
    assert paid == {(BETA, content.certificates[0].digest)}
    assert run.guarantees[0].status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert run.guarantees[0].epsilon <= protection.get("epsilon", 30.0)


def test_beta_at_delta_is_no_guarantee(tmp_path: Path) -> None:
    """The refusal before the run is not the only one: the accounting itself states nothing."""
    run = train(certified(tmp_path, epochs=1), folder=tmp_path / "run")
    (found,) = run.folder.read_ledger().guarantees(delta=BETA)
    assert found.status is Status.NONE
    with pytest.raises(NoGuarantee):
        guarantees([], delta=BETA)


def test_a_search_takes_no_certificate_yet(tmp_path: Path) -> None:
    chosen = {
        "trainer": {"kind": "convex"}, "protection": {"kind": "last-iterate", "epsilon": 3.0, "noise": "device"},
        "device": {"name": "gaussian", "certificate": "mine.toml"},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"device\.certificate: is not for a search yet"):
        Search(load_config(chosen), {"trainer.clip": ["0.5"]}, mean=3.0, folder=tmp_path / "search")
