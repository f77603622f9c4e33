"""One run: its settings, its inputs, who watches it, and what makes it pause."""
