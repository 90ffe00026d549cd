"""The settings of `rallypoint run` for the output of workers, beside `--redirects`, `--tee` and `--log-dir`."""

from __future__ import annotations

import msgspec

__all__ = ["OutputSettings"]


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How output is shown and copied."""

    shown_ranks: frozenset[int] | None = None
    """Global ranks whose output is shown on the console; None: all."""

    fold: str = "auto"
    """Whether equal lines of several ranks are shown once: on, off, or auto."""

    progress_bars: str = "auto"
    """What happens to lines that are rewritten with carriage returns: auto (redrawn, or the last state), or raw."""

    stdout_filters: tuple[str, ...] = ()
    """Texts of --duplicate-stdout-filters."""

    stderr_filters: tuple[str, ...] = ()
    logs_specs: str = ""
    """Name of the class that chooses the files, in the entry points of torchrun; empty: this package does."""

    event_log_handler: str = "null"
    """Where torchrun's events go: nowhere (null), or to stderr (console)."""
