"""A store from Python: set, get, count, wait, and an error that says what is missing.

python examples/store.py [URL]
"""

import sys
import threading

import rallypoint

store = rallypoint.connect(sys.argv[1] if len(sys.argv) > 1 else "memory://", timeout=10)

store.set("model", "resnet50")
print("model is", store.get("model").decode())
print("three more epochs:", store.add("epoch", 1), store.add("epoch", 1), store.add("epoch", 1))

# get waits until the key is there; another thread, or another process, may write it.
threading.Timer(0.1, store.set, ["checkpoint", "step-1000.pt"]).start()
print("the checkpoint is", store.get("checkpoint").decode())

# A part of the store for one job: the same keys, under a prefix.
job = rallypoint.PrefixStore("job-7", store)
job.multi_set(["rank0", "rank1"], ["ready", "ready"])
print("keys of job 7:", sorted(job.list_keys()))

try:
    job.wait(["rank0", "rank1", "rank2"], timeout=0.2)
except rallypoint.StoreTimeout as error:
    print("missing:", ", ".join(error.missing))
