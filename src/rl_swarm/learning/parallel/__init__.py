"""Shares devices among nodes, and spreads a node over devices."""
