"""What a server shows of itself: one model (`model.py`), rendered as JSON, text, a live page, and metrics."""
