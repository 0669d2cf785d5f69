"""A swarm's manifest written by hand, in TOML, for `shoal swarm create` and `shoal coordinator init --manifest FILE`.

epoch_seconds = 600            # these four and [caps] may be left out
[[environments]]
name = "chain_sum"
weight = 2
settings = { min_terms = 2, max_terms = 3, examples = 3, max_tokens = 16 }
"""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from protocol.manifest import (
    REASONING_GYM_VERSION,
    Caps,
    Coordination,
    EnvironmentSpec,
    Manifest,
    ManifestError,
    Setting,
    make_manifest,
)


class ManifestFileError(Exception):
    """The file is no manifest; the message names the file, the field and the limit."""


class _Environment(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    version: str = REASONING_GYM_VERSION
    weight: int = 1
    settings: dict[str, Setting] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    environments: list[_Environment]
    epoch_seconds: int = 600
    slots_per_epoch: int = 4096
    shared_slots: int = 64
    shards: int = 1
    caps: dict[str, Any] = {}


def read_manifest(path: Path, name: str, genesis: float, coordination: Coordination | None = None) -> Manifest:
    """The manifest of a file, under a name and with epoch 0 beginning at `genesis` (unix seconds).

    Raises ManifestFileError, OSError.
    """
    try:
        content = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        unknown = content.caps.keys() - set(Caps.__struct_fields__)
        if unknown:
            known = ", ".join(Caps.__struct_fields__)
            raise ManifestFileError(f"{path}: unknown caps {', '.join(sorted(unknown))} ; known are {known}")
        environments = tuple(EnvironmentSpec(e.name, e.version, e.weight, e.settings) for e in content.environments)
        return make_manifest(
            name,
            genesis,
            environments,
            epoch_seconds=content.epoch_seconds,
            slots_per_epoch=content.slots_per_epoch,
            shared_slots=content.shared_slots,
            shards=content.shards,
            caps=Caps(**content.caps),
            coordination=coordination,
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestFileError(f"{path} is not valid TOML: {error} ; correct that line") from error
    except (msgspec.ValidationError, ManifestError) as error:
        raise ManifestFileError(f"{path}: {error} ; correct that field") from error
