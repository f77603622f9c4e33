"""The engine asked: whether a program answers what the model does, how fast, and in what memory."""
