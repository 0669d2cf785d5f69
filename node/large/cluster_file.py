"""`cluster.toml`: what a large node wants of a Ray cluster. It is read once, at a start (`shoal up --large FILE`)."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from node.config import Config
from node.config_types import PEER, Arguments, Section
from node.settings import ConfigError, allowed

MAX_BYTES = 64 << 10
HOST_AND_PORT = re.compile(r"[^\s:/\[\]]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


class ClusterFileError(ConfigError):
    """A cluster file cannot be read, or asks for what cannot be; names file, key, limit and fix."""


def reachable(text: str) -> str:
    if text not in ("auto", "local") and not (
        HOST_AND_PORT.fullmatch(text) and 0 < int(text.rpartition(":")[2]) <= 65535
    ):
        raise ValueError(f"{text!r} is none of auto, local and host:port")
    return text


def absolute(text: str) -> str:
    if text and not Path(text).is_absolute():
        raise ValueError(f"{text!r} is no absolute path, and so not the same on every machine")
    if "\0" in text:
        raise ValueError(f"{text!r} holds a NUL, which no path can")
    return text


Count = Annotated[int, Field(strict=True)]
Cpus = Annotated[float, Field(strict=True, gt=0, le=4096)]


class RaySection(Section):
    address: Annotated[str, AfterValidator(reachable)] = Field(
        "auto", description="auto: the Ray that runs on this machine; local: one just for this node; or host:port"
    )
    start_seconds: float = Field(
        300.0, strict=True, gt=0, le=86400, description="deadline for Ray to answer, and to make room for the parts"
    )


class TrainerSection(Section):
    workers: Count = Field(ge=1, le=64, description="processes that hold the model together (train.shards)")
    gpus: Literal[0, 1] = Field(1, description="GPUs of each; 0: it computes on the CPU")
    cpus: Cpus = Field(1.0, description="processors of each")


class EnginesSection(Section):
    number: Count = Field(ge=1, le=64, description="vLLM servers")
    gpus: Count = Field(1, ge=0, le=64, description="GPUs of each, on one machine; 0: it computes on the CPU")
    cpus: Cpus = Field(1.0, description="processors of each")
    command: str = Field("", description="the vllm program on those machines; empty: engine.command")
    args: Arguments = Field((), description="more arguments for it, after engine.args (--key=value)")


class RewardsSection(Section):
    workers: Count = Field(0, ge=0, le=1024, description="scorers besides the loop; 0: one, in a process of the node")
    cpus: Cpus = Field(1.0, description="processors of each")
    in_flight: Count = Field(
        2, ge=1, le=64, description="chunks of at most 64 answers that each has at a time, at most"
    )


class Cluster(Section):
    """All of a cluster file."""

    layout: Literal["auto", "disjoint", "mixed", "colocated"] = Field(
        "auto", description="whether engines have GPUs of their own, some of them, or share the trainer's; auto: see"
    )
    shared: Annotated[str, AfterValidator(absolute)] = Field(
        "",
        description="directory that all machines see at the same path, for weights and logs; empty: the node's home",
    )
    ray: RaySection = RaySection()
    trainer: TrainerSection
    engines: EnginesSection
    rewards: RewardsSection = RewardsSection()

    @model_validator(mode="after")
    def same_kind(self) -> "Cluster":
        if (self.trainer.gpus == 0) != (self.engines.gpus == 0):
            raise ValueError(
                f"trainer.gpus = {self.trainer.gpus} and engines.gpus = {self.engines.gpus}: one of them computes on "
                "GPUs and the other one does not; set both to 0, or neither"
            )
        if self.trainer.gpus == 0 and self.layout not in ("auto", "disjoint"):
            raise ValueError(
                f"layout = {self.layout} is about GPUs that two parts share, and trainer.gpus is 0; set layout to auto"
            )
        if self.layout in ("mixed", "colocated") and self.engines.gpus > self.trainer.workers:
            raise ValueError(
                f"layout = {self.layout} has engines of {self.engines.gpus} GPUs share those of "
                f"{self.trainer.workers} trainer workers, which are fewer; lower engines.gpus, or set layout to auto"
            )
        return self


def read_cluster(path: Path) -> Cluster:
    """The cluster file. Raises ClusterFileError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ClusterFileError(
                f"{path} has {path.stat().st_size} bytes, and a cluster file at most {MAX_BYTES} ; give the right file"
            )
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ClusterFileError(f"{path} cannot be read: {error.strerror} ; see docs/operations.md, Ray") from error
    except tomllib.TOMLDecodeError as error:
        raise ClusterFileError(f"{path} is not valid TOML: {error} ; correct that line") from error
    except UnicodeDecodeError as error:
        raise ClusterFileError(f"{path} is not UTF-8 text: {error} ; save it as UTF-8") from error
    except ValueError as error:  # the parser's type is another one
        raise ClusterFileError(f"{path} has a number of thousands of digits ; see docs/operations.md, Ray") from error
    except RecursionError as error:
        raise ClusterFileError(f"{path} has lists in lists without end ; see docs/operations.md, Ray") from error
    try:
        return Cluster.model_validate(content)
    except ValidationError as error:
        raise ClusterFileError(f"{path}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    """The first thing wrong: key, value, what is allowed."""
    first, *more = error.errors()
    others = f" (and {len(more)} more)" if more else ""
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _keys(Cluster), 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(_keys(Cluster))}"
        return f"unknown key {key[:100]}{others} ; {hint}"
    field, value = _field(key), _shown(first["input"])
    if first["type"] == "model_type":
        return f"{key} = {value} is no section{others} ; write [{key}], and its keys in the lines below it"
    if first["type"] == "missing":
        wanted = f"set it to {allowed(field)}: {field.description}" if field else "add that section"
        return f"{key} is missing{others} ; {wanted}"
    if field is not None:
        said = first["msg"].removeprefix("Value error, ").lower()
        return f"{key} = {value}: {said}{others} ; set it to {allowed(field)}: {field.description}"
    what, _, fix = first["msg"].removeprefix("Value error, ").partition("; ")
    return f"{key}{': ' if key else ''}{what}{others} ; {fix or 'see docs/operations.md, Ray'}"


def _shown(value: object) -> str:
    try:
        return repr(value)[:100]
    except (ValueError, RecursionError):
        return "something endless"  # a number in hexadecimal may have any number of digits


def _keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            keys += _keys(inner, f"{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _field(key: str) -> Any:
    """The field of a key with a value, None for a section."""
    section: Any = Cluster
    *sections, name = key.split(".")
    for part in sections:
        field = section.model_fields.get(part)
        section = field.annotation if field else None
        if not (isinstance(section, type) and issubclass(section, Section)):
            return None
    field = section.model_fields.get(name)
    return None if field is None or key not in _keys(Cluster) else field


def overrides(cluster: Cluster, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a node that follow from its cluster file, as flags. Raises ClusterFileError against other flags."""
    follow = {"train.shards": str(cluster.trainer.workers), "rollout.engine": "vllm"}
    for key, value in follow.items():
        if flags.get(key, value) != value:
            raise ClusterFileError(
                f"flag --set {key}={flags[key]} is against the cluster file, by which it is {value} ; leave one of them"
            )
    return follow


def check_settings(config: Config) -> None:
    """Raises ClusterFileError for settings that a large node cannot have."""
    engine, teacher = config.engine, config.train.distill_teacher
    for key, wrong, why, fix in (
        ("engine.url", engine.url, "names a server, and Ray places engines itself", "nothing"),
        ("engine.gpus", engine.gpus, "names GPUs of one machine, and Ray gives engines theirs", "nothing"),
        ("engine.weights_dir", engine.weights_dir, "is not where engines look, which `shared` says", "nothing"),
        ("engine.transfer", engine.transfer != "files", "is not files, and engines get files", "files"),
        ("train.lora_rank", config.train.lora_rank, "trains adapters, which fit one device", "0"),
        ("train.optimizer", config.train.optimizer != "adamw", "keeps moments of 8 bits", "adamw"),
        (
            "train.distill_teacher",
            teacher and not teacher.startswith(("http://", "https://", PEER)),
            "is a model in the node's own process",
            "a vLLM server's URL, peer:PEER_ID, or nothing",
        ),
        ("federation.teach", config.federation.teach, "computes in the node's own process", "false"),
        ("federation.follow", config.federation.follow, "has the node train nothing", "nothing"),
        ("averaging.method", config.averaging.method != "none", "averages weights of one process", "none"),
    ):
        if wrong:
            raise ClusterFileError(f"{key} {why}, which is not for a node of `--large` ; set {key} to {fix}")
