"""The table of operators: `table` defines what a row holds, the other modules hold the rows by topic."""

from server_export.ir.operators import (
    arithmetic,
    elementwise,
    layouts,
    products,
    quantization,
    reductions,
    selection,
)
from server_export.ir.operators.table import (
    TABLE,
    Category,
    Operator,
    differentiable,
    members,
    row,
    row_of,
    rules,
)

__all__ = ["TABLE", "Category", "Operator", "differentiable", "members", "row", "row_of", "rules"]
__all__ += ["arithmetic", "elementwise", "layouts", "products", "quantization", "reductions", "selection"]
