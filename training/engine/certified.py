"""What a run takes from its device's certificate: the credited law, its beta, and what the ledger says of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from accounting.ledger.evidence import Alarm, CertificateFacts
from accounting.ledger.ledger import LedgerContent
from opusim.description.schema import DeviceDescription, MonitorSettings
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import Certificate, load_certificate
from opusim.errors import ConfigError, DeviceError
from training.config.run import RunConfig
from training.errors import RunFolderError
from training.runs.folder import RunFolder


def certificate_of(
    config: RunConfig, description: DeviceDescription | None, folder: RunFolder | None
) -> Certificate | None:
    """Return the certificate that a run rests on, once it fits the device, the day and the run's delta.

    Args:
        config: The run.
        description: That of its device, or None without one.
        folder: The folder of a run to resume, which keeps the certificate, so that its file may be gone.

    Raises:
        ConfigError: It is another device's or description's, too old, without a law, or its beta leaves no delta.
        RunFolderError: The file now holds another certificate than the run was started with.
    """
    chosen = config.device
    if chosen.certificate is None or description is None:
        return None
    if folder is None:
        found = load_certificate(chosen.certificate)
    else:
        found = Certificate.model_validate(folder.read_facts()["certificate"])
        _require_same(found, Path(chosen.certificate), folder)
    found.check_device(description, n_outputs=0)  # the window is checked when the device is opened
    found.require_fresh(chosen.certificate_days, date.today())
    delta = config.protection.delta
    if found.beta >= delta:
        reason = (
            f"beta = {found.beta:g} is the certificate's own error and leaves nothing of protection.delta = {delta:g}; "
            f"calibrate with --beta {delta / 10:g}, or raise protection.delta"
        )
        raise ConfigError(found.device, "certificate.beta", reason)
    return found


def _require_same(kept: Certificate, path: Path, folder: RunFolder) -> None:
    """Refuse to resume a run whose certificate's file now holds another one."""
    if path.exists() and load_certificate(path).digest != kept.digest:
        raise RunFolderError(
            f"run folder {folder.path} was started under the certificate of {kept.date}, and {path} now holds another; "
            "move that file away, or begin a new run"
        )


def monitored(
    description: DeviceDescription | None, certificate: Certificate | None
) -> DeviceDescription | None:
    """Return the description with a monitor, which a run under a certificate always has; it looks before each step."""
    if description is None or certificate is None or description.monitor is not None:
        return description
    return description.model_copy(update={"monitor": MonitorSettings(every_steps=1)})


def credit_of(config: RunConfig, certificate: Certificate | None) -> Mapping[str, Any]:
    """Return the keywords of a mechanism that rests on the device's noise under a certificate."""
    if certificate is None or not config.protection.credits_device:
        return {}
    return {"beta": certificate.beta, "certificate": certificate.digest}


def facts_of(certificate: Certificate, device: NoisyDevice) -> CertificateFacts:
    """Return what the ledger keeps of a certificate.

    Args:
        certificate: The run's.
        device: The open device, which states the certified law and is monitored.
    """
    monitor = device.description.monitor or MonitorSettings()
    return CertificateFacts(
        digest=certificate.digest,
        device=certificate.device,
        date=certificate.date,
        age_days=certificate.age_days(date.today()),
        beta=certificate.beta,
        law=device.noise.describe(),
        remarks=tuple(certificate.remarks),
        every_steps=monitor.every_steps,
        finds=device.smallest_changes(1)["variance below the law"],
    )


def alarm_of(error: DeviceError, device: NoisyDevice, *, step: int, first_step: int) -> Alarm | None:
    """Return what the ledger says of an error, or None if it is no alarm of the monitor.

    Args:
        error: What the device raised.
        device: The device.
        step: The step before which it was raised.
        first_step: The step from which this process began; the device was checked when it was opened for it.
    """
    if not device.changed:
        return None
    since, found = device.doubtful_from, str(error).split("; ")[0]  # the remedy stands behind it
    if since is None:
        return Alarm(step=step, since=step, found=found, covered=True)
    at_opening = not 0 <= since <= step  # labels are read under a step number beyond all others
    return Alarm(step=step, since=first_step or -1 if at_opening else since, found=found, covered=False)


def require_undoubted(content: LedgerContent, folder: RunFolder) -> None:
    """Refuse to resume a run whose later steps no guarantee would cover.

    Raises:
        RunFolderError: The device's monitor found the noise other than certified.
    """
    for alarm in content.doubts:
        raise RunFolderError(
            f"run folder {folder.path} cannot be resumed under its guarantee: {alarm.text}; begin a new run, and see "
            f"what is covered with: opusim account run {folder.path}"
        )
