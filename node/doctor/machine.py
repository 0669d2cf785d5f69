"""Checks of what computes: Python, torch's build against the GPU, the model, its memory, and vLLM.

torch and transformers are imported inside, so that what is quick is told before they are there.
"""

import http.client
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from node.config import Config
from node.doctor.finding import PROBE_SECONDS, Finding, Subject, fail, failed, ok, warn
from node.home import models_dir

if TYPE_CHECKING:
    from node.hardware import EngineChoice

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Where there is an NVIDIA driver there is one of them (the last one under WSL)."""
CUDA_BUILD = "install a CUDA build of torch (docs/operations.md), or set model.device to cpu"
ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
VERSION_SECONDS = 10.0
"""Deadline for the Python of a vllm program to say its version."""
ENDPOINTS = {"/collective_rpc": "VLLM_SERVER_DEV_MODE=1", "/pause": "VLLM_SERVER_DEV_MODE=1"}
"""What a vLLM server elsewhere needs, and what it must be started with to have it (node/engines/vllm_probe.py)."""
GB = 1 << 30


def wanted(package: str) -> SpecifierSet:
    """Versions of a package that this Shoal is made for, from its own metadata."""
    for line in requires("shoal") or ():
        requirement = Requirement(line)
        if requirement.name == package:
            return requirement.specifier
    return SpecifierSet()


def python(_subject: Subject) -> list[Finding]:
    need, have = SpecifierSet(metadata("shoal")["Requires-Python"]), platform.python_version()
    said = f"Python {have} on {platform.system()} {platform.machine()}"
    if not need.contains(have, prereleases=True):
        return [fail("python", said, f"install Shoal with Python {need}")]
    return [ok("python", said)]


def torch_build(_subject: Subject) -> list[Finding]:
    """Version and kind of build. The first check that imports torch and transformers, for all after it."""
    import torch

    import node.hardware  # noqa: F401

    need = wanted("torch")
    kind = "CPU build"
    if torch.version.cuda:
        kind = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        kind = f"ROCm {torch.version.hip}"
    said = f"torch {torch.__version__} ({kind}), transformers {version('transformers')}"
    if not need.contains(str(torch.__version__).partition("+")[0], prereleases=True):
        return [fail("torch", said, f"this Shoal needs torch{need}: pip install 'torch{need}'")]
    return [ok("torch", said)]


def device(subject: Subject) -> list[Finding]:
    """Whether torch sees the GPU, and has code for it: else the first kernel fails, minutes into a start."""
    import torch

    if subject.config.model.device == "cpu":
        return [ok("device", f"CPU, {psutil.cpu_count(logical=False) or 1} cores (model.device = cpu)")]
    driver = next((file for file in DRIVER_FILES if file.exists()), None)
    if not torch.cuda.is_available():
        if subject.config.model.device != "auto":
            return [
                fail(
                    "device",
                    f"model.device = {subject.config.model.device}, and torch sees no GPU{_why()}",
                    CUDA_BUILD if torch.version.cuda is None else "update the driver, or set model.device = cpu",
                )
            ]
        if driver is not None and torch.version.cuda is None and torch.version.hip is None:
            return [
                warn("device", f"an NVIDIA driver is here ({driver}), but this torch is built for CPUs", CUDA_BUILD)
            ]
        if driver is not None and torch.version.cuda is not None:
            return [
                warn(
                    "device",
                    f"an NVIDIA driver is here ({driver}), but torch sees no GPU{_why()}",
                    f"update the driver to one for CUDA {torch.version.cuda}; in a container: give it the GPU",
                )
            ]
        return [ok("device", f"CPU, {psutil.cpu_count(logical=False) or 1} cores: there is no GPU")]
    if torch.version.hip is not None:
        return [ok("device", f"{torch.cuda.get_device_name(0)} (ROCm: whether torch has code for it is not checked)")]
    built = torch.cuda.get_arch_list()
    return [
        _gpu(i, torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i), built)
        for i in range(torch.cuda.device_count())
    ]


def _why() -> str:
    """What torch says of it when asked to start CUDA."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f": {str(error).splitlines()[0]}"
    return ""


def _gpu(index: int, name: str, capability: tuple[int, int], built: Sequence[str]) -> Finding:
    said = f"cuda:{index} {name}, compute capability {capability[0]}.{capability[1]}; torch has {' '.join(built)}"
    match code_for(capability, built):
        case "binary":
            return ok("device", said)
        case "ptx":
            return warn(
                "device",
                f"{said}: no code for it, only PTX that the driver translates at every first start",
                "install a newer torch, one that is built for this GPU",
            )
        case _:
            return fail(
                "device",
                f"{said}: nothing of that runs on it",
                f"install a torch with sm_{capability[0]}{capability[1]}, or set model.device to cpu",
            )


def code_for(capability: tuple[int, int], built: Sequence[str]) -> str | None:
    """'binary', 'ptx' or None: what of a torch build runs on a GPU.

    Code for X.Y runs on X.Z with Z >= Y, PTX is translated for anything newer; of a suffix, `a` is for that very chip
    and `f` for its family (CUDA C++ Programming Guide, compute capabilities).
    """
    found = None
    for architecture in built:
        match = ARCHITECTURE.fullmatch(architecture)
        if match is None:
            continue
        kind, of = match[1], (int(match[2]), int(match[3]))
        fits = of[0] == capability[0] and of[1] <= capability[1] if kind == "sm" or match[4] else of <= capability
        if match[4] == "a":
            fits = of == capability
        if fits and kind == "sm":
            return "binary"
        if fits:
            found = "ptx"
    return found


def local_model(config: Config) -> Path | None:
    """Directory of the model, where it is on this machine: the embedded one may not have been converted yet."""
    from node.models import EMBEDDED, embedded_target

    if config.model.path != EMBEDDED:
        return Path(config.model.path).expanduser()
    target = embedded_target(models_dir())
    return target if target.is_dir() else None


def shape_of_checkpoint(config: Config, directory: Path) -> int:
    """Bytes that the trainer writes: what it trains in 32 bits, and the optimizer's moments. Raises ModelError."""
    from node.memory_plan import MOMENT_BYTES
    from node.model_shape import model_shape

    shape = model_shape(directory)
    trained = shape.adapters(config.train) if config.train.lora_rank else shape.parameters
    return trained * (4 + MOMENT_BYTES[config.train.optimizer])


def model(subject: Subject) -> list[Finding]:
    """Whether the model's files are there, of a kind that is known, with tokenizer and chat template."""
    from node.models import ModelError, check_model

    try:
        directory = local_model(subject.config)
        if directory is None:
            return [
                warn(
                    "model",
                    f"the embedded model is not converted yet (540 MB into {models_dir()})",
                    "shoal model prepare, or the first start does it",
                )
            ]
        kind = check_model(directory)
    except ModelError as error:
        return [failed("model", error)]
    return [ok("model", f"{directory} ({kind}), with tokenizer and chat template")]


def memory(subject: Subject) -> list[Finding]:
    """Whether model, optimizer, gradients and keys and values fit, with the sum that a start would refuse by."""
    from node.models import ModelError
    from node.preflight import prepare

    try:
        if local_model(subject.config) is None:
            return [ok("memory", "not checked: the model is not here yet")]
        setup = prepare(subject.config, models_dir())
    except ModelError as error:
        return [failed("memory", error)]
    free = psutil.virtual_memory().available
    if not setup.machine.gpus and subject.status is None and setup.plan.total > free:
        return [
            warn(
                "memory",
                f"{setup.plan}; only {free / GB:.1f} GB are free now",
                "end what else takes memory before shoal up",
            )
        ]
    return [ok("memory", str(setup.plan))]


def vllm(subject: Subject) -> list[Finding]:
    """The server at engine.url, or the program; nothing where another engine samples."""
    from node.hardware import choose_engine, look

    engine, need = subject.config.engine, wanted("vllm")
    seen = look(subject.config)
    choice = choose_engine(subject.config, seen)
    if choice.name != "vllm":
        return [_not_used(choice, bool(seen.gpus) and subject.config.rollout.engine == "auto")]
    if engine.url:
        return [_server(url, need) for url in (engine.url, *engine.others)]
    program = shutil.which(engine.command)
    if program is None:
        return [
            fail(
                "vllm",
                f"{choice.why}, but there is no program '{engine.command}'",
                f"pip install 'vllm{need}' in an environment of its own and set engine.command to its vllm",
            )
        ]
    have = _version_of(Path(program))
    if have is None:
        return [warn("vllm", f"{program}: its version cannot be told", f"see that it is vllm{need}")]
    return [_judge(f"{program} is vLLM {have}", have, need)]


def _not_used(choice: "EngineChoice", could: bool) -> Finding:
    why, _, fix = choice.why.partition("; ")
    return warn("vllm", why, fix) if could else ok("vllm", f"not used: {choice.why}")


def _judge(said: str, have: str, need: SpecifierSet) -> Finding:
    if not need.contains(have.partition("+")[0], prereleases=True):
        return fail("vllm", f"{said}; this Shoal speaks to vllm{need}", f"pip install 'vllm{need}' there")
    return ok("vllm", said)


def _version_of(program: Path) -> str | None:
    """Version of the vllm package beside a vllm program, asked of the program's own Python; None: not told.

    `vllm --version` would import torch and take half a minute.
    """
    with program.open("rb") as script:
        line = script.readline(4096).decode(errors="replace").strip()
    if not line.startswith("#!") or "python" not in line:
        return None
    question = "from importlib.metadata import version; print(version('vllm'))"
    try:
        asked = subprocess.run(
            [*line[2:].split(), "-I", "-c", question], capture_output=True, text=True, timeout=VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def _server(url: str, need: SpecifierSet) -> Finding:
    """A server elsewhere: well, of the right version, and with the control endpoints."""
    start = "start it (docs/operations.md, The engine), or correct engine.url"
    try:
        status, _ = _ask(url, "/health")
        if status != 200:
            return fail("vllm", f"{url}/health answers {status}", start)
        _, answer = _ask(url, "/version")
        have = str(json.loads(answer)["version"])
        missing = [flag for path, flag in ENDPOINTS.items() if _ask(url, path)[0] == 404]
        if _ask(url, "/inference/v1/generate")[0] == 404 and _ask(url, "/v1/completions")[0] == 404:
            missing.append("--enable-scale-out")
    except (OSError, http.client.HTTPException) as error:
        return fail("vllm", f"no answer from {url} ({error})", start)
    except (ValueError, KeyError, TypeError):
        return fail("vllm", f"{url}/version names no version: is it vLLM?", start)
    if missing:
        return fail(
            "vllm",
            f"the vLLM server {have} at {url} cannot take new weights or sample for a trainer",
            f"start it with {', '.join(dict.fromkeys(missing))}",
        )
    return _judge(f"the server at {url} is vLLM {have}, and well", have, need)


def _ask(url: str, path: str) -> tuple[int, bytes]:
    """GET; (status, at most 64 KB of the answer)."""
    where = urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", where.path.rstrip("/") + path)
        response = connection.getresponse()
        return response.status, response.read(1 << 16)
    finally:
        connection.close()
