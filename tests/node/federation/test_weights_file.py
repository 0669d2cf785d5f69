"""Files of weights: their digest, what changes make of them, and files that are not what they should be."""

import hashlib
import io
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.federation.changes import BadChanges, Changes, changes_between
from node.federation.weights_file import BadWeights, WeightsFile, write_changed, write_weights, write_whole

SHAPES = {"b.weight": (3, 4), "a.bias": (5,), "none": (0, 2)}


def weights(seed: int, kind: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance).to(kind) for name, shape in SHAPES.items()}


def between(old: WeightsFile, new: WeightsFile) -> bytes:
    pairs = zip(old.tensors, new.tensors, strict=True)
    return b"".join(b"".join(changes_between(old.words(a), new.words(b))) for a, b in pairs)


def test_the_digest_is_that_of_the_document(tmp_path: Path) -> None:
    tensors = weights(0)
    file = write_weights(tensors, tmp_path / "w.safetensors", "bfloat16")
    expected = hashlib.sha256()
    for name, shape in (("a.bias", "5"), ("b.weight", "3,4"), ("none", "0,2")):
        expected.update(f"{name}\nbfloat16\n{shape}\n".encode())
        expected.update(tensors[name].view(torch.int16).numpy().tobytes())
    assert file.digest() == expected.digest()


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_a_chain_of_changes_is_exact_and_leads_back(tmp_path: Path, kind: Any) -> None:
    files = [write_weights(weights(i, getattr(torch, kind)), tmp_path / f"{i}.safetensors", kind) for i in range(3)]
    chain = [between(files[0], files[1]), between(files[1], files[2])]
    last = write_changed(files[0], [Changes(io.BytesIO(raw)) for raw in chain], tmp_path / "x", files[2].digest())
    assert load_file(last.path)["b.weight"].equal(weights(2, getattr(torch, kind))["b.weight"])
    back = dict(files[2].changed([Changes(io.BytesIO(raw)) for raw in reversed(chain)]))
    for tensor, words in back.items():
        assert (words == files[0].words(tensor)).all()


def test_wrong_changes_leave_no_file(tmp_path: Path) -> None:
    old, new = (write_weights(weights(i), tmp_path / f"{i}", "bfloat16") for i in range(2))
    raw = between(old, new)
    with pytest.raises(BadWeights, match="do not lead"):
        write_changed(old, [Changes(io.BytesIO(raw))], tmp_path / "x", bytes(32))
    with pytest.raises(BadChanges):
        write_changed(old, [Changes(io.BytesIO(raw[:-1]))], tmp_path / "x", new.digest())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_full_disk_is_an_error_of_the_system_and_leaves_no_file(tmp_path: Path) -> None:
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="cannot be written"):
            write_weights(weights(0), tmp_path / "w.safetensors", "bfloat16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


def pieces(raw: bytes) -> Iterator[bytes]:
    yield raw[:7]
    yield raw[7:]


def test_a_whole_from_its_pieces(tmp_path: Path) -> None:
    file = write_weights(weights(0), tmp_path / "w", "bfloat16")
    raw = file.path.read_bytes()
    again = write_whole(pieces(raw), tmp_path / "x", SHAPES, "bfloat16", file.digest())
    assert again.path.read_bytes() == raw
    with pytest.raises(BadWeights, match="not the weights"):
        write_whole(pieces(raw[:-1] + b"\x55"), tmp_path / "y", SHAPES, "bfloat16", file.digest())
    assert not (tmp_path / "y").exists()


def header(entries: Any, data: int = 34) -> bytes:
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


GOOD = {
    "a.bias": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]},
    "b.weight": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [10, 34]},
    "none": {"dtype": "BF16", "shape": [0, 2], "data_offsets": [34, 34]},
}


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "begin|header"),
        (b"\xff" * 8, "header of"),
        ((2**30).to_bytes(8, "little") + b"{}", "header of"),
        (header([]), "no safetensors header"),
        (header({**GOOD, "a.bias": 3}), "no safetensors header"),
        (header({**GOOD, "c": GOOD["none"]}), "another model or type: 1 tensors differ, the first is c"),
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "dtype": "F16"}}), "the first is a.bias"),
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "shape": [5, 1]}}), "the first is a.bias"),
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "shape": [6]}}), "no safetensors header"),
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "data_offsets": [-2, 8]}}), "no safetensors header"),
        (header({**GOOD, "b.weight": {**GOOD["b.weight"], "data_offsets": [0, 24]}}), "no safetensors header"),
        (header(GOOD, data=33), "no safetensors header"),
        (header(GOOD, data=99), "no safetensors header"),
        # what `json` reads, and the library that weights are loaded with does not
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "shape": [5.0]}}), "no safetensors header"),
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "data_offsets": ["0", 10]}}), "no safetensors header"),
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "data_offsets": [0, float("inf")]}}), "no safetensors header"),
        (header({**GOOD, "a.bias": {**GOOD["a.bias"], "more": float("nan")}}), "no safetensors header"),
        (header({**GOOD, "__metadata__": 3}), "no safetensors header"),
        (header({**GOOD, "c" * 9999: GOOD["none"]}), "the first is c{80}$"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path: Path, raw: bytes, problem: str) -> None:
    (tmp_path / "w").write_bytes(raw)
    with pytest.raises(BadWeights, match=problem):
        WeightsFile(tmp_path / "w", SHAPES, "bfloat16")
