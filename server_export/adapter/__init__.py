"""LoRA adapters: the adapted layers, the module that adapts them, and the initial matrices."""
