"""A group: see who joins, leaves and dies, as it happens.

python examples/group.py
"""

import rallypoint

with rallypoint.Server(grace=0.5) as server:
    ann = rallypoint.Group(rallypoint.connect(server.url), "trainers").join("ann", devices=["cuda:0"])

    bob_store = rallypoint.connect(server.url)
    bob = rallypoint.Group(bob_store, "trainers").join(
        "bob", devices=["cuda:1"], device_maps={"ann": {"cuda:1": "cuda:0"}}
    )
    print("here:", ", ".join(ann.wait_for(["bob"], timeout=60).members))
    print("answers for ann's cuda:0 go back to bob's", ann.view.members["ann"].reverse_maps["bob"]["cuda:0"])

    eve = rallypoint.Group(rallypoint.connect(server.url), "trainers").join("eve")
    eve.leave()
    bob_store.close()  # as the death of bob's process would do

    for event in ann.events(timeout=60):
        print(f"{event.member} {event.what}: {event.reason}")
        if event.what == "lost":
            break
