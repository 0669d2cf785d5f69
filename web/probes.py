"""What container health checks and Prometheus ask. The words of readiness, and the text format of metrics."""

from collections.abc import Mapping
from typing import Any

WHILE_PAUSED = frozenset({"PAUSED", "IDLE", "STOPPING"})

HELP = {
    "shoal_clip_fraction": "Share of tokens whose ratio was clipped in the last update",
    "shoal_entropy": "Mean entropy of the policy in the last update, nats per token",
    "shoal_ess": "Effective sample size of the importance weights in the last update, as a share",
    "shoal_exchange_trouble_total": "What the exchange dropped, put off or could not store, by the counter's name",
    "shoal_grad_norm": "Gradient norm of the last update before clipping",
    "shoal_groups_admitted_total": "Foreign groups that passed every rule",
    "shoal_groups_fetched_total": "Foreign groups pulled from peers",
    "shoal_groups_published_total": "Own groups announced to the swarm",
    "shoal_groups_rejected_total": "Announcements, groups and answers of peers refused, by reason",
    "shoal_held_out": "Mean held-out score of the last evaluation",
    "shoal_kl_behaviour": "KL from behaviour policy to policy in the last update",
    "shoal_kl_teacher": "Reverse KL from policy to teacher per token in the last update, where there is a teacher",
    "shoal_last_step_age_seconds": "Seconds since the last finished step",
    "shoal_loss": "Loss of the last update",
    "shoal_max_mismatch": "Largest difference of log-prob between engine and trainer in the last update",
    "shoal_members": "Members on the coordinator's list, where there is a coordinator",
    "shoal_network_bytes_in_total": "Bytes received from peers",
    "shoal_network_bytes_out_total": "Bytes sent to peers",
    "shoal_network_dropped_events_total": "Transport events dropped because a queue was full",
    "shoal_network_dropped_publishes_total": "Announcements dropped because a queue was full",
    "shoal_peers": "Connected peers",
    "shoal_resident_bytes": "Resident memory of the daemon",
    "shoal_policy_skipped_total": "Versions not published because the one before was still being written",
    "shoal_policy_version": "Version of the policy that is published for followers, or followed",
    "shoal_reward": "Mean reward of the last step",
    "shoal_round": "Number of the coordinator's present round, where there is a coordinator",
    "shoal_scorer_answers_total": "Answers scored, of this node and of its peers",
    "shoal_scorer_failures_total": "Answers whose scoring crashed or missed its deadline; they score 0",
    "shoal_scorer_restarts_total": "Times the process that scores was started anew",
    "shoal_scorer_turned_away_total": "Foreign groups not scored because too many waited for it",
    "shoal_stage_seconds": "Seconds spent in each stage of the current step",
    "shoal_step": "Updates done",
    "shoal_tokens_per_second": "Sampled tokens per second in the last step",
    "shoal_trained_followers_total": "Of them, those that followers sampled with this node's policy",
    "shoal_trained_foreign_total": "Foreign groups used in updates",
    "shoal_trainer_bytes": "Memory of the trainer after the last update, by kind",
    "shoal_up": "1 unless the node has failed",
    "shoal_held": "1 where training is held, by whom",
    "shoal_uptime_seconds": "Seconds since the daemon started",
}


EXCHANGE_TROUBLE = (
    "dropped_announcements",
    "dropped_outbox",
    "dropped_provides",
    "dropped_wanted",
    "put_off",
    "store_errors",
    "turned_away",
)
"""Counters among `groups` of the status; they are 0 where all is well, or nearly."""


def trouble(groups: Mapping[str, Any]) -> dict[str, float]:
    """Samples of what went wrong in the exchange, from `groups` of the status."""
    return {
        f'shoal_exchange_trouble_total{{reason="{name}"}}': float(groups[name])
        for name in EXCHANGE_TROUBLE
        if name in groups
    }


def readiness(status: Mapping[str, Any]) -> list[str]:
    """Why the node does not work as it should; empty when it does.

    A node that starts or resumes is given as long as a step may take; one that is paused or has done all its steps is
    well however long ago it stepped.
    """
    state = status["state"]
    if state == "FAILED":
        return [f"failed: {status['reason']}"]
    if status.get("held_by") == "disk":  # a person's pause and quiet hours are as they should be, this is not
        return [f"training is held: {status['reason']}"]
    if state in WHILE_PAUSED:
        return []
    age, deadline = status["last_step_age"], status["step_deadline"]
    if age is None:
        age = status["uptime"]
    if age <= deadline:
        return []
    held = f"no step for {age:.0f} s, the deadline is {deadline:.0f} s"
    doing = f"stage {status['stage']} for {status['stage_seconds']:.0f} s"
    return [f"{held}; {state.lower()}, {doing}" + (f": {status['reason']}" if status["reason"] else "")]


def prometheus(samples: Mapping[str, float]) -> str:
    """Text exposition format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats).

    `samples`: full name with labels -> value. Samples of one metric are put together, as the format wants it;
    a name on `_total` is a counter, every other one a gauge.
    """
    families: dict[str, list[str]] = {}
    for full_name, value in samples.items():
        name = full_name.partition("{")[0]
        families.setdefault(name, []).append(f"{full_name} {number(value)}")
    lines = []
    for name, family in sorted(families.items()):
        lines.append(f"# HELP {name} {HELP.get(name, name.removeprefix('shoal_').replace('_', ' '))}")
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += family
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """As Go reads it: +Inf, -Inf, NaN; whole numbers without a point."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
