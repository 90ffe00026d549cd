"""The bare limit: a server that only receives and sends. A program of its own, started by `servers`.

The first byte of a request says how many bytes to answer. One thread waits with epoll, as the servers do. Rejected: a
blocking thread or process for each connection; with four clients on one core both came out slower.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading


def main() -> None:
    """Serve until standard input ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    serve(listener)


def serve(listener: socket.socket) -> None:
    """Answer everybody."""
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    peers: dict[int, socket.socket] = {}
    answers = [bytes(size) for size in range(256)]
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                peer, _ = listener.accept()
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peers[peer.fileno()] = peer
                poll.register(peer, select.EPOLLIN)
                continue
            request = peers[number].recv(4096)
            if request:
                peers[number].send(answers[request[0]])
            else:
                peers.pop(number).close()


if __name__ == "__main__":
    main()
