"""Defines the coding environment: solvers, proposers and evaluators."""
