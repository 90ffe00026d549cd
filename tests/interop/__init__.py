"""PyTorch's own processes against ours. All of these need torch; most of them run in a crew (crew.py)."""
