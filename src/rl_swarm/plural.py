"""Writes numbers with their nouns, as people do."""


def counted(number: int, noun: str) -> str:
    """Writes "1 node" and "1,200 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
