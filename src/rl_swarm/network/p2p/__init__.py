"""Connects nodes without a server, over hivemind's DHT and libp2p's streams."""
