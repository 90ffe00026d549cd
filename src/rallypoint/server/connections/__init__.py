"""The server's end of a connection: a handler for each protocol, and the transports that carry its bytes."""
