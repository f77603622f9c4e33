"""Text generation: prompts, sampling, stop words, and the decoding loop; numpy alone."""
