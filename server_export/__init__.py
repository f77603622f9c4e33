"""The workstation: a transformers model becomes a program with its bundle. Needs the `export` extra."""
