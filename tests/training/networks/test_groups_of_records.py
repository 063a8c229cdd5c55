"""Groups of neighbouring records that count as one, such as those of a user: one norm and one clip for each group."""

import pytest
import torch

from opusim.training.networks.record_gradients.tape import RecordTape
from tests.support.record_models import CASES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
]

GROUPS, EACH = 4, 3
FAST = (
    "linear", "convolution in 2d", "bare parameters", "tied decoder", "residual network", "lstm, time first",
)  # fmt: skip
"""Cases with the records in other dimensions, with copies of a parameter for each record, and with kept statistics."""


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_norm_and_the_clip_of_a_group_are_those_of_its_records_sum(name: str) -> None:
    torch.manual_seed(0)
    build, records = CASES[name]
    model, x = build(), records(GROUPS * EACH)
    tape = RecordTape(model, x)
    signal = torch.randn_like(model(x))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradient(rows: slice) -> torch.Tensor:
        found = torch.autograd.grad(
            (model(x[rows]) * signal[rows]).sum(), parameters, allow_unused=True, materialize_grads=True
        )
        return torch.cat([each.double().flatten() for each in found])

    wanted = torch.stack([gradient(slice(n, n + EACH)) for n in range(0, len(x), EACH)])
    norms = wanted.norm(dim=1)
    recorder = tape.begin(GROUPS, EACH)
    with recorder:
        (model(x) * signal).sum().backward()
    tape.end(recorder)
    torch.testing.assert_close(tape.squared_norms().sum(dim=0).sqrt(), norms, rtol=2e-2, atol=1e-6)
    bound = float(norms.median())
    tape.clip(bound)
    found = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    clipped = (wanted * (bound / norms).clamp(max=1.0)[:, None]).sum(dim=0)
    assert float((found - clipped).norm()) < 0.02 * float(clipped.norm())
    apart = torch.stack([gradient(slice(n, n + 1)) for n in range(len(x))]).norm(dim=1)
    assert not torch.allclose(apart.view(GROUPS, EACH).sum(dim=1), norms, rtol=2e-2)
