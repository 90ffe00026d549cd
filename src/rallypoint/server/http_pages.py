"""The HTML pages of a server: the page behind a login link, and the live page. They load nothing from elsewhere.

The live page is static text (`status/text.py`) until its script (`page_assets/page.js`) has received the first event;
without scripts it stays so. The Content-Security-Policy (`POLICY`) allows exactly this script and these styles, by
their hashes, and connections to this server. All text of peers is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources

from rallypoint.server.status.model import ServerStatus
from rallypoint.server.status.text import render_text

__all__ = ["POLICY", "login_page", "status_page"]


def _asset(name: str) -> str:
    return (resources.files("rallypoint.server") / "page_assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _asset("page.css"), _asset("page.js")
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; connect-src 'self'; "
    f"style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}"
)
"""The Content-Security-Policy of every reply."""

_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>rallypoint</title>\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<style>{_STYLE}</style></head>\n<body>\n"
)

_LOGIN = """<h1>rallypoint</h1>
<form method="post" action="/login"><input type="hidden" name="code" value="{code}">
<p>This link opens the pages of this server in this browser, once. <button>Open</button></p></form>
</body></html>
"""

_TOP = """<header><h1>rallypoint</h1><div id="summary"></div><span id="link">static page</span></header>
<main><pre id="static">"""

_BOTTOM = f"""</pre>
<div id="live" hidden><div id="runs"></div><div id="waiting"></div><div id="stragglers"></div><div id="history"></div>
<div id="server"></div></div></main>
<script>{_SCRIPT}</script>
</body></html>
"""


def login_page(code: str) -> bytes:
    """Return the page behind a login link: one button, which uses the code."""
    return (_HEAD + _LOGIN.format(code=html.escape(code))).encode()


def status_page(status: ServerStatus) -> bytes:
    """Return the live page, with the status as text for browsers without scripts."""
    return "".join((_HEAD, _TOP, html.escape(render_text(status)), _BOTTOM)).encode()
