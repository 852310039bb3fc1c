"""Defines every setting, and finds out what a user has set."""
