"""Side by side with the peers: `make bench`, or `python -m benchmarks [SUBJECT …] [--quick]` from the root of the tree.

Each subject is a module with a `TITLE`, `NOTES` (how to read its lines) and `run(quick)`, which returns lines for the
table. Rules of all of them: ours and the peer run at the same time and are measured in turn, in short slices whose
order alternates, so that whatever else the machine does hits both; every process is pinned, and every comparison is
made with the clients on the server's core and on a core of their own; a figure is a median, printed with its quartiles.
"""
