"""Settings of verbs: fields that are flags, keys of a file and their help, with hints for what was meant."""
