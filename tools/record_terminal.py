"""Run a command on a terminal of its own, and draw what it shows as an SVG that needs nothing.

    python tools/record_terminal.py docs/images/first-run.svg -- \\
        rallypoint run --nproc-per-node 4 --max-restarts 3 examples/pi.py --kill-half-way

At the right of each line stands when it came, in seconds since the command began. The name of this host is replaced by
`node0`. The picture reads on light and dark pages. Only lines and colours are drawn: a command that moves the cursor
is refused. Rejected: rich's export_svg; it loads its font from a network.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS, ROWS = 92, 40
CHARACTER, LINE, EDGE, TOP = 7.8, 19, 18, 44
"""Sizes in the picture: of a character, of a line, of the frame."""

TIME_COLUMNS = 8
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #24292f;
       white-space: pre }
.frame { fill: #f6f8fa; stroke: #d0d7de } .dot { fill: #d0d7de } .time { fill: #8c959f }
.bold { font-weight: 600 } .dim { fill: #6e7781 }
.c31, .c91 { fill: #cf222e } .c32, .c92 { fill: #1a7f37 } .c33, .c93 { fill: #9a6700 }
.c34, .c94 { fill: #0969da } .c35, .c95 { fill: #8250df } .c36, .c96 { fill: #1b7c83 }
@media (prefers-color-scheme: dark) {
text { fill: #d1d7e0 } .frame { fill: #151b23; stroke: #3d444d } .dot { fill: #3d444d } .time { fill: #656c76 }
.dim { fill: #9198a1 }
.c31, .c91 { fill: #ff7b72 } .c32, .c92 { fill: #3fb950 } .c33, .c93 { fill: #d29922 }
.c34, .c94 { fill: #58a6ff } .c35, .c95 { fill: #bc8cff } .c36, .c96 { fill: #39c5cf }
}
"""
COLOUR = re.compile(r"\x1b\[([\d;]*)m")


def record(command: list[str]) -> Iterator[tuple[float, str]]:
    """Run the command on a new terminal; yield each line with the time at which it began to arrive."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began_at = line_at = time.monotonic()
    pending = b""
    while data := _read(terminal):
        line_at = line_at if pending else time.monotonic()
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield line_at - began_at, line.rstrip(b"\r").decode()
            line_at = time.monotonic()
    if pending:
        yield line_at - began_at, pending.decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(f"{shlex.join(command)} ended with {code}; nothing is written")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the last process that had the terminal has ended
        return b""


def spans(line: str) -> Iterator[tuple[str, str]]:
    """Yield pieces of a line with their classes; raise ValueError for anything but colours."""
    classes: list[str] = []
    for index, piece in enumerate(COLOUR.split(line)):
        if index % 2:
            classes = restyled(classes, piece)
        elif "\x1b" in piece or "\r" in piece:
            raise ValueError(f"the command moves the cursor: {line!r}")
        elif piece:
            yield piece, " ".join(classes)


def restyled(classes: list[str], codes: str) -> list[str]:
    for code in codes.split(";"):
        number = int(code or 0)
        if number == 0:
            classes = []
        elif number in (1, 2):
            classes = [*classes, "bold" if number == 1 else "dim"]
        elif number == 39:
            classes = [name for name in classes if not re.match(r"c\d", name)]
        else:
            classes = [*(name for name in classes if not re.match(r"c\d", name)), f"c{number}"]
    return classes


def draw(command: str, lines: list[tuple[float, str]]) -> str:
    """Return the picture."""
    width = round(2 * EDGE + COLUMNS * CHARACTER + TIME_COLUMNS * CHARACTER)
    height = TOP + (len(lines) + 1) * LINE + EDGE // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{escape(command)}</title><style>{STYLE}</style>",
        f'<rect class="frame" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>',
        *(f'<circle class="dot" cx="{EDGE + 16 * dot}" cy="18" r="5"/>' for dot in range(3)),
        row(0, [("$ ", "dim"), (command, "bold")]),
    ]
    for number, (at, line) in enumerate(lines, 1):
        parts.append(row(number, spans(line)))
        place = f'x="{width - EDGE}" y="{TOP + number * LINE}" text-anchor="end"'
        parts.append(f'<text class="time" {place}>{at:.2f} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def row(number: int, pieces: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> str:
    told = "".join(
        f'<tspan class="{classes}">{escape(text)}</tspan>' if classes else f"<tspan>{escape(text)}</tspan>"
        for text, classes in pieces
    )
    return f'<text class="line" x="{EDGE}" y="{TOP + number * LINE}">{told}</text>'


def main() -> None:
    """Record, and write the picture."""
    parser = argparse.ArgumentParser(prog="tools/record_terminal.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    host = socket.gethostname()
    lines = [(at, line.replace(host, "node0")) for at, line in record(asked.command)]
    asked.picture.write_text(draw(shlex.join(asked.command), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
