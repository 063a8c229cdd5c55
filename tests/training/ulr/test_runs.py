"""Runs of the trainer `ulr`: learning, protection, device noise, user-supplied modules, non-finite losses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.bare import bare
from opusim import open_device, training
from opusim.errors import ConfigError
from opusim.randomness.streams import SeededStream, noise_stream
from opusim.training.config import load_config
from opusim.training.config.sections import OptimizerConfig
from opusim.training.errors import RunFolderError, TrainingDiverged
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.base import DeviceNormals
from opusim.training.protections.clipping import Clipping
from opusim.training.protections.record import RecordGradients
from opusim.training.ulr.estimator import Estimator, ModuleSequence
from opusim.training.ulr.trainer import PlainUpdate, UlrTrainer
from tests.support.ulr_models import losses_of, new_network, records

CLIP, DIVISOR = 0.31, 19.0
CONFIG: dict[str, Any] = {
    "epochs": 12, "threads": 1, "model": {"hidden": [32], "activation": "gelu"},
    "optimizer": {"name": "adam", "lr": 0.005}, "sampler": {"batch_size": 100},
    "trainer": {"kind": "ulr", "sigma": 0.3, "copies": 2},
}  # fmt: skip


def blobs(n: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Three classes apart from each other."""
    generator = np.random.default_rng(1)
    labels = np.arange(n) % 3
    return 4.0 * np.eye(3, 8)[labels] + generator.normal(size=(n, 8)), labels


def new_trainer(network: ModuleSequence, protection: RecordGradients | None = None) -> UlrTrainer:
    update = PlainUpdate(
        network, Estimator(copies=2, reduction="antithetic"), sigma=0.2,
        noise=noise_stream("experiment", 5, "output-noise"), protection=protection,
    )  # fmt: skip
    optimizer = make_optimizer(network.parameters, OptimizerConfig(lr=1e-30))
    return bare(
        UlrTrainer, network, load_config({"trainer": {"kind": "ulr"}}), optimizer=optimizer, update=update
    )


def clipped(network: ModuleSequence, *, by_layer: bool = False) -> RecordGradients:
    return RecordGradients(
        clip_norm=CLIP, noise_multiplier=0.0, divisor=DIVISOR, noise=noise_stream("experiment", 6, "central-noise"),
        clipping=Clipping(kind="per_layer" if by_layer else "flat"),
    )  # fmt: skip


@pytest.mark.parametrize("clip", ["joint", "module"])
def test_a_protected_run_learns_and_states_the_sampled_gaussian(tmp_path: Path, clip: str) -> None:
    config = {
        **CONFIG, "data": {"n_classes": 3}, "sampler": {"scheme": "poisson", "batch_size": 100},
        "trainer": {**CONFIG["trainer"], "clip": clip}, "protection": {"kind": "record", "epsilon": 8.0},
    }  # fmt: skip
    run = training.train(config, data=blobs(), folder=tmp_path / "run")
    (guarantee,) = run.guarantees
    assert guarantee.status == "proven"
    assert guarantee.epsilon <= 8.0
    assert run.evaluate(*blobs())["accuracy"] > 0.7


@pytest.mark.parametrize("name", ["linear", "convolution", "residual block", "callable"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_clipped_sums_equal_loops_over_records(name: str, by_layer: bool) -> None:
    """Compare with steps of one record each, whose contributions are clipped by hand."""
    x, y = records(5, new_network(name).n_inputs)
    network = new_network(name)
    update = new_trainer(network).update
    outputs = network.forward(x)
    losses = losses_of(y)
    signals = update._estimator.signals(
        network, outputs, losses, losses(outputs.output, slice(None))[0], noise_stream("experiment", 5, "output-noise"),
        [0.2] * network.depth,
    )  # fmt: skip
    expected = [torch.zeros_like(parameter) for parameter in network.parameters]
    for i in range(5):
        layers = []
        for layer, (delta, h) in enumerate(zip(signals, outputs.inputs, strict=True)):
            value = (network.layer(layer, h[i : i + 1]) * delta[i]).sum()
            layers.append(torch.autograd.grad(value, network.layer_parameters(layer)))
        norms = [torch.cat([g.flatten() for g in grads]).norm() for grads in layers]
        joint = min(1.0, CLIP / float(torch.stack(norms).norm()))
        single = [min(1.0, CLIP / len(norms) ** 0.5 / float(norm)) for norm in norms]
        factors = single if by_layer else [joint] * len(norms)
        flat = [factor * g for factor, grads in zip(factors, layers, strict=True) for g in grads]
        for total, g in zip(expected, flat, strict=True):
            total += g / DIVISOR
    new_trainer(network, clipped(network, by_layer=by_layer)).step(x, y, step=0)
    for parameter, total in zip(network.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", ["linear", "convolution", "residual block"])
def test_one_record_changes_the_sum_by_at_most_the_clip(name: str, by_layer: bool) -> None:
    network = new_network(name)
    x, y = records(6, network.n_inputs)
    for scale in (1e-3, 1.0, 1e4):
        totals = []
        for rows in (slice(0, 6), slice(0, 5)):  # the others keep their noise: it is drawn row by row
            new_trainer(network, clipped(network, by_layer=by_layer)).step(scale * x[rows], y[rows], step=0)
            totals.append(torch.cat([p.grad.double().flatten() for p in network.parameters]))
        assert 0 < float((totals[0] - totals[1]).norm()) * DIVISOR <= CLIP * (1 + 1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("protected", [False, True])
def test_a_loss_that_is_not_finite_is_reported_and_leaves_others_alone(value: float, protected: bool) -> None:
    network = new_network("linear")
    protection = clipped(network) if protected else None
    x, y = records(6, network.n_inputs)
    sizes = []
    for rows in (slice(0, 5), slice(0, 6)):
        trainer = new_trainer(network, protection)
        x[5] = value
        if rows.stop == 6:
            numbers = torch.tensor([40, 41, 42, 43, 44, 99])
            with pytest.warns(UserWarning, match="step 3: ignored 1 of 6 records, .*NaN or infinite"):
                record = trainer.step(x[rows], y[rows], step=3, records=numbers)
        else:
            record = trainer.step(x[rows], y[rows], step=3)
        assert torch.isfinite(record.loss_sum)
        assert record.n_records == 5
        gradient = torch.cat([p.grad.flatten() for p in network.parameters])
        sizes.append(gradient * (DIVISOR if protected else rows.stop))
    torch.testing.assert_close(sizes[0], sizes[1], rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_finite_loss_stops_the_run() -> None:
    network = new_network("linear")
    x, y = records(6, network.n_inputs)
    with pytest.raises(TrainingDiverged, match="step 2: .*no record .* finite loss"):
        new_trainer(network).step(x * float("nan"), y, step=2)


def test_an_empty_batch_moves_nothing() -> None:
    for name in ("linear", "convolution", "residual block"):
        network = new_network(name)
        for protection in (None, clipped(network)):
            x, y = records(0, network.n_inputs)
            record = new_trainer(network, protection).step(x, y, step=0, observe=True)
            assert record.n_records == 0
            assert all(not parameter.grad.any() for parameter in network.parameters)


class Sign(nn.Module):
    """The sign of every entry: no derivative says anything about it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x)


def test_a_module_of_ones_own_is_trained_and_given_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 32), Sign(), nn.Linear(32, 3))
    run = training.train(CONFIG, data=blobs(), model=model, folder=tmp_path / "run")
    assert run.model is model
    assert run.evaluate(*blobs())["accuracy"] > 0.9
    with pytest.raises(RunFolderError, match=r"user-supplied module.*: opusim\.load_run"):
        training.load_run(tmp_path / "run")
    again = nn.Sequential(nn.Linear(8, 32), Sign(), nn.Linear(32, 3))
    x = blobs()[0]
    assert (training.load_run(tmp_path / "run", model=again).predict(x) == run.predict(x)).all()


@pytest.mark.parametrize("kind", ["ulr", "zo"])
def test_dropout_neither_trains_nor_predicts_at_random(tmp_path: Path, kind: str) -> None:
    """Two seeded runs agree to the bit, and a module that is read back gives one answer."""

    def model() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 32), Sign(), nn.Dropout(0.5), nn.Linear(32, 3))

    plain = {"name": "sgd", "lr": 0.01, "momentum": 0.0}
    config, x = {**CONFIG, "epochs": 1, "trainer": {"kind": kind}, "optimizer": plain}, blobs()[0]
    runs = [training.train(config, data=blobs(), model=model(), folder=tmp_path / name) for name in "ab"]
    first, second = (list(run.model.parameters()) for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    again = training.load_run(tmp_path / "a", model=model())
    assert (again.predict(x) == again.predict(x)).all()


@pytest.mark.parametrize("kind", ["ulr", "zo"])
@pytest.mark.parametrize("protection", [{}, {"kind": "record", "epsilon": 3.0, "delta": 1e-4}])
def test_a_module_takes_images_in_their_shape(tmp_path: Path, kind: str, protection: dict[str, Any]) -> None:
    def model(*first: nn.Module) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *first, nn.Conv2d(1, 4, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        )

    x, y = blobs()
    plain = {"name": "sgd", "lr": 0.01, "momentum": 0.0}
    config = {**CONFIG, "epochs": 1, "trainer": {"kind": kind}, "optimizer": plain, "protection": protection}
    config["data"] = {"n_classes": 3}
    images = x.reshape(-1, 1, 2, 4)
    run = training.train(config, data=(images, y), model=model(), folder=tmp_path / "images")
    flat = training.train(
        config, data=(x, y), model=model(nn.Unflatten(1, (1, 2, 4))), folder=tmp_path / "flat"
    )
    assert (run.predict(images) == flat.predict(x)).all()
    again = training.load_run(tmp_path / "images", model=model())
    assert (again.predict(images) == run.predict(images)).all()


@pytest.mark.parametrize("kind", ["ulr", "zo"])
@pytest.mark.parametrize(("n_inputs", "n_outputs", "message"), [
    (8, 4, r"gives \(2, 4\) for two records of shape \(8,\).*outputs of shape \(2, 3\)"),
    (7, 3, r"cannot take records of shape \(8,\).*change the module"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, kind: str, n_inputs: int, n_outputs: int, message: str
) -> None:
    model = nn.Sequential(nn.Linear(n_inputs, 32), Sign(), nn.Linear(32, n_outputs))
    config = {**CONFIG, "trainer": {"kind": kind}}
    with pytest.raises(ValueError, match=message):
        training.train(config, data=blobs(), model=model, folder=tmp_path / "run")


def test_a_device_takes_the_place_of_the_generator(tmp_path: Path) -> None:
    """Its noise, brought to sigma, trains as well; usage is metered; a law that is not Gaussian is refused by name."""
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], "noise": "device"}}
    device = {"name": "gaussian", "noise": {"sigma": 2.7}}
    run = training.train({**config, "device": device}, data=blobs(), folder=tmp_path / "run")
    assert run.evaluate(*blobs())["accuracy"] > 0.95
    assert run.summary["frames"] > 0
    for name, message in (("ideal", "standard deviation 0"), ("camera", "Poisson counts")):
        with pytest.raises(ConfigError, match=f"trainer.noise.*{name!r}.*{message}.*Gaussian law above 0"):
            training.train({**config, "device": {"name": name}}, data=blobs(), folder=tmp_path / name)


def test_equal_numbers_of_a_device_and_a_generator_give_equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the numbers come from does not matter: a device that hands out the generator's."""
    x, y = records(7, 6)
    gradients = []
    for source in ("generator", "device"):
        network = new_network("linear")
        trainer = new_trainer(network)
        if source == "device":
            device = open_device("gaussian", n_inputs=1, n_outputs=8, noise={"sigma": 2.7})
            normals = DeviceNormals(device, key="trainer.noise")
            stream = SeededStream(5, "output-noise")
            stream.seek(4)
            monkeypatch.setattr(device, "draw", lambda shape, s=stream: 2.7 * s.normal(shape))
            trainer.update._noise = normals
        trainer.step(x, y, step=4)
        gradients.append([parameter.grad.clone() for parameter in network.parameters])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("changes", "message"), [
    ({"trainer": {"kind": "ulr", "reduction": "leave-one-out"}}, "needs other copies, but copies = 1"),
    ({"trainer": {"kind": "ulr", "form": "published", "reduction": "antithetic"}}, "changes the noise"),
    ({"trainer": {"kind": "ulr", "form": "published", "clip": "module"}}, "belongs to form = 'proven'"),
    ({"trainer": {"kind": "ulr", "threshold": 0.1}}, "it needs trainer.kind = 'pdfa' or 'tdfa'"),
    ({"trainer": {"kind": "ulr", "sigma": 0.0}}, "trainer.sigma"),
    ({"trainer": {"kind": "ulr"}, "protection": {"kind": "label-amplified", "epsilon": 1.0}}, "'label-amplified'"),
    ({"trainer": {"kind": "ulr"}, "model": {"initial_output": "feedback"}}, "'feedback' does nothing here"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, changes=changes)
