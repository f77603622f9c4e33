"""Training and serving on a phone over adb: the runtime, files, jobs, and verbs that run there."""
