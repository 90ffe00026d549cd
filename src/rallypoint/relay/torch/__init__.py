"""The PyTorch clients of a relay: their calls, merged into the requests of one session."""
