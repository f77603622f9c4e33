"""Exceptions by which libraries reject their inputs, for `prge.errors.refused_as`.

Any other exception of a library is a defect of prge or of the library, and keeps its traceback.
"""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

# Raised by transformers' classes for invalid configurations and files. They validate few values, so a wrong
# type or size surfaces as the exception of whatever statement uses it first.
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
    """Return what torch.export raises for models that it can't trace or whose sizes it can't keep dynamic."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

    return (TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode)


def executorch_errors() -> tuple[type[Exception], ...]:
    """Return what ExecuTorch's lowering raises for programs that it does not support."""
    from executorch.exir.error import ExportError, InternalError
    from torch._export.verifier import SpecViolationError

    return (ExportError, InternalError, SpecViolationError, *torch_export_errors())
