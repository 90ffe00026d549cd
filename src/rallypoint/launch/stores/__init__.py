"""The servers and relays that a run starts, and the store of each round."""
