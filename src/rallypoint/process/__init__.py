"""Servers as child processes: start, supervise, and end them with their parent."""
