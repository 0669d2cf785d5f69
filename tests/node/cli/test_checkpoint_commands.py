import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from click.testing import Result

from node.checkpoint import CheckpointStore
from node.cli.checkpoint import ADAPTER_SETTINGS, TRAINER_FILES
from node.home import Home

Run = Callable[..., Result]
MODEL_FILES = {"model.safetensors": "weights", "config.json": "{}", "tokenizer.json": "{}"}


def write(directory: Path) -> None:
    for name, content in (MODEL_FILES | dict.fromkeys(TRAINER_FILES, "{}")).items():
        (directory / name).write_text(content)


@pytest.fixture
def saved(home: Home) -> CheckpointStore:
    store = CheckpointStore(home.checkpoints, keep=2)
    store.save(25, write, {"rng": 1})
    store.save(50, write, {"rng": 2})
    store.save_best(40, 0.625, write)
    return store


def test_list(run: Run, home: Home, saved: CheckpointStore) -> None:
    found = json.loads(run("--home", home.path, "checkpoint", "list", "--json").stdout)
    assert [(entry["name"], entry["step"], entry["held_out"]) for entry in found] == [
        ("step-25", 25, None), ("step-50", 50, None), ("best", 40, 0.625)
    ]  # fmt: skip
    rows = run("--home", home.path, "checkpoint", "list").stdout.splitlines()
    assert [row.split()[:3] for row in rows] == [
        ["name", "step", "held-out"], ["step-25", "25", "-"], ["step-50", "50", "-"], ["best", "40", "0.625"]
    ]  # fmt: skip


def test_list_of_none(run: Run, home: Home) -> None:
    assert run("--home", home.path, "checkpoint", "list", "--json").stdout == "[]\n"
    home.checkpoints.rmdir()  # of a home that was restored without
    said = run("--home", home.path, "checkpoint", "list")
    assert (said.exit_code, f"No checkpoint yet: shoal --home {home.path} up trains" in said.stdout) == (0, True)


@pytest.mark.parametrize(("name", "step"), [("latest", 50), ("25", 25), ("best", 40)])
def test_export_takes_the_model_only(
    run: Run, home: Home, saved: CheckpointStore, tmp_path: Path, name: str, step: int
) -> None:
    result = run("--home", home.path, "checkpoint", "export", name, tmp_path / "model", "--json")
    assert json.loads(result.stdout) == {"step": step, "path": str(tmp_path / "model")}
    assert {file.name: file.read_text() for file in (tmp_path / "model").iterdir()} == MODEL_FILES
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").rglob("*")}
    assert ((tmp_path / "model").stat().st_mode & 0o777, modes) == (0o755, {0o644})  # for others too


def test_export_refuses_a_directory_that_came_meanwhile(
    run: Run, home: Home, saved: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: Path, target: Path, leave: Collection[str]) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").touch()

    monkeypatch.setattr("node.cli.checkpoint.copy", copy)
    taken = run("--home", home.path, "checkpoint", "export", "latest", tmp_path / "model")
    assert (taken.exit_code, "give a new directory" in taken.stderr) == (1, True)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["theirs"]


def test_export_to_a_full_disk(
    run: Run, home: Home, saved: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: Path, target: Path, leave: Collection[str]) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("node.cli.checkpoint.copy", copy)
    full = run("--home", home.path, "checkpoint", "export", "latest", tmp_path / "model")
    assert full.exit_code == 1
    assert "(os error 28))\nFix: free some disk" in full.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_export_refuses(run: Run, home: Home, saved: CheckpointStore, tmp_path: Path) -> None:
    missing = run("--home", home.path, "checkpoint", "export", "30", tmp_path / "model")
    assert (missing.exit_code, "step-50" in missing.stderr) == (1, True)
    (tmp_path / "taken").mkdir()
    taken = run("--home", home.path, "checkpoint", "export", "latest", tmp_path / "taken")
    assert (taken.exit_code, "give a new directory" in taken.stderr) == (1, True)
    (home.checkpoints / "step-50" / "model.safetensors").write_text("WEIGHTS")
    damaged = run("--home", home.path, "checkpoint", "export", "latest", tmp_path / "model")
    assert (damaged.exit_code, "model.safetensors has changed" in damaged.stderr) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "taken"]


def test_the_trainers_files_are_those_the_trainer_writes() -> None:
    from node.training import files, lora  # imports torch

    assert TRAINER_FILES == (files.FIRST_MOMENTS, files.SECOND_MOMENTS, files.MOMENTS_8BIT, files.TRAINER)
    assert ADAPTER_SETTINGS == lora.SETTINGS


def test_export_of_adapters(
    run: Run, home: Home, saved: CheckpointStore, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Added to the weights of the model that they are of, in one directory that says nothing of adapters; or alone."""
    import torch
    from safetensors.torch import load_file, save_file

    model = tiny_model("llama")
    name = "model.layers.1.self_attn.q_proj"
    weights = load_file(model / "model.safetensors")

    def write_adapters(directory: Path) -> None:
        settings = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
        (directory / "adapter_config.json").write_text(json.dumps(settings))
        a, b = torch.ones(2, 48), torch.full((48, 2), 0.5)
        sides = {f"base_model.model.{name}.lora_{side}.weight": tensor for side, tensor in (("A", a), ("B", b))}
        save_file(sides, directory / "adapter_model.safetensors")
        (directory / TRAINER_FILES[-1]).write_text("{}")

    saved.save(75, write_adapters, {})
    options = ("--home", home.path, "--set", f"model.path={model}", "checkpoint", "export", "latest")
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    assert "model.path" in run(*options, whole).stdout
    assert {file.name for file in whole.iterdir()} == {file.name for file in model.iterdir()}
    merged = load_file(whole / "model.safetensors")
    torch.testing.assert_close(merged[f"{name}.weight"], weights[f"{name}.weight"] + 3.0)  # 6 / 2 * (0.5 + 0.5)
    assert all(torch.equal(merged[key], weights[key]) for key in weights if not key.startswith(name))
    assert "adapters of step 75" in run(*options, alone, "--adapters").stdout
    assert sorted(file.name for file in alone.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    plain = run("--home", home.path, "checkpoint", "export", "50", tmp_path / "none", "--adapters")
    assert (plain.exit_code, "no adapters\nFix: export it without --adapters" in plain.stderr) == (1, True)
