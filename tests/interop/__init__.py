"""PyTorch's own processes against ours. All tests here need torch; most run in forked processes (torch_processes.py).

Tests import `torch.distributed` by `importlib.import_module`: its types leave out names that it re-exports, such as
TCPStore, and are missing where torch is not installed. So mypy reports the same with torch and without.
"""
