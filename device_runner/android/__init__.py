"""A phone over adb: the runtime that is brought to it, and runs on it."""
