"""Guesses at the next tokens of an answer from what its siblings said after the same words (grouped suffix drafting).

Answers to one task resemble each other and their prompt. A suffix trie over all of them, one per group, tells what came
next after the longest common ending, and how often (Seer, arXiv 2511.14617). The model then computes several tokens of
an answer in one pass, and samples at each of them as it would have: a guess only counts while it is what was drawn, so
what is sampled is the same with drafting and without (rejection sampling with a draft that is certain of its token).

A pass over more tokens takes longer, so a guess is made only where it pays: see `Drafter`. All of this follows from the
tokens alone, never from measured time: a repeated run must draft the same.
"""

from collections.abc import Sequence

DEPTH = 6
"""Longest ending that is looked up."""
LONGEST = 16
"""Most tokens guessed at a time."""
MOST_SAID = 8192
"""Tokens that one trie remembers; it takes about 1.5 KB for each."""
DOUBT = 2
"""Times that something else is taken to have been said after every ending."""
MARGIN = 1.25
"""How many times what it costs a guess must be worth: its chance is an estimate."""
TRIED = 8.0
"""Guessed tokens that the estimates are believed like before any were tried."""
PATIENCE = 64.0
"""Tokens' worth of time that guesses may cost a call of the engine before it makes no more."""


class Node:
    """What was said after one ending."""

    __slots__ = ("children", "count", "said")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.count = 0
        """How often the ending occurred."""
        self.said = 0
        """How often something came after it."""


Endings = tuple[Node, ...]
"""The endings of a sequence that are in the trie, shortest first: the root, the last token, the last two, ..."""


class SuffixTrie:
    """Sequences of one group by their endings of up to DEPTH tokens."""

    def __init__(self) -> None:
        self.root = Node()
        self.said = 0

    @property
    def start(self) -> Endings:
        return (self.root,)

    def add(self, endings: Endings, token: int, weight: int = 1) -> Endings:
        """Say `token` after a sequence with these endings; returns the longer sequence's. A full trie only looks."""
        self.said += 1
        if self.said > MOST_SAID:
            return self._after(endings, token)
        longer = [self.root]
        for node in endings[:DEPTH]:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node()
            child.count += weight
            node.said += weight
            longer.append(child)
        return tuple(longer)

    def _after(self, endings: Endings, token: int) -> Endings:
        return (self.root, *(node.children[token] for node in endings[:DEPTH] if token in node.children))

    def guess(
        self, endings: Endings, most: int, least: float, trust: float, stop_ids: frozenset[int] = frozenset()
    ) -> list[int]:
        """The likeliest next tokens, while all of them together are likelier than `least`, up to one that ends.

        `trust` is what the trie's estimates are multiplied with, once per token.
        """
        tokens: list[int] = []
        chance = 1.0
        while len(tokens) < min(most, LONGEST):
            known = next((node for node in reversed(endings) if node.children), self.root)
            if known is self.root:
                break
            token, child = max(known.children.items(), key=lambda item: item[1].count)
            chance *= trust * child.count / (known.said + DOUBT)
            if chance <= least:
                break
            tokens.append(token)
            if token in stop_ids:
                break
            endings = self._after(endings, token)
        return tokens


class Drafter:
    """How far to guess, in one call of the engine.

    A pass over T tokens takes about as long as `knee` + T of them alone: below the knee it is the weights that are
    read, whatever T is. With n answers a pass yields n tokens, so a token is worth (knee + n) / n; a guess costs 1 and
    is worth its chance times that. Guesses that have cost more than they were worth end all guessing.
    """

    def __init__(self, knee: float) -> None:
        self.knee = knee
        self.guessed = self.drawn = 0.0
        self.gain = 0.0
        """Tokens' worth of time saved so far."""

    @property
    def trust(self) -> float:
        """What estimates are lowered by: below 1 once fewer than half of the guesses tried were drawn."""
        return 1.0 if self.guessed < TRIED else min(1.0, 0.5 + self.drawn / self.guessed)

    def least(self, answers: int) -> float:
        """Chance over which a guess pays when so many answers are sampled together; 1: none does."""
        return min(1.0, MARGIN * answers / (self.knee + answers)) if self.gain > -PATIENCE else 1.0

    def learn(self, accepted: Sequence[float], answers: int) -> None:
        """What became of one answer's guesses: the share of its samples that drew each."""
        self.guessed += len(accepted)
        self.drawn += sum(accepted)
        self.gain += sum(accepted) * (self.knee + answers) / answers - len(accepted)
