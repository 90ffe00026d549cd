"""Plug-ins for other launchers. So far: torchrun."""
