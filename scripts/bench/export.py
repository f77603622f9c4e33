"""What an export takes: seconds, peak memory, sizes of programs and weights, by model.

    python scripts/bench/export.py --models smollm2-135m tinyllama-1.1b llama-3.1-8b --json export.json

A model is an architecture with random weights, written to a temporary folder in bfloat16 shard by shard.
Every export is a `prge export` in a process of its own. Prints JSON: by model `seconds`, `peak_rss_mb`,
`program_bytes` and `weights_bytes`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from reports import circumstances, parser_of, report
from timing import export, folder_bytes

from prge.files.signatures import ROLES
from server_export.model.random_models import CONFIGURATIONS, save_random_model


def main() -> None:
    """Read the flags, export, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=["smollm2-135m"])
    parser.add_argument("--quantize", default="8da4w")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--folder", type=Path, help="where the models and bundles are made for a while")
    arguments = parser.parse_args()
    figures = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            folder, bundle = Path(name, "model"), Path(name, "bundle")
            save_random_model(folder, model, arguments.layers)
            figures[model] = {
                **export(folder, bundle, "--quantize", arguments.quantize, "--roles", *arguments.roles),
                "program_bytes": folder_bytes(bundle / "programs"),
                "weights_bytes": folder_bytes(bundle / "weights"),
            }
    report({**figures, **circumstances(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
