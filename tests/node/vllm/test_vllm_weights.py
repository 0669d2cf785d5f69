"""Directories of weights: whole, checked, and no more of them than needed."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError
from safetensors.torch import load_file

from node.aside import LOCK
from node.cli.app import shoal
from node.engines.choose import export_weights
from node.engines.vllm_weights import WeightFiles, WeightFilesError
from node.models import ModelBundle


def files(root: Path) -> WeightFiles:
    return WeightFiles(root, lambda directory: (directory / "model.safetensors").write_bytes(b"abc"))


def test_old_directories_are_removed_and_names_never_return(tmp_path: Path) -> None:
    kept = files(tmp_path / "w")
    made = [kept.publish(version) for version in (1, 2, 3, 3)]
    assert len({published.directory for published in made}) == 4
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == sorted(p.directory.name for p in made[2:])
    assert made[0].sums == (("model.safetensors", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),)
    kept.close()
    assert not list((tmp_path / "w").iterdir())


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "v1-deadbeef").mkdir()  # of a process that was killed
    (tmp_path / ".v2-deadbeef").mkdir()
    kept = files(tmp_path)
    kept.publish(1)
    kept.close()
    assert [path.name for path in tmp_path.iterdir()] == ["videos"]


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    kept = files(tmp_path)
    published = kept.publish(1)
    kept.verify(published)
    (published.directory / "model.safetensors").write_bytes(b"abd")
    with pytest.raises(WeightFilesError, match="is not what was written"):
        kept.verify(published)
    (published.directory / "model.safetensors").unlink()
    with pytest.raises(WeightFilesError, match="cannot be read"):
        kept.verify(published)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # what tokenizers raises
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_leaves_nothing_half(tmp_path: Path, error: Exception) -> None:
    def full(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise error

    kept = WeightFiles(tmp_path, full)
    with pytest.raises(WeightFilesError, match=r"version 4 cannot be written .*No space left.*engine\.weights_dir"):
        kept.publish(4)
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_writing_is_not_called_a_full_disk(tmp_path: Path) -> None:
    kept = WeightFiles(tmp_path, lambda directory: {}["lm_head"])
    with pytest.raises(KeyError):
        kept.publish(4)
    assert not list(tmp_path.iterdir())


def test_what_is_unfinished_takes_no_place_of_what_is_whole(tmp_path: Path) -> None:
    kept = files(tmp_path)
    first = kept.publish(1)
    (tmp_path / ".v2-deadbeef").mkdir()
    second = kept.publish(3)
    assert {*tmp_path.iterdir()} == {first.directory, second.directory}


def test_the_output_layer_is_written_apart_where_a_server_needs_it(bundle: ModelBundle, tmp_path: Path) -> None:
    assert bundle.model.config.tie_word_embeddings
    for untied in (False, True):
        directory = tmp_path / str(untied)
        directory.mkdir()
        export_weights(bundle, directory, untied=untied)
        weights = load_file(directory / "model.safetensors")
        assert ("lm_head.weight" in weights) == untied
        torch.testing.assert_close(weights["model.embed_tokens.weight"], bundle.model.get_input_embeddings().weight)
    torch.testing.assert_close(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert (directory / "tokenizer.json").is_file()


def test_a_model_for_a_server_elsewhere(bundle: ModelBundle, tmp_path: Path, no_variables: None) -> None:
    """`shoal model export` writes what such a server starts with; no home is needed."""
    target = tmp_path / "model"
    (target / "of others").mkdir(parents=True, mode=0o700)
    (target / "secret").touch(mode=0o600)
    (target / ".export-killed").mkdir()
    (target / ".export-killed" / LOCK).touch()
    words = ["--home", str(tmp_path / "none"), "--set", f"model.path={bundle.directory}"]
    done = CliRunner().invoke(shoal, [*words, "model", "export", str(target), "--untied", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"model": str(target)}
    assert "lm_head.weight" in load_file(target / "model.safetensors")
    assert (target / "tokenizer_config.json").stat().st_mode & 0o777 == 0o644
    assert [(target / name).stat().st_mode & 0o777 for name in ("of others", "secret")] == [0o700, 0o600]
    assert not list(target.glob(".*"))
    assert not (tmp_path / "none").exists()
