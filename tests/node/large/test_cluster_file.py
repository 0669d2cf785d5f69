"""Cluster files: what they say, and every wrong one named with key, limit and fix."""

from pathlib import Path

import pytest

from node.config import Config
from node.large.cluster_file import ClusterFileError, check_settings, overrides, read_cluster

GOOD = """
layout = "mixed"
shared = "/mnt/shoal"
[ray]
address = "10.0.0.1:6379"
start_seconds = 60
[trainer]
workers = 4
[engines]
number = 3
gpus = 2
args = ["--max-num-seqs=64"]
[rewards]
workers = 8
cpus = 0.5
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, GOOD))
    assert (cluster.layout, cluster.shared, cluster.ray.address) == ("mixed", "/mnt/shoal", "10.0.0.1:6379")
    assert (cluster.trainer.workers, cluster.trainer.gpus, cluster.trainer.cpus) == (4, 1, 1.0)
    assert (cluster.engines.number, cluster.engines.gpus, cluster.engines.args) == (3, 2, ("--max-num-seqs=64",))
    assert (cluster.rewards.workers, cluster.rewards.cpus, cluster.rewards.in_flight) == (8, 0.5, 2)
    assert overrides(cluster, {}) == {"train.shards": "4", "rollout.engine": "vllm"}


def test_the_shortest_file(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, "[trainer]\nworkers = 1\n[engines]\nnumber = 1\n"))
    assert (cluster.layout, cluster.ray.address, cluster.rewards.workers) == ("auto", "auto", 0)


TRAINER, ENGINES = "[trainer]\nworkers = 4\n", "[engines]\nnumber = 2\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"trainer is missing \(and 1 more\) ; add that section"),
        (
            f"[trainer]\n{ENGINES}",
            r"trainer.workers is missing ; set it to a whole number at least 1, at most 64: proc",
        ),
        (
            f"[trainer]\nworkers = 0\n{ENGINES}",
            r"trainer.workers = 0: .* greater than or equal to 1 ; set it to a whole",
        ),
        (f"[trainer]\nworkers = 65\n{ENGINES}", r"trainer.workers = 65: .* less than or equal to 64"),
        (f'[trainer]\nworkers = "4"\n{ENGINES}', r"trainer.workers = '4': input should be a valid integer"),
        (f"[trainer]\nworkers = true\n{ENGINES}", r"trainer.workers = True: input should be a valid integer"),
        (
            f"[trainer]\nworkers = 4\ngpus = 2\n{ENGINES}",
            r"trainer.gpus = 2: input should be 0 or 1 ; set it to one of 0, 1",
        ),
        (f"[trainer]\nworkers = 4\ncpus = inf\n{ENGINES}", r"trainer.cpus = inf"),
        (f"{TRAINER}worker = 4\n{ENGINES}", r"unknown key trainer.worker ; did you mean trainer.workers\?"),
        (f"{TRAINER}{ENGINES}[engine]\nnumber = 1\n", r"unknown key engine ; did you mean engines"),
        (
            f"layout = 'best'\n{TRAINER}{ENGINES}",
            r"layout = 'best': .* ; set it to one of auto, disjoint, mixed, coloc",
        ),
        (f"shared = 'here'\n{TRAINER}{ENGINES}", r"shared = 'here': .* no absolute path"),
        (f"{TRAINER}{ENGINES}[ray]\naddress = 'nowhere'\n", r"ray.address = 'nowhere': 'nowhere' is none of auto"),
        (f"{TRAINER}{ENGINES}[ray]\naddress = 'a:99999'\n", r"ray.address = 'a:99999'"),
        (f"[trainer]\nworkers = 4\ngpus = 0\n{ENGINES}", r"trainer.gpus = 0 and engines.gpus = 1: .* ; set both to 0"),
        (
            "layout = 'colocated'\n[trainer]\nworkers = 2\ngpus = 0\n[engines]\nnumber = 1\ngpus = 0\n",
            r"layout = colocated is about GPUs .* ; set layout to auto",
        ),
        (
            f"layout = 'colocated'\n{TRAINER}[engines]\nnumber = 1\ngpus = 8\n",
            r"engines of 8 GPUs share those of 4 tra",
        ),
        ("trainer = 3\nengines = 4\n", r"trainer = 3 is no section \(and 1 more\) ; write \[trainer\], and its keys"),
        (f"shared = '/a\\u0000b'\n{TRAINER}{ENGINES}".replace("'", '"'), r"shared = '/a\\x00b': .* holds a nul"),
        (f"[trainer]\nworkers = {'9' * 5000}\n{ENGINES}", "has a number of thousands of digits"),
        (f"[trainer]\nworkers = 0x{'f' * 5000}\n{ENGINES}", r"trainer.workers = something endless: .* equal to 64"),
        (f"trainer = {'[' * 5000}{']' * 5000}", "has lists in lists without end"),
        ("[trainer", r"is not valid TOML: .* ; correct that line"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ClusterFileError, match=said):
        read_cluster(written(tmp_path, text))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "nothing")
    (tmp_path / "large").write_bytes(b"#" * 70_000)
    with pytest.raises(ClusterFileError, match="has 70000 bytes, and a cluster file at most 65536"):
        read_cluster(tmp_path / "large")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterFileError, match="is not UTF-8 text"):
        read_cluster(tmp_path / "binary")


def test_a_flag_against_it(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, GOOD))
    assert overrides(cluster, {"train.shards": "4", "swarm.join": "x"})["train.shards"] == "4"
    with pytest.raises(ClusterFileError, match=r"--set train.shards=2 is against the cluster file, by which it is 4"):
        overrides(cluster, {"train.shards": "2"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": {"url": "http://10.0.0.5:8000"}}, "engine.url names a server, .* set engine.url to nothing"),
        ({"engine": {"gpus": "1,2"}}, "engine.gpus names GPUs of one machine, .* set engine.gpus to nothing"),
        ({"engine": {"weights_dir": "/mnt/weights"}}, "engine.weights_dir is not where engines look, which `shared`"),
        ({"engine": {"transfer": "nccl"}}, "engine.transfer is not files"),
        ({"train": {"lora_rank": 8}}, "train.lora_rank trains adapters"),
        ({"train": {"optimizer": "adamw8bit"}}, "train.optimizer keeps moments"),
        ({"train": {"distill_teacher": "/models/big"}}, "train.distill_teacher is a model in"),
        ({"averaging": {"method": "diloco"}, "rollout": {"engine": "transformers"}}, "averaging.method averages"),
    ],
)
def test_settings_that_a_large_node_cannot_have(settings: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(ClusterFileError, match=said):
        check_settings(Config.model_validate(settings))
    check_settings(Config.model_validate({"train": {"distill_teacher": "http://10.0.0.5:8000"}}))
