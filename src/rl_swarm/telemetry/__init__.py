"""Writes down what a node measures, and passes it on."""
