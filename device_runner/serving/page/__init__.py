"""The server's own page: a person talks to its models there, and looks at runs while they go on."""
