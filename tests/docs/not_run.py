"""The fenced blocks that tests/docs does not run: those that another test runs, and those that nothing runs, with what
they would need. The `rallypoint` commands in them are checked all the same.
"""

from __future__ import annotations

from tests.docs.blocks import Block

__all__ = ["ELSEWHERE", "NOT_RUN", "reason_for"]

HOSTS, INDEX, PROMETHEUS = "hosts of the reader", "a package index", "a Prometheus server"
SCHEDULER, SERVER, IDLE = "a scheduler", "it runs until it is stopped", "an idle machine"
JAX = "JAX; tests/launch/test_jax_elastic.py runs the example with a stand-in"
GROUP = "a process group of the reader; tests/interop run stores and the adapter under one"
HOME = "it writes to the home directory; tests press Tab in a shell of their own"

NOT_RUN = {
    ("README.md", "python3 -m venv"): INDEX,
    ("docs/install.md", "python3 -m venv"): INDEX,
    ("docs/tutorial/one-node.md", "python3 -m venv"): INDEX,
    ("docs/tutorial/security.md", "pip install"): INDEX,
    ("docs/tutorial/etcd.md", "apt-get install"): INDEX,
    ("docs/how-to/jax.md", "pip install jax"): JAX,
    ("docs/how-to/slurm.md", "#!/bin/bash"): SCHEDULER,
    ("docs/how-to/slurm.md", "rallypoint status"): SCHEDULER,
    ("docs/how-to/slurm.md", "srun "): SCHEDULER,
    ("docs/clusters.md", "#!/bin/bash"): SCHEDULER,
    ("docs/clusters.md", "srun "): SCHEDULER,
    ("docs/clusters.md", "mpirun "): SCHEDULER,
    ("docs/clusters.md", "rallypoint run --hosts"): HOSTS,
    ("docs/cli.md", "export RALLYPOINT_URL="): SCHEDULER,
    ("docs/cli.md", "mkdir -p ~/.local"): HOME,
    ("docs/durability.md", "rallypoint serve"): SERVER,
    ("docs/stores.md", "rallypoint serve"): SERVER,
    ("docs/relay.md", "rallypoint relay "): HOSTS,
    ("docs/run.md", "rallypoint run --nproc-per-node 4 --max-restarts 3 --grace 5"): JAX,
    ("docs/run.md", "rallypoint run --nnodes 2:4"): HOSTS,
    ("docs/run.md", "--health-check"): HOSTS,
    ("docs/security.md", "rallypoint token new"): HOSTS,
    ("docs/security.md", "rallypoint serve"): HOSTS,
    ("docs/security.md", "rallypoint tls new"): HOSTS,
    ("docs/etcd.md", "rallypoint serve"): HOSTS,
    ("docs/etcd.md", "rallypoint relay"): HOSTS,
    ("docs/etcd.md", "rallypoint run"): HOSTS,
    ("docs/etcd.md", "etcd --auto-compaction"): HOSTS,
    ("docs/torch.md", "rallypoint serve"): HOSTS,
    ("docs/torch.md", "export TORCHELASTIC_USE_AGENT_STORE"): HOSTS,
    ("docs/torch.md", "torchrun "): HOSTS,
    ("docs/torch.md", "store = dist.TCPStore"): GROUP,
    ("docs/torch.md", "import rallypoint"): GROUP,
    ("docs/status.md", "scrape_configs:"): PROMETHEUS,
    ("docs/performance.md", "make bench"): IDLE,
}
"""Blocks that no test runs, by page and words of their first line, and what they would need."""

ELSEWHERE = {
    ("docs/cli.md", "console"): "tests/test_cli_store.py",
    ("docs/etcd.md", "console"): "tests/etcd/test_page.py",
    ("docs/etcd.md", "python"): "tests/etcd/test_page.py",
    ("docs/etcd.md", "yaml"): "tests/etcd/test_page.py",
    ("docs/clusters.md", "yaml"): "tests/launch/test_clusters.py",
    ("docs/kubernetes.md", "sh"): "tests/packaging/test_kubernetes.py",
    ("docs/kubernetes.md", "yaml"): "tests/packaging/test_kubernetes.py",
}
"""Blocks that another test runs, by page and language, and its file."""


def reason_for(block: Block) -> tuple[str, str] | None:
    """Return the entry of the tables above about a block; None if it is to be run."""
    for page, words in NOT_RUN:
        if page == block.page and words in block.text.partition("\n")[0]:
            return page, words
    elsewhere = block.page, block.language
    return elsewhere if elsewhere in ELSEWHERE else None
