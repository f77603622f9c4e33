"""From examples to a trained adapter: losses, batches, optimizers, checkpoints and the loop. numpy alone."""
