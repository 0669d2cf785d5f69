"""Makes the engine that was chosen (node/hardware.py)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from node.config import Config
from node.device import Device
from node.engines.transformers import TransformersEngine
from node.engines.vllm import VllmEngine
from node.engines.vllm_adapters import LORA_VARIABLES, AdapterTransfer, lora_arguments
from node.engines.vllm_client import LINE_BYTES, Address, VllmClient
from node.engines.vllm_probe import EngineSetupError
from node.engines.vllm_server import ServerPlan, VllmServer
from node.engines.vllm_transfer import FileTransfer, NcclTransfer, WeightTransfer
from node.engines.vllm_upkeep import Upkeep
from node.engines.vllm_weights import WeightFiles
from node.hardware import Machine, sleeps
from node.memory_plan import gpu_share
from node.models import ModelBundle
from node.preflight import Setup
from node.routing import longest_field
from node.training.files import save_model

UNTIED = '{"tie_word_embeddings": false}'


def make_engine(
    setup: Setup,
    config: Config,
    bundle: ModelBundle,
    device: Device,
    *,
    home: Path,
    peer_id: str,
    say: Callable[[str], None],
    number: int = 0,
    alone: bool = True,
) -> TransformersEngine | VllmEngine:
    """The engine, not started yet. `say` is told what it waits for; `number` tells apart those of one node.

    Raises EngineSetupError.
    """
    machine, choice, bundle = setup.machine, setup.choice, as_sampled(bundle, config)
    if choice.name == "transformers":
        return TransformersEngine(bundle, device, drafting=config.rollout.drafting == "auto")
    engine, sleep = config.engine, sleeps(config, choice, machine)
    if engine.transfer == "nccl" and (choice.shared_gpu or not machine.gpus):
        raise EngineSetupError(
            "engine.transfer = nccl sends weights from one GPU to another, and vLLM has none of its own here; "
            "set engine.gpus to GPUs that the trainer does not use, or engine.transfer to files"
        )
    if engine.quantization != "none" and not engine.url and not machine.gpus:
        raise EngineSetupError(
            f"engine.quantization = {engine.quantization} needs a GPU, and there is none; set engine.quantization to "
            "none, or engine.url to a server that has one"
        )
    server = None
    if not engine.url:
        if not machine.vllm:
            raise EngineSetupError(
                f"rollout.engine is vllm, and there is no program '{engine.command}'; pip install vllm, set "
                "engine.command to its path, or engine.url to a running server"
            )
        share = gpu_share(config, setup.plan, choice)
        server = VllmServer(server_plan(config, bundle, machine, share=share, sleep=sleep, home=home))
    root = Path(engine.weights_dir).expanduser().absolute() / peer_id[-12:] if engine.weights_dir else home / "weights"
    if number:
        root = root.with_name(f"{root.name}-{number}")
    transfer = make_transfer(config, bundle, device, machine, root)
    address = server.address if server is not None else Address(engine.url)
    client = client_of(address, bundle)
    return VllmEngine(
        Upkeep(client, bundle, device, transfer, engine, server=server, sleep=sleep, say=say, alone=alone)
    )


def client_of(address: Address, bundle: ModelBundle) -> VllmClient:
    """A client of a server of this model, which reads lines as long as its choices of experts may be."""
    return VllmClient(address, LINE_BYTES + (longest_field(bundle.routing, bundle.context) if bundle.routing else 0))


def share_device(device: Device, engines: Sequence[TransformersEngine | VllmEngine]) -> None:
    """Have servers that take memory of the device give it back before each of its jobs."""
    served = [engine for engine in engines if isinstance(engine, VllmEngine)]

    async def rest() -> None:
        for engine in served:
            await engine.rest()

    if served:
        device.make_room = rest


def as_sampled(bundle: ModelBundle, config: Config) -> ModelBundle:
    """The model as an engine has it: without routers to note the choices of where nobody repeats them."""
    return bundle if config.train.routing_replay != "off" else dataclasses.replace(bundle, routing=None)


def make_transfer(config: Config, bundle: ModelBundle, device: Device, machine: Machine, root: Path) -> WeightTransfer:
    """How the server gets what is trained; `root` is where it is written."""
    if config.train.lora_rank:
        return AdapterTransfer(root, device, bundle, config)
    files = WeightFiles(root, functools.partial(export_weights, bundle, untied=unties(bundle, machine)))
    return NcclTransfer(files, device, bundle) if config.engine.transfer == "nccl" else FileTransfer(files, device)


def make_engines(
    setup: Setup,
    config: Config,
    bundle: ModelBundle,
    device: Device,
    *,
    home: Path,
    peer_id: str,
    say: Callable[[str], None],
) -> list[TransformersEngine | VllmEngine]:
    """The engine, or one for each of `engine.url` and `engine.others`. Raises EngineSetupError."""
    engines = []
    for number, url in enumerate((config.engine.url, *config.engine.others)):
        engine = config.engine.model_copy(update={"url": url, "others": ()})
        theirs = config.model_copy(update={"engine": engine})
        made = make_engine(
            setup,
            theirs,
            bundle,
            device,
            home=home,
            peer_id=peer_id,
            say=say,
            number=number,
            alone=not config.engine.others,
        )
        engines.append(made)
    return engines


def unties(bundle: ModelBundle, machine: Machine) -> bool:
    """Whether the output layer goes to the server as weights of its own.

    On a CPU vLLM keeps a packed copy of it, which a reload does not renew where it is tied to the embedding: the server
    would go on with the old one, without a word (seen with 0.32.0; on a GPU both are one tensor).
    """
    return not machine.gpus and bool(bundle.model.config.tie_word_embeddings)


def export_weights(bundle: ModelBundle, directory: Path, *, untied: bool) -> None:
    """Write the model for a server, in the compute type: what the trainer computes with, and half of 32-bit weights."""
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, parameter in bundle.model.named_parameters(remove_duplicate=not untied):
        # files of tensors cannot share memory
        weights[name] = parameter.detach().clone() if id(parameter) in seen else parameter
        seen.add(id(parameter))
    save_model(bundle, weights, directory)


def server_plan(
    config: Config, bundle: ModelBundle, machine: Machine, *, share: float, sleep: bool, home: Path
) -> ServerPlan:
    """Arguments and environment of a server of our own, for the hardware it runs on."""
    engine = config.engine
    arguments = [
        "--served-model-name=shoal",
        f"--dtype={str(bundle.model.dtype).removeprefix('torch.')}",
        f"--max-model-len={engine.context or bundle.context}",
        "--enable-scale-out",
        "--logprobs-mode=raw_logprobs",
        "--generation-config=vllm",
        "--disable-uvicorn-access-log",
    ]
    variables: list[tuple[str, str]] = []
    if config.train.lora_rank:
        arguments += lora_arguments(config)
        variables += LORA_VARIABLES
    if engine.quantization != "none":
        arguments.append(f"--quantization={engine.quantization}")
    if machine.gpus:
        arguments.append(f"--gpu-memory-utilization={share:.3f}")
        variables.append(("CUDA_VISIBLE_DEVICES", engine.gpus or config.model.device.partition(":")[2] or "0"))
        if len(engine.gpus.split(",")) > 1:
            arguments.append(f"--tensor-parallel-size={len(engine.gpus.split(','))}")
        if sleep:
            arguments.append("--enable-sleep-mode")
        if bundle.routing is not None:
            arguments.append("--enable-return-routed-experts")
        if engine.transfer == "nccl":
            arguments.append('--weight-transfer-config={"backend":"nccl"}')
    else:
        # compiled mode compiles at every start; its threads spin, and bound to cores they would hold up the trainer
        arguments.append("--enforce-eager")
        if unties(bundle, machine) and not config.train.lora_rank:
            arguments.append(f"--hf-overrides={UNTIED}")
        threads = str(config.node.threads or torch.get_num_threads())
        variables += [
            ("VLLM_CPU_KVCACHE_SPACE", str(engine.cache_gb)),
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            ("OMP_NUM_THREADS", threads),
        ]
    return ServerPlan(machine.vllm, (*arguments, *engine.args), tuple(variables), home / "logs" / "vllm.log")
