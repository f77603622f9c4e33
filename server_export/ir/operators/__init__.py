"""What is known of each operator: `table` says what a row has, the other files hold the rows by subject."""

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
