"""The relay of one node: PyTorch's clients and ours share one connection to the server (`relay/upstream.py`)."""
