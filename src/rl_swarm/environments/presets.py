"""Names lists of reasoning-gym tasks.

`tiny` holds short questions that the bundled model can read and answer; `sapo` is the nine tasks of the SAPO paper, for
real language models. Any other reasoning-gym task can be named in the settings.
"""

from rl_swarm.protocol.tasks import PRESET_NAMES, Task

TINY = (
    Task("basic_arithmetic", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    Task("chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    Task("count_primes", config={"min_n": 1, "max_n": 100}),
    Task(
        "decimal_arithmetic",
        config={"min_num_decimal_places": 1, "max_num_decimal_places": 1, "min_terms": 2, "max_terms": 2},
    ),
    Task(
        "fraction_simplification",
        config={"min_value": 1, "max_value": 30, "min_factor": 2, "max_factor": 9, "styles": ["plain"]},
    ),
    Task("gcd", config={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 99}),
    Task("leg_counting", config={"min_animals": 1, "max_animals": 2, "max_instances": 9}),
    Task("letter_counting", config={"min_words": 2, "max_words": 3}),
    Task("simple_equations", config={"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20}),
    Task("spell_backward", config={"min_word_len": 3, "max_word_len": 5}),
)

SAPO = tuple(
    Task(name)
    for name in (
        "arc_1d",
        "basic_arithmetic",
        "base_conversion",
        "bf",
        "binary_matrix",
        "calendar_arithmetic",
        "decimal_arithmetic",
        "fraction_simplification",
        "propositional_logic",
    )
)

PRESETS: dict[str, tuple[Task, ...]] = dict(zip(PRESET_NAMES, (TINY, SAPO), strict=True))
