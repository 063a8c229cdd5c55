"""Build fully connected networks, whose layer gradients have a closed form: no autograd in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from opusim.processes import require_memory
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.networks.base import BYTES_PER_PARAMETER, seeded_generator
from opusim.training.networks.clipping import ClippedNeurons
from opusim.training.networks.functions import ACTIVATIONS, Activation, activation_of
from opusim.training.networks.network import LayeredNetwork, LinearJacobian, require_trainable


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """Intermediate values of a forward pass, eq. 2 of the PDFA paper.

    Attributes:
        inputs: h_(l-1) of each layer, shape (batch, n_(l-1)).
        pre_activations: z_l = W_l h_(l-1) + b_l of each layer, shape (batch, n_l).
        activations: phi_l(z_l) of each layer, before its neurons are clipped, shape (batch, n_l).
        output: h_L, shape (batch, n_L).
    """

    inputs: list[Tensor]
    pre_activations: list[Tensor]
    activations: list[Tensor]
    output: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape and options of one layer.

    Attributes:
        n_outputs: Width n_l.
        activation: Name of phi_l.
        bias: Whether there is a b_l.
        tau_h_max: Clip of the layer's neurons (see ClippedNeurons), or None if there is no clip.
        tau_h_min: Offset of clipped neurons.
    """

    n_outputs: int
    activation: str
    bias: bool
    tau_h_max: float | None = None
    tau_h_min: float = 0.0


class FullyConnected(LayeredNetwork):
    """A view of an nn.Sequential of linear layers and activations; it shares the module's parameters.

    Layer l computes h_l = phi_l(W_l h_(l-1) + b_l), l = 1..L, with W_l of shape (n_l, n_(l-1)).

    Attributes:
        widths: n_1 .. n_L.

    Args:
        model: nn.Linear layers in order of use, each followed by at most one activation out of
            Tanh, ReLU, Sigmoid, GELU and Identity, and at most one ClippedNeurons after that. A last layer
            without activation outputs logits.

    Raises:
        TypeError: The model holds another module, which the message names.
        ValueError: There is no layer, widths do not match, or parameters are not float32.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"model must be an nn.Sequential of nn.Linear and activations, got {type(model).__name__}; "
                "wrap its layers in nn.Sequential(...)"
            )
        self.model = model
        self.linears, self.activations, self.clips = _split_layers(model)
        self.jacobians = [LinearJacobian(linear) for linear in self.linears]
        self.widths = [linear.out_features for linear in self.linears]
        _check_layers(self.linears)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """Build the network that `facts` describes, with parameters to be filled in."""
        layers = [LayerShape(**layer) for layer in facts["layers"]]
        return cls(build_sequential(facts["n_inputs"], layers, generator=torch.Generator()))

    @property
    def facts(self) -> dict[str, Any]:
        """See Network.facts."""
        return {"n_inputs": self.n_inputs, "layers": [asdict(layer) for layer in self.layers]}

    @property
    def n_inputs(self) -> int:
        """Width n_0 of the input."""
        return self.linears[0].in_features

    @property
    def layers(self) -> list[LayerShape]:
        """Shape and options of each layer."""
        return [
            LayerShape(
                n_outputs=linear.out_features,
                activation=phi.name,
                bias=linear.bias is not None,
                tau_h_max=clip.tau_h_max if clip else None,
                tau_h_min=clip.tau_h_min if clip else 0.0,
            )
            for linear, phi, clip in zip(self.linears, self.activations, self.clips, strict=True)
        ]

    def forward(self, x: Tensor) -> ForwardPass:
        """Run the forward pass and keep the values that gradients need.

        Args:
            x: Inputs, shape (batch, n_0).
        """
        inputs, pre_activations, activations = [], [], []
        h = x
        with torch.no_grad():
            for linear, phi, clip in zip(self.linears, self.activations, self.clips, strict=True):
                inputs.append(h)
                z = nn.functional.linear(h, linear.weight, linear.bias)
                pre_activations.append(z)
                activations.append(phi.function(z))
                h = clip(activations[-1]) if clip else activations[-1]
        return ForwardPass(inputs=inputs, pre_activations=pre_activations, activations=activations, output=h)

    def derivative(self, forward: ForwardPass, layer: int, *, through_clip: bool) -> Tensor | None:
        """Return dh_l/dz_l, shape (batch, n_l), or None if it is 1 everywhere.

        Args:
            forward: Values of the forward pass.
            layer: Layer number, 0 .. L-1, or -1 for the last.
            through_clip: Whether a clipped neuron has slope 0, as in autograd, or phi'_l(z_l), as in eq. 8 of the PDFA
                paper.
        """
        phi, clip = self.activations[layer], self.clips[layer]
        slope = None
        if phi.name != "identity":
            slope = phi.derivative(forward.pre_activations[layer], forward.activations[layer])
        if clip is None or not through_clip:
            return slope
        passed = clip.passes(forward.activations[layer])
        return passed if slope is None else slope * passed

    def multiply_by_derivative(
        self, signal: Tensor, forward: ForwardPass, layer: int, *, through_clip: bool
    ) -> Tensor:
        """Multiply a signal of shape (batch, n_l) by dh_l/dz_l, in place; for the arguments see `derivative`."""
        phi, clip = self.activations[layer], self.clips[layer]
        z, h = forward.pre_activations[layer], forward.activations[layer]
        signal = phi.multiply(signal, z, h)
        return signal.mul_(clip.passes(h)) if clip is not None and through_clip else signal

    def gradients(self, layer: int) -> Tensor:
        """Return the layer's gradient as one flat vector, weight first, then bias."""
        gradients = [parameter.grad for parameter in self.layer_parameters(layer)]
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def build_sequential(
    n_inputs: int, layers: Sequence[LayerShape], *, generator: torch.Generator, gain: float = 1.0
) -> nn.Sequential:
    """Build an nn.Sequential whose initial values come from an explicit generator.

    Weights and biases are uniform on +-gain/sqrt(n_(l-1)), which is the law of nn.Linear for gain 1.

    Args:
        n_inputs: Width n_0 of the input.
        layers: Layers 1..L.
        generator: Source of the initial values; global random state is neither read nor changed.
        gain: Factor on the initial range.

    Raises:
        ValueError: Weights and gradients need more memory than is free.
    """
    widths = [n_inputs, *(layer.n_outputs for layer in layers)]
    require_memory(
        BYTES_PER_PARAMETER * sum(rows * columns for rows, columns in pairwise(widths)),
        why="weights and gradients of an mlp",
        remedy="lower model.hidden, or give fewer features or classes",
        model__hidden=widths[1:-1],
        inputs=n_inputs,
        outputs=widths[-1],
    )
    modules: list[nn.Module] = []
    fan_in = n_inputs
    for layer in layers:
        linear = nn.Linear(fan_in, layer.n_outputs, bias=layer.bias, device="meta")  # draws nothing
        bound = gain / fan_in**0.5
        for name, parameter in list(linear.named_parameters()):
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(linear, name, nn.Parameter(values.uniform_(-bound, bound, generator=generator)))
        modules.append(linear)
        if layer.activation != "identity":
            modules.append(ACTIVATIONS[layer.activation].module())
        if layer.tau_h_max is not None:
            modules.append(ClippedNeurons(layer.n_outputs, layer.tau_h_max, layer.tau_h_min))
        fan_in = layer.n_outputs
    return nn.Sequential(*modules)


def _split_layers(
    model: nn.Sequential,
) -> tuple[list[nn.Linear], list[Activation], list[ClippedNeurons | None]]:
    """Split a Sequential into linear layers, the activation of each, and the clip of each."""
    linears: list[nn.Linear] = []
    activations: list[Activation] = []
    clips: list[ClippedNeurons | None] = []
    expects = "linear"  # next module: "linear" only, or also an "activation" or clip, or also a "clip"
    for module in model:
        if type(module) is nn.Linear:  # a subclass may compute something else
            linears.append(module)
            activations.append(ACTIVATIONS["identity"])
            clips.append(None)
            expects = "activation"
        elif type(module) is ClippedNeurons and expects in ("activation", "clip"):
            clips[-1] = module
            expects = "linear"
        else:
            activation = activation_of(module)
            if expects != "activation":
                raise TypeError(
                    f"model: {type(module).__name__} does not follow an nn.Linear; "
                    "put at most one activation after each linear layer"
                )
            activations[-1] = activation
            expects = "clip"
    if not linears:
        raise ValueError("model holds no nn.Linear; a network needs at least one layer")
    return linears, activations, clips


def _check_layers(linears: list[nn.Linear]) -> None:
    """Refuse layers that share parameters, are frozen or not float32, and widths that do not match."""
    require_trainable(
        [list(linear.parameters()) for linear in linears],
        if_frozen="remove frozen layers and give their output as x",
    )
    for number, (linear, following) in enumerate(pairwise(linears), start=1):
        if following.in_features != linear.out_features:
            raise ValueError(
                f"model: layer {number + 1} takes {following.in_features} inputs but layer {number} has "
                f"{linear.out_features} outputs; make them equal"
            )


def build_model(config: RunConfig, dataset: Dataset) -> nn.Sequential:
    """Build the model of the section `model`, freshly initialised, for the features and classes of the data."""
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
    generator = seeded_generator(config.seed_for("initialisation"))
    return build_sequential(dataset.n_features, layers, generator=generator, gain=options.initial_gain)


def build_network(config: RunConfig, dataset: Dataset, model: nn.Module | None) -> FullyConnected:
    """Return a view of the user-supplied model, or of a new one as the configuration says if there is none.

    Raises:
        TypeError, ValueError: See FullyConnected; or the widths do not match the data.
    """
    if model is None:
        return FullyConnected(build_model(config, dataset))
    network = FullyConnected(model)
    wanted = (dataset.n_features, dataset.n_classes)
    found = (network.n_inputs, network.widths[-1])
    if wanted != found:
        raise ValueError(
            f"model maps {found[0]} inputs to {found[1]} outputs, but the data have {wanted[0]} features and "
            f"{wanted[1]} classes; change the first or last layer"
        )
    return network
