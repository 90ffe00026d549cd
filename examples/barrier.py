"""A barrier that names who is missing.

python examples/barrier.py
"""

import threading

import rallypoint

MEMBERS = ["node-a", "node-b", "node-c"]

with rallypoint.Server() as server:

    def run(name: str, timeout: float) -> None:
        barrier = rallypoint.Barrier(rallypoint.connect(server.url), "epoch", MEMBERS)
        try:
            barrier.wait(name, timeout)
            print(f"{name}: all are here")
        except rallypoint.MembersMissing as error:
            print(f"{name}: {error.reason}")

    for present in (MEMBERS[:2], MEMBERS):  # first without node-c, then with it: a barrier can be used again
        timeouts = [60, 60, 60] if present == MEMBERS else [1, 2]  # node-a gives up first, and says why
        threads = [threading.Thread(target=run, args=arguments) for arguments in zip(present, timeouts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
