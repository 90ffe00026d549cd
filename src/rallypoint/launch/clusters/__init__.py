"""What the environment of an agent says about its job: pure functions, from variables to a decision and its reason."""
