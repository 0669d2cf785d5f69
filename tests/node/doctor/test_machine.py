"""Torch against the GPU (by torch's own functions, answered for), the model, its memory, vLLM."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config import Config
from node.doctor import machine
from node.doctor.finding import Subject
from node.hardware import Gpu, Machine
from node.home import Home
from node.memory_plan import GB

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def of(home: Home, **sections: Any) -> Subject:
    return Subject(home, Config.model_validate(sections))


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), CUDA_13, "binary"),
        ((8, 9), CUDA_13, "binary"),  # by the code for 8.6
        ((12, 1), CUDA_13, "binary"),
        ((13, 0), CUDA_13, "ptx"),  # a GPU that is newer than the build
        ((6, 1), CUDA_13, None),  # one that the build has dropped
        ((7, 0), CUDA_13, None),  # 7.5's code does not run on it
        ((9, 0), ["sm_90a"], "binary"),
        ((9, 1), ["sm_90a", "compute_90a"], None),
        ((10, 3), ["sm_100f"], "binary"),
        ((11, 0), ["compute_100f"], None),
        ((9, 0), ["gfx942"], None),
        ((9, 0), [], None),
    ],
)
def test_what_of_a_build_runs_on_a_gpu(capability: tuple[int, int], built: list[str], runs: str | None) -> None:
    assert machine.code_for(capability, built) == runs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """A GPU of a compute capability under a CUDA build of torch."""

    def see(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Toy")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_13)

    return see


@pytest.mark.parametrize(
    ("capability", "verdict", "fix"),
    [((9, 0), "ok", ""), ((13, 0), "warn", "newer torch"), ((6, 1), "fail", "a torch with sm_61")],
)
def test_compute_capability(
    home: Home, gpu: Callable[[tuple[int, int]], None], capability: tuple[int, int], verdict: str, fix: str
) -> None:
    gpu(capability)
    (found,) = machine.device(of(home))
    assert (found.verdict, fix in found.fix) == (verdict, True)
    assert f"NVIDIA Toy, compute capability {capability[0]}.{capability[1]}; torch has sm_75" in found.said


def test_a_gpu_that_torch_does_not_see(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "DRIVER_FILES", (tmp_path / "driver",))
    assert "there is no GPU" in machine.device(of(home))[0].said
    assert machine.device(of(home, model={"device": "cuda"}))[0].verdict == "fail"
    (tmp_path / "driver").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    (cpu_build,) = machine.device(of(home))
    assert (cpu_build.verdict, "built for CPUs" in cpu_build.said) == ("warn", True)
    assert machine.device(of(home, model={"device": "cpu"}))[0].verdict == "ok"
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    (old,) = machine.device(of(home))
    assert old.said.endswith("is too old (found version 11040).")
    assert "CUDA 13.0" in old.fix


def test_versions(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.python(of(home))[0].verdict == "ok"
    assert machine.torch_build(of(home))[0].verdict == "ok"
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    (old,) = machine.torch_build(of(home))
    assert (old.verdict, "needs torch" in old.fix) == ("fail", True)


def test_model_and_memory(home: Home, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    node = of(home, model={"path": str(model), "dtype": "float32"})
    (there,) = machine.model(node)
    assert (there.verdict, there.said) == ("ok", f"{model} (llama), with tokenizer and chat template")
    (fits,) = machine.memory(node)
    assert (fits.verdict, fits.said.startswith("weights 0.0 + optimizer 0.0")) == ("ok", True)
    (gone,) = machine.model(of(home, model={"path": str(tmp_path / "gone")}))
    assert (gone.verdict, gone.fix) == ("fail", "set model.path to 'embedded' or to a local model directory")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            text = file.read_bytes().replace(b'"chat_template"', b'"none"')
            (bare / file.name).write_bytes(text)
    (mute,) = machine.model(of(home, model={"path": str(bare)}))
    assert (mute.verdict, "no chat template" in mute.said) == ("fail", True)


def test_memory_that_is_too_small_is_told_with_the_sum(
    home: Home, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.hardware.memory_limit", lambda: 1 << 20)
    (found,) = machine.memory(of(home, model={"path": str(tiny_model("llama")), "dtype": "float32"}))
    assert (found.verdict, "does not fit: weights" in found.said) == ("fail", True)
    assert "train.lora_rank" in found.fix


class FakeVllm(BaseHTTPRequestHandler):
    paths: dict[str, tuple[int, str]]

    def do_GET(self) -> None:
        status, text = self.paths.get(self.path, (404, "{}"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    paths = {
        "/health": (200, ""), "/version": (200, '{"version": "0.33.1"}'), "/collective_rpc": (405, ""),
        "/pause": (405, ""), "/inference/v1/generate": (405, ""),
    }  # fmt: skip
    handler = type("Handler", (FakeVllm,), {"paths": paths})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}", paths
    listening.shutdown()
    listening.server_close()


def test_a_vllm_server(home: Home, server: tuple[str, dict[str, tuple[int, str]]]) -> None:
    url, paths = server
    node = of(home, engine={"url": url})
    assert machine.vllm(node)[0].verdict == "ok"
    paths["/version"] = (200, '{"version": "0.21.0"}')
    (old,) = machine.vllm(node)
    assert (old.verdict, "vLLM 0.21.0" in old.said, "pip install 'vllm" in old.fix) == ("fail", True, True)
    paths["/version"] = (200, "<html>")
    assert "names no version" in machine.vllm(node)[0].said
    paths["/version"] = (200, '{"version": "0.33.1"}')
    del paths["/pause"], paths["/inference/v1/generate"]
    (flags,) = machine.vllm(node)
    assert flags.fix == "start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out"
    paths["/health"] = (503, "")
    assert "answers 503" in machine.vllm(node)[0].said
    assert "no answer from" in machine.vllm(of(home, engine={"url": "http://127.0.0.1:9"}))[0].said


def test_a_vllm_program(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = of(home, rollout={"engine": "vllm"}, engine={"command": str(tmp_path / "vllm")})
    assert "there is no program" in machine.vllm(node)[0].said
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.33.4\n")
    python.chmod(0o755)
    program = tmp_path / "vllm"
    program.write_text(f"#!{python}\n")
    program.chmod(0o755)
    (found,) = machine.vllm(node)
    assert (found.verdict, found.said) == ("ok", f"{program} is vLLM 0.33.4")
    program.write_bytes(b"\x7fELF")
    assert "cannot be told" in machine.vllm(node)[0].said


def test_no_vllm_where_another_engine_samples(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.vllm(of(home, rollout={"engine": "transformers"}))[0].verdict == "ok"
    bare = Machine(64 * GB, (Gpu("H200", 140 * GB),), "")
    monkeypatch.setattr("node.hardware.look", lambda config: bare)
    (could,) = machine.vllm(of(home))
    assert (could.verdict, could.fix.startswith("pip install vllm")) == ("warn", True)
