"""Finding a server: the addresses of a store, the order in which to try them, and the relay of the node."""
