"""`rallypoint run`: an agent on each node joins the rounds of a job and runs its workers."""
