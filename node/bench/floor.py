"""The least a step can cost: its floating-point operations over the machine's matrix-product rate.

With L weights in the layers' matrices and H in the output head (embedding lookups cost nothing), a forward pass costs
2 FLOP per weight and token, a backward pass 4. Every distinct token is counted once, as the packed forward does:

    prefill   2 L p            p: distinct tokens of all prompts (common beginnings merged)
    decode    2 L d            d: distinct sampled tokens that are fed back (the last one of a completion is not)
    sampling  2 H (g + d)      g: prompts; each state that a token is drawn from is projected once
    training  6 L t + 6 H u    t: distinct tokens of the informative groups that something follows;
                               u: distinct states that a completion token is read off

Attention's own products, the optimizer, scoring and everything else count nothing, so it is a lower bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from node.batching import TokenTrie
from node.interfaces import TrainGroup


@dataclass(frozen=True, slots=True)
class Work:
    """Distinct tokens and states of one step; the letters are those of the formula."""

    prompts: int
    prefill_tokens: int
    decode_tokens: int
    trained_tokens: int
    trained_states: int

    def flops(self, layers: int, head: int) -> float:
        """Of a model with `layers` weights in its layers' matrices and `head` in its output head."""
        rollout = 2 * layers * (self.prefill_tokens + self.decode_tokens) + 2 * head * (
            self.prompts + self.decode_tokens
        )
        return float(rollout + 6 * layers * self.trained_tokens + 6 * head * self.trained_states)


def work_of(groups: Sequence[TrainGroup]) -> Work:
    """What the groups of one step cost, sampling included; uniform groups are sampled but not trained on."""
    prompts, trained = TokenTrie(), TokenTrie()
    decode = states = 0
    for group in groups:
        prompts.insert(group.prompt_ids)
        answers = TokenTrie()
        for sequence in group.sequences:
            answers.insert(sequence.token_ids[:-1])
        decode += len(answers)
        if not group.uniform:
            states += 1 + len(answers)
            for sequence in group.sequences:
                trained.insert(group.prompt_ids + sequence.token_ids)
    return Work(len(groups), len(prompts), decode, trained.inner, states)


def matrix_weights(model: Any) -> tuple[int, int]:
    """(L, H) of a transformers causal language model."""
    embedding = model.get_input_embeddings().weight
    layers = sum(p.numel() for p in model.base_model.parameters() if p.ndim == 2 and p is not embedding)
    return layers, model.get_output_embeddings().weight.numel()
