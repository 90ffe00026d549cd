"""The relay's connection to its server, its channels, and its outages."""
