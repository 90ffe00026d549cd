"""A rendezvous: nodes form a round, one dies, another takes its place, and each knows its rank, and why.

python examples/rendezvous.py
"""

from concurrent.futures import ThreadPoolExecutor

import rallypoint

with rallypoint.Server(grace=0.5) as server, ThreadPoolExecutor() as pool:
    stores = {name: rallypoint.connect(server.url) for name in ("ann", "bob", "eve")}
    ann, bob, eve = (
        rallypoint.Rendezvous(store, "training", min_nodes=2, node=name, settings={"batch": 32})
        for name, store in stores.items()
    )

    def form(*nodes: rallypoint.Rendezvous) -> None:
        """Let nodes join at the same time, each in a thread, as if on machines of their own."""
        for node, now in zip(nodes, pool.map(lambda node: node.join(timeout=60), nodes), strict=True):
            print(f"round {now.number}: {node.node} is rank {now.rank} of {now.world_size}, {now.reason}")

    form(ann, bob)
    stores["bob"].close()  # as the death of bob's process would do
    ann.changed.wait()
    print("the round is over:", ann.changed.reason)
    form(ann, eve)

    ann.close("succeeded", "the model is trained")
    try:
        eve.join()
    except rallypoint.RunClosed as closed:
        print("eve ends:", closed.result)
