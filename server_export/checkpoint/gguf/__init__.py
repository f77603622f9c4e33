"""Reading of models from GGUF files: header, configuration, tokenizer, weights."""
