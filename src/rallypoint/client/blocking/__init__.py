"""The session of the blocking client: one socket, one session, any number of threads."""
