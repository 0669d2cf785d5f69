"""Settings that are allowed together and hardly meant."""

from node.config import Config


def oddities(config: Config) -> list[str]:
    """What is allowed and hardly meant, for the log."""
    train, said = config.train, list[str]()
    if train.loss in ("gspo", "soft_gate", "gmpo") and train.aggregation != "seq-mean-token-mean":
        said.append(
            f"train.loss = {train.loss} is meant for train.aggregation = seq-mean-token-mean; "
            f"with {train.aggregation} long completions weigh otherwise"
        )
    if train.lora_rank and train.learning_rate < 1e-4:
        said.append(
            f"train.learning_rate = {train.learning_rate:g} is low for adapters: they learn best at about ten times "
            "the rate of whole weights"
        )
    if train.kl_in == "reward" and train.kl_coefficient == 0:
        said.append("train.kl_in = reward does nothing while train.kl_coefficient is 0")
    if train.kl_coefficient > 0 and train.kl_estimator == "k1" and train.kl_in == "loss":
        said.append("train.kl_estimator = k1 measures the KL and does not pull; k2, k3 and k3+ do")
    if config.rollout.temperature != 1:
        said.append(
            f"rollout.temperature = {config.rollout.temperature:g} samples from another distribution than the policy, "
            "whose log-probs are those at temperature 1: train.correction does not correct that"
        )
    if config.averaging.method != "none" and (config.limits.upload_kbps or config.limits.download_kbps):
        said.append(
            "limits.upload_kbps and limits.download_kbps do not hold for averaging, whose rounds send and fetch whole "
            "weights at the line's speed; raise averaging.every, or set averaging.method = none"
        )
    if config.federation.publish and config.swarm.foreign_groups == 0:
        said.append(
            "federation.publish gives followers the policy, and swarm.foreign_groups = 0 takes none of their groups; "
            "set it to as many as an update is to have"
        )
    if train.foreign_negatives == "truncated" and config.swarm.foreign_ratio == "self":
        if train.loss_has_ratio:
            said.append(
                "train.foreign_negatives = truncated does nothing without the producers' log-probs: train.loss = "
                f"{train.loss} has the ratio to the policy before the step itself; set swarm.foreign_ratio = behaviour"
            )
        elif train.passes * train.mini_batches == 1:
            said.append(
                "train.foreign_negatives = truncated does nothing: the ratio of foreign tokens is 1 in the first "
                "optimizer step; set swarm.foreign_ratio = behaviour, or train.passes over 1"
            )
    return said
