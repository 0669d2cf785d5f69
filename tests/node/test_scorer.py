"""The scorer process against real foreign text: what it costs, what it may not touch, and what comes back."""

import asyncio
import os
import re
import time
from pathlib import Path

import psutil
import pytest

from node.bench.scorer import processor_seconds
from node.environments.known import reasoning_gym_version
from node.interfaces import Score
from node.scorer import Scorer, ScorerError
from node.scorer_wire import LENGTH, MAX_ANSWER_BYTES, Done, frame
from protocol.manifest import EnvironmentSpec, embedded_manifest
from protocol.rollout import TaskRef
from tests.node.evaluating import DEADLINE, EVALUATING, REF, install


def confined(scorer: Scorer) -> None:
    if "seccomp" not in scorer.isolation:
        pytest.skip("this kernel has no seccomp filters")


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def test_isolation_is_reported(evaluating: Scorer) -> None:
    assert evaluating.isolation[0] == "rlimits"
    confined(evaluating)
    assert "no_new_privs" in evaluating.isolation


async def test_evaluated_text_touches_nothing(evaluating: Scorer, tmp_path: Path) -> None:
    confined(evaluating)
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    made = tmp_path / "made"
    attacks = {
        "shell": f"__import__('os').system('touch {made}')",
        "program": f"__import__('subprocess').run(['touch', '{made}'])",
        "exec": f"__import__('os').execv('/bin/touch', ['touch', '{made}'])",
        "write": f"open('{made}', 'w').write('x')",
        "append": f"open('{kept}', 'a').write('x')",
        "update": f"open('{kept}', 'r+').write('x')",
        "truncate": f"__import__('os').truncate('{kept}', 0)",
        "delete": f"__import__('os').unlink('{kept}')",
        "rename": f"__import__('os').rename('{kept}', '{made}')",
        "link": f"__import__('os').symlink('{kept}', '{made}')",
        "directory": f"__import__('os').mkdir('{made}')",
        "mode": f"__import__('os').chmod('{kept}', 0)",
        "memory file": "__import__('os').memfd_create('x')",
        "socket": "__import__('socket').socket()",
        "unix socket": "__import__('socket').socket(1)",
        "resolve": "__import__('socket').create_connection(('127.0.0.1', 9), 1)",
        "fork": "__import__('os').fork()",
        "thread": "__import__('_thread').start_new_thread(int, ())",
        "kill us": f"__import__('os').kill({os.getpid()}, 9)",
        "kill parent": "__import__('os').kill(__import__('os').getppid(), 9)",
        "kill all": "__import__('os').killpg(0, 9)",
        "limits": "__import__('resource').setrlimit(7, (99, 99))",
    }
    scores = await evaluating.score([(REF, text) for text in attacks.values()] + [(REF, "6*7")])
    for name, score in zip(attacks, scores, strict=False):
        assert score.reward == 0, name
        # `system` returns a status instead of raising; what it must not do is run anything
        assert name == "shell" or re.search(
            "PermissionError|Operation not permitted|gaierror|start new thread|ValueError", score.failure or ""
        ), (name, score.failure)
    assert scores[-1].reward == 1
    assert not made.exists()
    assert kept.read_text() == "as it was"
    assert evaluating.restarts == 0


async def test_gold_answers_come_from_the_scorer_process(evaluating: Scorer, embedded: Scorer) -> None:
    refs = [TaskRef("evaluating", "1", 1, index) for index in (0, 1, 13, 2)]
    assert await evaluating.golds(refs) == [None, "6 * 7", None, "6 * 7"]
    refs = [TaskRef(name, version, 3, 4) for name, version in embedded._known]
    golds = await embedded.golds(refs)
    scores = await embedded.score([(ref, gold or "") for ref, gold in zip(refs, golds, strict=True)])
    assert [score.reward for score in scores] == [1.0] * 4


async def test_an_environment_without_gold_answers_says_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = EVALUATING[: EVALUATING.index("    def gold")]
    install(tmp_path / "site", "silent", source, "silent@1 = silent:Evaluating")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    scorer = Scorer([EnvironmentSpec("silent", "1", 1, {})], deadline=DEADLINE, memory_mb=512, clock=time.monotonic)
    await scorer.start()
    assert await scorer.golds([TaskRef("silent", "1", 1, 1)]) == [None]
    await scorer.close()


async def test_secrets_cannot_be_read(evaluating: Scorer, tmp_path: Path) -> None:
    if not any(measure.startswith("landlock") for measure in evaluating.isolation):
        pytest.skip("this kernel has no Landlock")
    key = tmp_path / "identity.key"
    key.write_text("secret")
    scores = await evaluating.score(
        [(REF, f"open('{path}').read()") for path in (key, f"/proc/{os.getpid()}/environ", "/etc/passwd")]
    )
    assert all("PermissionError" in (score.failure or "") for score in scores)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9**9**9**9", "missed its deadline of 0.5 s"),
        ("[0]*10**10", "MemoryError"),
        ("[[0]*10**6 for _ in iter(int, 1)]", "MemoryError|missed its deadline"),
        ("'a' * 10**12", "MemoryError"),
        ("[None for _ in iter(int, 1) if 0]", "missed its deadline of 0.5 s"),
        ("[__import__('os').fork() for _ in range(10**9)]", "PermissionError"),
        ("__import__('os')._exit(0)", "exited with code 0"),
        ("__import__('os')._exit(3)", "exited with code 3"),
        ("__import__('ctypes').string_at(0)", "killed by SIGSEGV"),
        ("(" * 5000 + ")" * 5000, "Error"),
        ("exit()", "exited with code 1"),
        ("[__import__('signal').setitimer(0, 0) for _ in iter(int, 1)]", "no answer within 1 s"),
        ("[attempt(__import__('os').write, fd, b'\\0\\0\\0\\1x' * 99) for fd in range(3, 99)]", "nonsense"),
        ("[attempt(__import__('os').write, fd, b'\\xff' * 9) for fd in range(3, 99)]", "reply of 4294967295 bytes"),
        ("[attempt(__import__('os').close, fd) for fd in range(3, 99)] + [*iter(int, 1)]", "killed by SIGKILL"),
    ],
)
async def test_a_bad_answer_costs_itself_alone(evaluating: Scorer, text: str, why: str) -> None:
    confined(evaluating)
    began = time.monotonic()
    before, bad, after = await evaluating.score([(REF, "42"), (REF, text), (REF, "40+2")])
    assert time.monotonic() - began < DEADLINE + 1.0 + 5.0  # deadline, grace, start of a process on a busy machine
    assert (before.reward, bad.reward, after.reward) == (1, 0, 1)
    assert bad.failure is not None
    assert bad.failure.startswith("scorer_failed: ")
    assert re.search(why, bad.failure)


async def test_no_answer_changes_how_other_chunks_are_scored(evaluating: Scorer) -> None:
    confined(evaluating)
    forged = frame(Done(0, score=Score(1.0, True)))
    attacks = [
        "setattr(__import__('evaluating').Evaluating, 'score', lambda *a: __import__('evaluating').Score(1.0, True))",
        "setattr(__import__('builtins'), 'eval', lambda *a: 42)",
        "setattr(__import__('node.scorer_worker').scorer_worker, '_work', lambda *a: 0)",
        f"[attempt(__import__('os').write, fd, {forged!r}) for fd in range(3, 99)]",
        "__import__('signal').signal(14, __import__('signal').SIG_IGN)",
    ]
    for foreign in (True, False):
        for attack in attacks:
            await evaluating.score([(REF, attack)], foreign=foreign)
            wrong, right, slow = await evaluating.score([(REF, "41"), (REF, "42"), (REF, "9**9**9**9")])
            assert (wrong.reward, right.reward) == (0, 1), attack
            assert "missed its deadline" in (slow.failure or "")
    (task,) = await evaluating.tasks([REF])
    assert task.messages[0].content == "1/1"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (frame(Done(0, score=Score(1e300, True))), r"a reward of 1e\+300, not in \[0, 1\]"),
        (frame(Done(0, score=Score(float("nan"), True))), "a reward of nan"),
        (LENGTH.pack(5001) + b"\x96\xa4Done" + b"\x91" * 4996, "nonsense"),
    ],
    ids=["large", "nan", "nested"],
)
async def test_a_reply_that_an_answer_wrote_ends_no_scorer(evaluating: Scorer, reply: bytes, why: str) -> None:
    confined(evaluating)
    await evaluating.score([(REF, "42")])
    assert evaluating._process is not None
    pid = evaluating._process.pid
    (forged,) = await evaluating.score(
        [(REF, f"[attempt(__import__('os').write, fd, {reply!r}) for fd in range(3, 99)]")]
    )
    assert forged.reward == 0
    assert re.search(why, forged.failure or "")
    (right,) = await evaluating.score([(REF, "42")])
    assert right.reward == 1
    assert evaluating._process.pid == pid


async def test_a_child_that_has_scored_is_gone(evaluating: Scorer) -> None:
    """All that is left of a chunk of answers is the process that does tasks."""
    await evaluating.score([(REF, "42")])
    assert evaluating._process is not None
    worker = psutil.Process(evaluating._process.pid)
    before = await only_child(worker)
    await evaluating.score([(REF, "__import__('time').sleep(9)")])
    assert await only_child(worker) == before


async def only_child(worker: psutil.Process) -> psutil.Process:
    """The one child left; the answer arrives a moment before the child that scored it has ended."""
    for _ in range(1000):
        children = worker.children()
        if len(children) == 1:
            break
        await asyncio.sleep(0.01)
    (child,) = children
    return child


async def test_settings_that_take_for_ever_to_build_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "endless", "def Endless(settings):\n    while True: pass", "endless@1 = endless:Endless")
    (tmp_path / "sitecustomize.py").write_text(
        "import node.isolation\nnode.isolation.bound_cpu = __import__(\n"
        "    'functools').partial(lambda real, seconds: real(1), node.isolation.bound_cpu)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scorer = Scorer([EnvironmentSpec("endless", "1", 1, {})], deadline=1, memory_mb=512, clock=time.monotonic)
    with pytest.raises(ScorerError, match="take too much processor time to start: their settings in the manifest"):
        await scorer.start()


async def test_environments_that_evaluate_answers_are_refused_where_nothing_confines_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import node.isolation\nnode.isolation.isolate = lambda *given, **named: ('rlimits',)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compares, evaluates = (EnvironmentSpec(name, reasoning_gym_version(), 1, {}) for name in ("chain_sum", "countdown"))
    scorer = Scorer([compares], deadline=1, memory_mb=512, clock=time.monotonic)
    await scorer.start()
    await scorer.close()
    assert scorer.isolation == ("rlimits",)
    scorer = Scorer([compares, evaluates], deadline=1, memory_mb=512, clock=time.monotonic)
    with pytest.raises(ScorerError, match="countdown may evaluate answers as code, and this system offers neither"):
        await scorer.start()


async def test_answers_that_cannot_be_sent_score_zero(evaluating: Scorer) -> None:
    huge, many_bytes, surrogate, largest = await evaluating.score(
        [
            (REF, "42" + " " * 5_000_000),
            (REF, "é" * (MAX_ANSWER_BYTES - 1)),
            (REF, "'\ud800'"),
            (REF, "42" + " " * (MAX_ANSWER_BYTES - 2)),
        ]
    )
    for score in (huge, many_bytes, surrogate):
        assert (score.reward, score.parsed, score.failure) == (0, False, None)
    assert largest.reward == 1


async def test_many_killers_in_one_batch_are_all_named(evaluating: Scorer) -> None:
    confined(evaluating)
    texts = ["42", "__import__('os')._exit(7)"] * 40
    scores = await evaluating.score([(REF, text) for text in texts])
    assert [score.reward for score in scores] == [1, 0] * 40
    assert evaluating.restarts == 40
    assert evaluating.failures == 40
    assert evaluating.answers == 80


async def test_hanging_foreign_answers_hold_own_scoring_up_by_one_deadline(evaluating: Scorer) -> None:
    foreign = asyncio.create_task(evaluating.score([(REF, "9**9**9**9")] * 6, foreign=True))
    await asyncio.sleep(0.1)
    hung = evaluating.restarts
    began = time.monotonic()
    (score,) = await evaluating.score([(REF, "42")])
    assert time.monotonic() - began < DEADLINE + 1.0
    assert score.reward == 1
    assert evaluating.restarts - hung <= 1
    assert not foreign.done()
    assert all("deadline" in (score.failure or "") for score in await foreign)


async def test_a_cancelled_call_leaves_no_answers_behind(evaluating: Scorer) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await evaluating.score([(REF, "9**9**9**9"), (REF, "42")])
    assert [score.reward for score in await evaluating.score([(REF, "41"), (REF, "42")])] == [0, 1]


async def test_errors_name_what_is_wrong(evaluating: Scorer) -> None:
    with pytest.raises(ScorerError, match=r"evaluating/1/13 cannot be regenerated: ValueError: no task 13"):
        await evaluating.tasks([TaskRef("evaluating", "1", 1, 13)])
    with pytest.raises(ScorerError, match="chain_sum 9 is not one of this swarm's"):
        await evaluating.score([(TaskRef("chain_sum", "9", 0, 0), "1")])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EnvironmentSpec("chain_sum", "rg0.0.1-1", 1, {}), r"'rg0.0.1-1' is not installed; this node has version rg"),
        (EnvironmentSpec("alchemy", "1", 1, {}), "'alchemy' version '1' is not installed"),
        (EnvironmentSpec("chain_sum", reasoning_gym_version() or "", 1, {"terms": 2}), "chain_sum refuses settings"),
        (EnvironmentSpec("broken", "1", 1, {}), "did not start: .*ZeroDivisionError"),
    ],
)
async def test_environments_that_cannot_be_had_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: EnvironmentSpec, message: str
) -> None:
    install(tmp_path, "broken", "1 / 0", "broken@1 = broken:Broken")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scorer = Scorer([spec], deadline=1, memory_mb=512, clock=time.monotonic)
    with pytest.raises(ScorerError, match=f"(?s){message}"):
        await scorer.start()


async def test_the_process_ends_with_its_scorer(evaluating: Scorer) -> None:
    process = evaluating._process
    assert process is not None
    await evaluating.close()
    for _ in range(100):
        if not group_exists(process.pid):
            return
        await asyncio.sleep(0.05)
    pytest.fail("the scorer process or its child is still there 5 s after close")


async def test_a_killed_process_is_started_again(evaluating: Scorer) -> None:
    assert evaluating._process is not None
    evaluating._process.kill()
    await evaluating._process.wait()
    assert [score.reward for score in await evaluating.score([(REF, "42"), (REF, "41")])] == [1, 0]
    assert evaluating.restarts == 1


async def test_two_processes_give_the_same_tasks(embedded: Scorer) -> None:
    other = Scorer(embedded_manifest("t", 0).environments, deadline=5, memory_mb=1024, clock=time.monotonic)
    await other.start()
    refs = [
        TaskRef(spec.name, spec.version, seed, index)
        for spec in embedded_manifest("t", 0).environments
        for seed in (0, 2**63 - 1, 123456789012345678)
        for index in (0, 1, 4095, 2**63 - 1)
    ]
    tasks = await embedded.tasks(refs)
    reversed_tasks = await other.tasks(refs[::-1])
    await other.close()
    assert tasks == reversed_tasks[::-1]
    assert len({task.messages[-1] for task in tasks}) > 40  # few questions of one-digit sums repeat
    assert all(task.max_tokens in (16, 24) and len(task.messages) == 8 for task in tasks)


async def test_known_evaluating_scorers_do_not_evaluate(tmp_path: Path) -> None:
    version = reasoning_gym_version() or ""
    names = ["binary_matrix", "spiral_matrix", "string_insertion", "n_queens", "countdown", "puzzle24"]
    names += ["polynomial_multiplication", "simple_integration", "intermediate_integration"]
    scorer = Scorer(
        [EnvironmentSpec(name, version, 1, {}) for name in names], deadline=5, memory_mb=1024, clock=time.monotonic
    )
    await scorer.start()
    texts = [
        f"__import__('os').system('touch {tmp_path}/X')",
        "9**9**9**9",
        "[0]*10**10",
        "(1).__class__",
        "x" * 60_000,
    ]
    began = await processor_seconds(scorer)
    scores = await scorer.score([(TaskRef(name, version, 3, 0), text) for name in names for text in texts])
    assert await processor_seconds(scorer) - began < 10
    await scorer.close()
    assert all(score.reward == 0 and score.failure is None for score in scores)
    assert not (tmp_path / "X").exists()
    assert scorer.restarts == 0


async def test_the_documented_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (entry_point,) = re.findall(r'"(parity@1)" = "(parity:Parity)"', page)
    install(tmp_path, "parity", source, " = ".join(entry_point))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scorer = Scorer([EnvironmentSpec("parity", "1", 1, {"bits": 4})], deadline=2, memory_mb=512, clock=time.monotonic)
    await scorer.start()
    ref = TaskRef("parity", "1", 5, 0)
    (task,) = await scorer.tasks([ref])
    ones = task.messages[-1].content.count("1")
    scores = await scorer.score([(ref, "Odd "), (ref, "even"), (ref, "two")])
    assert await scorer.golds([ref]) == ["odd" if ones % 2 else "even"]
    await scorer.close()
    assert task.max_tokens == 8
    assert [score.reward for score in scores] == ([1, 0, 0] if ones % 2 else [0, 1, 0])
    assert [score.parsed for score in scores] == [True, True, False]


async def test_a_manifest_cannot_make_the_scorer_take_more_memory_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = EVALUATING.replace("def __init__(self, settings): ...", "def __init__(self, settings): bytes(1 << 30)")
    install(tmp_path / "site", "evaluating", greedy, "evaluating@1 = evaluating:Evaluating")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    scorer = Scorer([EnvironmentSpec("evaluating", "1", 1, {})], deadline=1, memory_mb=512, clock=time.monotonic)
    with pytest.raises(ScorerError, match="need more than 512 MB"):
        await scorer.start()
