"""Policy as pure functions: known facts in, a decision and its reason out."""
