"""The table of operators: one row per operator, with everything that the passes know about it.

    row(aten.silu.default, category=Category.ELEMENTWISE, derivative=_silu, core=_silu_in_core)

A row stands in the module of its topic, or in the module of the one pattern that needs it. If a row lacks
what a pass needs, the pass leaves the operator as it is or refuses the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import torch

from server_export.ir.tangents import Dual, GraphTangents
from server_export.ir.writer import Eager, GraphWriter, Rule

# (calls, argument, result, *other arguments) -> the elementwise derivative of the result by the argument.
Derivative = Callable[..., Any]
# (tangents, node, *arguments) -> the Dual of the result. Arguments that depend on a differentiated input are
# Duals too.
JvpRule = Callable[..., Any]
RuleSet = Literal["rewrite", "core", "functional", "backward"]


class Category(Enum):
    """What an operator does to the elements of a tensor."""

    IDENTITY = auto()  # returns its input
    CAST = auto()  # changes the dtype or the memory format
    CAST_LIKE = auto()  # casts to the dtype of another tensor
    RESHAPE = auto()  # changes the shape, given as a list of sizes
    SQUEEZE = auto()  # changes the shape, given by dimensions
    PERMUTE = auto()  # permutes dimensions
    EXPAND = auto()  # repeats dimensions of size 1
    EXPAND_LIKE = auto()  # expands to the shape of another tensor
    REPEAT = auto()  # repeats any dimension
    SPLIT = auto()  # returns several parts
    SELECT = auto()  # returns one part
    JOIN = auto()  # concatenates parts, or writes one tensor into another
    ELEMENTWISE = auto()  # applies a function to each element
    ARITHMETIC = auto()  # adds, subtracts, multiplies or divides two values
    COMPARE = auto()  # compares two values, or selects between them
    REDUCE = auto()  # reduces a dimension
    NORMALIZE = auto()  # applies a function to a whole row
    PRODUCT = auto()  # multiplies matrices
    QUANTIZE = auto()  # quantizes or dequantizes
    GRADIENT = auto()  # appears in the backward passes that autograd writes
    FUSED = auto()  # an operator of prge that fuses several, so that passes don't have to match them


@dataclass(frozen=True)
class Operator:
    """Everything that is known about one operator.

    Attributes:
        target: the operator overload, or its name if its library is loaded later.
        category: what the operator does to elements.
        rewrite: writes the operator in simpler ones that XNNPACK delegates.
        core: writes the operator as ExecuTorch's core operators.
        functional: writes the operator in a graph whose in-place operators have been removed.
        backward: writes the operator where autograd put it into a backward pass.
        jvp: the forward-mode derivative (JVP).
        derivative: the derivative of an elementwise function, for both modes.
        autograd: a function that autograd traces instead of the operator.

    Rules of passes take a writer, the node and the node's arguments, and return the replacement of the node;
    None keeps the node.
    """

    target: Any
    category: Category
    rewrite: Rule | None = None
    core: Rule | None = None
    functional: Rule | None = None
    backward: Rule | None = None
    jvp: JvpRule | None = None
    derivative: Derivative | None = None
    autograd: Callable[..., Any] | None = None


# Keys are operator names, because some operators belong to libraries that are loaded later.
TABLE: dict[str, Operator] = {}


def row(*targets: Any, category: Category, derivative: Derivative | None = None, **known: Any) -> None:
    """Add operators to the table.

    The `derivative` of an elementwise function provides its JVP rule, and a backward pass for overloads
    outside of ATen.

    Args:
        targets: overloads or their names.
        category: what the operators do to elements.
        derivative: the derivative of an elementwise function.
        known: other fields of `Operator`.

    Raises:
        ValueError: an operator already has a row.
    """
    for target in targets:
        name = str(target)
        if name in TABLE:
            raise ValueError(f"the operator {name} already has a row")
        fields = dict(known)
        if derivative is not None:
            fields.setdefault("jvp", _jvp_from_derivative(derivative))
            if not isinstance(target, str) and not name.startswith("aten."):
                fields.setdefault("autograd", _autograd_from_derivative(target, derivative))
        TABLE[name] = Operator(target, category, derivative=derivative, **fields)


def row_of(target: Any) -> Operator | None:
    """Return the row of an operator, or None if it has none."""
    return TABLE.get(str(target))


def rules(rule_set: RuleSet) -> dict[str, Rule]:
    """Return the rules of a pass by operator name, as `apply_rules` takes them."""
    return {name: rule for name, each in TABLE.items() if (rule := getattr(each, rule_set)) is not None}


def differentiable() -> set[str]:
    """Return the names of the operators that have a forward-mode derivative."""
    return {name for name, each in TABLE.items() if each.jvp is not None}


def members(*categories: Category) -> frozenset[Any]:
    """Return the operators of the given categories, as `node.target` holds them."""
    return frozenset(each.target for each in TABLE.values() if each.category in categories)


def _jvp_from_derivative(derivative: Derivative) -> JvpRule:
    def jvp(tangents: GraphTangents, node: Any, source: Dual, *rest: Any, **named: Any) -> Dual:
        primal = tangents.call(node.target, source.primal, *rest, **named)
        return source.scaled(primal, derivative(tangents, source.primal, primal, *rest, **named))

    return jvp


def _autograd_from_derivative(target: Any, derivative: Derivative) -> Callable[..., Any]:
    class Elementwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, argument: torch.Tensor, *rest: Any) -> Any:
            result = target(argument, *rest)
            ctx.save_for_backward(argument, result)
            ctx.rest = rest
            return result

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            by_argument = derivative(Eager(), *ctx.saved_tensors, *ctx.rest)
            return torch.ops.aten.mul.Tensor(grad_output, by_argument), *(None for _ in ctx.rest)

    return Elementwise.apply


def gradient_of(target: Any, reads: Literal["argument", "result"], usual: Collection[Any] = ()) -> Rule:
    """Return the backward rule for autograd's operator (grad_output, value, ...) of an elementwise function.

    Args:
        target: the function; its row has the derivative.
        reads: whether the value is the function's argument or its result.
        usual: values that further arguments may have; the rule declines any other.
    """

    def backward(
        writer: GraphWriter, node: Any, grad_output: Any, value: Any, *rest: Any, **named: Any
    ) -> Any:
        if any(each not in usual for each in (*rest, *named.values())):
            return None
        result = writer.call(target, value) if reads == "argument" else value
        derivative = TABLE[str(target)].derivative
        assert derivative is not None
        return writer.times(grad_output, derivative(writer, value, result))

    return backward
