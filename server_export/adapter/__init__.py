"""LoRA: which layers are adapted, the adapted layer, and the matrices that training starts from."""
