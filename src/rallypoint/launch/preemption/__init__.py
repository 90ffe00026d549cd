"""Preemption: the ranks of a round agree on a step to stop at, and the preempted nodes leave the run."""
