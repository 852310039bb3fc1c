"""Reads and writes files in places where others may write too."""
