"""What an agent sees of its workers while they run: progress, process state, stacks; and what it reports of them."""
