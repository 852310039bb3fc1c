"""Defines what peers exchange, and how it is signed and checked; pure, but for the key in its file."""
