"""The linear layer with several LoRA or LoRA-FA adapters, and its insertion into a model.

    y[copy] = base(x[copy]) + (x[copy] lora_a^T) lora_b[copy]                     LoRA-FA
    y[copy] = base(x[copy]) + scale (x[copy] lora_a[copy]^T) lora_b[copy]         LoRA

`lora_b` is an input of every call, one per copy. LoRA-FA's `lora_a` is a frozen constant that includes the
scale (Zhang et al., arXiv 2308.03303); LoRA's is an input too (Hu et al., arXiv 2106.09685). Computing all
perturbations in one call is from P-RGE, arXiv 2409.15520.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from prge.errors import AdapterError, ConfigError, Refusal
from prge.formats.peft import PeftAdapter
from prge.model_spec import AdaptedModule
from server_export.adapter.repeated_blocks import block_names
from server_export.library_errors import TRANSFORMERS_ERRORS

ALL_LINEAR = "all-linear"
# A batch size that is no other size of a model.
_ROWS = 10_007
_EXPRESSION_SIGNS = set("*+?|()[]^$\\")
_USUAL_TARGETS = (("q_proj", "v_proj"), ("qkv_proj",), ("query", "value"), ("q_lin", "v_lin"), ("in_proj",))


class CallInputs:
    """The inputs of a program's current call that layers deep inside the model need.

    This is no module, because torch.export refuses assignments of tensors to modules while it traces.
    """

    def __init__(self) -> None:
        self.adapter: dict[str, torch.Tensor] = {}


class StackedLoraLinear(nn.Module):
    """A frozen linear layer with one adapter per copy.

    Args:
        base: the frozen layer.
        lora_a: f32 [rank, in], with the scale; None if it is an input of the call.
        module: the adapted layer, with the names of its matrices [copies, rank, width] in `inputs`.
        inputs: the program's current call.
        scale: the scale of the low-rank product if `lora_a` is an input of the call.
    """

    lora_a: torch.Tensor | None

    def __init__(
        self,
        base: nn.Linear,
        lora_a: torch.Tensor | None,
        module: AdaptedModule,
        inputs: CallInputs,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("lora_a", lora_a)
        self.module = module
        self.inputs = inputs
        self.scale = scale

    @property
    def weight(self) -> torch.Tensor:
        """The frozen layer's weight: some models inspect its type."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [copies x batch, ..., in] to [copies x batch, ..., out]; rows are grouped by copy."""
        *lora_a_input, lora_b = (self.inputs.adapter[matrix.name] for matrix in self.module.matrices)
        copies, rank, _ = lora_b.shape
        if x.shape[0] % copies:
            raise Refusal(
                "layer-not-per-token",
                f"Cannot adapt {self.module.name}: the model calls it with something else than one hidden "
                "state per token of each row.",
                remedy="Choose other layers with --target-modules, or use another checkpoint.",
            )
        base = self.base(x)
        if self.lora_a is not None:
            reduced = F.linear(x, self.lora_a).reshape(copies, -1, rank)
        else:
            (lora_a,) = lora_a_input
            reduced = torch.bmm(x.reshape(copies, -1, x.shape[-1]), lora_a.transpose(1, 2)) * self.scale
        return base + torch.bmm(reduced, lora_b).reshape(base.shape)


def convert_conv1d(model: nn.Module) -> int:
    """Replace GPT-2's Conv1D layers (weight [in, out]) by linear layers; return their number."""
    names = conv1d_names(model)
    for name in names:
        module: Any = model.get_submodule(name)
        linear = nn.Linear(module.weight.shape[0], module.weight.shape[1], device="meta")
        linear.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
        replace_module(model, name, linear)
    return len(names)


def conv1d_names(model: nn.Module) -> list[str]:
    """Return the names of GPT-2's Conv1D layers."""
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in model.named_modules() if isinstance(module, Conv1D)]


def replace_module(model: nn.Module, name: str, module: nn.Module | torch.Tensor) -> None:
    """Replace the module or tensor at the path `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def usual_target_modules(model: nn.Module) -> str | list[str] | None:
    """Return the usual target modules: PEFT's for the architecture, else queries and values, else None."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type)
    if isinstance(targets, str):
        return targets
    endings = {name.rpartition(".")[2] for name in _linear_names(model)}
    choices = [targets] if targets is not None else filter(endings.issuperset, _USUAL_TARGETS)
    return next((list(names) for names in choices), None)


def default_target_modules(model: nn.Module, unadapted: Collection[str] = ()) -> str | list[str]:
    """Return the usual target modules, or all linear layers of the blocks but those in `unadapted` modules.

    Raises:
        ConfigError: the blocks have no linear layers.
    """
    usual = usual_target_modules(model)
    if usual is not None:
        return usual
    return _block_linear_names(model, unadapted)


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _block_linear_names(model: nn.Module, unadapted: Collection[str]) -> list[str]:
    """Return the names of all linear layers of the blocks, except those in `unadapted` modules."""
    try:
        blocks = tuple(f"{name}." for name in block_names(model))
    except ConfigError:
        raise ConfigError(
            "No layer can be adapted:",
            [f"the blocks of {type(model).__name__} have no linear layers, which adapters need"],
            remedy="Use another checkpoint.",
            code="no-linear-layers",
        ) from None
    excluded = tuple(f"{name}." for name in unadapted)
    return [n for n in _linear_names(model) if n.startswith(blocks) and not n.startswith(excluded)]


def normalize_target_modules(target_modules: str | Sequence[str]) -> str | list[str]:
    """Return target modules as PEFT expects them, with a single expression or `all-linear` as a string."""
    if isinstance(target_modules, str):
        return target_modules
    names = list(target_modules)
    if len(names) == 1 and (names[0] == ALL_LINEAR or set(names[0]) & _EXPRESSION_SIGNS):
        return names[0]
    return names


def match_target_modules(
    model: nn.Module, target_modules: str | Sequence[str], unadapted: Collection[str] = ()
) -> list[str]:
    """Return the names of the linear layers that PEFT adapts, in module order; never the output head.

    Args:
        model: the model, with or without weights.
        target_modules: target modules with PEFT's meaning.
        unadapted: names of modules whose layers `all-linear` leaves out.

    Raises:
        ConfigError: nothing matches, or a match is not a linear layer.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    targets = normalize_target_modules(target_modules)
    modules = dict(model.named_modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if targets == ALL_LINEAR:
        return _block_linear_names(model, unadapted)
    settings = SimpleNamespace(target_modules=targets, target_parameters=None)
    matched = [name for name in modules if name and check_target_module_exists(settings, name)]
    problems = [
        f"{name} is the output head, which is frozen"
        if modules[name] is head
        else f"{name} is a {type(modules[name]).__name__}, not a linear layer"
        for name in matched
        if modules[name] is head or not isinstance(modules[name], nn.Linear)
    ]
    if not matched:
        endings = sorted({name.rpartition(".")[2] for name in _linear_names(model)})
        stacked = any(parameter.dim() == 3 for parameter in model.parameters())
        note = "; stacked matrices, such as experts, can't be adapted" if stacked else ""
        problems.append(
            f"no layer matches {targets!r}; names of linear layers end in {', '.join(endings)}{note}"
        )
    if problems:
        raise ConfigError("Cannot adapt these target modules:", problems, code="target-modules-unusable")
    return matched


def refused_by_peft(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the layers whose adapter PEFT would not load, or would load into other layers, by their names.

    Examples are `down_proj` of experts, which older checkpoints had for each expert, and Mamba's `out_proj`,
    whose weight is read by kernels directly.
    """
    from peft import LoraConfig, inject_adapter_in_model

    def is_adapted(name: str) -> bool:
        # PEFT decides by names and the model's configuration.
        twin = nn.Module()
        twin.config = model.config
        for path in accumulate(name.split(".")[:-1], "{}.{}".format):
            twin.set_submodule(path, nn.Module())
        twin.set_submodule(name, nn.Linear(1, 1))
        try:
            inject_adapter_in_model(LoraConfig(r=1, target_modules=[name]), twin)
        except ValueError:
            return False
        return hasattr(twin.get_submodule(name), "lora_A")

    endings = {name.rpartition(".")[2]: name for name in names}
    refused = {ending for ending, name in endings.items() if not is_adapted(name)}
    return [name for name in names if name.rpartition(".")[2] in refused]


def per_token_layers(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the layers that a model without weights calls with one hidden state per token, and nothing else.

    Some encoders also call layers of queries and keys with tables of distances. Decoders that support
    cross-attention have layers that are never called.
    """
    others, called = set[str](), set[str]()

    def recorder(name: str) -> Any:
        def record(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            called.add(name)
            if inputs[0].shape[0] % _ROWS:
                others.add(name)

        return record

    hooks = [model.get_submodule(name).register_forward_pre_hook(recorder(name)) for name in names]
    tokens = torch.zeros(_ROWS, 2, dtype=torch.long, device="meta")
    with suppress(*TRANSFORMERS_ERRORS), torch.no_grad():  # models that need values are checked when traced
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        others |= set(names) - called
    for hook in hooks:
        hook.remove()
    return [name for name in names if name not in others]


def initial_lora_a(model: nn.Module, names: Sequence[str], rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random `lora_a` f32 [rank, in] per layer, initialized as in PEFT, in module order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.init.kaiming_uniform_(
            torch.empty(rank, _linear(model, name).in_features), a=math.sqrt(5), generator=generator
        )
        for name in names
    }


def match_start_adapter(model: nn.Module, adapter: PeftAdapter) -> dict[str, str]:
    """Return the adapter's names of the model's adapted layers, by the model's names in module order.

    The two differ by the base model's prefix if only one of the models has a head.

    Raises:
        AdapterError: the model lacks a layer, or has it in another shape.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    prefix = getattr(model, "base_model_prefix", "") + "."
    names: dict[str, str] = {}
    problems = []
    for adapter_name in adapter.lora_a:
        candidates = (adapter_name, adapter_name.removeprefix(prefix), prefix + adapter_name)
        model_name = next((name for name in candidates if name in modules), adapter_name)
        if model_name not in modules:
            problems.append(f"the model has no linear layer {adapter_name}")
            continue
        layer = modules[model_name]
        shape = (adapter.lora_b[adapter_name].shape[0], adapter.lora_a[adapter_name].shape[1])
        if shape != (layer.out_features, layer.in_features):
            problems.append(
                f"{adapter_name} is for a layer of shape {shape}, but the model's has "
                f"{(layer.out_features, layer.in_features)}"
            )
        names[model_name] = adapter_name
    if problems:
        raise AdapterError("The adapter belongs to another model:", problems, code="adapter-does-not-fit")
    return {name: names[name] for name in modules if name in names}


def insert_lora(
    model: nn.Module,
    lora_a: Mapping[str, torch.Tensor],
    inputs: CallInputs,
    scales: Mapping[str, float] | None = None,
) -> tuple[AdaptedModule, ...]:
    """Replace the layers that `lora_a` names by `StackedLoraLinear`; return them in module order.

    Args:
        model: the model that is changed.
        lora_a: f32 [rank, in] by layer, with the scale if it is frozen.
        inputs: the inputs that the layers read.
        scales: the scale of each layer of LoRA, which trains `lora_a` too; None for LoRA-FA.
    """
    adapted = []
    for name, matrix in lora_a.items():
        base = _linear(model, name)
        trains_a = scales is not None
        module = AdaptedModule(name, matrix.shape[0], base.in_features, base.out_features, trains_a)
        constant, scale = (matrix, 1.0) if scales is None else (None, scales[name])
        replace_module(model, name, StackedLoraLinear(base, constant, module, inputs, scale))
        adapted.append(module)
    return tuple(adapted)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return module
