"""A server's log in a directory: what is committed comes back, whatever dies when; damage is never overlooked."""
