"""Serves the dashboard: a swarm as a page and as an API.

`following.py` keeps up with a swarm's files, `records.py` names what is told about it, `texts.py` reads rollouts. None
of
them knows HTTP. `api.py` and its neighbours put them on the network, and `static/` is the page. Only the latter need
the
extra `web`.
"""
