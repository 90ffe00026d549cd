"""The write-ahead log in a directory."""
