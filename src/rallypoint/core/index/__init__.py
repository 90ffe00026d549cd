"""Ordered and prefix lookups beside the engine's tables."""
