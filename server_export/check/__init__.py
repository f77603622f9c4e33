"""The engine asked: whether a program returns what the model does, how fast, and in what memory."""
