"""The log of a server as JSON, one object per line, for programs that collect logs."""

from __future__ import annotations

import json
import logging
import time

__all__ = ["JsonFormatter"]


class JsonFormatter(logging.Formatter):
    """Formats a record as an object: time (RFC 3339, UTC), level, logger, pid, message, and exception, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)
