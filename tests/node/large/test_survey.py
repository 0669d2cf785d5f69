"""What a machine says of itself."""

from pathlib import Path

import psutil

from node.large.survey import PROBE, parsed, shoal_version, survey


def test_nvidia_smi_is_read() -> None:
    said = "NVIDIA H200, 143771\nNVIDIA RTX 6000, Ada, 49140\n\nnonsense\nNVIDIA X, [N/A]\n"
    assert parsed(said) == (("NVIDIA H200", 143771 << 20), ("NVIDIA RTX 6000, Ada", 49140 << 20))
    assert parsed("") == ()


def test_a_machine_that_sees_all_and_one_that_does_not(tmp_path: Path) -> None:
    shared, model = tmp_path / "shared", tmp_path / "model"
    assert survey(str(shared), "abc", str(model)).trouble == (
        f"{shared} is not there, or not to be written (No such file or directory)"
    )
    shared.mkdir()
    (shared / f"{PROBE}abc").write_text("another")
    assert survey(str(shared), "abc", str(model)).trouble == f"{shared} there is another directory"
    (shared / f"{PROBE}abc").write_text("abc")
    assert survey(str(shared), "abc", str(model)).trouble == f"the model's directory {model} is not there"
    model.mkdir()
    (model / "config.json").write_text("{}")
    found = survey(str(shared), "abc", str(model))
    assert (found.trouble, found.shoal, found.memory) == ("", shoal_version(), psutil.virtual_memory().total)
    assert (shared / f"{PROBE}abc-answer").read_text() == "abc"
