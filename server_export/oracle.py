"""What PyTorch computes: transformers' own model with an adapter, in eager PyTorch, as an engine.

    layer(x) + (x lora_a^T) lora_b        at every adapted layer

Engines of devices are compared with it, baselines train it, and attacks on reports are made with it. It knows
nothing of chains, blocks and programs.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prge.engine import Array, Call, Directions, FloatArray, GradFn, IntArray, TokenSequence
from prge.errors import BundleError, EngineError
from prge.files.bundle import Bundle
from prge.files.chain import OWN_HEAD
from prge.files.peft import PeftAdapter, read_lora
from prge.model_spec import AdaptedModule, ModelSpec, matrices
from server_export.adapter.layers import convert_conv1d
from server_export.checkpoint.base import content_problems, model_problems
from server_export.checkpoint.classifier import states_of
from server_export.checkpoint.loading import LoadedModel, load_model
from server_export.quantize.bundle_layers import layers_of
from server_export.quantize.quantization import quantize_layers, round_base
from server_export.trace.positions import position_numbers


class TorchEngine:
    """Implements prge.engine.Engine with a transformers model.

    Arrays have the precision of the network: float32, or float64 of a reference. Sequences are computed one
    by one, since some models compute nothing sensible beside padding; with `padding` all at once.

    Attributes:
        network: the transformers model, without an adapter.
        model: its sizes, and the adapted layers; a layer that trains `lora_a` too has it among the values.
        lora_a: [rank, in] by adapted layer, the scale folded in, of layers whose `lora_a` is frozen.
        scales: of the other layers, alpha / rank by name; default: 1.
        pooling: of an encoder: `first`, or the mean of all tokens.
        padding: token that fills sequences up.
        positions: numbers of positions i64 [1, length] that padded sequences have; None: the network's own.
    """

    def __init__(
        self,
        network: Any,
        model: ModelSpec,
        lora_a: Mapping[str, torch.Tensor],
        *,
        scales: Mapping[str, float] | None = None,
        pooling: str = "mean",
        padding: int | None = None,
    ) -> None:
        self.network = network
        self.model = model
        self.lora_a = dict(lora_a)
        self.scales = scales or {}
        self.pooling = pooling
        self.padding = padding
        self.positions: torch.Tensor | None = None
        self._takes_cache = "use_cache" in inspect.signature(network.forward).parameters
        self._seconds = 0.0

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        loaded: LoadedModel,
        *,
        adapter: PeftAdapter | None = None,
        padding: int | None = None,
    ) -> TorchEngine:
        """The engine of a bundle's model, as `open_base` loads it.

        Args:
            bundle: gives the adapted layers, and what is read of a sequence.
            loaded: the model; its experts are computed eagerly from now on.
            adapter: gives `lora_a` and scales; default: the bundle's own.
            padding: see the class.
        """
        model = bundle.chain.model
        adapter = adapter or read_lora(bundle.adapter)
        scales = {module.name: adapter.scale_of(module.name) for module in model.modules}
        lora_a = {name: torch.from_numpy(adapter.lora_a[name]) * scale for name, scale in scales.items()}
        network: Any = loaded.model
        network.set_experts_implementation("eager")
        network.config.return_dict = True
        pooling = bundle.chain.pooling
        engine = cls(network, model, lora_a, scales=scales, pooling=pooling, padding=padding)
        if padding is not None and "position_ids" in inspect.signature(network.forward).parameters:
            engine.positions = position_numbers(loaded, model.sequence_length)
        return engine

    @property
    def seconds(self) -> float:
        """See Engine."""
        return self._seconds

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the network."""
        found: torch.dtype = self.network.dtype
        return found

    def to(self, dtype: torch.dtype) -> TorchEngine:
        """Convert the network and `lora_a` in place; returns this engine."""
        self.network.to(dtype)
        self.lora_a = {name: matrix.to(dtype) for name, matrix in self.lora_a.items()}
        return self

    def forward(self, call: Call) -> FloatArray:
        """See ForwardEngine."""
        with self._timed(), torch.no_grad():
            outputs = [self.outputs(call.sequences, self._tensor(values)) for values in call.adapters]
        found: FloatArray = torch.stack(outputs).numpy()
        return found

    def jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        """See Engine; each sequence by two backward passes and one for every query."""
        outputs, derivatives = [], []
        with self._timed():
            for number, sequence in enumerate(call.sequences):
                values = self._tensor(call.adapters[0]).requires_grad_()
                found = self.outputs([sequence], values)
                # The product of a vector and the Jacobian is linear in the vector: the Jacobian is its slope.
                weights = torch.zeros_like(found, requires_grad=True)
                (product,) = torch.autograd.grad(found, values, weights, create_graph=True)
                along = self._along(directions, number)
                changes = [
                    torch.autograd.grad(product, weights, each, retain_graph=True)[0] for each in along
                ]
                outputs.append(found.detach())
                derivatives.append(torch.stack(changes))
        return torch.cat(outputs).numpy(), torch.cat(derivatives, 1).numpy()

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[FloatArray, FloatArray]:
        """See Engine."""
        with self._timed():
            values = self._tensor(call.adapters[0]).requires_grad_()
            outputs = self.outputs(call.sequences, values)
            found = outputs.detach().numpy()
            by_output = np.asarray(grad_fn(found))
            if by_output.shape != found.shape:
                shapes = f"{[*by_output.shape]}, the outputs {[*found.shape]}"
                raise EngineError(
                    f"the gradient of the loss has the shape {shapes}", code="gradient-of-other-shape"
                )
            (gradient,) = torch.autograd.grad(outputs, values, self._tensor(by_output))
            if not (np.isfinite(found).all() and gradient.isfinite().all()):
                gradient = torch.full_like(gradient, torch.nan)
        return found, gradient.numpy()

    def outputs(self, sequences: Sequence[TokenSequence], values: torch.Tensor | None = None) -> torch.Tensor:
        """Compute outputs that can be differentiated, [targets] or [sequences, width].

        Args:
            sequences: any.
            values: of the adapter, [adapter size]; None: there is none.
        """
        if self.padding is not None:
            return self._padded_outputs(sequences, values, self.padding)
        return torch.cat([self._single_output(sequence, values) for sequence in sequences])

    def logits(self, tokens: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits [rows, length, vocabulary] of tokens i64 [rows, length] without padding."""
        found: torch.Tensor = self.call(values, input_ids=tokens).logits
        return found

    def call(self, values: torch.Tensor | None, **inputs: Any) -> Any:
        """Call the network.

        Args:
            values: of the adapter, [adapter size], or of each row's own adapter, [rows, adapter size].
            inputs: of the network, by name.

        Returns:
            What transformers returns.
        """
        if self._takes_cache:
            inputs["use_cache"] = False
        usual = torch.get_default_dtype()
        # Some models make tensors as they run.
        torch.set_default_dtype(self.dtype)
        try:
            with self.adapted(values):
                return self.network(**inputs)
        finally:
            torch.set_default_dtype(usual)

    @contextmanager
    def adapted(self, values: torch.Tensor | None) -> Iterator[None]:
        """Give the network an adapter meanwhile; see `call`."""
        with ExitStack() as hooks:
            if values is not None:
                trained = split_values(self.model.modules, values)
                for module in self.model.modules:
                    layer = self.network.get_submodule(module.name)
                    hook = partial(_add, *self._matrices(module, trained))
                    hooks.callback(layer.register_forward_hook(hook).remove)
            yield

    def _matrices(
        self, module: AdaptedModule, trained: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's `lora_a` and `lora_b`, one of them scaled."""
        lora_b = trained[f"lora_b.{module.name}"]
        if not module.trains_a:
            return self.lora_a[module.name], lora_b
        return trained[f"lora_a.{module.name}"], lora_b * self.scales.get(module.name, 1.0)

    def _single_output(self, sequence: TokenSequence, values: torch.Tensor | None) -> torch.Tensor:
        tokens = torch.tensor([sequence.tokens])
        if self.model.is_encoder:
            states = states_of(self.call(values, input_ids=tokens), len(sequence.tokens))
            return states[:, 0] if self.pooling == "first" else states.mean(1)
        _, positions, targets = _targets([sequence])
        return torch.log_softmax(self.logits(tokens, values)[0], -1)[positions, targets]

    def _padded_outputs(
        self, sequences: Sequence[TokenSequence], values: torch.Tensor | None, padding: int
    ) -> torch.Tensor:
        tokens, mask = padded(sequences, padding)
        if self.model.is_encoder:
            seen = torch.from_numpy(mask)
            output = self._call_padded(values, tokens, attention_mask=seen)
            states = states_of(output, tokens.shape[1])
            if self.pooling == "first":
                return states[:, 0]
            weights = seen.to(states.dtype).unsqueeze(1)
            return torch.bmm(weights, states).squeeze(1) / weights.sum(2)
        rows, positions, targets = _targets(sequences)
        longest = int(positions.max()) + 1
        # The vocabulary head sees each position once that is read, and no other.
        read, place = torch.unique(rows * longest + positions, return_inverse=True)

        def keep_read(head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (inputs[0].reshape(-1, inputs[0].shape[-1]).index_select(0, read)[None],)

        hook = self.network.get_output_embeddings().register_forward_pre_hook(keep_read)
        try:
            logits = self._call_padded(values, tokens[:, :longest]).logits[0]
        finally:
            hook.remove()
        return torch.log_softmax(logits, -1)[place, targets]

    def _call_padded(self, values: torch.Tensor | None, tokens: IntArray, **more: torch.Tensor) -> Any:
        if self.positions is not None:
            more["position_ids"] = self.positions[:, : tokens.shape[1]]
        return self.call(values, input_ids=torch.from_numpy(tokens), **more)

    def _along(self, directions: Directions, number: int) -> Iterator[torch.Tensor]:
        """The directions of a sequence as values of the adapter, one for each query."""
        trained = matrices(self.model.modules)
        for query in range(len(directions[trained[0].u])):
            yield self._tensor(direction_values(self.model.modules, directions, query, number))

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.tensor(array, dtype=self.dtype)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begin


def open_base(bundle: Bundle, model: str, *, rounds_activations: bool = False) -> LoadedModel:
    """Load the model that a bundle was exported from, with the frozen values that the bundle has.

    Args:
        bundle: of the model.
        model: folder, GGUF file or hub id.
        rounds_activations: whether quantized layers round their inputs too, with a derivative as if not.

    Raises:
        BundleError: there is no such model, or it is another one.
    """
    recorded = bundle.manifest.get("model", {})
    revision = recorded.get("revision") if recorded.get("name_or_path") == model else None
    own_head = bundle.pooling == OWN_HEAD
    loaded = load_model(model, pooled=bundle.chain.is_encoder, revision=revision, own_head=own_head)
    as_exported(bundle, loaded, rounds_activations=rounds_activations)
    return loaded


def as_exported(bundle: Bundle, loaded: LoadedModel, *, rounds_activations: bool = False) -> None:
    """Give a model the frozen values of a bundle in place; its Conv1D layers become linear ones.

    Raises:
        BundleError: it is another model.
    """
    block = bundle.manifest.get("model", {})
    if problems := model_problems(loaded, block) or content_problems(loaded, block.get("sha256")):
        raise BundleError(
            f"{loaded.name_or_path} is not the model of the bundle: " + "; ".join(problems),
            remedy="give the model that the bundle was exported from with --model",
            code="model-differs",
        )
    convert_conv1d(loaded.model)
    scheme = bundle.quantization or "fp32"
    if not rounds_activations or scheme == "fp32":
        round_base(loaded.model, scheme, layers_of(bundle))
        return
    quantize_layers(loaded.model, scheme, layers_of(bundle))
    for layer in loaded.model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = _straight_through(layer)


def split_values(modules: Sequence[AdaptedModule], values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split values [..., adapter size] into the trained matrices, views [..., rank, width] by name."""
    trained = matrices(modules)
    parts = values.split([matrix.size for matrix in trained], -1)
    return {
        matrix.name: part.reshape(*values.shape[:-1], matrix.rank, matrix.width)
        for matrix, part in zip(trained, parts, strict=True)
    }


def direction_values(
    modules: Sequence[AdaptedModule], directions: Directions, query: int, number: int
) -> FloatArray:
    """The direction of a query and a sequence as values of the adapter, f32 [adapter size]."""
    products = [
        np.outer(directions[matrix.u][query, number], directions[matrix.v][query, number]).ravel()
        for matrix in matrices(modules)
    ]
    return np.concatenate(products)


def padded(sequences: Sequence[TokenSequence], padding: int) -> tuple[IntArray, IntArray]:
    """Tokens of sequences filled up on the right, and a mask of them, i64 [sequences, longest]."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens = np.full((len(sequences), longest), padding, np.int64)
    mask = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        mask[row, : len(sequence.tokens)] = 1
    return tokens, mask


def _targets(sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, position and token of all targets, i64 [targets] each."""
    found = [
        (row, target.position, target.token)
        for row, sequence in enumerate(sequences)
        for target in sequence.targets
    ]
    rows, positions, tokens = torch.tensor(found, dtype=torch.long).reshape(-1, 3).unbind(1)
    return rows, positions, tokens


def _add(
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    layer: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    """A forward hook: what a layer returns, and what its adapter adds; with rows each by its own."""
    x = inputs[0]
    if lora_b.dim() == 2:
        return output + F.linear(x, lora_a) @ lora_b
    rows = x.reshape(len(lora_b), -1, x.shape[-1])
    return output + torch.bmm(rows @ lora_a.mT, lora_b).reshape(output.shape)


def _straight_through(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a quantized layer; its derivative is that of the weights as they were rounded."""
    weight: Any = layer.weight
    smooth, rounded = weight.dequantize(), layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            exact = rounded(x)
        found = F.linear(x, smooth, layer.bias)
        return found + (exact - found).detach()

    return forward
