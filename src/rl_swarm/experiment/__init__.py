"""Measures what sharing rollouts is worth: the SAPO experiment. Importing this loads no torch."""
