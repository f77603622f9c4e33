"""From examples to a trained adapter: recipe, session, loop, estimators, optimizers, checkpoints. numpy alone."""
