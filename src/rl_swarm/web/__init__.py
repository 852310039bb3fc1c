"""Serves a swarm as a page and as an API over HTTP.

`api.py` has the endpoints, `static/` is the page, and `monitor/` reads the swarm. This package needs the extra `web`.
"""
