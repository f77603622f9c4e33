"""The machine that work runs on: whole files, children, interrupts, memory, the terminal."""
