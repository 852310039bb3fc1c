"""Writes down what a node measures, and exports it."""
