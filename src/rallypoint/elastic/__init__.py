"""Rounds that form, break and form again: the rendezvous of the nodes of a run."""
