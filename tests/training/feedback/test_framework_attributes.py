"""Frameworks keep attributes of their own on modules, and overwrite none of ours."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import opusim
from opusim.features.optical import OpticalLayer
from tests.support.private_loops import parts, private_loop

x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
y = torch.arange(8) % 2

FRAMEWORKS = {
    "lightning": (
        "_device _dtype _fabric _fabric_optimizers _forward_methods _forward_module _original_module _strategy "
        "_fabric_module_initialized _current_fx_name _metric_attributes _trainer _device_mesh"
    ),
    "accelerate": (
        "_is_accelerate_prepared _original_forward _old_forward _hf_hook hf_device_map require_backward_grad_sync "
        "require_forward_param_sync _converted_to_transformer_engine"
    ),
    "transformers": (
        "_tp_size tp_size model_tags is_parallelizable model_parallel _is_quantized_training_enabled hf_quantizer "
        "neftune_noise_alpha neftune_post_forward_hook warnings_issued _keys_to_ignore_on_save active_adapter "
        "peft_config"
    ),
    "torch": (
        "_compiled_call_impl _orig_mod _ddp_params_and_buffers_to_ignore require_backward_grad_sync "
        "_is_fsdp_managed_module _fsdp_use_orig_params _fsdp_wrapped_module "
        "_is_replica _former_parameters _is_root qconfig activation_post_process _is_full_backward_hook"
    ),
    "ignite": "_device _amp_mode state should_terminate",
    "deepspeed": "ds_id ds_children ds_inflight_param_registry gradient_accumulation_steps lr_scheduler",
    "opacus": "autograd_grad_sample_hooks max_batch_len _forward_counter grad_sample_hooks_enabled",
}
"""Attributes that each framework sets on a module or on what it passes through to a module."""


def feedback() -> opusim.FeedbackAlignment:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    device = opusim.open_device("gaussian", n_inputs=2, n_outputs=6, seed=4)
    return opusim.FeedbackAlignment(net, device=device)


def criterion(folder: Path) -> nn.Module:
    with private_loop(folder, parts()) as private:
        return private.criterion


MODULES: dict[str, Callable[[Path], nn.Module]] = {
    "FeedbackAlignment": lambda _: feedback(),
    "DeviceModel": lambda _: opusim.convert(nn.Linear(4, 3), "pcm"),
    "DeviceLinear": lambda _: opusim.convert(nn.Linear(4, 3), "pcm").layers[0],
    "DeviceConv2d": lambda _: opusim.convert(nn.Conv2d(1, 2, 2), "pcm").model,
    "OpticalLayer": lambda _: OpticalLayer(opusim.open_device("ideal", n_inputs=4, n_outputs=3)),
    "PrivateCriterion": criterion,
}


@pytest.mark.parametrize("name", MODULES)
def test_no_attribute_has_a_name_that_frameworks_set(name: str, tmp_path: Path) -> None:
    module = MODULES[name](tmp_path)
    own = (set(vars(module)) - set(vars(nn.Module()))) | set(module._modules)
    taken = {attribute for names in FRAMEWORKS.values() for attribute in names.split()}
    assert own
    assert not own & taken


class Forwarding(nn.Module):
    """Passes attributes on to the module that it wraps if that has them, as Lightning Fabric's wrapper does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_original_module", module)

    def __setattr__(self, name: str, value: object) -> None:
        original = self.__dict__.get("_original_module")
        if original is not None and hasattr(original, name):
            setattr(original, name, value)
        super().__setattr__(name, value)

    def forward(self, *args: Tensor) -> Tensor:
        return self._original_module(*args)


def gradients(model: opusim.FeedbackAlignment, run: nn.Module) -> list[Tensor]:
    cross_entropy(run(x), y).backward()
    return [p.grad for p in model.parameters()]


def test_a_wrapper_that_forwards_its_torch_device_leaves_the_noisy_device() -> None:
    plain, model = feedback(), feedback()
    wrapped = Forwarding(model)
    wrapped._device, wrapped._dtype = torch.device("cpu"), torch.float32
    assert all(map(torch.equal, gradients(model, wrapped), gradients(plain, plain)))
    assert model.usage.frames == plain.usage.frames > 0


def test_a_torch_device_is_refused_with_the_call_that_moves_the_model() -> None:
    model = feedback()
    with pytest.raises(TypeError, match=r"NoisyDevice, not device; move the model by \.to\('cpu'\)"):
        model.device = torch.device("cpu")
