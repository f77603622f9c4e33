"""The stock ExecuTorch libraries through a small C interface: an engine in a process without torch.

engine.cpp   the C interface
build.py     compiles it on first use, with one compiler call, into the user's cache
runtime.py   programs, weights files, arenas and methods through ctypes
"""
