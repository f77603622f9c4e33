"""Rewards of generated text: rules, the user's own functions, and the completions that they score."""
