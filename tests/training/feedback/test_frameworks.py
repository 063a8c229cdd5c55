"""Feedback points under torch.compile, DDP, mixed precision and Opacus: gradients of a plain loop, or a refusal."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opusim import FeedbackAlignment, open_device
from tests.support import feedback_ranks
from tests.support.record_models import Custom
from tests.support.shared_checks import with_marks

ROOT = Path(__file__).parents[3]
WIDTH, CLASSES = 6, 3
x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
y = torch.arange(8) % CLASSES


def block() -> nn.Module:
    parts = {"linear": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)}
    return Custom(lambda m, h: m.norm(h + m.linear(h).tanh()), **parts)


def new_net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(block(), block(), block(), nn.Linear(WIDTH, CLASSES))


def new_model(sigma: float = 0.3) -> FeedbackAlignment:
    """A model whose device repeats its noise in a model made anew."""
    device = open_device("gaussian", n_inputs=CLASSES, n_outputs=WIDTH, seed=4, noise={"sigma": sigma})
    return FeedbackAlignment(new_net(), device=device)


def trained(model: FeedbackAlignment, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Parameters after three steps; evaluation between them takes no step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(run(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            run(x)
    return list(model.parameters())


def close(first: list[Tensor], second: list[Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("part", with_marks(["whole", "model", "blocks"], ["whole", "model"]))
def test_compiled_models_learn_the_same(part: str) -> None:
    """Noise and steps too; `aot_eager` traces as `inductor` does, without a C++ compiler."""
    torch.compiler.reset()
    plain, model = new_model(), new_model()
    run: Callable[[Tensor], Tensor] = model
    if part == "blocks":
        for block in list(model.model)[:3]:
            block.compile(backend="aot_eager")
    else:
        run = torch.compile(model if part == "whole" else model.model, backend="aot_eager")
    wanted = trained(plain, plain)
    assert close(trained(model, run), wanted)
    assert model.usage.frames == plain.usage.frames > 0
    other = new_model()
    with other.backpropagating():
        assert not close(trained(other, other), wanted)


def test_a_whole_graph_is_refused() -> None:
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"FeedbackAlignment\._begin"):
        torch.compile(new_model(), backend="eager", fullgraph=True)(x)


@pytest.mark.slow
def test_processes_average_their_gradients_and_stay_equal(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "tests.support.feedback_ranks", str(tmp_path)]
    subprocess.run(call, cwd=ROOT, check=True, timeout=120)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(feedback_ranks.PROCESSES)]
    for name in ("gradients", "parameters"):
        assert all(map(torch.equal, ranks[0][name], ranks[1][name]))
    own = [feedback_ranks.gradients(feedback_ranks.new_model(rank), rank) for rank in (0, 1)]
    assert close(ranks[0]["gradients"], [(a + b) / 2 for a, b in zip(*own, strict=True)])
    assert not close(*own)


def test_replicas_in_threads_are_refused() -> None:
    replica = new_model().model._replicate_for_data_parallel()
    with pytest.raises(ValueError, match=r"nn\.DataParallel.*use nn\.parallel\.DistributedDataParallel"):
        replica(x)


def test_autocast_and_a_gradient_scaler_keep_the_gradients() -> None:
    plain, model = new_model(), new_model()
    cross_entropy(plain(x), y).backward()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        cosine = torch.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0)
        assert cosine > 0.98  # eight bits of mantissa


def test_function_transforms_are_refused() -> None:
    model = new_model()

    def loss(given: dict[str, Tensor]) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, given, (x,)), y)

    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad or vmap; use loss\.backward\(\)"):
        torch.func.grad(loss)(dict(model.named_parameters()))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_opacus_finds_the_gradient_of_every_record() -> None:
    opacus = pytest.importorskip("opacus")
    model = new_model(sigma=0.0)
    hooked = opacus.GradSampleModule(model)
    cross_entropy(hooked(x), y).backward()
    for record in range(len(x)):
        single = new_model(sigma=0.0)
        cross_entropy(single(x[record : record + 1]), y[record : record + 1]).backward()
        samples = [p.grad_sample[record] for p in model.parameters()]
        assert close(samples, [p.grad for p in single.parameters()])


def test_functional_calls_have_the_same_gradients() -> None:
    plain, model = new_model(), new_model()
    cross_entropy(plain(x), y).backward()
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = cross_entropy(torch.func.functional_call(model, given, (x,)), y)
    assert close(list(torch.autograd.grad(loss, list(given.values()))), [p.grad for p in plain.parameters()])
