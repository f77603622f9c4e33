"""What a trained adapter becomes: PEFT, GGUF, merged model, inference programs, model card."""
