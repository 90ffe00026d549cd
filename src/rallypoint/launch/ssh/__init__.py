"""`rallypoint run --hosts`: one agent on each of several hosts, over the system's ssh."""
