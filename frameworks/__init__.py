"""Training frameworks under `rallypoint run`: each one's own script, killed half-way. `make frameworks` runs it."""
