"""Four workers meet at a store, exchange addresses and count together: what rallypoint is for, in a few seconds.

python examples/meet.py
"""

import os
import socket
import subprocess
import sys
import time

import rallypoint

WORKERS = 4
STEPS = 500


def work(rank: int) -> None:
    store = rallypoint.connect(os.environ["RALLYPOINT_URL"], timeout=60)
    say = f"worker {rank} (pid {os.getpid()})"

    # Meet: everyone says where it listens, and waits for the others. Nobody polls, nobody sleeps.
    listener = socket.create_server(("127.0.0.1", 0))
    store.set(f"address/{rank}", f"127.0.0.1:{listener.getsockname()[1]}")
    print(f"{say}: I listen on port {listener.getsockname()[1]}; waiting for the others", flush=True)
    addresses = store.multi_get([f"address/{other}" for other in range(WORKERS)])
    print(f"{say}: everyone is here: {b', '.join(addresses).decode()}", flush=True)

    # Use what was exchanged: greet the next worker directly, and be greeted by the one before.
    host, port = addresses[(rank + 1) % WORKERS].decode().split(":")
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(f"worker {rank}".encode())
    caller, _ = listener.accept()
    with caller:
        print(f"{say}: greeted by {caller.recv(100).decode()} on a connection of our own", flush=True)

    # Count together: every increment counts once, whoever makes it.
    for _ in range(STEPS):
        store.add("steps", 1)
    store.barrier("counted", WORKERS)
    print(f"{say}: together we counted to {int(store.get('steps'))}", flush=True)


def main() -> None:
    started = time.monotonic()
    with rallypoint.Server() as server:
        print(f"a store server is up at {server.url} after {time.monotonic() - started:.2f} s (pid {server.pid})")
        environment = {**os.environ, "RALLYPOINT_URL": server.url}
        command = [sys.executable, __file__]
        workers = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(WORKERS)]
        codes = [worker.wait() for worker in workers]
        total = int(rallypoint.connect(server.url).get("steps"))
    if any(codes) or total != WORKERS * STEPS:
        sys.exit(f"something went wrong: exit codes {codes}, counted to {total}, expected {WORKERS * STEPS}")
    print(f"done in {time.monotonic() - started:.2f} s: {WORKERS} workers x {STEPS} steps = {total}, none lost")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(int(sys.argv[1]))
    else:
        main()
