"""The relay of a node: its PyTorch and native clients share one connection to the server
(`relay/upstream/connection.py`)."""
