"""Stores: one interface (base), and one module for each backend."""
