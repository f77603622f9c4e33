"""The device: data, engine and verbs of a run; numpy, tokenizers, the ExecuTorch runtime, no transformers."""
