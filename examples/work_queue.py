"""A work queue: two workers take items in turn, every item goes to one of them, and nobody polls.

python examples/work_queue.py [URL]
"""

import sys
import threading

import rallypoint

store = rallypoint.connect(sys.argv[1] if len(sys.argv) > 1 else "memory://", timeout=10)


def work(name: str) -> None:
    while (item := store.queue_pop("shards")) != b"stop":
        store.queue_push("done", f"{item.decode()} by {name}")


workers = [threading.Thread(target=work, args=[name]) for name in ("ann", "bob")]
for worker in workers:
    worker.start()
for number in range(6):
    store.queue_push("shards", f"shard-{number}")
for _ in workers:
    store.queue_push("shards", "stop")
for worker in workers:
    worker.join()

finished = sorted(store.queue_pop("done").decode() for _ in range(6))
print("\n".join(finished))
print("left over:", store.queue_len("shards"))
