"""The fully connected network that a configuration asks for."""

from __future__ import annotations

from torch import nn

from training.config.run import RunConfig
from training.data import Dataset
from training.networks.network import FullyConnected, LayerShape, build_model
from training.seeds import generator_for


def configured_model(config: RunConfig, dataset: Dataset) -> nn.Sequential:
    """The network of the section `model`, freshly initialised, as wide as the data."""
    options = config.model
    layers = [
        LayerShape(
            n_outputs=width,
            activation=options.activation,
            bias=options.bias,
            tau_h_max=options.tau_h_max,
            tau_h_min=options.tau_h_min,
        )
        for width in options.hidden
    ]
    layers.append(
        LayerShape(n_outputs=dataset.n_classes, activation=options.output_activation, bias=options.bias)
    )
    generator = generator_for(config, "initialisation")
    return build_model(dataset.n_features, layers, generator=generator, gain=options.initial_gain)


def fitting_network(config: RunConfig, dataset: Dataset, model: nn.Module | None) -> FullyConnected:
    """A person's own fully connected module where it fits the data, or a new one as the configuration says.

    Raises:
        TypeError, ValueError: See FullyConnected; or its widths are not those of the data.
    """
    if model is None:
        return FullyConnected(configured_model(config, dataset))
    network = FullyConnected(model)
    wanted = (dataset.n_features, dataset.n_classes)
    found = (network.n_inputs, network.widths[-1])
    if wanted != found:
        raise ValueError(
            f"model maps {found[0]} inputs to {found[1]} outputs, but the data have {wanted[0]} features and "
            f"{wanted[1]} classes; change its first or last layer"
        )
    return network
