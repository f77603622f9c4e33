"""Services of the operating system: atomic files, child processes, interrupts, memory, the terminal."""
