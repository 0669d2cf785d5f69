"""What scoring in a process of its own adds, in processor time: a busy machine changes nothing."""

from node.bench.scorer import processor_seconds
from node.scorer import Scorer
from protocol.manifest import embedded_manifest
from protocol.rollout import TaskRef
from tests.node.evaluating import REF


async def test_scoring_adds_less_than_a_millisecond_an_answer(embedded: Scorer) -> None:
    refs = [TaskRef(s.name, s.version, 1, i) for s in embedded_manifest("t", 0).environments for i in range(16)]
    items = [(ref, str(n)) for ref in refs for n in range(8)]
    await embedded.tasks(refs)
    began = await processor_seconds(embedded)
    scores = await embedded.score(items)
    assert (await processor_seconds(embedded) - began) / len(items) < 0.001
    assert len(scores) == 512
    assert 0 < sum(score.reward for score in scores) < 100


async def test_a_child_for_every_chunk_adds_less_than_a_millisecond_an_answer(evaluating: Scorer) -> None:
    await evaluating.score([(REF, "42")])
    began = await processor_seconds(evaluating)
    scores = await evaluating.score([(REF, "6*7")] * 512)
    assert (await processor_seconds(evaluating) - began) / 512 < 0.001
    assert sum(score.reward for score in scores) == 512
