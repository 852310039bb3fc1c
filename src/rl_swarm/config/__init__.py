"""Puts the sections of settings together, and finds out what a user has set."""
