"""What is kept of a step's rollouts."""

from node.interfaces import Sample, Score
from node.rollouts import Rollout
from node.summary import summarise
from protocol.rollout import TaskRef


def rollout(origin: str, environment: str, *rewards: float) -> Rollout:
    """Answers of two tokens each."""
    return Rollout(
        origin=origin,  # type: ignore[arg-type]
        ref=TaskRef(environment, "1", 0, 0),
        prompt_ids=(1,),
        samples=tuple(Sample((2, 3), (-0.5, -0.5), "stop", 4) for _ in rewards),
        texts=("x",) * len(rewards),
        scores=tuple(Score(reward, parsed=reward > 0) for reward in rewards),
        budget=8,
    )


def test_rewards_of_what_was_sampled_and_of_what_is_trained_on() -> None:
    first, second = rollout("own", "sums", 0.0, 1.0), rollout("own", "words", 0.0, 0.0)
    foreign = [rollout("foreign", "sums", 1.0, 0.5), rollout("foreign", "sums", 0.0)]
    kept = summarise([first, second], [first], foreign, version=5, rollout_seconds=2.0, seconds=3.0)
    assert (kept["reward"], kept["rewards"]) == (0.25, {"sums": 0.5, "words": 0.0})
    assert (kept["own_reward"], kept["foreign_reward"]) == (0.5, 0.5)
    assert (kept["rollout_tokens"], kept["completion_tokens"], kept["tokens_per_second"]) == (8, 2.0, 4.0)
    alone = summarise([first], [first], [], version=5, rollout_seconds=2.0, seconds=3.0)
    assert alone["foreign_reward"] is None
