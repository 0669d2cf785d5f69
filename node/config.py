"""Every setting of a node, with its default, limits and help. Sources and precedence: `node.settings`.

Defaults here are the ones measured best on the embedded model (docs/results.md).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from node.config_averaging import ROUND_SLACK, AveragingConfig
from node.config_train import TRAIN_AT_START, TrainConfig
from node.config_types import Arguments, Kbps, Multiaddrs, Peers, Section, Texts, listened, quiet, signing_peer


class NodeConfig(Section):
    name: str = Field("", max_length=64, description="a name for people; empty: derived from the peer id")
    seed: int = Field(0, ge=0, lt=2**63, description="seeds sampling, the sampler and the held-out set")
    threads: int = Field(0, ge=0, le=1024, description="torch threads; 0: all physical cores")


class ModelConfig(Section):
    path: str = Field("embedded", description="'embedded' (SmolLM2-135M-Instruct) or a local model directory")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="where the model lives")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute type; auto: bfloat16 where the device has units for it, else float32"
    )


class RolloutConfig(Section):
    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="what samples completions; auto: vllm where there is a GPU and vLLM, or engine.url is set"
    )
    group_size: int = Field(8, ge=2, le=256, description="G, completions per task")
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")
    max_new_tokens: int = Field(0, ge=0, le=131072, description="cap per completion; 0: the task's own budget")
    drafting: Literal["auto", "off"] = Field(
        "auto", description="guess at next tokens from siblings' answers; transformers; auto: where it pays"
    )

    # which groups make up a step (node/scheduling/rounds.py)
    policy: Literal["synchronous", "partial", "tail", "asynchronous"] = Field(
        "synchronous",
        description="wait for all; keep the unfinished for later; give them a step of their own; never wait",
    )
    over_provision: float = Field(1.5, ge=1, le=8, description="groups in flight per group of a step; not synchronous")
    max_staleness: int = Field(1, ge=0, le=64, description="versions a token may be behind; partial, asynchronous")
    window: int = Field(0, ge=0, le=65536, description="groups that may overtake the oldest one; 0: staleness decides")

    # how samples go to engines that take them at any time (node/scheduler.py)
    dispatch: Literal["whole", "longest-first", "divided"] = Field(
        "whole", description="whole groups at once; samples, the longest first; the same, a chunk at a time"
    )
    concurrency: int = Field(64, ge=0, le=65536, description="samples in flight per engine, if not whole; 0: all")
    chunk_tokens: int = Field(2048, ge=16, le=131072, description="tokens of a chunk of divided samples")
    kv_tokens: int = Field(0, ge=0, description="tokens an engine has memory for, if divided; 0: its own concern")


class EngineConfig(Section):
    """Of the vllm engine; transformers has nothing to set."""

    url: str = Field(
        "", pattern=r"^(https?://[^\s/]+(/\S*)?)?$", description="a running vLLM server; empty: the node starts one"
    )
    others: Texts = Field((), description="more vLLM servers like the one at engine.url, to share the rollouts")
    command: str = Field("vllm", min_length=1, description="the vllm program that the node starts")
    args: Arguments = Field((), description="more arguments for it (--key=value)")
    gpus: str = Field("", pattern=r"^(\d+(,\d+)*)?$", description="GPUs for it, like 1 or 1,2; empty: the trainer's")
    gpu_share: float = Field(0.0, ge=0, lt=1, description="share of GPU memory it may take; 0: what the trainer leaves")
    cache_gb: int = Field(1, ge=1, le=4096, description="memory for its keys and values, on a CPU")
    context: int = Field(0, ge=0, description="longest prompt and answer together, in tokens; 0: the model's")
    concurrency: int = Field(256, ge=1, le=16384, description="samples in flight at most")
    sleep: Literal["auto", "on", "off"] = Field(
        "auto", description="give its GPU memory back while the trainer works; auto: where both share a GPU"
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="what it computes rollouts in; fp8: faster on GPUs that have it, and corrected by train.correction",
    )
    transfer: Literal["files", "nccl"] = Field("files", description="how it gets new weights")
    weights_dir: str = Field("", description="where weights are written, a path that a server elsewhere sees too")
    start_seconds: float = Field(480.0, gt=0, description="deadline for it to answer after a start")
    update_seconds: float = Field(300.0, gt=0, description="deadline for it to take new weights")
    stall_seconds: float = Field(180.0, gt=0, description="how long it may sample without any token")

    @model_validator(mode="after")
    def first_of_several(self) -> "EngineConfig":
        if self.others and not self.url:
            raise ValueError("engine.others are servers besides the one at engine.url; set engine.url to the first one")
        return self


class SwarmConfig(Section):
    own_groups: int = Field(4, ge=0, le=4096, description="I, own groups per update")
    foreign_groups: int = Field(4, ge=0, le=4096, description="J, foreign groups per update, as far as there are any")
    foreign_adaptive: bool = Field(False, description="lower J while the held-out score is below its best")
    foreign_ratio: Literal["self", "behaviour"] = Field("self", description="importance ratio of foreign tokens")
    max_group_uses: int = Field(3, ge=1, le=100, description="how often one foreign group may be trained on")
    max_producer_share: float = Field(
        1.0, gt=0, le=1, description="share of J that one producer may fill; the manifest may say less"
    )
    join: str = Field("", description="invite to join at start (shoal:...)")

    @model_validator(mode="after")
    def some_groups(self) -> "SwarmConfig":
        if self.own_groups + self.foreign_groups == 0:
            raise ValueError(
                "own_groups + foreign_groups is 0: nothing to train on; set swarm.own_groups to at least 1"
            )
        return self


class FederationConfig(Section):
    """Policies between nodes of the same base model: a leader publishes, followers sample for it."""

    publish: bool = Field(False, description="offer every version of this node's policy to followers")
    publish_every: int = Field(1, ge=1, le=10_000, description="updates between two published versions")
    whole_every: int = Field(
        16, ge=1, le=20, description="published versions between two wholes; the others are what changed only"
    )
    follow: Annotated[str, AfterValidator(signing_peer)] = Field(
        "",
        description="peer id of a leader of the same base model: take its policy, train nothing, send it groups",
    )
    poll_seconds: float = Field(2.0, ge=0.1, le=3600, description="how often a follower asks for a newer version")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="type of the published weights; the same at leader and followers"
    )
    staleness: int = Field(4, ge=0, le=16, description="published versions that a follower's group may be behind")
    spot_check: float = Field(
        0.1, ge=0, le=1, description="share of followers' groups whose log-probs are computed again before use"
    )
    teach: bool = Field(
        False, description="tell members what this node's policy thinks of their tokens (train.distill_teacher)"
    )
    teach_tokens: int = Field(
        200_000, ge=1000, le=10**9, description="tokens a minute that one peer may ask the teacher about"
    )

    @model_validator(mode="after")
    def one_side(self) -> "FederationConfig":
        if self.publish and self.follow:
            raise ValueError(
                "federation.publish and federation.follow are both set, and a follower has no policy of its own; set "
                "federation.publish to false, or federation.follow to nothing"
            )
        return self


class NetworkConfig(Section):
    listen: Annotated[str, AfterValidator(listened)] = Field(
        "/ip4/0.0.0.0/tcp/0",
        description="multiaddr to listen on; tcp/0: a free port, kept once chosen",
    )
    announce: Multiaddrs = Field((), description="multiaddrs to tell others, where the listen address is not reachable")
    bootstrap: Peers = Field((), description="multiaddrs to dial, besides those of the invite")
    heal_seconds: float = Field(15.0, ge=1, description="how often lost announcements are asked for")
    request_timeout: float = Field(20.0, gt=0, le=600, description="deadline of one stream request, in seconds")


class WebConfig(Section):
    host: str = Field("127.0.0.1", description="address of the API and the dashboard")
    port: int = Field(8420, ge=0, le=65535, description="port; 0: a free one")
    allowed_hosts: Texts = Field((), description="Host header values accepted besides the loopback names")


class EvalConfig(Section):
    every: int = Field(10, ge=0, description="steps between held-out evaluations; 0: only at the start")
    tasks: int = Field(32, ge=1, le=4096, description="held-out tasks per environment")
    samples: int = Field(1, ge=1, le=64, description="completions per held-out task")
    roll_back: bool = Field(
        True, description="go back to the best weights when two scores in a row are far below theirs"
    )


class CheckpointConfig(Section):
    every: int = Field(25, ge=1, description="steps between full checkpoints; every step is journalled besides")
    seconds: float = Field(600.0, gt=0, description="age of a checkpoint at which the next step writes another one")
    keep: int = Field(2, ge=1, le=100, description="full checkpoints kept, besides the best by held-out score")


class LimitsConfig(Section):
    store_mb: int = Field(512, ge=16, description="disk for experience, in MB")
    group_mb: int = Field(8, ge=1, le=64, description="largest group that a swarm's manifest may allow, in MB")
    stage_seconds: float = Field(600.0, gt=0, description="deadline of one stage of a step")
    scorer_seconds: float = Field(2.0, gt=0, le=60, description="deadline for scoring one answer")
    scorer_memory_mb: int = Field(1024, ge=256, le=1 << 20, description="memory of the scorer process")

    # what the node may take of the machine (node/holding.py, swarm/throttle.py)
    quiet_hours: Annotated[str, AfterValidator(quiet)] = Field(
        "",
        max_length=500,
        description="no training at these times: 22:00-08:00, or mon-fri 09:00-17:00,...; in the time zone of TZ, else "
        "of the machine, which in a container is UTC",
    )
    hours_per_day: float = Field(0.0, ge=0, le=24, description="hours of training on a calendar day; 0: no limit")
    upload_kbps: Kbps = Field(0, description="kbit/s to all peers together, at least 64; 0: no limit")
    download_kbps: Kbps = Field(0, description="kbit/s from all peers together, at least 64; 0: no limit")
    disk_mb: int = Field(0, ge=0, description="disk for the whole home, in MB; 0: no limit")
    gpu_memory_share: float = Field(
        0.0, ge=0, le=1, description="share of the GPU's memory that this process may take; 0: no limit"
    )


class CoordinatorConfig(Section):
    """Of `shoal coordinator up`; a node that trains has nothing to set here."""

    round_seconds: int = Field(900, ge=1, le=30 * 86400, description="how long a round is open at most")
    answer_seconds: int = Field(300, ge=1, le=86400, description="for members to answer its held-out tasks")
    least_members: int = Field(1, ge=1, le=4096, description="present members for a round to open")
    groups: int = Field(64, ge=0, description="groups after which a member is through with a round; 0: time only")
    quorum: float = Field(0.8, gt=0, le=1, description="share of present members that are through, to close early")
    tasks: int = Field(8, ge=1, le=256, description="held-out tasks of each environment")
    samples: int = Field(1, ge=1, le=16, description="completions of each held-out task")
    mix: Literal["measured", "manifest"] = Field(
        "measured", description="weights of environments: by measured pass rate, or the manifest's"
    )
    from_network: int = Field(
        16,
        ge=0,
        description="new members an hour from one network (/24, /48 of IPv6) into an open swarm; 0: any number",
    )
    patience: float = Field(30.0, gt=0, description="seconds of a leader's silence until a standby takes over")


AT_ONCE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "node": ("name",),
        "rollout": ("group_size", "temperature", "max_new_tokens"),
        "train": tuple(name for name in TrainConfig.model_fields if name not in TRAIN_AT_START),
        "swarm": tuple(name for name in SwarmConfig.model_fields if name != "join"),
        "federation": ("staleness", "spot_check"),
        "eval": tuple(EvalConfig.model_fields),
        "checkpoint": tuple(CheckpointConfig.model_fields),
        "limits": (
            "store_mb",
            "stage_seconds",
            "quiet_hours",
            "hours_per_day",
            "upload_kbps",
            "download_kbps",
            "disk_mb",
        ),
    }
)
"""Settings by section that a running node takes up, limits.* at once and the others with its next step. The rest holds
from the next start: parts that are made then depend on it."""


def applies(key: str) -> Literal["now", "restart"]:
    """When a change of 'section.key' holds for a running node."""
    section, name = key.split(".")
    return "now" if name in AT_ONCE.get(section, ()) else "restart"


class Config(Section):
    node: NodeConfig = NodeConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig()
    swarm: SwarmConfig = SwarmConfig()
    federation: FederationConfig = FederationConfig()
    network: NetworkConfig = NetworkConfig()
    web: WebConfig = WebConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    averaging: AveragingConfig = AveragingConfig()
    limits: LimitsConfig = LimitsConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()

    @model_validator(mode="after")
    def between_sections(self) -> "Config":
        if self.engine.quantization != "none" and self.train.correction == "none":
            raise ValueError(
                f"engine.quantization = {self.engine.quantization} samples from another distribution than the "
                "trainer's, and train.correction = none does not correct that; set train.correction to tis, or "
                "engine.quantization to none"
            )
        late = self.rollout.policy in ("partial", "asynchronous") and self.rollout.max_staleness > 0
        if late and self.train.correction == "none":
            raise ValueError(
                f"rollout.policy = {self.rollout.policy} trains on tokens of older versions, and train.correction = "
                "none does not correct that; set train.correction to tis, or rollout.policy to synchronous"
            )
        if self.train.shards > 1 and ":" in self.model.device:
            raise ValueError(
                f"train.shards = {self.train.shards} uses the first {self.train.shards} GPUs, and model.device = "
                f"{self.model.device} names one; set model.device to cuda or auto, or train.shards to 1"
            )
        if self.train.lora_rank and self.engine.transfer == "nccl":
            raise ValueError(
                "engine.transfer = nccl sends whole weights, and train.lora_rank trains adapters only; set "
                "engine.transfer to files"
            )
        if self.train.lora_rank and (self.federation.publish or self.federation.follow):
            raise ValueError(
                "federation.publish and federation.follow are for whole weights, and train.lora_rank trains adapters; "
                "set train.lora_rank to 0"
            )
        if self.federation.follow and self.train.shards > 1:
            raise ValueError(
                f"train.shards = {self.train.shards} is for training, and a node with federation.follow trains "
                "nothing; set train.shards to 1"
            )
        if self.federation.follow and self.rollout.policy != "synchronous":
            raise ValueError(
                f"rollout.policy = {self.rollout.policy} goes on with a sample under newer weights, and a follower's "
                "groups are of one version each; set rollout.policy to synchronous"
            )
        if self.rollout.policy == "asynchronous" and self.rollout.max_staleness == 0:
            raise ValueError(
                "rollout.policy = asynchronous samples while the trainer makes the next version, and "
                "rollout.max_staleness = 0 takes no token of an older one; set rollout.max_staleness to 2, or "
                "rollout.policy to synchronous"
            )
        if self.averaging.method != "none":
            self._check_averaging()
        return self

    def _check_averaging(self) -> None:
        if self.federation.publish or self.federation.follow:
            raise ValueError(
                f"averaging.method = {self.averaging.method} changes weights within a version, and federation.publish "
                "and federation.follow are about versions; set averaging.method to none, or these off"
            )
        for name, value, off in (("shards", self.train.shards, 1), ("lora_rank", self.train.lora_rank, 0)):
            if value != off:
                raise ValueError(
                    f"averaging.method = {self.averaging.method} averages whole weights of one process, and "
                    f"train.{name} is {value}; set train.{name} to {off}, or averaging.method to none"
                )
        if self.rollout.engine == "vllm":
            raise ValueError(
                f"averaging.method = {self.averaging.method} changes weights between two steps, which a vLLM server "
                "would not get; set rollout.engine to transformers, or averaging.method to none"
            )
        if self.averaging.timeout + ROUND_SLACK > self.limits.stage_seconds:
            raise ValueError(
                f"averaging.timeout = {self.averaging.timeout:g} and {ROUND_SLACK:g} s more are not within "
                f"limits.stage_seconds = {self.limits.stage_seconds:g}, the deadline of a stage; lower it"
            )
