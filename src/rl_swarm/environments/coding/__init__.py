"""Teaches a swarm to program: solvers, proposers and evaluators."""
