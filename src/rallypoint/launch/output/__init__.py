"""The output of workers: routing to console and files, line by line."""
