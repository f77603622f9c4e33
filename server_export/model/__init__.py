"""From a transformers model to a torch module that can be exported."""
