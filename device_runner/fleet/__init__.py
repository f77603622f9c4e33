"""Training on many devices: what they agree on, what they tell, and what a server makes of it."""
