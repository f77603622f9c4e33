"""From graphs to programs, through ExecuTorch."""
