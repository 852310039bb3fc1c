"""Lets nodes meet without a server, over hivemind's DHT and libp2p's streams."""
