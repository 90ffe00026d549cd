"""Simulations: processes against a simulated server, in virtual time, with a seeded scheduler and seeded faults."""
