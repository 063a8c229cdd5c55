"""What a photonic run without protection claims: the paper's formula, where the run has its constants."""

from __future__ import annotations

from accounting.mechanisms import Mechanism
from accounting.pdfa_mechanisms import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from opusim.noise import GaussianNoise, NoiseModel
from training.config.feedback import FeedbackConfig
from training.config.run import RunConfig
from training.networks.activations import ACTIVATIONS
from training.networks.network import FullyConnected


def published_mechanism(
    config: RunConfig, options: FeedbackConfig, network: FullyConnected, noise: NoiseModel | None
) -> Mechanism:
    """The paper's formula, where the run has the constants that it asks for."""
    clips_updates = options.clipped_layers != "none"
    tau_h_max = (options.tau_h_max if clips_updates else None) or config.model.tau_h_max
    tau_h_min = (options.tau_h_min if clips_updates else 0.0) or config.model.tau_h_min
    sigma = noise.min_std if isinstance(noise, GaussianNoise) else 0.0
    missing = {
        "the ball of the projected error (trainer.tau_b)": options.tau_b is None,
        "the clip of the activations (trainer.tau_h_max)": tau_h_max is None,
        "Gaussian noise of the device": not sigma,
    }
    if options.tau_b is None or tau_h_max is None or not sigma:
        return PdfaWithoutFormula(missing=", ".join(name for name, lacks in missing.items() if lacks))
    layers = tuple(
        PublishedLayer(
            fan_in=linear.in_features + (linear.bias is not None),
            width=linear.out_features,
            gamma_min=ACTIVATIONS[phi.name].slope_bounds[0],
            gamma_max=ACTIVATIONS[phi.name].slope_bounds[1],
            inputs_bounded_below=False,
            noised=number < network.depth - 1,
        )
        for number, (linear, phi) in enumerate(zip(network.linears, network.activations, strict=True))
    )
    return PublishedPdfa(
        layers=layers,
        batch_size=config.sampler.batch_size,
        sigma=sigma,
        tau_b=options.tau_b,
        tau_h_min=tau_h_min,
        tau_h_max=tau_h_max,
    )
