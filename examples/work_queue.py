"""A work queue: two workers take items, one of them fails once, and every item is done once.

python examples/work_queue.py [URL]
"""

import sys
import threading

import rallypoint

store = rallypoint.connect(sys.argv[1] if len(sys.argv) > 1 else "memory://", timeout=10)
shards = rallypoint.WorkQueue(store, "shards")
shards.put_many(f"shard-{number}" for number in range(6))


def work(name: str) -> None:
    while (item := shards.try_take()) is not None:
        try:
            with item:  # done at the end of the block; given back if it raises
                if item.data == b"shard-2" and item.deliveries == 1:
                    raise OSError("cannot read shard-2")
                print(f"{item.data.decode()} by {name}, delivery {item.deliveries}")
        except OSError as error:
            print(f"{name}: {error}")


workers = [threading.Thread(target=work, args=[name]) for name in ("ann", "bob")]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()

shards.join()  # waits for items that other processes hold
status = shards.status()
print(f"done: {status.done}, left over: {status.ready + status.taken + status.dead}")
