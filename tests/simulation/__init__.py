"""Many members against the machines, both ways of hosting, one seeded scheduler, no clock but a number."""
