"""The embedded model without two layers: a model of its own that answers."""

import pytest
import torch

from node.home import models_dir
from node.models import load_model
from node.smaller import LEFT_OUT, NAME, smaller_model, without


def test_layers_are_left_out_and_the_others_numbered_anew() -> None:
    weights = {f"model.layers.{i}.w": torch.full((2,), float(i)) for i in range(5)} | {
        "model.norm.weight": torch.ones(2)
    }
    left = without(weights, (1, 3))
    assert {name: float(tensor[0]) for name, tensor in left.items()} == {
        "model.layers.0.w": 0.0, "model.layers.1.w": 2.0, "model.layers.2.w": 4.0, "model.norm.weight": 1.0,
    }  # fmt: skip


@pytest.mark.slow
def test_the_smaller_model_is_another_one_of_the_same_language() -> None:
    models = models_dir()
    directory = smaller_model(models)
    assert (directory.name, smaller_model(models)) == (NAME, directory)
    bundle = load_model(str(directory), device="cpu", dtype="float32", models=models)
    whole = load_model("embedded", device="cpu", dtype="float32", models=models)
    assert len(bundle.model.model.layers) == len(whole.model.model.layers) - len(LEFT_OUT)
    assert bundle.fingerprint == whole.fingerprint
    ids = torch.tensor([whole.tokenizer.encode("The capital of France is Paris, and that of Italy is")])
    with torch.no_grad():
        answers = [one.model(ids).logits[0, -1].argmax() for one in (bundle, whole)]
    assert [whole.tokenizer.decode([int(answer)]) for answer in answers] == [" Rome", " Rome"]
