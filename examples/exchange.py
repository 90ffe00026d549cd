"""An exchange: every rank gives its address, and gets everybody's, in one round trip.

python examples/exchange.py
"""

from concurrent.futures import ThreadPoolExecutor

import rallypoint

RANKS = 4

with rallypoint.Server() as server:

    def run(rank: int) -> list[bytes]:
        exchange = rallypoint.Exchange(rallypoint.connect(server.url), "addresses", RANKS)
        addresses = exchange.all_gather(rank, f"10.0.0.{rank}:4711".encode(), timeout=60)
        seed = exchange.broadcast(rank, b"seed 42" if rank == 0 else b"", root=0, timeout=60)
        return [*addresses, seed]

    with ThreadPoolExecutor(RANKS) as pool:
        results = list(pool.map(run, range(RANKS)))

assert all(result == results[0] for result in results)
print("every rank knows:", b", ".join(results[0]).decode())
