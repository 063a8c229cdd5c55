"""Networks whose layer gradients have a closed form: no autograd in a step.

J_i = d v_i / d theta is the Jacobian of a module's output at record i with respect to its own parameters. Linear and
convolutional modules use a closed form (`opusim.training.networks.contributions`), every other module torch.func.vjp of
that module only; no later module is differentiated. A network of linear layers needs no vjp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim.crossbar.layers import DeviceConv2d, DeviceLinear
from opusim.processes import require_memory
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.networks.base import BYTES_PER_PARAMETER, Network, seeded_generator
from opusim.training.networks.clipping import Clip, ClippedNeurons
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import ConvolutionUse, LinearUse, Use
from opusim.training.networks.functions import ACTIVATIONS, Activation, activation_of


class Jacobian:
    """J_i of one module, such as a residual block, that torch.func can differentiate; subclasses have closed forms.

    Args:
        module: Processes the records of a batch independently.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = list(module.parameters())

    def use(self, delta: Tensor, h: Tensor) -> Use:
        """Return the use of the module's parameters at which record i, of input h_i, adds J_i^T delta_i."""
        return ModuleUse(self.module, delta, h)

    def contributions(self, delta: Tensor, h: Tensor) -> Contributions:
        """Return what the records add to the parameters of this module only; for the arguments see `use`."""
        return Contributions([(self.parameters, [self.use(delta, h)])], len(delta))

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        """Write (1/divisor) sum_i J_i^T delta_i into the gradients of the parameters, without a clip.

        One backward pass through the module.
        """
        with torch.enable_grad():
            output = self.module(h.detach())
            gradients = torch.autograd.grad(output, self.parameters, delta, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.div_(divisor)

    def factor_rows(self, h: Tensor) -> Tensor | None:
        """Return rows u_ip of J_i^T J_i = I (x) sum_p u_ip u_ip^T, shape (batch, positions, inputs), or None.

        The identity acts on the module's outputs (channels); a last entry of 1 stands for the bias.
        """
        return None


class LinearJacobian(Jacobian):
    """v = W h + b: J_i^T delta_i = delta_i (h_i, 1)^T is an outer product and is never formed.

    If a record has several positions, as a sequence does, the products are summed over them.
    """

    def __init__(self, module: nn.Linear | DeviceLinear) -> None:
        super().__init__(module)
        self._weight, self._bias = module.weight, module.bias

    @override
    def use(self, delta: Tensor, h: Tensor) -> LinearUse:
        return LinearUse(delta, h, self._weight, self._bias)

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        """See Jacobian: one matrix product, written in place, and a sum for the bias."""
        signals, weight = delta.flatten(0, -2), self._weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)  # reused: allocating costs more than writing the product
        torch.addmm(weight.grad, signals.t(), h.flatten(0, -2), beta=0, alpha=1 / divisor, out=weight.grad)
        if self._bias is not None:
            self._bias.grad = signals.sum(dim=0).div_(divisor)

    def factor_rows(self, h: Tensor) -> Tensor:
        """See Jacobian: (h_i, 1), one row per position."""
        rows = h.view(len(h), -1, h.shape[-1])
        return rows if self._bias is None else torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)


class ConvolutionJacobian(Jacobian):
    """v_op = w_o . u_p + b_o at every position p, where u_p is the patch of the input under the kernel.

    J_i^T delta_i = sum_p delta_ip (u_ip, 1)^T.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._convolution = module
        names = ("stride", "padding", "dilation", "groups")
        self._options = {name: getattr(module, name) for name in names}

    @override
    def use(self, delta: Tensor, h: Tensor) -> ConvolutionUse:
        return ConvolutionUse(delta, h, self._convolution.weight, self._convolution.bias, self._options)

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        """See Jacobian: the convolution's weight gradient."""
        ones = torch.ones(len(delta), dtype=torch.float64, device=delta.device)
        use = self.use(delta, h)
        clip = Clip(factors=ones, rounded=ones.float(), squares=ones, kept=None)
        (totals,) = use.totals_of([(use, clip)])
        for parameter, total in zip(use.wrt, totals, strict=True):
            parameter.grad = total.div_(divisor)

    def factor_rows(self, h: Tensor) -> Tensor | None:
        """See Jacobian: one patch per position; None for grouped convolutions, whose groups see different patches."""
        return None if self._convolution.groups > 1 else self.use(h[:, None], h).factor_rows()


class DeviceConvolutionJacobian(Jacobian):
    """A convolution on a device, as a linear layer on its patches; the device is not read."""

    def __init__(self, module: DeviceConv2d) -> None:
        super().__init__(module)
        self._convolution, self._product = module, LinearJacobian(module.product)

    @override
    def use(self, delta: Tensor, h: Tensor) -> LinearUse:
        return self._product.use(_positions(delta), self._convolution.patches(h))

    @override
    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        self._product.set_gradient(_positions(delta), self._convolution.patches(h), divisor)

    def factor_rows(self, h: Tensor) -> Tensor:
        """See Jacobian: one patch per position."""
        return self._product.factor_rows(self._convolution.patches(h))


class ModuleUse(Use):
    """The parameters of a whole module, whose per-record gradients are formed from h and delta, shapes (batch, ...)."""

    def __init__(self, module: nn.Module, delta: Tensor, h: Tensor) -> None:
        named = dict(module.named_parameters())
        self.wrt, self.records = list(named.values()), len(delta)
        self._names = list(named)
        self._module, self._delta, self._h = module, delta, h
        self.numbers = 8 * sum(tensor.numel() for tensor in self.wrt) + delta[:1].numel()

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: J_i^T delta_i by torch.func.vjp."""
        values = [tensor.detach() for tensor in self.wrt]

        def of_record(signal: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            def output(*parameters: Tensor) -> Tensor:
                found: Tensor = torch.func.functional_call(
                    self._module, dict(zip(self._names, parameters, strict=True)), (x[None],)
                )
                return found[0]

            gradients: tuple[Tensor, ...] = torch.func.vjp(output, *values)[1](signal)
            return gradients

        return list(torch.func.vmap(of_record)(self._delta[part], self._h[part]))


class LayeredNetwork(Network):
    """A network whose layers measure and sum per-record gradients J_i^T delta_i without forming them.

    J_i is the Jacobian of layer l's output at record i with respect to the layer's own parameters. A protection that
    clips contributions and adds noise works on every such network. Layers are numbered 0 .. L-1.

    Attributes:
        jacobians: The Jacobian of each layer.
    """

    jacobians: Sequence[Jacobian]

    @property
    def depth(self) -> int:
        """Number of layers L."""
        return len(self.jacobians)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all layers, in order."""
        return [parameter for jacobian in self.jacobians for parameter in jacobian.parameters]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by position, "layer1.weight", "layer1.bias", ..., whatever the names of the modules."""
        return {
            f"layer{number}.{name}": parameter.detach()
            for number, jacobian in enumerate(self.jacobians, start=1)
            for name, parameter in jacobian.module.named_parameters()
        }

    def layer_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters of a layer, in a fixed order."""
        return self.jacobians[layer].parameters

    def contributions(self, deltas: Sequence[Tensor], inputs: Sequence[Tensor]) -> Contributions:
        """Return what a batch adds to all layers' parameters, from signals at their outputs and inputs as used."""
        return Contributions(
            [
                (jacobian.parameters, [jacobian.use(delta, h)])
                for jacobian, delta, h in zip(self.jacobians, deltas, inputs, strict=True)
            ],
            len(deltas[0]),
        )

    def set_gradient(self, layer: int, delta: Tensor, h: Tensor, divisor: float) -> None:
        """Write (1/divisor) sum_i J_i^T delta_i, at the inputs h that the update uses, into a layer's gradients."""
        self.jacobians[layer].set_gradient(delta, h, divisor)


def require_trainable(layers: Sequence[Sequence[nn.Parameter]], *, if_frozen: str) -> None:
    """Refuse (ValueError) layers that a step cannot update independently: shared, frozen or not float32.

    `if_frozen` is the remedy for a frozen layer.
    """
    seen: set[int] = set()
    for number, parameters in enumerate(layers, start=1):
        for parameter in parameters:
            if id(parameter) in seen:
                raise ValueError(
                    f"model: layer {number} shares parameters with an earlier layer; give each layer its own"
                )
            seen.add(id(parameter))
            if not parameter.requires_grad:
                raise ValueError(
                    f"model: layer {number} is frozen (requires_grad is False), but every layer is trained; {if_frozen}"
                )
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"model: layer {number} has dtype {parameter.dtype}; train in torch.float32 (model.float())"
                )


def jacobian_of(module: nn.Module) -> Jacobian:
    """Return the Jacobian of a module with parameters, in closed form if there is one."""
    if type(module) in (nn.Linear, DeviceLinear):
        return LinearJacobian(module)  # type: ignore[arg-type]
    if isinstance(module, DeviceConv2d):
        return DeviceConvolutionJacobian(module)
    if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return ConvolutionJacobian(module)
    return Jacobian(module)


def _positions(delta: Tensor) -> Tensor:
    """Return signals of channels (batch, channels, height, width) as rows of positions (batch, positions, channels)."""
    return delta.flatten(2).transpose(1, 2)


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
        require_trainable(
            [list(linear.parameters()) for linear in self.linears],
            if_frozen="remove frozen layers and give their output as x",
        )
        for number, (linear, following) in enumerate(pairwise(self.linears), start=1):
            if following.in_features != linear.out_features:
                raise ValueError(
                    f"model: layer {number + 1} takes {following.in_features} inputs but layer {number} has "
                    f"{linear.out_features} outputs; make them equal"
                )

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """Build the network that `facts` describes, with parameters to be filled in."""
        layers = [LayerShape(**layer) for layer in facts["layers"]]
        return cls(build_sequential(facts["n_inputs"], layers, generator=torch.Generator()))

    @property
    @override
    def facts(self) -> dict[str, Any]:
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
        """Run the forward pass on inputs, shape (batch, n_0), and keep the values that gradients need."""
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

    def multiply_by_derivative(
        self, signal: Tensor, forward: ForwardPass, layer: int, *, through_clip: bool
    ) -> Tensor:
        """Multiply a signal, shape (batch, n_l), by dh_l/dz_l in place, and return it; layer -1 is the last.

        A clipped neuron has slope 0, as in autograd, if `through_clip`, else phi'_l(z_l), as in eq. 8 of the PDFA
        paper.
        """
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
    """Build an nn.Sequential of layers 1..L whose initial values come from an explicit generator.

    Weights and biases are uniform on +-gain/sqrt(n_(l-1)), which is the law of nn.Linear for gain 1. Global random
    state is neither read nor changed. Raises ValueError if weights and gradients need more memory than is free.
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
            # Its weight may be computed, as by torch.nn.utils.prune, or a hook may change its output.
            changed = [name for name in ("weight", "bias") if name not in module._parameters]
            if changed or module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module):
                what = (
                    f"its {changed[0]} is computed from other tensors"
                    if changed
                    else "hooks may change its output"
                )
                raise TypeError(
                    f"model: {module} is no plain layer, because {what}; remove the hooks, as by prune.remove"
                )
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
    """Return a view of the user-supplied model, or of a new one from the configuration.

    Raises TypeError or ValueError as FullyConnected, or if the widths do not match the data.
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
