"""Lets nodes meet: exchanges move rollouts, coordinators say which round it is."""
