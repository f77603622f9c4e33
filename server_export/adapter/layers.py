"""The stacked linear layer with LoRA-FA or LoRA, and its insertion into a model.

    y[copy] = base(x[copy]) + (x[copy] lora_a^T) lora_b[copy]                     LoRA-FA
    y[copy] = base(x[copy]) + scale (x[copy] lora_a[copy]^T) lora_b[copy]         LoRA

`lora_b` comes with every call, one per copy. LoRA-FA's `lora_a` is a frozen constant with the scale folded in
(Zhang et al., arXiv 2308.03303), LoRA's comes with the call too (Hu et al., arXiv 2106.09685). One call for
all perturbations: P-RGE, arXiv 2409.15520.
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
from prge.files.peft import PeftAdapter
from prge.model_spec import AdaptedModule
from server_export.adapter.blocks import block_names
from server_export.library_errors import TRANSFORMERS_ERRORS

ALL_LINEAR = "all-linear"
# No number of anything else.
_SOME_ROWS = 10_007
_EXPRESSION_SIGNS = set("*+?|()[]^$\\")
_USUAL_TARGETS = (("q_proj", "v_proj"), ("qkv_proj",), ("query", "value"), ("q_lin", "v_lin"), ("in_proj",))


class CallInputs:
    """What the current call of a program gives to layers deep inside the model.

    Not a module: torch.export refuses tensors that are assigned to modules while it traces.
    """

    def __init__(self) -> None:
        self.adapter: dict[str, torch.Tensor] = {}


class StackedLoraLinear(nn.Module):
    """A frozen linear layer with `copies` adapters side by side.

    Args:
        base: the frozen layer.
        lora_a: f32 [rank, in], scaled; None: it comes with a call.
        module: the layer; the names of its matrices [copies, rank, width] in `inputs`.
        inputs: the program's current call.
        scale: of what comes of both matrices, where both come with a call.
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
        """The frozen layer's: some models look at its type."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [copies x batch, ..., in] -> [copies x batch, ..., out]; rows are copy by copy."""
        *given, lora_b = (self.inputs.adapter[matrix.name] for matrix in self.module.matrices)
        copies, rank, _ = lora_b.shape
        if x.shape[0] % copies:
            raise Refusal(
                "layer-not-per-token",
                f"{self.module.name} can't be adapted: the model gives it other numbers than a state of "
                "each token of each row in turn",
                remedy="name other layers with --target-modules, or take another checkpoint",
            )
        base = self.base(x)
        if self.lora_a is not None:
            reduced = F.linear(x, self.lora_a).reshape(copies, -1, rank)
        else:
            (lora_a,) = given
            reduced = torch.bmm(x.reshape(copies, -1, x.shape[-1]), lora_a.transpose(1, 2)) * self.scale
        return base + torch.bmm(reduced, lora_b).reshape(base.shape)


def convert_conv1d(model: nn.Module) -> int:
    """Turn GPT-2's Conv1D layers (weight [in, out]) into linear ones; returns how many."""
    names = conv1d_names(model)
    for name in names:
        module: Any = model.get_submodule(name)
        linear = nn.Linear(module.weight.shape[0], module.weight.shape[1], device="meta")
        linear.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
        replace_module(model, name, linear)
    return len(names)


def conv1d_names(model: nn.Module) -> list[str]:
    """Names of GPT-2's Conv1D layers."""
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in model.named_modules() if isinstance(module, Conv1D)]


def replace_module(model: nn.Module, name: str, module: nn.Module | torch.Tensor) -> None:
    """Put a module, or a tensor in the place of one, at the path `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def usual_target_modules(model: nn.Module) -> str | list[str] | None:
    """PEFT's choice for the architecture, or queries and values where PEFT has none; None without these."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type)
    if isinstance(targets, str):
        return targets
    endings = {name.rpartition(".")[2] for name in _linear_names(model)}
    choices = [targets] if targets is not None else filter(endings.issuperset, _USUAL_TARGETS)
    return next((list(names) for names in choices), None)


def default_target_modules(model: nn.Module, unread: Collection[str] = ()) -> str | list[str]:
    """What is usual, or all linear layers of the blocks but those of `unread` modules.

    Raises:
        ConfigError: the model has none.
    """
    usual = usual_target_modules(model)
    if usual is not None:
        return usual
    return _linear_names_of_blocks(model, unread)


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _linear_names_of_blocks(model: nn.Module, unread: Collection[str]) -> list[str]:
    """Without the head's, those that make what a model's blocks begin with, and those of unread modules."""
    try:
        blocks = tuple(f"{name}." for name in block_names(model))
    except ConfigError:
        raise ConfigError(
            "no layer can be adapted:",
            [f"the blocks of {type(model).__name__} have no linear layers, which adapters are for"],
            remedy="take another checkpoint",
            code="no-linear-layers",
        ) from None
    left_out = tuple(f"{name}." for name in unread)
    return [n for n in _linear_names(model) if n.startswith(blocks) and not n.startswith(left_out)]


def normal_targets(target_modules: str | Sequence[str]) -> str | list[str]:
    """Target modules as PEFT takes them: one word of a list may be an expression or `all-linear`."""
    if isinstance(target_modules, str):
        return target_modules
    words = list(target_modules)
    if len(words) == 1 and (words[0] == ALL_LINEAR or set(words[0]) & _EXPRESSION_SIGNS):
        return words[0]
    return words


def match_target_modules(
    model: nn.Module, target_modules: str | Sequence[str], unread: Collection[str] = ()
) -> list[str]:
    """Names of the linear layers that PEFT would adapt, in module order; the output head never is.

    Args:
        model: which may lack its weights.
        target_modules: with PEFT's meaning.
        unread: names of modules whose layers `all-linear` leaves out.

    Raises:
        ConfigError: nothing matches, or what matches isn't a linear layer.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    targets = normal_targets(target_modules)
    modules = dict(model.named_modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if targets == ALL_LINEAR:
        return _linear_names_of_blocks(model, unread)
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
        frozen = "; stacks of matrices, such as experts, have no adapters" if stacked else ""
        problems.append(f"no layer matches {targets!r}; linear layers end in {', '.join(endings)}{frozen}")
    if problems:
        raise ConfigError("these target modules can't be adapted:", problems, code="target-modules-unusable")
    return matched


def refused_by_peft(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Those of some layers whose adapter PEFT doesn't load, or gives to others, by their names.

    Older checkpoints had a `down_proj` for each expert; kernels of Mamba read `out_proj` themselves.
    """
    from peft import LoraConfig, inject_adapter_in_model

    def is_adapted(name: str) -> bool:
        # PEFT goes by names and the model's configuration.
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


def read_by_rows(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Those of some layers that a model without weights gives states of rows, and nothing else.

    Some encoders give layers of queries and keys their tables of distances too; a decoder that may read from
    an encoder has layers for that which it never asks.
    """
    others, asked = set[str](), set[str]()

    def watching(name: str) -> Any:
        def watch(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            asked.add(name)
            if given[0].shape[0] % _SOME_ROWS:
                others.add(name)

        return watch

    hooks = [model.get_submodule(name).register_forward_pre_hook(watching(name)) for name in names]
    tokens = torch.zeros(_SOME_ROWS, 2, dtype=torch.long, device="meta")
    with suppress(*TRANSFORMERS_ERRORS), torch.no_grad():  # what needs numbers is found out later
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        others |= set(names) - asked
    for hook in hooks:
        hook.remove()
    return [name for name in names if name not in others]


def initial_lora_a(model: nn.Module, names: Sequence[str], rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Random `lora_a` f32 [rank, in] per layer, drawn as PEFT does, in module order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.init.kaiming_uniform_(
            torch.empty(rank, _linear(model, name).in_features), a=math.sqrt(5), generator=generator
        )
        for name in names
    }


def match_start_adapter(model: nn.Module, adapter: PeftAdapter) -> dict[str, str]:
    """Module names of the model and the names that the adapter has for them, in module order.

    Of models of one type those with a head name the layers below the model's prefix.

    Raises:
        AdapterError: a layer isn't there, or is of another shape.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    prefix = getattr(model, "base_model_prefix", "") + "."
    names: dict[str, str] = {}
    problems = []
    for theirs in adapter.lora_a:
        names_of = (theirs, theirs.removeprefix(prefix), prefix + theirs)
        ours = next((name for name in names_of if name in modules), theirs)
        if ours not in modules:
            problems.append(f"the model has no linear layer {theirs}")
            continue
        layer = modules[ours]
        shape = (adapter.lora_b[theirs].shape[0], adapter.lora_a[theirs].shape[1])
        if shape != (layer.out_features, layer.in_features):
            problems.append(
                f"{theirs} is for a layer {shape}, the model's is {(layer.out_features, layer.in_features)}"
            )
        names[ours] = theirs
    if problems:
        raise AdapterError("the adapter is for another model:", problems, code="adapter-does-not-fit")
    return {name: names[name] for name in modules if name in names}


def insert_lora(
    model: nn.Module,
    lora_a: Mapping[str, torch.Tensor],
    inputs: CallInputs,
    scales: Mapping[str, float] | None = None,
) -> tuple[AdaptedModule, ...]:
    """Replace the layers that `lora_a` names by stacked ones; returns them in module order.

    Args:
        model: is changed.
        lora_a: f32 [rank, in] by layer; scaled, if it is frozen.
        inputs: of the layers.
        scales: of LoRA by layer, which trains `lora_a` too; None: LoRA-FA.
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
