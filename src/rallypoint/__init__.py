"""rallypoint."""
