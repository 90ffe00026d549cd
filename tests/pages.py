"""The HTTP pages of a server or a relay, as a test reads them; those of a protected one with its token, and by TLS."""

from __future__ import annotations

import json
import ssl
from typing import Any
from urllib.request import Request, urlopen

from tests.raw_peer import AMPLE_S

__all__ = ["pid_at", "read_page"]


def read_page(place: str, path: str = "/about", token: str = "", ca: str = "") -> Any:
    """Return a page of the server at host:port, or at a tcp:// URL; `ca` is the file of the CA of its certificate.

    Raises OSError if the server does not answer, or refuses.
    """
    address = place.rpartition("://")[2].partition("?")[0]
    asked = Request(f"http{'s' if ca else ''}://{address}{path}")
    if token:
        asked.add_header("Authorization", f"Bearer {token}")
    context = ssl.create_default_context(cafile=ca) if ca else None
    with urlopen(asked, timeout=AMPLE_S, context=context) as page:
        return json.load(page)


def pid_at(place: str, token: str = "", ca: str = "") -> int:
    """Return the pid of the server at host:port, or at a tcp:// URL."""
    return int(read_page(place, "/about", token, ca)["pid"])
