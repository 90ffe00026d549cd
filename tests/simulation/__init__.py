"""Simulated members of the machines, on both hosts, with a seeded scheduler and a simulated clock."""
