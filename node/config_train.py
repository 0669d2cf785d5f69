"""Settings of an update: what is trained, in how much memory, by which advantages, losses and corrections."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from node.config_types import Decay, Section, Texts, split_commas, teacher


class TrainConfig(Section):
    """Names, formulas and sources of the algorithms: docs/algorithms.md."""

    # what is trained, and in how much memory
    lora_rank: int = Field(0, ge=0, le=512, description="train adapters of this rank, and no weights; 0: all weights")
    lora_alpha: int = Field(32, ge=1, description="adapters count lora_alpha / lora_rank times")
    lora_targets: Texts = Field(
        ("all-linear",), description="linear layers that get adapters, like q_proj,v_proj; all-linear: all of them"
    )
    optimizer: Literal["adamw", "adamw8bit"] = Field(
        "adamw", description="adamw8bit: moments in 8 bits instead of 32, on a GPU, by bitsandbytes"
    )
    shards: int = Field(
        1, ge=1, le=64, description="devices that hold the model together, each with a worker process of its own"
    )
    backend: Literal["fsdp", "megatron"] = Field(
        "fsdp", description="how shards hold the model: rows of every layer, or as Megatron-core divides it"
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="shards that divide each layer between them, by megatron")
    pipeline_parallel: int = Field(1, ge=1, le=64, description="stages that divide the layers, by megatron")
    expert_parallel: int = Field(1, ge=1, le=64, description="shards that divide the experts of a layer, by megatron")
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto", description="compute layers again on the way back, to keep less; auto: once memory runs out"
    )

    # the optimizer, and how a batch becomes its steps
    learning_rate: float = Field(3e-5, gt=0, le=1, description="AdamW peak learning rate")
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(split_commas)] = Field((0.9, 0.95), description="AdamW betas")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    warmup_steps: int = Field(5, ge=0, description="linear warm-up, in steps")
    decay_after: int = Field(
        10, ge=0, description="step from which the learning rate falls with 1/sqrt(step); 0: it does not"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping by global norm")
    routing_replay: Literal["auto", "on", "off"] = Field(
        "auto", description="train with the experts that the rollout chose; auto: where the model has experts"
    )
    tokens_per_micro_batch: int = Field(640, ge=64, description="token budget of one forward and backward")
    mini_batches: int = Field(1, ge=1, le=256, description="optimizer steps that a batch's groups are dealt to")
    passes: int = Field(1, ge=1, le=64, description="times a batch is gone through")

    # which groups an update is made of, and what their rewards become
    dynamic_rounds: int = Field(2, ge=0, le=64, description="rounds of more own tasks in place of uniform groups")
    overlong_buffer: int = Field(0, ge=0, description="last tokens of an answer's budget that cost reward; 0: none do")
    overlong_factor: float = Field(1.0, gt=0, description="what the whole overlong buffer costs")
    mask_truncated: bool = Field(False, description="do not train on completions that were cut off")
    curriculum_low: float = Field(0.0, ge=0, le=1, description="pass rate below which an environment is passed over")
    curriculum_high: float = Field(1.0, ge=0, le=1, description="pass rate above which an environment is passed over")

    # advantages
    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "gdpo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gae",
        "turn_gae",
        "bilevel_gae",
    ] = Field("grpo", description="advantage estimator; the gae ones train a critic")
    gamma: float = Field(1.0, gt=0, le=1, description="discount from token to token of reinforce_pp and gae")
    turn_gamma: float = Field(1.0, gt=0, le=1, description="discount from turn to turn of turn_gae and bilevel_gae")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="lambda of gae, turn_gae and bilevel_gae")
    gdpo_parts: Texts = Field(("reward", "parsed"), description="reward components of gdpo")
    critic_learning_rate: float = Field(0.02, gt=0, le=1, description="about how far a value moves in one step")
    critic_clip: float = Field(0.2, gt=0, description="how far a value may get from the one before the update")

    # losses
    loss: Literal["dapo", "ppo", "gspo", "cispo", "soft_gate", "gmpo", "gpg", "reinforce"] = Field(
        "dapo", description="policy loss"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of dapo and ppo, distance from 1")
    clip_high: float = Field(0.28, gt=0, description="upper clip of dapo and ppo, distance from 1")
    dual_clip: float = Field(3.0, gt=1, description="dual clip c for negative advantages")
    gspo_clip_low: float = Field(3e-4, gt=0, lt=1, description="lower clip of gspo's sequence ratio, distance from 1")
    gspo_clip_high: float = Field(4e-4, gt=0, description="upper clip of gspo's sequence ratio, distance from 1")
    cispo_clip_low: float = Field(1.0, ge=0, le=1, description="lower clip of cispo's weight, distance from 1")
    cispo_clip_high: float = Field(4.0, gt=0, description="upper clip of cispo's weight, distance from 1")
    soft_gate_positive: float = Field(1.0, gt=0, description="temperature tau of soft_gate where the advantage is > 0")
    soft_gate_negative: float = Field(1.05, gt=0, description="temperature tau of soft_gate elsewhere")
    gmpo_clip_low: float = Field(0.4, gt=0, description="lower clip of gmpo's log-ratio, distance from 0")
    gmpo_clip_high: float = Field(0.4, gt=0, description="upper clip of gmpo's log-ratio, distance from 0")
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "seq-mean-token-mean", description="how token losses become one number"
    )
    aggregation_constant: float = Field(1024.0, gt=0, description="divisor of seq-mean-token-sum-norm")
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus")

    # corrections
    correction: Literal["none", "tis", "tis-sequence", "icepop", "mis", "mis-sequence", "mis-geometric"] = Field(
        "tis", description="rollout-training mismatch correction"
    )
    tis_cap: float = Field(2.0, ge=1, description="C of truncated importance sampling")
    icepop_low: float = Field(0.5, ge=0, le=1, description="alpha of icepop: smallest ratio that is kept")
    icepop_high: float = Field(5.0, ge=1, description="beta of icepop: largest ratio that is kept")
    mis_low: float = Field(0.5, ge=0, le=1, description="smallest ratio that mis keeps")
    mis_high: float = Field(2.0, ge=1, description="largest ratio that mis keeps")
    mis_veto: float = Field(1e-4, ge=0, lt=1, description="token ratio below which mis drops the whole completion")
    opsm_delta: float = Field(0.0, ge=0, description="off-policy sequence masking beyond this drift; 0: off")
    foreign_negatives: Literal["full", "truncated"] = Field(
        "full", description="truncated: TOPR's weight min(ratio, 1) for foreign tokens of negative advantage"
    )

    # a teacher
    distill_teacher: Annotated[str, AfterValidator(teacher)] = Field(
        "",
        description="model to learn from besides rewards: a directory, 'embedded', a vLLM server's URL, or "
        "peer:PEER_ID of a node with federation.teach; empty: none",
    )
    distill_coefficient: float = Field(1.0, gt=0, description="weight of the reverse KL to the teacher")

    # the reference
    kl_coefficient: float = Field(
        0.0, ge=0, description="weight of KL to the frozen reference; 0: no reference is kept"
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = Field("k3", description="KL estimator")
    kl_in: Literal["loss", "reward"] = Field("loss", description="where the KL counts")

    @property
    def trained(self) -> str:
        """What weights and optimizer state a run has, in words: it cannot change from one step to another."""
        if not self.lora_rank:
            return f"{self.optimizer} on all weights"
        targets = ",".join(self.lora_targets)
        return f"{self.optimizer} on adapters of rank {self.lora_rank} and alpha {self.lora_alpha} in {targets}"

    @property
    def critic(self) -> bool:
        """Whether the advantages need a critic."""
        return self.advantage in ("gae", "turn_gae", "bilevel_gae")

    @property
    def loss_has_ratio(self) -> bool:
        """Whether the loss weighs a token by the policy's ratio to what it was before the step."""
        return self.loss not in ("reinforce", "gpg")

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    @property
    def looks_first(self) -> bool:
        """Whether an update starts with a pass that changes nothing: for old log-probabilities, values or the KL."""
        return self.passes * self.mini_batches > 1 or self.critic or self.kl_in_reward

    @model_validator(mode="after")
    def combinations(self) -> "TrainConfig":
        by_token = ("reinforce_pp", "gae", "turn_gae", "bilevel_gae")
        others = "grpo, dr_grpo, rloo, opo, gdpo, reinforce_pp_baseline"
        if self.curriculum_low > self.curriculum_high:
            raise ValueError(
                f"train.curriculum_low = {self.curriculum_low:g} is above train.curriculum_high = "
                f"{self.curriculum_high:g}: no pass rate is in between; set it to at most {self.curriculum_high:g}"
            )
        if self.shards > 1 and self.lora_rank:
            raise ValueError(
                f"train.shards = {self.shards} shares out whole weights, and train.lora_rank trains adapters only, "
                "which fit one device; set train.shards to 1, or train.lora_rank to 0"
            )
        if self.shards > 1 and self.optimizer != "adamw":
            raise ValueError(
                f"train.shards = {self.shards} shares out moments of 32 bits, and train.optimizer = {self.optimizer} "
                "keeps them in 8; set train.optimizer to adamw, or train.shards to 1"
            )
        self._check_division()
        if self.loss == "gmpo" and self.advantage in by_token:
            raise ValueError(
                f"train.loss = gmpo takes one advantage for a whole completion, which {self.advantage} does not give; "
                f"set train.advantage to one of {others}, or train.loss to one of dapo, ppo, gspo, cispo, soft_gate, "
                "gpg, reinforce"
            )
        if self.kl_in_reward and self.advantage not in by_token:
            raise ValueError(
                f"train.kl_in = reward puts the KL on single tokens, which {self.advantage} does not see; "
                f"set train.advantage to one of {', '.join(by_token)}, or train.kl_in to loss"
            )
        return self

    def _check_division(self) -> None:
        parts = {
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "expert_parallel": self.expert_parallel,
        }
        if self.backend == "fsdp":
            for name, count in parts.items():
                if count > 1:
                    raise ValueError(
                        f"train.{name} = {count} is Megatron's, and train.backend is fsdp; set train.backend to "
                        f"megatron, or train.{name} to 1"
                    )
            return
        product = self.tensor_parallel * self.pipeline_parallel * self.expert_parallel
        if self.shards == 1 or self.shards % product:
            raise ValueError(
                f"train.backend = megatron divides a model over train.shards = {self.shards} devices, and "
                f"{' x '.join(f'{name} = {count}' for name, count in parts.items())} is {product}; set train.shards to "
                f"a multiple of {product}, and to 2 or more"
            )


TRAIN_AT_START = frozenset(
    {
        "lora_rank",
        "lora_alpha",
        "lora_targets",
        "optimizer",
        "shards",
        "backend",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "routing_replay",
        "distill_teacher",
        "kl_coefficient",
    }
)
"""What is trained, by how many processes, what else is in memory for it (a teacher, the reference), and what the engine
must send along."""
