from __future__ import annotations

from tests.support.faults.answers_too_bright import plant
from tests.support.faults.base import Fault

FAULT = Fault(
    name="counts_too_bright",
    breaks="Labels are shown to the camera with 1.5 times the accounted light.",
    trainers=("pdfa",),
    protections=("label-readout",),
    settings=("protection.noise=counts",),
    checks=("counts: mean losses", "counts: spread of losses"),
    plant=plant,
)
