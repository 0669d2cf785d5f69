"""`shoal bench`: this node's own code against the peers of the field, on this machine.

Each side runs in a process of its own (node.bench.side), one after the other, with the same number of threads, so
that time, CPU time and peak memory of one are not those of the other. Nothing is installed or downloaded.
"""

from typing import Any


def run(name: str, threads: int = 1, **options: Any) -> dict[str, Any]:
    """Run the benchmark of a module of this package with a `compare`, which gets `options`; its result as JSON values.

    Raises BenchError when a side fails, or what it is compared with is not installed.
    """
    import asyncio
    from importlib import import_module

    from node.bench.machine import machine

    facts = machine(threads)
    outcome: dict[str, Any] = asyncio.run(import_module(f"node.bench.{name}").compare(threads, facts, **options))
    return {"bench": name, "machine": facts, **outcome}
