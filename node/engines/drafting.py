"""Guesses at the next tokens of an answer from what its siblings said after the same words (grouped suffix drafting).

Answers to one task resemble each other and their prompt. A suffix trie over all of them, one per group, tells what came
next after the longest common ending, and how often (Seer, arXiv 2511.14617). The model then computes several tokens of
an answer in one pass, and samples at each of them as it would have: a guess only counts while it is what was drawn, so
what is sampled is the same with drafting and without (rejection sampling with a draft that is certain of its token).

A pass over more tokens takes longer, so guesses are computed only where that pays, which is found out beforehand, for
nothing: they are made, and compared with what is drawn without them (see `Drafter`). All of this follows from the
tokens alone, never from measured time: a repeated run must draft the same.
"""

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
FADING = 0.99
"""What one more answer and pass leaves of those before it."""
TRIED = 40.0
"""Answers and passes looked at before guesses are computed; with FADING never more than 100 count."""
UNEVEN = 1.1
"""How much longer a pass takes when answers are of different lengths."""
PAYS, STILL_PAYS = 1.3, 1.1
"""Expected gain at which guesses begin, and end, to be computed."""


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

    def guess(self, endings: Endings, most: int, least: float, stop_ids: frozenset[int] = frozenset()) -> list[int]:
        """The likeliest next tokens, while all of them together are likelier than `least`, up to one that ends."""
        tokens: list[int] = []
        chance = 1.0
        while len(tokens) < min(most, LONGEST):
            known = next((node for node in reversed(endings) if node.children), self.root)
            if known is self.root:
                break
            token, child = max(known.children.items(), key=lambda item: item[1].count)
            chance *= child.count / (known.said + DOUBT)
            if chance <= least:
                break
            tokens.append(token)
            if token in stop_ids:
                break
            endings = self._after(endings, token)
        return tokens


class Drafter:
    """Whether and how far to guess, in one call of the engine.

    A pass over T tokens takes about as long as `knee` + T of them alone: below the knee it is the weights that are
    read, whatever T is. With n answers a pass yields n tokens, so a token is worth (knee + n) / n; a guess costs 1 and
    is worth its chance times that.
    """

    def __init__(self, knee: float) -> None:
        self.knee = knee
        self.on = False
        """Guesses are computed; otherwise they are only compared."""
        self.seen = self.guessed = self.drawn = 0.0
        """Answers and passes looked at, guesses in them, and those of them that were drawn; older ones fade."""

    def least(self, answers: int) -> float:
        """Chance over which a guess pays when so many answers are sampled together; 1: none does."""
        return min(1.0, MARGIN * answers / (self.knee + answers))

    def learn(self, guessed: int, drawn: float) -> None:
        """What became of one answer's guesses in one pass."""
        self.seen = FADING * self.seen + 1
        self.guessed = FADING * self.guessed + guessed
        self.drawn = FADING * self.drawn + drawn

    def gain(self, answers: int) -> float:
        """Tokens in a given time with such guesses, over those without."""
        if self.seen < TRIED:
            return 0.0
        tokens, passed = 1 + self.drawn / self.seen, 1 + self.guessed / self.seen
        return tokens * (self.knee + answers) / ((self.knee + answers * passed) * UNEVEN)

    def decide(self, answers: int) -> bool:
        """Whether to compute guesses in the next pass."""
        self.on = self.gain(answers) > (STILL_PAYS if self.on else PAYS)
        return self.on
