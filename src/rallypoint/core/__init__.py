"""Pure logic: no I/O, clock, threads or randomness. All input comes as arguments, all output as results."""
