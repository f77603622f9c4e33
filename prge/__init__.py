"""Fine-tune language models with nothing but an inference engine (P-RGE, arXiv 2409.15520)."""

__version__ = "0.2.0"
