"""What is being sampled in one batch: groups, and the rows of samples that have the same tokens so far."""

from dataclasses import dataclass, field

import torch

from node.engines.drafting import Endings, SuffixTrie
from node.interfaces import FinishReason, PromptRequest

DRAWS = 64
"""Positions whose random numbers are drawn at once."""


@dataclass(slots=True)
class Row:
    """Samples with the same tokens so far."""

    members: list[int]
    token: int = -1
    """The last token, whose keys and values are not computed yet."""
    length: int = 0
    """Answer tokens whose keys and values are computed."""
    draft: list[int] = field(default_factory=list)
    """Guesses at the tokens after it, to be computed with it (node/engines/drafting.py)."""
    compared: list[int] = field(default_factory=list)
    """Guesses that are only compared with what is drawn, of which the first `hits` were."""
    hits: int = 0
    endings: Endings = ()
    """Where the group's trie knows the last tokens from."""


@dataclass(slots=True)
class Group:
    request: PromptRequest
    generator: torch.Generator
    prefix: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of the prompt in each layer, [K, P, d]."""
    keys: torch.Tensor
    """[layers, n, K, L, d]: answers' keys; row j of the group is at j. Finite up to `reach` in all live rows."""
    values: torch.Tensor
    rows: list[Row]
    tokens: list[list[int]]
    """Of every sample, those of its start included; log-probabilities only of the new ones."""
    logprobs: list[list[float]]
    finish: list[FinishReason]
    experts: list[bytearray]
    """Of every sample, which experts the prompt's tokens and its own went to; empty where that is not noted."""
    trie: SuffixTrie | None = None
    """What the prompt and all samples say, for guesses; None: no guesses."""
    draws: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    """[positions, n] in [0, 1): the number that token t of sample i is drawn with."""

    @property
    def open(self) -> int:
        return sum(len(row.members) for row in self.rows)

    @property
    def reach(self) -> int:
        return max(row.length for row in self.rows)

    def draw(self, row: Row, ahead: int) -> torch.Tensor:
        """The numbers that the row's samples draw their next token but `ahead` with, [members].

        They follow from seed, sample and position alone, so a sample that is stopped and goes on later (in the same
        place of a request with the same seed) draws what it would have drawn.
        """
        position = len(self.tokens[row.members[0]]) + ahead
        while position >= len(self.draws):
            more = torch.rand(DRAWS, self.request.n, generator=self.generator, dtype=torch.float64)
            self.draws = torch.cat([self.draws.view(-1, self.request.n), more])
        return self.draws[position, row.members]
