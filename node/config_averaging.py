"""Settings of averaging with nodes of the same model (DiLoCo): docs/operations.md."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from node.config_types import Averagers, Decay, Section, listened

ROUND_SLACK = 30.0
"""Seconds over `averaging.timeout` in which a round is given up for sure: a stage that ends first ends the node."""


class AveragingConfig(Section):
    method: Literal["none", "diloco"] = Field(
        "none", description="diloco: average weights with nodes of the same model; it trusts them with a share of yours"
    )
    every: int = Field(50, ge=1, description="H, steps between two rounds")
    outer_learning_rate: float = Field(0.7, gt=0, le=2, description="of the outer optimizer")
    outer_momentum: Decay = Field(0.9, description="Nesterov momentum of the outer optimizer")
    min_peers: int = Field(2, ge=2, le=8, description="nodes that make a round, this one counted")
    max_norm: float = Field(
        3.0, gt=0, le=1000, description="how many times as far as the own weights those of a peer may have moved"
    )
    robust: Literal["none", "median", "trimmed"] = Field(
        "none",
        description="what is taken of each weight's values: the mean, the median, the mean without the outer ones",
    )
    timeout: float = Field(120.0, ge=10, le=3600, description="seconds of a round: half to find others, half to fetch")
    listen: Annotated[str, AfterValidator(listened)] = Field(
        "/ip4/0.0.0.0/tcp/0", description="multiaddr that other nodes' averagers reach this one at"
    )
    peers: Averagers = Field((), description="multiaddrs of other averagers; the events of a node say its own")

    @model_validator(mode="after")
    def enough_for_robust(self) -> "AveragingConfig":
        if self.robust != "none" and self.min_peers < 3:
            raise ValueError(
                f"robust = {self.robust} is the plain mean of two values; set averaging.min_peers to at least 3, or "
                "averaging.robust to none"
            )
        return self
