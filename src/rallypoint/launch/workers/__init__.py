"""The worker processes of one node."""
