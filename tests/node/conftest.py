"""A home in a temporary directory, and an environment without SHOAL_* variables of whoever runs the tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from node.home import Home


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_") and name != "SHOAL_CACHE"]:
        monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path: Path, no_variables: None) -> Home:
    made = Home(tmp_path / "home")
    made.init()
    return made


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Path]":
    """Directory of a small random model of a type (llama, qwen2, qwen3), with a byte-level tokenizer."""

    def make(kind: str) -> Path:
        directory = tmp_path_factory.getbasetemp() / f"tiny-{kind}"
        if not directory.exists():
            _make_tiny(kind, directory)
        return directory

    return make


def _make_tiny(kind: str, directory: Path) -> None:
    import tokenizers
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>"
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=kind != "qwen3",
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
