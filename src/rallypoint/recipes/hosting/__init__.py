"""Hosts of shared objects: our server, or a value that the members change by compare-and-set."""
