"""Mixture of experts: routing of tokens to experts and the weighted sum of their outputs, in float32.

    hidden states before the experts   [expert inputs, router weights, expert indices, passed-through values]
    hidden states after the experts    [sum of expert outputs, passed-through values]

An expert's program takes the expert inputs of a token followed by the token's router weight, and returns its
weighted output: the product with the router weight and all derivatives are inside of the program. Experts are
computed one after the other and their outputs added in that order, so that the bits of the sum depend on
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prge.engine import FloatArray, IntArray

# Computes an expert: from its number and arrays of its tokens' inputs [..., tokens, width] to its outputs.
ExpertFunction = Callable[..., Sequence[FloatArray]]


@dataclass(frozen=True)
class Routing:
    """The layout of the hidden states around a layer of experts.

    Attributes:
        entering: width of the hidden states before the experts.
        leaving: width of the hidden states after the experts.
        program_inputs: width of a token's inputs of an expert's program, including the router weight.
        outputs: width of an expert's outputs.
        count: number of experts in the layer.
    """

    entering: int
    leaving: int
    program_inputs: int
    outputs: int
    count: int

    @property
    def inputs(self) -> int:
        """Width of the expert inputs of a token, without the router weight."""
        return self.program_inputs - 1

    @property
    def passed_through(self) -> int:
        """Width of the values that pass the experts unchanged."""
        return self.leaving - self.outputs

    @property
    def read_width(self) -> int:
        """Width of the part of the hidden states that the forward and backward passes of experts read."""
        return self.entering - self.passed_through

    @property
    def experts_per_token(self) -> int:
        """Number of experts that the router chooses for each token."""
        return (self.entering - self.inputs - self.passed_through) // 2

    @property
    def is_consistent(self) -> bool:
        """Whether the widths can be those of a layer of experts."""
        return (
            min(self.inputs, self.outputs, self.experts_per_token) >= 1
            and self.passed_through >= 0
            and self.entering == self.inputs + 2 * self.experts_per_token + self.passed_through
        )

    def assignments(self, states: FloatArray) -> Iterator[tuple[int, IntArray, IntArray]]:
        """Yield each expert that the router chose, in ascending order.

        Args:
            states: hidden states before the experts, [tokens, entering].

        Yields:
            The expert's number, the indices of its tokens, and the columns of these tokens' router weights.

        Raises:
            RuntimeError: the router chose an expert that doesn't exist.
        """
        indices = states[:, self.inputs + self.experts_per_token : self.inputs + 2 * self.experts_per_token]
        experts = np.unique(indices)
        if not np.isin(experts, np.arange(self.count)).all():
            raise RuntimeError(f"a router chose expert {experts[-1]}, there are {self.count}")
        for expert in experts.astype(int).tolist():
            # A router chooses the largest scores of a token, so that a token has an expert at most once.
            tokens, choices = np.nonzero(indices == expert)
            yield expert, tokens, self.inputs + choices

    def _gather(self, states: FloatArray, tokens: IntArray, columns: IntArray) -> FloatArray:
        """Return the inputs of an expert's program, [..., tokens, program_inputs]."""
        expert_inputs, weights = states[..., tokens, : self.inputs], states[..., tokens, columns]
        return np.concatenate([expert_inputs, weights[..., None]], -1)

    def _initial_outputs(self, states: FloatArray) -> FloatArray:
        """Return the states after the experts, [..., tokens, leaving], before outputs are added."""
        result = np.zeros((*states.shape[:-1], self.leaving), np.float32)
        result[..., self.outputs :] = states[..., self.read_width :]
        return result

    def forward(self, states: FloatArray, run: ExpertFunction, *tangents: FloatArray) -> list[FloatArray]:
        """Compute the hidden states after the experts, and their tangents.

        Args:
            states: hidden states before the experts, f32 [tokens, entering].
            run: the forward pass of an expert, or its JVP if there are tangents.
            tangents: tangents of the hidden states, f32 [queries, tokens, entering]; the expert indices have
                none.

        Returns:
            Hidden states, f32 [tokens, leaving], and their tangents, f32 [queries, tokens, leaving].
        """
        outputs = [self._initial_outputs(array) for array in (states, *tangents)]
        for expert, tokens, columns in self.assignments(states):
            inputs = [self._gather(array, tokens, columns) for array in (states, *tangents)]
            for total, expert_output in zip(outputs, run(expert, *inputs), strict=True):
                total[..., tokens, : self.outputs] += expert_output
        return outputs

    def backward(self, states: FloatArray, grad_output: FloatArray, run: ExpertFunction) -> FloatArray:
        """Compute the gradient with respect to the hidden states before the experts, f32 [tokens, entering].

        Args:
            states: hidden states before the experts, f32 [tokens, entering]; passed-through values may be
                missing.
            grad_output: gradient with respect to the hidden states after the experts, f32 [tokens, leaving].
            run: the backward pass of an expert, given its inputs and the gradient of its outputs.
        """
        grad_states = np.zeros((len(states), self.entering), np.float32)
        grad_states[:, self.read_width :] = grad_output[:, self.outputs :]
        for expert, tokens, columns in self.assignments(states):
            expert_inputs = self._gather(states, tokens, columns)
            (grad_inputs,) = run(expert, expert_inputs, grad_output[tokens, : self.outputs])
            grad_states[tokens, : self.inputs] += grad_inputs[:, :-1]
            grad_states[tokens, columns] = grad_inputs[:, -1]
        return grad_states
