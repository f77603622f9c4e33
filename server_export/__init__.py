"""The workstation: exports transformers models as bundles of programs. Needs the `export` extra."""
