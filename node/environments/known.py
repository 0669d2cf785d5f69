"""Which environments this node has: reasoning_gym's datasets, and whatever entry points of `shoal.environments` add.

Looking up what there is imports neither reasoning_gym (2 s) nor an entry point's module; building an environment does.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from node.interfaces import Environment

Settings = Mapping[str, int | float | str | bool]

ENTRY_POINT_GROUP = "shoal.environments"
"""Entry points named `<environment>@<version>`, each a callable that takes the settings and gives an Environment."""

ADAPTER_REVISION = 1
"""Raised whenever the same (settings, seed, index) would give another prompt, answer or score than before."""

REASONING_GYM_DATASETS: tuple[str, ...] = (
    "ab",
    "acre",
    "advanced_geometry",
    "aiw",
    "arc_1d",
    "arc_agi",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_alternation",
    "binary_matrix",
    "bitwise_arithmetic",
    "boxnet",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "circuit_logic",
    "codeio",
    "coin_flip",
    "color_cube_rotation",
    "complex_arithmetic",
    "count_bits",
    "count_primes",
    "countdown",
    "course_schedule",
    "cryptarithm",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "emoji_mystery",
    "family_relationships",
    "figlet_font",
    "fraction_simplification",
    "futoshiki",
    "game_of_life",
    "game_of_life_halting",
    "gcd",
    "graph_color",
    "group_anagrams",
    "gsm_symbolic",
    "intermediate_integration",
    "isomorphic_strings",
    "jugs",
    "kakurasu",
    "knight_swap",
    "knights_knaves",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "letter_jumble",
    "list_functions",
    "mahjong_puzzle",
    "manipulate_matrix",
    "maze",
    "mini_sudoku",
    "modulo_grid",
    "n_queens",
    "needle_haystack",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "palindrome_generation",
    "palindrome_partitioning",
    "path_star",
    "polynomial_equations",
    "polynomial_multiplication",
    "pool_matrix",
    "power_function",
    "prime_factorization",
    "products",
    "propositional_logic",
    "puzzle24",
    "quantum_lock",
    "ransom_note",
    "rearc",
    "rectangle_count",
    "rotate_matrix",
    "rotten_oranges",
    "rubiks_cube",
    "rush_hour",
    "self_reference",
    "sentence_reordering",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "sokoban",
    "spell_backward",
    "spiral_matrix",
    "string_insertion",
    "string_manipulation",
    "string_splitting",
    "string_synthesis",
    "sudoku",
    "survo",
    "syllogism",
    "time_intervals",
    "tower_of_hanoi",
    "tsumego",
    "word_ladder",
    "word_sequence_reversal",
    "word_sorting",
    "zebra_puzzles",
)
"""All of reasoning_gym 0.1.25 but `composite`, which takes other datasets as its settings."""


class EnvironmentUnknown(Exception):
    """This node does not have an environment of that name and version."""


class SettingsRefused(Exception):
    """The manifest gives an environment settings that it does not take."""


def available() -> dict[tuple[str, str], Callable[[Settings], Environment]]:
    """Everything this node can regenerate and score: (name, version) -> what builds it from its settings."""
    found: dict[tuple[str, str], Callable[[Settings], Environment]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        name, _, entry_version = entry.name.partition("@")
        found[name, entry_version] = _loads(entry)
    ours = reasoning_gym_version()
    if ours is not None:
        found.update({(name, ours): _adapts(name, ours) for name in REASONING_GYM_DATASETS})
    return found


def reasoning_gym_version() -> str | None:
    """Version of all reasoning_gym environments: the library's and our adapter's. None: not installed."""
    try:
        return f"rg{version('reasoning-gym')}-{ADAPTER_REVISION}"
    except PackageNotFoundError:
        return None


def build(name: str, wanted: str, settings: Settings) -> Environment:
    """The environment `name` in version `wanted`. Raises EnvironmentUnknown, and what the environment raises."""
    have = available()
    if (name, wanted) not in have:
        versions = sorted(v for n, v in have if n == name)
        hint = f"this node has version {', '.join(versions)}" if versions else "`shoal env list` shows what it has"
        raise EnvironmentUnknown(f"environment {name!r} version {wanted!r} is not installed; {hint}")
    return have[name, wanted](settings)


def _loads(entry: EntryPoint) -> Callable[[Settings], Environment]:
    def load(settings: Settings) -> Environment:
        environment: Environment = entry.load()(settings)
        return environment

    return load


def _adapts(name: str, ours: str) -> Callable[[Settings], Environment]:
    def adapt(settings: Settings) -> Environment:
        from node.environments.reasoning_gym import ReasoningGym

        return ReasoningGym(name, ours, settings)

    return adapt
