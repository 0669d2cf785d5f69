"""Samples in the making: what came of each stream, and by which weights its tokens were sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from node.engines.partial import continued
from node.engines.vllm_client import Piece
from node.engines.vllm_probe import EngineSetupError
from node.interfaces import FinishReason, PromptRequest, Sample, SampledGroup
from node.models import ModelBundle
from node.routing import RoutingError, fits, from_vllm


@dataclass(slots=True, eq=False)
class Stream:
    """A sample in the making."""

    name: str
    request: PromptRequest
    start: Sample | None
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason = "aborted"
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(token, version): from this token on it was sampled by this version, as far as this side can tell."""
    told: tuple[tuple[int, int], ...] = ()
    """(version, tokens), as the server told at the end."""
    constant: bool = False
    """Sampled with what it began with to its end, whatever was loaded meanwhile: the server knows of no adapters."""
    experts: bytes = b""
    """Of the prompt and all tokens (node/routing.py), as the server told at the end."""

    def sample(self, version: int) -> Sample:
        """What there is of it; `version` for one without tokens."""
        spans = self._by_marks() if self.constant or not self.told else self.told
        return continued(self.start, self.token_ids, self.logprobs, self.finish, version, spans, self.experts)

    def take(self, piece: Piece, bundle: ModelBundle, versions: Mapping[str, int]) -> None:
        """Add what came; `versions` are those of the weights by the names that the server knows.

        Raises EngineSetupError for what only another server's model or another trainer's weights explain.
        """
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.finish is None:
            return
        self.finish = "aborted" if piece.finish == "abort" else piece.finish
        if self.finish == "stop" and self.token_ids[-1] not in bundle.stop_ids:
            raise EngineSetupError(
                f"the vLLM server ends answers at token {self.token_ids[-1]}, which is no end of turn of "
                f"{bundle.name}; start it with this node's model: vllm serve {bundle.directory}"
            )
        if strangers := [named for named, _ in piece.spans if named not in versions]:
            raise EngineSetupError(
                f"the vLLM server samples with weights {strangers[0]!r}, which are not this node's; "
                "give each node an engine of its own"
            )
        self.told = tuple((versions[named], count) for named, count in piece.spans)
        if piece.routed and bundle.routing is not None and fits(bundle.routing, self.request):
            had = len(self.start.token_ids) if self.start else 0
            tokens = len(self.request.prompt_ids) + had + len(self.token_ids)
            try:
                self.experts = from_vllm(piece.routed, bundle.routing, tokens)
            except RoutingError as error:
                raise EngineSetupError(f"the vLLM server tells experts of another model: {error}") from error

    def unrouted(self, bundle: ModelBundle) -> bool:
        """Whether it is done without the experts that the trainer would take."""
        return not self.experts and bundle.routing is not None and fits(bundle.routing, self.request)

    def _by_marks(self) -> tuple[tuple[int, int], ...]:
        if not self.marks:
            return ()
        ends = [at for at, _ in self.marks[1:]] + [len(self.token_ids)]
        spans = []
        begin = 0
        for (_, version), end in zip(self.marks, ends, strict=True):
            end = min(max(begin, end), len(self.token_ids))
            spans.append((version, end - begin))
            begin = end
        return tuple(span for span in spans if span[1])


@dataclass(slots=True, eq=False)
class Group:
    request: PromptRequest
    streams: list[Stream]
    open: int

    def outcome(self, version: int) -> SampledGroup:
        return SampledGroup(self.request.key, tuple(stream.sample(version) for stream in self.streams))
