"""Makes the parts of a training node from its settings: model, trainer, engines, exchange, and what a step needs."""

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from node.averaging import make_averaging
from node.checkpoint import CheckpointStore
from node.device import use_threads
from node.engines.agreement import check_agreement
from node.engines.choose import make_engines, share_device
from node.engines.transformers import TransformersEngine
from node.engines.vllm import VllmEngine
from node.engines.vllm_client import Address, VllmClient
from node.engines.vllm_probe import wait_until_healthy
from node.home import models_dir
from node.loop import Loop
from node.memory import share_gpu
from node.models import ModelBundle, ModelError, device_of, load_model
from node.parts import Parts, model_mark
from node.preflight import Setup, prepare
from node.rescore import Rescorer
from node.rollouts import prompts
from node.scheduling.own import schedule
from node.scorer import Scorer
from node.training.choose import make_trainer, place_of_model
from node.training.distill import load_teacher
from node.training.sharded import ShardedTrainer
from protocol.assignment import held_out_task
from protocol.manifest import Manifest
from swarm.exchange import POOL_TARGET, Exchange
from swarm.sampler import Sampler

if TYPE_CHECKING:
    from node.daemon import Daemon


async def wait_for_server(node: "Daemon") -> None:
    """Where a vLLM server runs elsewhere: wait for it before anything of this node takes memory of the GPU.

    It measures what it may take while it starts, and fails where that changes meanwhile. Raises Unreachable.
    """
    engine = node.config.engine
    if not engine.url or node.config.rollout.engine == "transformers" or node.large is not None:
        return
    client = VllmClient(Address(engine.url))
    try:
        async with node.progress.during("engine"):
            await wait_until_healthy(client, engine.start_seconds, node.starting)
    finally:
        await client.close()


async def start_engines(
    node: "Daemon", engines: Sequence[TransformersEngine | VllmEngine], parts: Parts, loop: Loop
) -> None:
    """Have them serve these weights, all at once, and see that each computes what the trainer does."""
    served = [engine for engine in engines if isinstance(engine, VllmEngine)]
    if served:
        async with node.progress.during("engine"):
            await asyncio.gather(*(engine.start() for engine in served))
    prompts_of_each = await _check_prompts(parts)

    async def check(engine: TransformersEngine | VllmEngine) -> None:
        node.progress.say("STARTING", "checking that engine and trainer give the same log-probabilities")
        facts = engine.facts if isinstance(engine, VllmEngine) else None
        async with node.progress.during("agreement check"):
            await check_agreement(
                engine,
                parts.trainer,
                node.device,
                prompts_of_each,
                dtypes=[str(parts.bundle.model.dtype).removeprefix("torch."), *(facts.computes_in if facts else ())],
                routing=parts.bundle.routing,
            )

    for engine in engines:
        await loop.outlast(functools.partial(check, engine))


def _load(node: "Daemon") -> tuple[Setup | None, ModelBundle]:
    """What was decided of this machine, None where Ray's machines do the work, and the model."""
    use_threads(node.config.node.threads)
    model = node.config.model
    share_gpu(device_of(model.device), node.config.limits.gpu_memory_share)
    if node.large is not None:  # new weights pass through here only
        setup, device, dtype = None, "cpu", str(node.large.planned.dtype).removeprefix("torch.")
    else:
        setup = prepare(node.config, models_dir())
        device, dtype = place_of_model(node.config, setup)
    return setup, load_model(model.path, device=device, dtype=dtype, models=models_dir())


async def make_parts(
    node: "Daemon", manifest: Manifest, scorer: Scorer
) -> tuple[Sequence[TransformersEngine | VllmEngine], Parts]:
    config = node.config
    starting = asyncio.create_task(scorer.start())  # its imports take as long as loading a model does
    try:
        setup, bundle = await node.device.run(_load, node)
        await starting
    finally:
        starting.cancel()
    large = node.large
    if setup is not None:
        choice = setup.choice
    else:
        assert large is not None
        choice = large.choice
    node.bundle, node.engine = bundle, choice.why
    node.history.event("info", "engine", node.engine)
    trainer = node.trainer = await node.device.run(
        functools.partial(make_trainer, bundle, config, node.home, seconds=lambda: node.progress.deadline, large=large)
    )
    if isinstance(trainer, ShardedTrainer):
        node.history.event("info", "trainer", f"training on {config.train.shards} workers: {trainer.workers}")
    if config.averaging.method != "none" and choice.name != "transformers":
        raise ModelError(
            f"averaging.method = {config.averaging.method} changes weights between two steps, which a vLLM server "
            "would not get; set rollout.engine to transformers, or averaging.method to none"
        )
    averaging = await node.device.run(
        functools.partial(
            make_averaging,
            trainer,
            config,
            node.home,
            node.history,
            mark=model_mark(bundle),
            manifest=manifest.digest,
            psk=node.home.swarm().psk,
            no_room=node.holding.no_room,
        )
    )
    engines: Sequence[TransformersEngine | VllmEngine]
    if setup is not None:
        engines = make_engines(
            setup, config, bundle, node.device, home=node.home.path, peer_id=node.identity.peer_id, say=node.starting
        )
    else:
        assert large is not None
        engines = large.engines(config, bundle, node.device, node.starting)
    share_device(node.device, engines)
    exchange = Exchange(
        node.transport,
        node.store,
        node.identity,
        manifest,
        Rescorer(bundle, scorer),
        node.clock,
        heal_seconds=config.network.heal_seconds,
        request_timeout=config.network.request_timeout,
        pool_target=0 if config.federation.follow else POOL_TARGET,
        seed=config.node.seed,
        on_event=lambda kind, message: node.history.event("info", kind, message),
        log_sync=node.rounds.sync if node.rounds else None,
        access=node.rounds.access if node.rounds else None,
    )
    return engines, Parts(
        config=config,
        manifest=manifest,
        peer_id=node.identity.peer_id,
        bundle=bundle,
        device=node.device,
        engine=schedule(config.rollout, engines),
        trainer=trainer,
        scorer=scorer,
        exchange=exchange,
        store=node.store,
        sampler=Sampler(config.node.seed),
        checkpoints=CheckpointStore(node.home.checkpoints, config.checkpoint.keep),
        history=node.history,
        progress=node.progress,
        clock=node.clock,
        teacher=await load_teacher(config, bundle, node.device),
        rounds=node.rounds,
        averaging=averaging,
        unreached=node.discovery.unreached,
    )


async def _check_prompts(parts: Parts) -> list[tuple[int, ...]]:
    """One held-out prompt of each environment, for the agreement check."""
    refs = [held_out_task(parts.manifest, spec.name, 0) for spec in parts.manifest.environments]
    return (await prompts(parts.bundle, parts.scorer, refs))[1]
