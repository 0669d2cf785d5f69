"""A manifest in plain sentences, for people who are asked to join by it."""

from protocol.manifest import Manifest


def in_sentences(manifest: Manifest, *, private: bool) -> list[str]:
    """What the swarm practises, how, and what each node holds the others to."""
    caps = manifest.caps
    share = {spec.name: spec.weight / manifest.total_weight for spec in manifest.environments}
    practised = ", ".join(f"{name} ({part:.0%})" for name, part in share.items())
    longest = max(spec.max_tokens or caps.max_tokens_per_completion for spec in manifest.environments)
    words = [
        f"The swarm {manifest.name} practises {counted(len(share), 'kind')} of task: {practised}.",
        f"An epoch lasts {duration(manifest.epoch_seconds)}. In each, a node has "
        f"{counted(manifest.slots_per_epoch, 'task')} of its own"
        + (
            f" and {counted(manifest.shared_slots, 'task')} that every node has."
            if manifest.shared_slots
            else ", and none that every node has."
        ),
        f"An answer has at most {longest:,} tokens, "
        f"and a group at most {counted(caps.max_completions, 'answer')} and {size(caps.max_group_bytes)}.",
        f"A group is worth training on for {duration(caps.group_ttl_seconds)}. One peer makes up at most "
        f"{caps.max_producer_share:.0%} of what a node learns from others.",
        "Every node makes the tasks itself and scores every answer again: a claimed reward that is off by more than "
        f"{caps.reward_tolerance:g} is refused.",
    ]
    if manifest.coordinators:
        words.append(
            "A coordinator sets the pace and the mix of tasks, and scores members on tasks that nobody knew before. It "
            "decides nothing about groups: those every node checks itself."
        )
    if manifest.listed_only:
        words.append("Only members that the coordinator let in take part.")
    if private:
        words.append("It is private: only who has an invite can connect, so the invite is a secret.")
    else:
        words.append("It is open: whoever has the address of a member can take part.")
    return words


def counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            return counted(round(seconds / unit), name)
    return counted(round(seconds), "second")


def size(number: int) -> str:
    return f"{number >> 20} MB" if number >= 1 << 20 else f"{number >> 10} KB"
