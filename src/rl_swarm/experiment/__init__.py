"""The SAPO experiment: what sharing rollouts is worth, measured at one's own desk. Importing this loads no torch."""
