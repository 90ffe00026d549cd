"""Pure logic: no I/O, no clock, no threads, no chance. What it needs is an argument, what it does is a result."""
