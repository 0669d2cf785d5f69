"""What the API says of a daemon whose parts are replaced here."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from node.daemon import Daemon, Stopped
from node.interfaces import Message, Task
from node.progress import Progress
from node.scorer import ScorerError
from node.view import DaemonView
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn
from swarm.experience import ADMITTED, GroupRecord

TASK = TaskRef("chain_sum", "1", 5, 6)
RECORD = GroupRecord(
    digest=b"\xab" * 32,
    origin="foreign",
    producer="12D3KooWpeer",
    epoch=3,
    task=TASK,
    model="m",
    claimed=(1.0,),
    local=(0.5,),
    verdict=ADMITTED,
    detail="",
    received_at=1.0,
    expires_at=2.0,
)
GROUP = RolloutGroup(
    epoch=3,
    task=TASK,
    model="m",
    tokenizer=b"",
    policy_version=1,
    completions=(Completion((Turn("assistant", "4"),), "stop", 2, 1.0),),
)


class FakeScorer:
    """Regenerates tasks unless `broken`; remembers whether it was asked as for foreign work."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.asked = broken, list[bool]()

    async def tasks(self, refs: Sequence[TaskRef], *, foreign: bool = False) -> list[Task]:
        self.asked.append(foreign)
        if self.broken:
            raise ScorerError("out of breath")
        return [Task((Message("user", f"{ref.seed}+{ref.index}"),), 8) for ref in refs]


def view(scorer: FakeScorer | None) -> DaemonView:
    store = SimpleNamespace(find=lambda group_id: RECORD, group_body=lambda digest: GROUP)
    node: Any = SimpleNamespace(store=store, scorer=scorer)
    return DaemonView(node)


async def test_a_group_is_shown_with_its_prompt_as_foreign_work() -> None:
    scorer = FakeScorer()
    shown = await view(scorer).group("abab")
    assert shown["prompt"] == [{"role": "user", "content": "5+6"}]
    assert shown["completions"] == [{"text": "4", "finish": "stop", "tokens": 2, "claimed": 1.0, "reward": 0.5}]
    assert scorer.asked == [True]


@pytest.mark.parametrize("scorer", [FakeScorer(broken=True), None])
async def test_a_group_whose_task_cannot_be_had_is_shown_without_it(scorer: FakeScorer | None) -> None:
    shown = await view(scorer).group("abab")
    assert shown["prompt"] == []
    assert shown["completions"][0]["text"] == "4"


async def test_what_breaks_a_service_is_said_while_the_others_stop() -> None:
    progress = Progress(lambda: 0.0, 60.0)
    daemon: Any = SimpleNamespace(progress=progress, _say_failed=lambda error: Daemon._say_failed(daemon, error))
    seen: list[str] = []

    async def breaks() -> None:
        raise OSError("the disk is gone")

    async def stops_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(progress.state)

    async def run() -> None:
        async with asyncio.TaskGroup() as services:
            services.create_task(stops_slowly())
            services.create_task(Daemon._told(daemon, breaks()))

    with pytest.raises(ExceptionGroup):
        await run()
    assert seen == ["FAILED"]
    assert progress.reason == "OSError: the disk is gone"

    async def ends() -> None:
        raise Stopped

    progress.say("TRAINING")
    with pytest.raises(Stopped):
        await Daemon._told(daemon, ends())
    assert progress.state == "TRAINING"
