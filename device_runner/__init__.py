"""The device side: verbs and engines on numpy, tokenizers and the ExecuTorch runtime."""
