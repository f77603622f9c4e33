"""The command line: settings of verbs as flags, YAML keys and help, with hints for mistyped names."""
