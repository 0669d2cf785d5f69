"""A plan of a large node in words: what there is, what went where and why, and what to change where it does not fit."""

from collections.abc import Iterator, Sequence

from node.large.cluster_file import Cluster
from node.large.room import GB, Bundle, Host, Layout, Needs


def of_gpus(gpus: int) -> str:
    return "" if not gpus else "1 GPU, " if gpus == 1 else f"{gpus} GPUs, "


def said_of(hosts: Sequence[Host], needs: Needs) -> str:
    machines = f"{len(hosts)} machine{'s' if len(hosts) != 1 else ''}"
    if not needs.on_gpu:
        cpus = sum(host.cpus for host in hosts)
        memory = sum(host.memory for host in hosts)
        return f"Ray offers {cpus:g} CPUs and {memory / GB:.1f} GB of memory on {machines}."
    kinds = sorted({f"{host.gpu_name or 'GPU'} of {_gb(host.gpu_bytes)}" for host in hosts if host.gpus})
    gpus = sum(host.gpus for host in hosts)
    return f"Ray offers {gpus} GPUs ({' and '.join(kinds) or 'none'}) on {machines}."


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB" if size else "unknown memory"


def said_of_trainer(trainer: Sequence[Bundle], cluster: Cluster, needs: Needs, layout: Layout) -> str:
    need = needs.trainer if layout == "disjoint" else needs.shared
    place = "its GPU" if needs.on_gpu else "its machine"
    return (
        f"{needs.model} is trained by {cluster.trainer.workers} workers on {_where(trainer)}, each with "
        f"{need.bytes / GB:.1f} GB of {place} ({need.said})."
    )


def said_of_engines(engines: Sequence[Bundle], cluster: Cluster, needs: Needs) -> str:
    own = [bundle for bundle in engines if not bundle.shares]
    shared = [bundle for bundle in engines if bundle.shares]
    said = []
    if own:
        said.append(
            f"{len(own)} with {of_gpus(cluster.engines.gpus) or 'CPUs '}of {'its' if len(own) == 1 else 'their'} own "
            f"on {_where(own)}"
        )
    if shared:
        said.append(f"{len(shared)} on the trainer's GPUs on {_where(shared)}, asleep while it trains")
    return (
        f"{cluster.engines.number} vLLM engine{'s' if cluster.engines.number != 1 else ''}: {' and '.join(said)}; each "
        f"device holds {needs.engine.bytes / GB:.1f} GB at least ({needs.engine.said})."
    )


def said_of_rewards(rewards: Sequence[Bundle]) -> Iterator[str]:
    if rewards:
        yield f"{len(rewards)} reward workers on {_where(rewards)}."


def said_of_layout(layout: Layout, cluster: Cluster, refused: Sequence[str]) -> str:
    if cluster.layout != "auto":
        return f"{layout}, as layout says."
    if cluster.trainer.gpus == 0:
        return "disjoint, because nothing shares a GPU."
    reason = {
        "disjoint": "everything has devices of its own, so that engines sample while the trainer works",
        "mixed": "there are GPUs for some of the engines, which sample while the trainer works",
        "colocated": "there are no GPUs besides the trainer's",
    }[layout]
    return f"{layout}, because {reason}" + (f" (not {'; not '.join(refused)})." if refused else ".")


def _where(bundles: Sequence[Bundle]) -> str:
    hosts = list(dict.fromkeys(bundle.host for bundle in bundles))
    counts = [sum(bundle.host == host for bundle in bundles) for host in hosts]
    if len(hosts) == 1:
        return hosts[0]
    return ", ".join(f"{host} ({count})" for host, count in zip(hosts, counts, strict=True))


def fix(hosts: Sequence[Host], cluster: Cluster, needs: Needs) -> str:
    """What to change, with the number that would do where one number does it."""
    if not hosts:
        return "start Ray on some machine: ray start --head"
    of_cpus = _fix_of_cpus(hosts, cluster)
    if not needs.on_gpu:
        fewer = "lower trainer.workers, engines.number or the cpus of parts, or use a smaller model"
        return f"{of_cpus or fewer}; or add machines to Ray"
    largest = max((host.gpu_bytes for host in hosts if host.gpus), default=0)
    if largest and needs.trainer.bytes > largest:
        return (
            f"raise trainer.workers, as each holds less the more there are: a worker's "
            f"{needs.trainer.bytes / GB:.1f} GB are more than the {largest / GB:.1f} GB of a GPU; or use another model"
        )
    if largest and needs.engine.bytes > largest:
        return f"raise engines.gpus: {needs.engine.bytes / GB:.1f} GB on each GPU are more than {largest / GB:.1f} GB"
    short = [of_cpus] if of_cpus else []
    gpus = sum(host.gpus for host in hosts)
    wanted = cluster.trainer.workers + cluster.engines.number * cluster.engines.gpus
    auto = "" if cluster.layout == "auto" else ", set layout to auto"
    if wanted > gpus:
        short.append(
            f"lower trainer.workers or engines.number{auto}: disjoint takes {wanted} GPUs, and there are {gpus}"
        )
    if not short:
        short.append(
            f"lower engines.gpus, or the numbers or cpus of parts{auto}: no machine has enough GPUs and CPUs left"
        )
    return f"{'; '.join(short)}; or add machines to Ray"


def _fix_of_cpus(hosts: Sequence[Host], cluster: Cluster) -> str:
    """What to change where all machines together have too few CPUs; empty: they have enough."""
    trainer, engines, rewards = cluster.trainer, cluster.engines, cluster.rewards
    there = sum(host.cpus for host in hosts)
    wanted = trainer.workers * trainer.cpus + engines.number * engines.cpus + rewards.workers * rewards.cpus
    if wanted <= there:
        return ""
    keys = "rewards.workers, rewards.cpus, trainer.cpus" if rewards.workers else "trainer.cpus"
    return f"lower {keys} or engines.cpus: all parts take {wanted:g} CPUs, and there are {there:g}"
