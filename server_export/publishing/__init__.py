"""What a trained adapter becomes: PEFT, merged model, inference program, model card."""
