"""A watch and a lease: see workers come and go as it happens.

python examples/watch.py
"""

import rallypoint

store = rallypoint.connect("memory://", timeout=10)

with store.watch("worker/") as changes:
    # A lease is a key that lives as long as the handle that made it; here each worker has a handle of its own.
    for name in ("ann", "bob"):
        worker = store.clone()
        worker.lease(f"worker/{name}", "training")
        if name == "bob":
            worker.close()  # as the death of its process would do

    for change in changes:
        print(change.key, "is gone" if change.value is None else f"is {change.value.decode()}")
        if change.value is None:
            break

print("still here:", store.list_keys())
