"""The process of a user's reward function: a JSON line in, a JSON line out.

    python -m prge.rewards.child FILE FUNCTION
    {"prompt": ..., "completion": ..., "row": ...}  ->  {"reward": 1.0} or {"error": "..."}

The first line out is {} once the function is loaded. What the function prints goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from prge.system.parents import end_with_starter

# Longest error that is passed on, in characters.
MAX_ERROR = 2000


def load(path: Path, name: str) -> Any:
    """Return a function of a Python file; its folder can be imported from."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"{path.name} has no function {name}")
    return function


def call(function: Any, line: str) -> dict[str, Any]:
    """Return the response to a line."""
    try:
        value = function(**json.loads(line))
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            value = value.item()
        is_number = isinstance(value, bool | int | float) and math.isfinite(value)
        return {"reward": value if is_number else repr(value)[:MAX_ERROR]}
    except Exception:
        return {"error": traceback.format_exc()[-MAX_ERROR:]}


def main(path: str, name: str) -> None:
    """Load the function, and respond to every line until standard input ends."""
    end_with_starter()
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def respond(response: dict[str, Any]) -> None:
        sys.stdout.flush()  # errors quote what was printed
        responses.write(json.dumps(response) + "\n")
        responses.flush()

    try:
        function = load(Path(path), name)
    except BaseException:
        respond({"error": traceback.format_exc()[-MAX_ERROR:]})
        return
    respond({})
    for line in sys.stdin:
        respond(call(function, line))


if __name__ == "__main__":
    main(*sys.argv[1:3])
