"""Text generation: prompts, sampling, stop words, and the decoding loop, with numpy only."""
