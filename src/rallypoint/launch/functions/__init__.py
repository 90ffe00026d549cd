"""`rallypoint.launch`: a function in several worker processes, from the call to the results or the first failure."""
