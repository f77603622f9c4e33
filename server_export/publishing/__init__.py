"""Formats of a published adapter: PEFT, GGUF, merged model, inference programs; and the model card."""
