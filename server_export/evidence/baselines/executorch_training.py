"""Train LoRA-FA with ExecuTorch's training module: forward and backward as one program on the stock engine.

`executorch.extension.training` runs the joint graph that torch.export makes of a loss; its SGD changes the
parameters in the engine's memory. The program is exported in this process, with the layers, the attention
and the loss of a bundle's programs, for the longest training row. The SGD's velocity can't be read, so
momentum is off.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prge.errors import ConfigError
from prge.objectives.examples import Example, labels_of, sequences_of, without_branches
from prge.training.estimators.protocol import BACKPROPAGATION_PASSES
from server_export.adapter.layers import replace_module
from server_export.evidence.baselines.fixed_length import fix_length, restore_length
from server_export.evidence.baselines.method import StepResult, TrainingMethod
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings
from server_export.quiet_libraries import quiet_engine
from server_export.trace import readout

_METHOD = "forward"
# Its exponential is exactly 0 relative to that of any real score.
_NO_CANDIDATE = -1e4


class AdaptedLinear(nn.Module):
    """A linear layer with a frozen `lora_a` [rank, in] and a trained `lora_b` [out, rank]."""

    lora_a: torch.Tensor

    def __init__(self, base: nn.Module, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("lora_a", lora_a)
        self.lora_b = nn.Parameter(lora_b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in]; return [..., out]."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class LossProgram(nn.Module):
    """The mean loss of a decoder's step, with fixed shapes as a program needs them.

    The inputs, for R rows, E examples of at most C candidates and S positions in a row, are

        tokens i64 [R, length]; positions, targets i64 [R, S]
        weights f32 [E * C, R * S]   weights of log-probabilities in the score of each candidate
        absent f32 [E, C]            0, or a very low score for candidates that an example lacks
        chosen f32 [E, C]            1 for the right candidate
        compared f32 [E]             1 for candidates, 0 for a completion, whose score is not normalized
    """

    def __init__(self, problem: ModelProblem, length: int) -> None:
        super().__init__()
        self.model = problem.model
        positions = problem.engine.positions
        self.register_buffer("position_ids", None if positions is None else positions[:, :length])
        self.positions: torch.Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._select_positions)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        absent: torch.Tensor,
        chosen: torch.Tensor,
        compared: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mean loss, f32 []."""
        self.positions = positions
        extra_inputs = {} if self.position_ids is None else {"position_ids": self.position_ids}
        logits = self.model(input_ids=tokens, use_cache=False, return_dict=True, **extra_inputs).logits
        self.positions = None
        logprobs = readout.log_probabilities(logits, targets)
        scores = (weights @ logprobs.reshape(-1, 1)).reshape(absent.shape) + absent
        highest = scores.detach().amax(1, keepdim=True)
        normalizer = highest[:, 0] + (scores - highest).exp().sum(1).log()
        return (compared * normalizer - (chosen * scores).sum(1)).mean()

    def _select_positions(
        self, head: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return inputs if self.positions is None else (readout.at_positions(inputs[0], self.positions),)


class ExecutorchTraining(TrainingMethod):
    """Train with ExecuTorch's SGD; `trained` is a copy of the parameters in the engine's memory."""

    def __init__(self, problem: ModelProblem, settings: BaselineSettings) -> None:
        if problem.is_encoder:
            raise _unsuitable_error("bundle", "it holds an encoder, and this method trains decoders only")
        train = [without_branches(example) for example in problem.train]
        counts = {len(example.sequences) for example in train}
        most = max(counts)
        if len(counts) > 1:
            raise _unsuitable_error(
                "rows", f"examples have {min(counts)} to {most} sequences, and all must have the same number"
            )
        examples = problem.batch_size
        self._rows = examples * most
        self._candidates = max(example.candidates for example in train)
        sequences = sequences_of(train)
        self._length = max(len(sequence.tokens) for sequence in sequences)
        self._targets = max(len(sequence.targets) for sequence in sequences)
        super().__init__(problem, [problem.insert_adapter()])
        # Views [rank, out] of the trained values, by the parameter names of the program.
        self._matrices = {
            f"model.{name}.lora_b": torch.from_numpy(matrix)
            for name, matrix in problem.adapter.lora_b.items()
        }
        # The engine doesn't copy the program, so it has to stay alive.
        self._program = _export(problem, self._length, self._inputs(problem.train[:examples]))
        from executorch.extension.training import _load_for_executorch_for_training_from_buffer

        with quiet_engine(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._module = _load_for_executorch_for_training_from_buffer(self._program)
        self._started = False

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Run the joint program once and take one step of ExecuTorch's SGD."""
        from executorch.extension.training import get_sgd_optimizer

        inputs = self._inputs(examples)
        if not self._started:
            # The module's parameters are available only after a first run.
            self._module.forward_backward(_METHOD, inputs)
            for name, parameter in self._module.named_parameters().items():
                parameter.copy_(self._matrices[name].T)
            self._started = True
        (loss,) = self._module.forward_backward(_METHOD, inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Without velocity the optimizer has no state, so each step can make one with its own rate.
            get_sgd_optimizer(self._module.named_parameters(), learning_rate).step(self.named_gradients())
        with torch.no_grad():
            for name, parameter in self._module.named_parameters().items():
                self._matrices[name].copy_(parameter.T)
        return StepResult(float(loss), BACKPROPAGATION_PASSES * self.problem.forward_passes(examples))

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the newest step by parameter name."""
        gradients: dict[str, torch.Tensor] = self._module.named_gradients()
        return gradients

    def _inputs(self, examples: Sequence[Example]) -> tuple[torch.Tensor, ...]:
        """Return the inputs of the program for a step's examples; see `LossProgram`."""
        examples = [without_branches(example) for example in examples]
        sequences = sequences_of(examples)
        tokens = np.full((self._rows, self._length), self.problem.pad, np.int64)
        positions, targets = (np.zeros((self._rows, self._targets), np.int64) for _ in range(2))
        scores = np.zeros((len(examples), self._candidates), np.float32)
        weights = np.zeros((scores.size, positions.size), np.float32)
        owners = np.repeat(np.arange(len(examples)), [len(example.sequences) for example in examples])
        for row, (owner, sequence) in enumerate(zip(owners.tolist(), sequences, strict=True)):
            tokens[row, : len(sequence.tokens)] = sequence.tokens
            for index, target in enumerate(sequence.targets):
                positions[row, index], targets[row, index] = target.position, target.token
                cell = owner * self._candidates + target.candidate
                weights[cell, row * self._targets + index] = target.weight
        absent, chosen, labels = scores.copy(), scores.copy(), labels_of(examples)
        candidates = np.array([example.candidates for example in examples])
        absent[np.arange(self._candidates) >= candidates[:, None]] = _NO_CANDIDATE
        chosen[np.arange(len(examples)), np.maximum(labels, 0)] = 1
        compared = (labels >= 0).astype(np.float32)
        arrays = (tokens, positions, targets, weights, absent, chosen, compared)
        return tuple(torch.from_numpy(array) for array in arrays)


def _unsuitable_error(what: str, problem: str) -> ConfigError:
    return ConfigError(
        f"executorch-training doesn't fit the {what}:",
        [problem],
        remedy="Use another method, such as backprop-lora-fa.",
        code=f"{what}-unfit",
    )


def _export(problem: ModelProblem, length: int, inputs: tuple[torch.Tensor, ...]) -> bytes:
    """Return the joint program of the loss, for rows of a given length."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from torch.export.experimental import _export_forward_backward

    program, model = LossProgram(problem, length), problem.model
    implementation = model.config._attn_implementation
    fix_length(model)
    model.requires_grad_(False)
    for name, matrix in problem.adapter.lora_b.items():
        lora_a, lora_b = problem.engine.lora_a[name], torch.from_numpy(matrix).T.contiguous()
        replace_module(model, name, AdaptedLinear(model.get_submodule(name), lora_a, lora_b))
    with torch.no_grad():
        program(*inputs)  # the first call fixes the position tables
    with quiet_engine(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joint = _export_forward_backward(torch.export.export(program, inputs))
        replace_full_like(joint)
        lowered = to_edge_transform_and_lower(joint, partitioner=[XnnpackPartitioner()]).to_executorch()
    # Evaluation may score longer rows than a step has.
    restore_length(model, implementation)
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            replace_module(model, name, module.base)
    buffer: bytes = lowered.buffer
    return buffer


def replace_full_like(joint: Any) -> None:
    """Replace `full_like(empty_permuted(shape), value)` by `full`.

    SiLU's backward contains the former, which the edge dialect lacks.
    """
    aten, graph = torch.ops.aten, joint.graph
    for node in list(graph.nodes):
        if node.target is aten.full_like.default and node.args[0].target is aten.empty_permuted.default:
            value = node.meta["val"]
            with graph.inserting_before(node):
                full = graph.call_function(
                    aten.full.default, (list(value.shape), node.args[1]), {"dtype": value.dtype}
                )
            full.meta = dict(node.meta)
            node.replace_all_uses_with(full)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is aten.empty_permuted.default and not node.users:
            graph.erase_node(node)
    joint.graph_module.recompile()
