"""What a swarm agrees on: environments, caps, epochs and topics. Its SHA-256 digest is the swarm's name.

Wire form: msgpack arrays in field order, map keys sorted; only that canonical form is accepted, so that one
manifest has one digest.
"""

import hashlib
import math
import re
from functools import cached_property
from typing import Annotated, Any

import msgspec

from protocol.identity import IdentityError, public_key_of
from protocol.messages import MAX_MANIFEST_BYTES
from protocol.rollout import Name, UInt63
from protocol.text import forbidden_character

MANIFEST_VERSION = 1
COORDINATED_VERSION = 2
"""A manifest that names coordinators; one that names none keeps version 1, and with it its bytes and its digest."""
MAX_COORDINATORS = 8
MAX_NAME = 64
"""Characters of a swarm's name."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Setting = int | float | str | bool


class ManifestError(Exception):
    """A manifest cannot be used; the message names the field and the limit."""


class ManifestRefused(ManifestError):
    """A manifest that is valid asks for more than this node gives; the message says how to give it."""


class EnvironmentSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One environment of the curriculum."""

    name: Name
    version: Name
    """Generator and scorer version; a node without exactly this one cannot take part in this environment."""
    weight: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    """Share of the tasks, relative to the other environments."""
    settings: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], Setting], msgspec.Meta(max_length=32)
    ]
    """Passed to the environment; `examples` (worked examples in the prompt) and `max_tokens` (budget of one
    answer) are understood by every environment."""

    @property
    def max_tokens(self) -> int | None:
        """Token budget of one answer, where the settings name one."""
        value = self.settings.get("max_tokens")
        return value if isinstance(value, int) else None


class Caps(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Limits that every node of the swarm holds foreign groups to."""

    max_group_bytes: Annotated[int, msgspec.Meta(ge=1024, le=64 * 2**20)] = 256 * 1024
    """Of a sealed group, and of its decompressed payload."""
    max_completions: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 64
    max_turns: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    max_tokens_per_completion: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 4096
    group_ttl_seconds: Annotated[int, msgspec.Meta(ge=10, le=30 * 86400)] = 1800
    max_producer_share: Share = 0.5
    """Of the foreign groups in one batch, as long as other producers have groups to give."""
    reward_tolerance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1e-4
    """How far a claimed reward may be from the local score."""


class Coordination(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who paces and evaluates the swarm (protocol.rounds)."""

    coordinators: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=52, max_length=52)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_COORDINATORS),
    ]
    """Peer ids: the primary, then the standbys. Term t is led by number t mod len."""
    listed_only: bool
    """Only peers of the coordinator's member list take part."""


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """Field order is the wire format. `dict=True` only so that the digest is computed once."""

    version: int
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    genesis: UInt63
    """Unix seconds at which epoch 0 begins."""
    epoch_seconds: Annotated[int, msgspec.Meta(ge=10, le=30 * 86400)]
    slots_per_epoch: Count
    """Own tasks of one node in one epoch."""
    shared_slots: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    """Tasks of one epoch that are assigned to everybody."""
    shards: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """Announcement topics; a producer announces on one of them."""
    environments: Annotated[tuple[EnvironmentSpec, ...], msgspec.Meta(min_length=1, max_length=256)]
    caps: Caps = Caps()
    coordination: Coordination | None = None
    """Since version 2; left out where it is None."""

    def to_bytes(self) -> bytes:
        """Canonical bytes."""
        fields = msgspec.structs.astuple(self)
        return _encoder.encode(fields if self.coordination else fields[:-1])

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Manifest":
        """Strict inverse of `to_bytes`. Raises ManifestError."""
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"manifest of {len(raw)} bytes, at most {MAX_MANIFEST_BYTES}")
        if len(raw) < 2 or raw[0] & 0xF0 != 0x90 or raw[1] > 0x7F:
            raise ManifestError("not a manifest: a msgpack array that begins with its version is expected")
        if raw[1] not in (MANIFEST_VERSION, COORDINATED_VERSION):
            raise ManifestError(f"manifest version {raw[1]}, this node knows {COORDINATED_VERSION}; upgrade shoal")
        try:
            manifest = _decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ManifestError(f"manifest: {_with_field_names(str(error))}") from error
        if manifest.to_bytes() != raw:
            raise ManifestError("manifest is not in canonical msgpack (see docs/protocol.md)")
        manifest._check()
        return manifest

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.to_bytes()).digest()

    @property
    def coordinators(self) -> tuple[str, ...]:
        """Peer ids of those who may sign rounds; empty where there is no coordinator."""
        return self.coordination.coordinators if self.coordination else ()

    @property
    def listed_only(self) -> bool:
        """Whether only peers of the member list take part."""
        return self.coordination is not None and self.coordination.listed_only

    @cached_property
    def total_weight(self) -> int:
        return sum(spec.weight for spec in self.environments)

    def environment(self, name: str) -> EnvironmentSpec | None:
        """The environment of that name, if the manifest has it."""
        return next((spec for spec in self.environments if spec.name == name), None)

    def epoch_at(self, now: float) -> int:
        """Epoch at unix time `now`. 0 before genesis too: a clock a little behind must not end in epoch -1."""
        return max(0, math.floor((now - self.genesis) / self.epoch_seconds))

    def epoch_ends(self, epoch: int) -> float:
        """Unix time at which an epoch ends."""
        return float(self.genesis + (epoch + 1) * self.epoch_seconds)

    def shard_of(self, producer: str) -> int:
        """Announcement shard of a producer, in [0, shards)."""
        return int.from_bytes(hashlib.sha256(b"shoal/1/shard\n" + producer.encode()).digest()[:8], "big") % self.shards

    def describe(self) -> dict[str, Any]:
        """JSON-able, for people."""
        named = _named(self)
        if self.coordination is None:
            del named["coordination"]
        return {"digest": self.digest.hex(), **named}

    def _check(self) -> None:
        """What types alone do not say. Raises ManifestError."""
        if (self.version == COORDINATED_VERSION) != (self.coordination is not None):
            raise ManifestError(f"coordination: a manifest names coordinators from version {COORDINATED_VERSION} on")
        for peer_id in self.coordinators:
            try:
                public_key_of(peer_id)
            except IdentityError as error:
                raise ManifestError(f"coordination.coordinators: {error}") from error
        if len(set(self.coordinators)) < len(self.coordinators):
            raise ManifestError("coordination.coordinators: one is named more than once; name each once")
        names = [spec.name for spec in self.environments]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ManifestError(f"environments: {', '.join(repeated)} named more than once; name each once")
        if not self.name.isprintable():
            raise ManifestError(f"name {self.name!r}: only printable characters")
        for spec in self.environments:
            for key, value in spec.settings.items():
                if not key.isprintable():
                    raise ManifestError(f"environments.{spec.name}.settings: key {key!r} has unprintable characters")
                if isinstance(value, str) and (found := forbidden_character(value)):
                    raise ManifestError(f"environments.{spec.name}.settings.{key}: forbidden control character {found}")
                if isinstance(value, float) and not math.isfinite(value):
                    raise ManifestError(f"environments.{spec.name}.settings.{key}: {value} is not a finite number")
                if isinstance(value, str) and len(value) > 256:
                    raise ManifestError(f"environments.{spec.name}.settings.{key}: longer than 256 characters")
            budget = spec.settings.get("max_tokens")
            if budget is not None and (
                isinstance(budget, bool)
                or not isinstance(budget, int)
                or not 1 <= budget <= self.caps.max_tokens_per_completion
            ):
                raise ManifestError(
                    f"environments.{spec.name}.settings.max_tokens: {budget!r}, expected an integer from 1 to "
                    f"caps.max_tokens_per_completion ({self.caps.max_tokens_per_completion})"
                )


MAX_GENESIS_AHEAD = 86400.0
"""Seconds: whoever made the manifest had another clock, but until genesis all is epoch 0, with the same few tasks."""


def check_local_limits(manifest: Manifest, now: float, *, max_group_mb: int) -> None:
    """Whether this node takes part in a swarm that others made. `now` in unix seconds. Raises ManifestRefused.

    What the protocol allows (groups of 64 MB) is for machines of any size; every group is held in memory while it is
    pulled, decoded and scored.
    """
    wanted = manifest.caps.max_group_bytes
    if wanted > max_group_mb << 20:
        raise ManifestRefused(
            f"the manifest allows groups of {wanted} bytes (caps.max_group_bytes), this node {max_group_mb << 20} ; "
            f"set limits.group_mb to {-(-wanted >> 20)} to take part, or ask for a manifest with smaller groups"
        )
    ahead = manifest.genesis - now
    if ahead > MAX_GENESIS_AHEAD:
        raise ManifestRefused(
            f"the manifest's genesis {manifest.genesis} is {ahead / 86400:.1f} days ahead, at most "
            f"{MAX_GENESIS_AHEAD / 86400:.0f} ; check this machine's clock, or start when the swarm begins"
        )


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Manifest)


def _with_field_names(message: str) -> str:
    """msgspec says `$[8][0]` where a person wants `caps.max_group_bytes`."""

    def names(path: re.Match[str]) -> str:
        parts: list[str] = []
        struct: type[msgspec.Struct] | None = Manifest
        for index in re.findall(r"\[([^]]*)\]", path[1]):
            if struct is not None and index.isdigit():
                parts.append("." + struct.__struct_fields__[int(index)])
                struct = Caps if parts[-1] == ".caps" else None
            else:
                struct = EnvironmentSpec if parts == [".environments"] else None
                parts.append(f"[{index}]")
        return "`" + "".join(parts).removeprefix(".") + "`"

    return re.sub(r"`\$((?:\[[^]]*\])+)`", names, message)


def _named(value: object) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_named(item) for item in value]
    return value


def make_manifest(
    name: str,
    genesis: float,
    environments: tuple[EnvironmentSpec, ...],
    *,
    epoch_seconds: int = 600,
    slots_per_epoch: int = 4096,
    shared_slots: int = 64,
    shards: int = 1,
    caps: Caps | None = None,
    coordination: Coordination | None = None,
) -> Manifest:
    """A checked manifest: what `Manifest.from_bytes` on any node accepts. Raises ManifestError."""
    manifest = Manifest(
        COORDINATED_VERSION if coordination else MANIFEST_VERSION,
        name,
        int(genesis),
        epoch_seconds,
        slots_per_epoch,
        shared_slots,
        shards,
        environments,
        caps or Caps(),
        coordination,
    )
    try:
        return Manifest.from_bytes(manifest.to_bytes())
    except (OverflowError, TypeError, UnicodeEncodeError) as error:  # what msgpack cannot say at all
        raise ManifestError(f"manifest: {error}") from error


REASONING_GYM_VERSION = "rg0.1.25-1"
"""reasoning_gym 0.1.25, first revision of how Shoal prompts and scores it."""


def embedded_manifest(name: str, genesis: float, coordination: Coordination | None = None) -> Manifest:
    """The default swarm: four easy reasoning_gym tasks that SmolLM2-135M gets right now and then."""

    def spec(environment: str, max_tokens: int, **settings: int) -> EnvironmentSpec:
        return EnvironmentSpec(
            environment, REASONING_GYM_VERSION, 1, {**settings, "examples": 3, "max_tokens": max_tokens}
        )

    return make_manifest(
        name,
        genesis,
        (
            spec("letter_counting", 16, min_words=3, max_words=5),
            spec("chain_sum", 16, min_terms=2, max_terms=2, min_digits=1, max_digits=1),
            spec("spell_backward", 16, min_word_len=3, max_word_len=4),
            spec("word_sorting", 24, min_words=3, max_words=3),
        ),
        coordination=coordination,
    )
