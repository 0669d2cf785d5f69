"""Every dataset of reasoning_gym as an environment: chat prompt with worked examples, strict rewards.

Task (seed, index) is item 0 of the dataset seeded with 32 bits of SHA-256(seed, index): reasoning_gym itself adds
seed and index, so that neighbouring seeds share tasks, and some of its datasets take no seed above 2^32 and no
index above their size.

The reward is 1 for what the dataset scores 1 and 0 for everything else. Most part credits of reasoning_gym (0.01
for any text, length of the gold answer over length of the answer, ...) would make a group of wrong answers look
informative; the raw value is kept in `Score.parts["raw"]`. In the GRADED datasets part credit says how much of the
answer is right, and small models start from it: there an answer in the asked format gets it.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ProceduralDataset

from node.environments.answers import COMPARED, FORMULAS, is_safe_formula
from node.environments.known import SettingsRefused
from node.interfaces import Message, Score, Task

MAX_PROMPT_CHARACTERS = 32_768
CACHED_ENTRIES = 512
EXAMPLE_SEED = 2
"""Of the seeds tried, the one whose examples help SmolLM2-135M most (gold answers of letter_counting 0.20 -> 0.28, of
chain_sum 0.09 -> 0.15). A task that repeats an example is drawn again."""
MAX_DRAWS = 64

SYSTEM = "Reply with the answer only."

_CONSTRUCTOR_SEEDED = frozenset(["acre", "gsm_symbolic", "list_functions", "survo"])
"""Datasets that use their seed when constructed. All others read it per item, so one instance serves every task."""

GRADED = frozenset(["spell_backward", "word_sorting"])
"""Part credit: the share of letters, or of words, in their right place."""

_FORMATS: Mapping[str, str] = {
    "chain_sum": r"[+-]?\d+",
    "letter_counting": r"\d+",
    "spell_backward": r"\w+",
    "word_sorting": r"\w+(,\s*\w+)+",
}
"""The asked format, where it is plain enough to tell an unreadable answer from a wrong one."""


class ReasoningGym:
    """One dataset with one set of settings.

    Settings `examples` (worked examples, default 3) and `max_tokens` (default 64) are ours; all others are fields of
    the dataset's own configuration. Raises SettingsRefused.
    """

    def __init__(self, name: str, version: str, settings: Mapping[str, int | float | str | bool]) -> None:
        self.name, self.version = name, version
        self.evaluates = name in FORMULAS
        own = dict(settings)
        examples = own.pop("examples", 3)
        max_tokens = own.pop("max_tokens", 64)
        if type(examples) is not int or not 0 <= examples <= 16:
            raise SettingsRefused(f"environment {name}: examples must be 0 to 16, got {examples!r}")
        if type(max_tokens) is not int or not 1 <= max_tokens <= 131_072:
            raise SettingsRefused(f"environment {name}: max_tokens must be 1 to 131072, got {max_tokens!r}")
        if "seed" in own or "size" in own:
            raise SettingsRefused(
                f"environment {name}: seed and size come from the task, remove them from the settings"
            )
        self._settings, self._max_tokens = own, max_tokens
        try:
            self._dataset = create_dataset(name, seed=0, size=1, **own)
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            raise SettingsRefused(f"environment {name} refuses settings {own}: {error}") from error
        self._entries: OrderedDict[tuple[int, int], tuple[ProceduralDataset, dict[str, Any]]] = OrderedDict()
        self._examples = [self._draw(_seed(EXAMPLE_SEED, i, 0))[1] for i in range(examples)]

    def task(self, seed: int, index: int) -> Task:
        messages = [Message("system", SYSTEM)]
        for example in self._examples:
            messages.append(Message("user", example["question"].strip()))
            messages.append(Message("assistant", str(example["answer"]).strip()))
        messages.append(Message("user", self._entry(seed, index)[1]["question"].strip()))
        return Task(messages=tuple(messages), max_tokens=self._max_tokens)

    def score(self, seed: int, index: int, answer: str) -> Score:
        dataset, entry = self._entry(seed, index)
        answer = answer.strip()
        if not answer:
            return Score(reward=0.0, parsed=False)
        raw, parsed = self._raw(dataset, entry, answer)
        solved = raw > 1 - 1e-6
        reward = raw if self.name in GRADED and parsed else float(solved)
        return Score(reward=reward, parsed=solved or parsed, parts={} if raw in (0.0, 1.0) else {"raw": float(raw)})

    def prepare(self, seed: int, index: int) -> None:
        """Make the task and keep it for `task`, `score` and `gold`."""
        self._entry(seed, index)

    def gold(self, seed: int, index: int) -> str | None:
        """The dataset's answer; some datasets accept many answers and give none."""
        answer = self._entry(seed, index)[1]["answer"]
        return None if answer is None else str(answer).strip()

    def self_check(self) -> Sequence[str]:
        problems = []
        for index in range(8):
            _, entry = self._entry(0, index)
            gold = entry["answer"]
            where = f"{self.name} task (0, {index})"
            length = sum(len(message.content) for message in self.task(0, index).messages)
            if length > MAX_PROMPT_CHARACTERS:
                problems.append(f"{where}: prompt of {length} characters, at most {MAX_PROMPT_CHARACTERS}")
            if gold is None:
                continue  # some datasets accept many answers and give none
            if self.score(0, index, str(gold)).reward != 1:
                problems.append(f"{where}: gold answer {str(gold)[:80]!r} does not score 1")
            if len(str(gold)) > 8 * self._max_tokens:
                problems.append(f"{where}: gold answer of {len(str(gold))} characters, max_tokens {self._max_tokens}")
        return problems

    def _raw(self, dataset: ProceduralDataset, entry: dict[str, Any], answer: str) -> tuple[float, bool]:
        """The dataset's own score, and whether the answer is in the asked format."""
        if self.name in COMPARED:
            return float(answer in COMPARED[self.name](entry)), True
        if self.name in FORMULAS and not is_safe_formula(answer, FORMULAS[self.name](entry)):
            return 0.0, False
        pattern = _FORMATS.get(self.name)
        return dataset.score_answer(answer, entry), pattern is None or re.fullmatch(pattern, answer) is not None

    def _entry(self, seed: int, index: int) -> tuple[ProceduralDataset, dict[str, Any]]:
        key = (seed, index)
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        shown = {example["question"] for example in self._examples}
        for draw in range(MAX_DRAWS):
            dataset, entry = self._draw(_seed(seed, index, draw))
            if entry["question"] not in shown:
                break
        self._entries[key] = dataset, entry
        if len(self._entries) > CACHED_ENTRIES:
            self._entries.popitem(last=False)
        return dataset, entry

    def _draw(self, seed: int) -> tuple[ProceduralDataset, dict[str, Any]]:
        if self.name in _CONSTRUCTOR_SEEDED:
            dataset = create_dataset(self.name, seed=seed, size=1, **self._settings)
        else:
            dataset = self._dataset
            dataset.seed = seed
        return dataset, dataset[0]


def _seed(seed: int, index: int, draw: int) -> int:
    """32 bits of the SHA-256 of what names a draw."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}/{draw}".encode()).digest()[:4])
