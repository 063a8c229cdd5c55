"""What a run takes from its device's certificate: the credited law, its beta, and what the ledger says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

from opusim.accounting.ledger import Alarm, CertificateFacts, Ledger
from opusim.description.schema import DeviceDescription, MonitorSettings
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import Certificate, load_certificate
from opusim.errors import ConfigError, DeviceError, DeviceFault, NoiseBelowCertificate
from opusim.files import quoted
from opusim.training.config.sections import DeviceChoice
from opusim.training.errors import RunFolderError
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint, reseal_checkpoint
from opusim.training.runs.folder import RunFolder

VOUCHED = "noise_vouched"
"""Key of a checkpoint's progress: step of the last check that confirmed the noise of all steps before it, or -1."""


def certificate_of(
    chosen: DeviceChoice, delta: float, description: DeviceDescription | None, folder: RunFolder | None
) -> Certificate | None:
    """Return the certificate that a run rests on, checked against the device, the date and the run's delta.

    The folder of a run to resume keeps the certificate, so that its file may be gone. Raises ConfigError if it is
    another device's or description's, too old, without a law, or its beta leaves no delta, and RunFolderError if the
    file now holds another one than the run was started with.
    """
    if chosen.certificate is None or description is None:
        return None
    if folder is None:
        found = load_certificate(chosen.certificate)
    else:
        found, path = Certificate.model_validate(folder.read_facts()["certificate"]), Path(chosen.certificate)
        if path.exists() and load_certificate(path).digest != found.digest:
            raise RunFolderError(
                f"run folder {folder.path} was started under the certificate of {found.date}, and {path} now holds "
                "another; move that file away, or begin a new run"
            )
    found.check_device(description, n_outputs=0)  # the window is checked when the device is opened
    if (age := found.age_days(date.today())) > chosen.certificate_days:
        reason = (
            f"{found.date} is {age} days ago, and a certificate holds for device.certificate_days = "
            f"{chosen.certificate_days}; calibrate again: opusim device calibrate {quoted(found.device)} --out FOLDER"
        )
        raise ConfigError(found.device, "certificate.date", reason)
    if found.beta >= delta:
        reason = (
            f"beta = {found.beta:g} is the certificate's own error and leaves nothing of protection.delta = {delta:g}; "
            f"calibrate with --beta {delta / 10:g}, or raise protection.delta"
        )
        raise ConfigError(found.device, "certificate.beta", reason)
    return found


def facts_of(certificate: Certificate, device: NoisyDevice) -> CertificateFacts:
    """Return what the ledger keeps of a certificate, whose law the open device states and monitors."""
    monitor = device.description.monitor or MonitorSettings()
    found = device.smallest_changes(1)
    single = found["variance of one output below the law"]
    return CertificateFacts(
        digest=certificate.digest,
        device=certificate.device,
        date=certificate.date,
        age_days=certificate.age_days(date.today()),
        beta=certificate.beta,
        law=device.noise.describe(),
        remarks=certificate.assumptions,
        every_steps=monitor.every_steps,
        finds=found["variance below the law"],
        finds_output=None if math.isnan(single) else single,
    )


def vouched_step(device: NoisyDevice, step: int, earlier: int) -> int:
    """Return the step of the last check that confirmed the device's noise in all steps before it.

    Labels are read under a step number beyond all others, and their checks do not count; then it is `earlier`, the
    checkpoint's, at most.
    """
    found = device.monitor.vouched
    return found if 0 <= found <= step else min(earlier, step)


def without_remedy(error: DeviceError) -> str:
    """Return the text of a device's error without its remedy."""
    return str(error).split("; ")[0]


@contextmanager
def noted_alarms(folder: RunFolder, ledger: Callable[[], Ledger]) -> Iterator[None]:
    """Record an alarm that stops a certified run outside its steps, such as when a resumed run opens its device.

    Doubt then begins at the last passed check of the newest checkpoint. The folder's lock is held.
    """
    try:
        yield
    except DeviceError as error:
        checkpoints = list_checkpoints(folder.checkpoints)
        # no alarm for a fault such as an unplugged cable
        judged = error.alarm and isinstance(error, DeviceFault | NoiseBelowCertificate)
        if not judged or not checkpoints or not folder.ledger_file.exists():
            raise
        newest = read_checkpoint(checkpoints[-1])
        since = newest.step if error.covered else min(newest.progress.get(VOUCHED, -1), newest.step)
        alarm = Alarm(step=newest.step, since=since, found=without_remedy(error), covered=error.covered)
        content = folder.read_ledger()
        if not content.payments or content.doubts or not alarm.doubts:  # a line would undo a clean stop
            raise
        with ledger() as opened:
            opened.note_alarm(alarm)
            reseal_checkpoint(checkpoints[-1], replace(newest.header.seal, ledger=opened.position))
        raise type(error)(f"{error}. {doubt_text(alarm, folder)}") from error


def doubt_text(alarm: Alarm, folder: RunFolder) -> str:
    """Return the message to the user about an alarm that leaves steps in doubt."""
    return (
        f"Its noise may have been weaker than certified from step {max(alarm.since, 0)} on; see what is covered "
        f"with: opusim account run {quoted(folder.path)}"
    )
