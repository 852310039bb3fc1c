"""Defines steps on a dictionary from words to integers."""

from rl_swarm.environments.coding.grammar import table

DICTIONARIES = (
    *table(
        "dict",
        "int",
        {
            "the sum of the values": "sum($v.values())",
            "the number of entries": "len($v)",
            "the largest value, or 0 if there is none": "max($v.values(), default=0)",
            "the smallest value, or 0 if there is none": "min($v.values(), default=0)",
            "how many values are greater than $k": "sum(x > $k for x in $v.values())",
            "how many values are even": "sum(x % 2 == 0 for x in $v.values())",
            "how many keys contain $c": "sum('$c' in w for w in $v)",
            "the sum of the values of keys with $c": "sum(x for w, x in $v.items() if '$c' in w)",
            "the number of letters of all keys": "sum(len(w) for w in $v)",
            "the value of '$c', or $k if it is missing": "$v.get('$c', $k)",
            "the sum of key lengths times values": "sum(len(w) * x for w, x in $v.items())",
            "how many different values there are": "len(set($v.values()))",
        },
    ),
    *table(
        "dict",
        "dict",
        {
            "add $k to each value": "{w: x + $k for w, x in $v.items()}",
            "subtract $k from each value": "{w: x - $k for w, x in $v.items()}",
            "multiply each value by $k": "{w: x * $k for w, x in $v.items()}",
            "square each value": "{w: x ** 2 for w, x in $v.items()}",
            "replace each value by its remainder modulo $k": "{w: x % $k for w, x in $v.items()}",
            "cap each value at $k": "{w: min(x, $k) for w, x in $v.items()}",
            "keep the entries with values greater than $k": "{w: x for w, x in $v.items() if x > $k}",
            "keep the entries with values less than $k": "{w: x for w, x in $v.items() if x < $k}",
            "keep the entries with even values": "{w: x for w, x in $v.items() if x % 2 == 0}",
            "keep the entries whose keys contain $c": "{w: x for w, x in $v.items() if '$c' in w}",
            "drop the entries whose keys start with $c": "{w: x for w, x in $v.items() if w[:1] != '$c'}",
            "keep the entries with keys longer than $k": "{w: x for w, x in $v.items() if len(w) > $k}",
            "turn the keys into capitals": "{w.upper(): x for w, x in $v.items()}",
            "reverse the keys": "{w[::-1]: x for w, x in $v.items()}",
            "append $c to each key": "{w + '$c': x for w, x in $v.items()}",
            "add the key's length to each value": "{w: x + len(w) for w, x in $v.items()}",
            "set '$c' to $k": "{**$v, '$c': $k}",
        },
    ),
    *table(
        "dict",
        "words",
        {
            "the keys, sorted": "sorted($v)",
            "the keys sorted by value": "sorted($v, key=lambda w: $v[w])",
            "the keys with values greater than $k": "[w for w, x in $v.items() if x > $k]",
            "the keys with even values": "[w for w, x in $v.items() if x % 2 == 0]",
            "the keys in the order they have": "list($v)",
        },
    ),
    *table(
        "dict",
        "list",
        {
            "the list of its values": "list($v.values())",
            "the values, sorted": "sorted($v.values())",
            "the values in descending order": "sorted($v.values(), reverse=True)",
            "the lengths of the keys": "[len(w) for w in $v]",
            "the values of the keys in alphabetical order": "[$v[w] for w in sorted($v)]",
        },
    ),
    *table(
        "dict",
        "str",
        {
            "the key with the largest value, or ''": "max($v, key=lambda w: $v[w], default='')",
            "the key with the smallest value, or ''": "min($v, key=lambda w: $v[w], default='')",
            "the longest key, or ''": "max($v, key=len, default='')",
            "join the keys with dashes": "'-'.join($v)",
        },
    ),
    *table(
        "dict",
        "bool",
        {
            "whether it has the key '$c'": "'$c' in $v",
            "whether a value is greater than $k": "any(x > $k for x in $v.values())",
            "whether all values are even": "all(x % 2 == 0 for x in $v.values())",
            "whether a value occurs twice": "len(set($v.values())) < len($v)",
            "whether the sum of the values is greater than $j": "sum($v.values()) > $j",
        },
    ),
    *table("dict", "swapped", {"swap keys and values, later ones winning": "{x: w for w, x in $v.items()}"}),
)
