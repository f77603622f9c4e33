"""Exceptions by which libraries refuse what they are given, for `prge.errors.refused_as`.

Whatever else a library raises is a defect, of prge or of the library, and keeps its traceback.
"""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

# What transformers' classes raise of a configuration or a file that they can't take: they check few values,
# so that one of the wrong type or size is met by whatever statement uses it first.
TRANSFORMERS_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def torch_export_errors() -> tuple[type[Exception], ...]:
    """What torch.export raises of a model that it can't trace, or whose sizes it can't leave open."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

    return (TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode)


def executorch_errors() -> tuple[type[Exception], ...]:
    """What ExecuTorch's lowering raises of a program that it can't take."""
    from executorch.exir.error import ExportError, InternalError
    from torch._export.verifier import SpecViolationError

    return (ExportError, InternalError, SpecViolationError, *torch_export_errors())
