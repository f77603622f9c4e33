"""The stock ExecuTorch libraries behind a small C interface: an engine in a process without torch.

engine.cpp   the interface
build.py     one compiler call on first use, kept in the user's cache
engine.py    the Engine protocol on it
"""
