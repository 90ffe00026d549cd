"""Stores: one interface (base), and one module for each place where the bytes can be."""
