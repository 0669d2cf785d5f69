"""Samples that go on where an earlier pass left them: whose tokens are whose."""

from collections.abc import Sequence

from node.interfaces import FinishReason, Sample, SampledGroup


class EngineFailed(Exception):
    """An engine cannot go on for now: its process died, or does not answer. The message names it, and what to do.

    Raised by `Engine.generate` and `update_weights`; another engine, or the same one later, may take the requests over.
    """

    def __init__(self, message: str, groups: Sequence[SampledGroup] = ()) -> None:
        super().__init__(message)
        self.groups = tuple(groups)
        """What unfinished requests have so far, as far as it is known."""


def spans_of(sample: Sample) -> tuple[tuple[int, int], ...]:
    """(version, tokens) of a sample in order, also where all of it is one version's."""
    if sample.spans:
        return sample.spans
    return ((sample.version, len(sample.token_ids)),) if sample.token_ids else ()


def continued(
    start: Sample | None,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish: FinishReason,
    version: int,
    spans: Sequence[tuple[int, int]] = (),
    experts: bytes = b"",
) -> Sample:
    """`start` and the tokens sampled after it by `version`, or by the versions of `spans` in order.

    Neighbouring spans of one version are joined; a sample of one version has none. `experts` are those of the prompt
    and all tokens in this pass; where the start has its own, its tokens were sampled with those.
    """
    before = spans_of(start) if start else ()
    joined: list[tuple[int, int]] = []
    for whose, count in (*before, *(spans or ((version, len(token_ids)),))):
        if joined and joined[-1][0] == whose:
            joined[-1] = (whose, joined[-1][1] + count)
        elif count:
            joined.append((whose, count))
    return Sample(
        token_ids=(*(start.token_ids if start else ()), *token_ids),
        logprobs=(*(start.logprobs if start else ()), *logprobs),
        finish=finish,
        version=joined[0][0] if joined else version,
        spans=tuple(joined) if len(joined) > 1 else (),
        experts=(start.experts if start else b"") + experts[len(start.experts) if start else 0 :],
    )
