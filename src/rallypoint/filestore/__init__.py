"""The parts of a FileStore: a log in a file, and each process's replica of the store, replayed from the log."""
