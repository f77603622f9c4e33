"""The table of operators: one row for each, with all that passes know of it.

    row(aten.silu.default, category=Category.ELEMENTWISE, derivative=_silu, core=_silu_in_core)

A row stands in the file of its subject, or in the file of the one peculiarity that it serves. What a pass
doesn't find in a row it leaves as it is, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import torch

from server_export.ir.tangents import Dual, GraphTangents
from server_export.ir.writer import Eager, GraphWriter, Rule

# (calls, argument, result, *other arguments) -> the derivative of the result by the argument, elementwise.
Derivative = Callable[..., Any]
# (tangents, node, *arguments) -> the result's Dual. Arguments that depend on what is differentiated are
# Duals, too.
JvpRule = Callable[..., Any]
Pass = Literal["rewrite", "core", "functional", "backward"]


class Category(Enum):
    """What an operator does to numbers."""

    IDENTITY = auto()  # nothing
    CAST = auto()  # gives them another type, or another order in memory
    CAST_LIKE = auto()  # the type of another value
    RESHAPE = auto()  # another shape, as a list of sizes
    SQUEEZE = auto()  # another shape, by its dimensions
    PERMUTE = auto()  # another order
    EXPAND = auto()  # repeats them along dimensions of 1
    EXPAND_LIKE = auto()  # in the shape of another value
    REPEAT = auto()  # repeats them along any dimension
    SPLIT = auto()  # several parts of them
    SELECT = auto()  # one part of them
    JOIN = auto()  # puts parts side by side, or one in the place of another
    ELEMENTWISE = auto()  # a function of each number
    ARITHMETIC = auto()  # adds, subtracts, multiplies or divides two values
    COMPARE = auto()  # true or false, or one of two values
    REDUCE = auto()  # one number of many
    NORMALIZE = auto()  # a function of a whole row
    PRODUCT = auto()  # a product of matrices
    QUANTIZE = auto()  # codes of them, and back
    GRADIENT = auto()  # what autograd writes for a backward pass
    FUSED = auto()  # of this project: several operators as one, so that passes needn't search for them


@dataclass(frozen=True)
class Operator:
    """What is known of one operator.

    Attributes:
        target: its overload, or the name of one that a library brings later.
        category: what it does to numbers.
        rewrite: how it is written plainer, in what XNNPACK takes.
        core: how ExecuTorch writes it.
        functional: how it is written in a graph that changed values in place before.
        backward: how it is written where autograd has put it into a backward pass.
        jvp: its forward-mode derivative.
        derivative: of an elementwise function, in both modes.
        autograd: what autograd goes through in its place.

    The rules of passes take a writer, the node and the node's arguments, and return what takes the node's
    place; None keeps it.
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


# By an operator's name: some are of libraries that are loaded later.
TABLE: dict[str, Operator] = {}


def row(*targets: Any, category: Category, derivative: Derivative | None = None, **known: Any) -> None:
    """Put operators into the table.

    An elementwise function's `derivative` gives it a rule for forward mode, and an overload that isn't
    PyTorch's own a backward pass.

    Args:
        targets: overloads or their names.
        category: what they do to numbers.
        derivative: of an elementwise function.
        known: other fields of `Operator`.

    Raises:
        ValueError: an operator has a row already.
    """
    for target in targets:
        name = str(target)
        if name in TABLE:
            raise ValueError(f"the operator {name} has a row already")
        fields = dict(known)
        if derivative is not None:
            fields.setdefault("jvp", _jvp_of(derivative))
            if not isinstance(target, str) and not name.startswith("aten."):
                fields.setdefault("autograd", _autograd_of(target, derivative))
        TABLE[name] = Operator(target, category, derivative=derivative, **fields)


def row_of(target: Any) -> Operator | None:
    """The row of an operator; None if it has none."""
    return TABLE.get(str(target))


def rules(of_pass: Pass) -> dict[str, Rule]:
    """The rules of a pass by operators' names, as `apply_rules` takes them."""
    return {name: rule for name, each in TABLE.items() if (rule := getattr(each, of_pass)) is not None}


def differentiable() -> set[str]:
    """The names of operators with a forward-mode derivative."""
    return {name for name, each in TABLE.items() if each.jvp is not None}


def members(*categories: Category) -> frozenset[Any]:
    """The operators of some categories, as nodes have them."""
    return frozenset(each.target for each in TABLE.values() if each.category in categories)


def _jvp_of(derivative: Derivative) -> JvpRule:
    def jvp(tangents: GraphTangents, node: Any, source: Dual, *rest: Any, **named: Any) -> Dual:
        primal = tangents.call(node.target, source.primal, *rest, **named)
        return source.scaled(primal, derivative(tangents, source.primal, primal, *rest, **named))

    return jvp


def _autograd_of(target: Any, derivative: Derivative) -> Callable[..., Any]:
    class Elementwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, argument: torch.Tensor, *rest: Any) -> Any:
            result = target(argument, *rest)
            ctx.save_for_backward(argument, result)
            ctx.rest = rest
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            by_argument = derivative(Eager(), *ctx.saved_tensors, *ctx.rest)
            return torch.ops.aten.mul.Tensor(gradient, by_argument), *(None for _ in ctx.rest)

    return Elementwise.apply


def gradient_of(target: Any, reads: Literal["argument", "result"], usual: Collection[Any] = ()) -> Rule:
    """The backward rule of an operator (gradient, value, ...) that autograd has for an elementwise function.

    Args:
        target: the function; its row has the derivative.
        reads: whether the value is the function's argument or its result.
        usual: what further arguments have to be among.
    """

    def backward(writer: GraphWriter, node: Any, gradient: Any, value: Any, *rest: Any, **named: Any) -> Any:
        if any(each not in usual for each in (*rest, *named.values())):
            return None
        result = writer.call(target, value) if reads == "argument" else value
        derivative = TABLE[str(target)].derivative
        assert derivative is not None
        return writer.times(gradient, derivative(writer, value, result))

    return backward
