"""A lock that dies with its holder, and a fence that keeps out a holder who slept through the end of its lease.

python examples/lock.py
"""

import rallypoint

with rallypoint.Server() as server:
    written_by = 0

    def write(fence: int) -> None:
        """What the lock protects: it refuses whoever held the lock before the last writer did."""
        global written_by
        if fence < written_by:
            raise PermissionError(f"fence {fence} is old, {written_by} has written since")
        written_by = fence

    sleeper = rallypoint.connect(server.url)
    old = rallypoint.Lock(sleeper, "checkpoint")
    old.acquire()
    sleeper.close()  # as the death of its process would do, or a cut for longer than the grace

    with rallypoint.Lock(rallypoint.connect(server.url), "checkpoint") as lock:
        write(lock.fence)
        print("the next one holds it, with a larger fence:", lock.fence > old.fence)

    try:
        write(old.fence)
    except PermissionError as error:
        print("the sleeper is refused:", str(error).split(" is")[1].split(",")[0])
