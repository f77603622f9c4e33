"""Training: the recipe, the session, the loop, estimators, optimizers and checkpoints, with numpy only."""
