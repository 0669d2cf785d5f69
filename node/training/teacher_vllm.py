"""A teacher on a vLLM server: it scores the policy's own tokens as a prompt and says the log-probability of each."""

from collections.abc import Sequence
from typing import Any

from node.engines.vllm_client import ServerGone, ServerRefused, VllmClient
from node.interfaces import TeacherError, TrainGroup
from node.models import ModelBundle

SEQUENCES_AT_ONCE = 32
"""Of one request: the server batches them, and its answer of ~100 bytes a token stays small."""
CHECK_SECONDS = 30.0
PROBE = "Hello, world! 0123456789\n\tdef f(x): return x**2  # naïve Ω 北京 🙂 "
"""A text whose tokens differ wherever two tokenizers do, for all practical purposes."""
LOWEST = -100.0
"""vLLM writes -9999 for minus infinity."""


class VllmTeacher:
    """Asks /v1/completions for `prompt_logprobs`, which any vLLM server answers. Weights of the server stay its own."""

    def __init__(self, client: VllmClient, policy: ModelBundle, *, seconds: float) -> None:
        """`seconds`: deadline of one request of SEQUENCES_AT_ONCE sequences."""
        self.name = str(client.address)
        self._client, self._policy, self._seconds = client, policy, seconds

    async def check(self) -> None:
        """Raises TeacherError when the server cannot be reached or splits text into other tokens than the policy."""
        tokenizer = self._policy.tokenizer
        probe = f"{PROBE}{tokenizer.decode([self._policy.end_of_turn])}"
        answer = await self._post("/tokenize", {"prompt": probe, "add_special_tokens": False}, CHECK_SECONDS)
        ours = tokenizer.encode(probe, add_special_tokens=False)
        if not isinstance(answer, dict) or answer.get("tokens") != ours:
            raise TeacherError(
                f"the teacher at {self.name} has another tokenizer than {self._policy.name}, so its probabilities are"
                " of other tokens ; set train.distill_teacher to a model of the same family"
            )

    async def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the teacher; [group][sequence][token]. Raises TeacherError."""
        results: list[list[tuple[float, ...]]] = [[()] * len(group.sequences) for group in groups]
        places = [(g, s) for g, group in enumerate(groups) for s, one in enumerate(group.sequences) if one.token_ids]
        for start in range(0, len(places), SEQUENCES_AT_ONCE):
            chunk = places[start : start + SEQUENCES_AT_ONCE]
            rows = [(*groups[g].prompt_ids, *groups[g].sequences[s].token_ids) for g, s in chunk]
            body = {"prompt": rows, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            answer = await self._post("/v1/completions", body, self._seconds)
            try:
                choices = sorted(answer["choices"], key=lambda choice: choice["index"])
                for (g, s), row, choice in zip(chunk, rows, choices, strict=True):
                    count = len(groups[g].sequences[s].token_ids)
                    results[g][s] = _last(choice["prompt_logprobs"], row, count)
            except (KeyError, TypeError, ValueError) as error:
                raise TeacherError(
                    f"{self.name}/v1/completions did not answer with prompt_logprobs: {error!r}"
                ) from error
        return results

    async def _post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        try:
            return await self._client.post(path, body, seconds)
        except (ServerGone, ServerRefused) as error:
            raise TeacherError(f"{error} ; is it a vLLM server, and up?") from error

    async def close(self) -> None:
        await self._client.close()


def _last(entries: Sequence[Any], row: Sequence[int], count: int) -> tuple[float, ...]:
    """Of the last `count` tokens of a row. An entry maps ids to what is known of them, the row's own token among them.

    Raises ValueError, KeyError, TypeError for anything else.
    """
    if len(entries) != len(row):
        raise ValueError(f"{len(entries)} entries for {len(row)} tokens")
    start = len(row) - count
    return tuple(
        max(LOWEST, float(entry[str(token)]["logprob"]))
        for entry, token in zip(entries[start:], row[start:], strict=True)
    )
