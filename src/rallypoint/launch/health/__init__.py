"""The health check of a node: one run of the command, and the gate that keeps a node out of the run while it fails."""
