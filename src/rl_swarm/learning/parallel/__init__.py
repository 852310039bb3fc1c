"""Runs several nodes on one device, and one node on several devices."""
