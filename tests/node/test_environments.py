"""Environments in this process: gold answers only, no foreign text is scored here but through the guards under test."""

import pytest
from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from node.environments.answers import COMPARED, FORMULAS, MAX_FORMULA_CHARACTERS, is_safe_formula
from node.environments.known import (
    REASONING_GYM_DATASETS,
    EnvironmentUnknown,
    SettingsRefused,
    available,
    build,
    reasoning_gym_version,
)
from node.environments.reasoning_gym import GRADED, ReasoningGym
from protocol.manifest import REASONING_GYM_VERSION, embedded_manifest

EMBEDDED = {spec.name: spec for spec in embedded_manifest("t", 0).environments}
CONSTRUCTOR_SEEDED = {"acre", "gsm_symbolic", "list_functions", "survo"}


def embedded(name: str) -> ReasoningGym:
    return ReasoningGym(name, REASONING_GYM_VERSION, EMBEDDED[name].settings)


def gold(environment: ReasoningGym, seed: int, index: int) -> str:
    found = environment.gold(seed, index)
    assert found is not None
    return found


def test_every_dataset_of_the_library_is_known_by_the_manifests_version() -> None:
    assert set(REASONING_GYM_DATASETS) == set(DATASETS) - {"composite"}
    assert reasoning_gym_version() == REASONING_GYM_VERSION
    assert {(name, REASONING_GYM_VERSION) for name in REASONING_GYM_DATASETS} <= set(available())


def test_unknown_environments_are_named_with_what_there_is() -> None:
    with pytest.raises(EnvironmentUnknown, match=r"'chain_sum' version '2' is not installed; this node has version rg"):
        build("chain_sum", "2", {})
    with pytest.raises(EnvironmentUnknown, match="`shoal env list`"):
        build("nothing", "1", {})


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_environments_are_sound(name: str) -> None:
    environment = build(name, REASONING_GYM_VERSION, EMBEDDED[name].settings)
    assert environment.self_check() == []
    assert (environment.name, environment.version) == (name, REASONING_GYM_VERSION)
    task = environment.task(2**63 - 1, 2**63 - 1)
    assert [message.role for message in task.messages] == ["system", *["user", "assistant"] * 3, "user"]
    assert sum(len(message.content) for message in task.messages) < 1600


@pytest.mark.parametrize("name", EMBEDDED)
def test_gold_scores_one_and_nothing_else_does(name: str) -> None:
    environment = embedded(name)
    for index in range(64):
        right = gold(environment, 5, index)
        assert environment.score(5, index, f" {right}\n").reward == 1
        for wrong in (f"The answer is {right}", f"{right}!", f"{right} {right}", right[:-1], "", " ", "7" + right):
            reward = environment.score(5, index, wrong).reward
            assert reward < 1 if name in GRADED else reward == 0, (right, wrong)


@pytest.mark.parametrize(
    ("name", "answer", "parsed"),
    [
        ("chain_sum", "-17", True),
        ("chain_sum", "four", False),
        ("chain_sum", "1 + 2", False),
        ("letter_counting", "99", True),
        ("letter_counting", "It appears 99 times", False),
        ("spell_backward", "000", True),
        ("spell_backward", "z z z", False),
        ("word_sorting", "b, a, c", True),
        ("word_sorting", "b a c", False),
        ("word_sorting", "", False),
    ],
)
def test_an_unreadable_answer_is_told_from_a_wrong_one(name: str, answer: str, parsed: bool) -> None:
    score = embedded(name).score(1, 1, answer)
    assert (score.reward, score.parsed) == (0, parsed)


def test_part_credit_is_the_reward_only_where_it_says_what_is_right() -> None:
    word = gold(environment := embedded("spell_backward"), 1, 1)
    half = word[:-1] + ("x" if word[-1] != "x" else "y")
    score = environment.score(1, 1, half)
    assert score.reward == pytest.approx(1 - 1 / len(word))
    assert environment.score(1, 1, f"It is {half}").reward == 0
    first, second, third = gold(environment := embedded("word_sorting"), 1, 1).split(", ")
    assert environment.score(1, 1, f"{first}, {third}, {second}").reward == pytest.approx(1 / 3)
    strict = embedded("letter_counting").score(1, 1, f"It is {gold(embedded('letter_counting'), 1, 1)}")
    assert (strict.reward, strict.parsed) == (0, False)
    assert strict.parts["raw"] > 0


def test_no_task_repeats_a_worked_example() -> None:
    environment = embedded("chain_sum")
    *shown, _ = [message.content for message in environment.task(0, 0).messages if message.role == "user"]
    asked = {environment.task(seed, index).messages[-1].content for seed in range(20) for index in range(100)}
    assert len(shown) == 3
    assert not asked & set(shown)
    assert len(asked) > 190  # 200 sums of two one-digit numbers, all but the examples


def test_examples_and_budget_come_from_the_settings() -> None:
    bare = ReasoningGym("chain_sum", "v", {"examples": 0, "max_tokens": 7})
    assert [message.role for message in bare.task(0, 0).messages] == ["system", "user"]
    assert bare.task(0, 0).max_tokens == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"examples": 17}, "examples must be 0 to 16, got 17"),
        ({"examples": True}, "examples must be 0 to 16, got True"),
        ({"max_tokens": 0}, "max_tokens must be 1 to 131072, got 0"),
        ({"seed": 1}, "seed and size come from the task"),
        ({"terms": 2}, "chain_sum refuses settings .*unexpected keyword"),
        ({"min_terms": 3, "max_terms": 2}, "chain_sum refuses settings .*max_terms must be >= min_terms"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsRefused, match=message):
        ReasoningGym("chain_sum", "v", settings)


def test_self_check_finds_a_budget_that_cannot_hold_the_answer() -> None:
    (first, *_) = ReasoningGym("binary_matrix", "v", {"max_tokens": 1, "min_n": 9}).self_check()
    assert "gold answer of" in first
    assert "max_tokens 1" in first


@pytest.mark.parametrize("name", [*COMPARED, *FORMULAS])
def test_guarded_environments_accept_gold(name: str) -> None:
    environment = ReasoningGym(name, "v", {"max_tokens": 512})
    problems = environment.self_check()
    # reasoning_gym gives up on one integral in four and then calls the unsolved integral the answer
    assert [problem for problem in problems if "Integral(" not in problem] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("(3 + 4.5) * -2 / 7", ""),
        ("x**2 - 3*x*y + 12", "xy"),
        ("x**(1/2) + x**-3 + 2**x + C", "xC"),
        ("sin(2*x)*exp(-x) + sqrt(x)", ["x", "sin", "exp", "sqrt"]),
    ],
)
def test_formulas_pass(text: str, names: str) -> None:
    assert is_safe_formula(text, names)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x +",
        "9**9**9",
        "(9**9)**9",
        "9**(9*9*9)",
        "2**65",
        "99999999999999",
        "1e300",
        "1 if x else 2",
        "x.__class__",
        "x[0]",
        "[x]",
        "'a'*3",
        "5!",
        "x and x",
        "x == x",
        "lambda: x",
        "(x := 1)",
        "f'{x}'",
        "True",
        "1j",
        "x // 2",
        "x % 2",
        "x @ x",
        "x << 9",
        "y",
        "E(x)",
        "eval(x)",
        "__import__('os').system('true')",
        "sin(x, x)",
        "sin(x, evaluate=0)",
        "sin(*x)",
        "ｘ",
        "(" * 300 + "x" + ")" * 300,
        "-" * MAX_FORMULA_CHARACTERS + "x",
    ],
)
def test_everything_else_never_reaches_the_parser(text: str) -> None:
    assert not is_safe_formula(text, ["x", "E", "sin"])


def test_powers_are_for_polynomials_and_integrals_only() -> None:
    assert not is_safe_formula("2**3", FORMULAS["countdown"]({}))
    assert is_safe_formula("a**3", FORMULAS["polynomial_multiplication"]({}))


def same_as_fresh(name: str) -> bool:
    """Whether an instance that is given another seed makes the items of one that was constructed with it."""
    reused = create_dataset(name, seed=0, size=1)
    for seed in (11, 4_000_000_001, 77):
        reused.seed = seed
        if repr(reused[0]) != repr(create_dataset(name, seed=seed, size=1)[0]):
            return False
    return True


@pytest.mark.parametrize("name", [*EMBEDDED, *sorted(CONSTRUCTOR_SEEDED)])
def test_one_instance_serves_every_seed_where_we_say_so(name: str) -> None:
    assert same_as_fresh(name) == (name not in CONSTRUCTOR_SEEDED)


@pytest.mark.slow
def test_every_dataset_is_sound() -> None:
    assert {name for name in REASONING_GYM_DATASETS if not same_as_fresh(name)} == CONSTRUCTOR_SEEDED
    problems = [
        problem
        for name in REASONING_GYM_DATASETS
        for problem in ReasoningGym(name, "v", {"max_tokens": 2048}).self_check()
        if "Integral(" not in problem
    ]
    assert problems == []
