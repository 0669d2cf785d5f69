"""The code is held to vectors.json, and so is a second implementation, written here from docs/protocol.md alone.

The second one shares nothing with the first: its own base58 and hashing, PyNaCl for Ed25519, u-msgpack for msgpack.
"""

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import base58
import msgspec
import nacl.signing
import pytest
import umsgpack

from protocol.assignment import held_out_task, is_assigned, own_task, round_task, shared_task
from protocol.averagers import AveragerPlace, AveragerRequest
from protocol.board import Board, MemberList, list_bytes, read_list
from protocol.envelope import Domain, digest_of, seal, unseal
from protocol.identity import Identity, public_key_of, verify
from protocol.invite import Invite
from protocol.listing import Listing, directory_key, open_listing, shard_of
from protocol.manifest import Manifest
from protocol.messages import (
    Announcement,
    BatchRequest,
    EnterRequest,
    EnterResponse,
    GroupRequest,
    ListRequest,
    LiveRequest,
    LiveResponse,
    ManifestRequest,
    ReportRequest,
    ReportResponse,
    RoundsRequest,
    RoundsResponse,
    Trained,
    announce_topic,
    rounds_topic,
)
from protocol.rejection import Rejected
from protocol.rollout import RolloutGroup, TaskRef
from protocol.rounds import Round, commitment_of, open_round, seed_for
from protocol.teaching import AskedGroup, TeachRequest, answer_of

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
WHO = VECTORS["identity"]
ME = Identity.from_seed(bytes.fromhex(WHO["seed_hex"]))
MANIFESTS = [Manifest.from_bytes(bytes.fromhex(vector["bytes_hex"])) for vector in VECTORS["manifests"]]


def hash64(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8], "big")


def values(fields: Any) -> Any:
    """Named fields to the arrays of the wire; maps (an environment's settings) sorted by key."""
    if isinstance(fields, list):
        return [values(item) for item in fields]
    if not isinstance(fields, dict):
        return fields
    return [dict(sorted(value.items())) if name == "settings" else values(value) for name, value in fields.items()]


def test_identity() -> None:
    assert ME.peer_id == WHO["peer_id"]
    assert public_key_of(ME.peer_id).hex() == WHO["public_key_hex"]
    assert ME.sign(WHO["signed_text"].encode()).hex() == WHO["signature_hex"]
    assert verify(ME.public_key, WHO["signed_text"].encode(), bytes.fromhex(WHO["signature_hex"]))


def test_identity_by_the_document() -> None:
    key = nacl.signing.SigningKey(bytes.fromhex(WHO["seed_hex"]))
    public = bytes(key.verify_key)
    assert base58.b58encode(bytes.fromhex("002408011220") + public).decode() == WHO["peer_id"]
    assert key.sign(WHO["signed_text"].encode()).signature.hex() == WHO["signature_hex"]


@pytest.mark.parametrize("vector", VECTORS["manifests"], ids=lambda vector: vector["fields"]["name"])
def test_manifests(vector: dict[str, Any]) -> None:
    raw = bytes.fromhex(vector["bytes_hex"])
    manifest = Manifest.from_bytes(raw)
    assert manifest.to_bytes() == raw
    assert manifest.digest.hex() == vector["digest_hex"]
    assert manifest.describe() == {"digest": vector["digest_hex"], **vector["fields"]}
    assert manifest.shard_of(ME.peer_id) == vector["shard_of_identity"]
    assert announce_topic(manifest.digest, vector["shard_of_identity"]) == vector["topic"]


@pytest.mark.parametrize("vector", VECTORS["manifests"], ids=lambda vector: vector["fields"]["name"])
def test_manifests_by_the_document(vector: dict[str, Any]) -> None:
    raw = umsgpack.packb(values(vector["fields"]))
    assert raw.hex() == vector["bytes_hex"]
    assert hashlib.sha256(raw).hexdigest() == vector["digest_hex"]
    shard = hash64(b"shoal/1/shard\n", WHO["peer_id"].encode()) % vector["fields"]["shards"]
    assert shard == vector["shard_of_identity"]
    assert vector["topic"] == f"/shoal/{vector['digest_hex'][:32]}/announce/{shard}"


@pytest.mark.parametrize("vector", VECTORS["assignments"], ids=str)
def test_assignments(vector: dict[str, Any]) -> None:
    manifest, slot = MANIFESTS[vector["manifest"]], vector["slot"]
    if vector["kind"] == "held-out":
        task = held_out_task(manifest, vector["environment"], slot)
    elif vector["kind"] == "own":
        task = own_task(manifest, vector["epoch"], ME.peer_id, slot)
    else:
        task = shared_task(manifest, vector["epoch"], slot)
    assert (task.environment, task.version, task.seed, task.index) == tuple(
        vector[name] for name in ("environment", "version", "seed", "index")
    )
    assert is_assigned(manifest, vector.get("epoch", 0), ME.peer_id, task) == (vector["kind"] != "held-out")


@pytest.mark.parametrize("vector", VECTORS["assignments"], ids=str)
def test_assignments_by_the_document(vector: dict[str, Any]) -> None:
    manifest = VECTORS["manifests"][vector["manifest"]]
    digest = bytes.fromhex(manifest["digest_hex"])
    if vector["kind"] == "held-out":
        assert vector["seed"] == hash64(b"shoal/1/held-out\n", digest, vector["environment"].encode()) >> 1
        return
    owner = WHO["peer_id"].encode() if vector["kind"] == "own" else b""
    name = b"shoal/1/" + vector["kind"].encode() + b"\n"
    assert vector["seed"] == hash64(name, digest, vector["epoch"].to_bytes(8, "big"), owner) >> 1
    environments = manifest["fields"]["environments"]
    position = vector["seed"].to_bytes(8, "big") + vector["index"].to_bytes(8, "big")
    draw = hash64(b"shoal/1/environment\n", position) % sum(spec["weight"] for spec in environments)
    drawn = [spec["name"] for spec in environments for _ in range(spec["weight"])][draw]
    assert vector["environment"] == drawn


@pytest.mark.parametrize("vector", VECTORS["envelopes"], ids=lambda vector: vector["domain"])
def test_envelopes(vector: dict[str, Any]) -> None:
    raw, payload = bytes.fromhex(vector["sealed_hex"]), bytes.fromhex(vector["payload_hex"])
    now, expires = vector["issued"], vector["issued"] + vector["lifetime"]
    opened = unseal(raw, Domain[vector["domain"]], max_bytes=4096, now=now)
    assert (opened.producer, opened.payload) == (ME.peer_id, payload)
    assert (opened.issued, opened.expires) == (now, expires)
    assert digest_of(raw).hex() == vector["digest_hex"]
    type_ = {"group": RolloutGroup, "announcement": Announcement, "round": Round}[vector["domain"]]
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(payload, type=type_)) == payload
    # zlib libraries may compress differently; what they compress to is signed, whatever it is
    deflater = zlib.compressobj(6, wbits=-15)
    if deflater.compress(payload) + deflater.flush() == umsgpack.unpackb(raw)[5]:
        assert seal(ME, Domain[vector["domain"]], payload, issued=now, expires=expires) == raw


@pytest.mark.parametrize("vector", VECTORS["envelopes"], ids=lambda vector: vector["domain"])
def test_envelopes_by_the_document(vector: dict[str, Any]) -> None:
    raw = bytes.fromhex(vector["sealed_hex"])
    version, domain, producer, issued, lifetime, packed, signature = umsgpack.unpackb(raw)
    assert (version, {1: "group", 2: "announcement", 3: "round"}[domain]) == (2, vector["domain"])
    assert producer.hex() == WHO["public_key_hex"]
    assert (issued, lifetime) == (vector["issued"], vector["lifetime"])
    assert zlib.decompress(packed, wbits=-15).hex() == vector["payload_hex"]
    head = f"shoal/2/{vector['domain']}\n".encode() + producer
    signed = head + issued.to_bytes(8, "big") + lifetime.to_bytes(4, "big") + packed
    nacl.signing.VerifyKey(producer).verify(signed, signature)
    assert umsgpack.packb([version, domain, producer, issued, lifetime, packed, signature]) == raw


def test_the_announcement_names_the_group() -> None:
    group, announcement, _ = VECTORS["envelopes"]
    fields = umsgpack.unpackb(bytes.fromhex(announcement["payload_hex"]))
    assert fields[0].hex() == VECTORS["manifests"][0]["digest_hex"]
    assert fields[1].hex() == group["digest_hex"]
    assert fields[2] == len(group["sealed_hex"]) // 2


def test_requests() -> None:
    digest = bytes.fromhex(VECTORS["envelopes"][0]["digest_hex"])
    swarm = bytes.fromhex(VECTORS["manifests"][0]["digest_hex"])
    expected = {
        "group": ([digest, 1000], GroupRequest(digest, 1000)),
        "batch": ([[digest]], BatchRequest((digest,))),
        "live": ([swarm, [digest], 5], LiveRequest(swarm, (digest,), 5)),
        "live_answer": ([[b"sealed"]], LiveResponse((b"sealed",))),
        "manifest": ([swarm], ManifestRequest(swarm)),
        "rounds": ([swarm, digest], RoundsRequest(swarm, digest)),
        "rounds_answer": ([[b"sealed"], [b"one", b"two"]], RoundsResponse((b"sealed",), (b"one", b"two"))),
        "list": ([digest], ListRequest(digest)),
        "enter": ([swarm, bytes(range(16))], EnterRequest(swarm, bytes(range(16)))),
        "enter_answer": (["member", ""], EnterResponse("member", "")),
        "report": (
            [swarm, 7, ["4", None], [[ME.peer_id, 3]]],
            ReportRequest(swarm, 7, ("4", None), (Trained(ME.peer_id, 3),)),
        ),
        "report_answer": ([False, "late"], ReportResponse(False, "late")),
        "averager": ([swarm, digest], AveragerRequest(swarm, digest)),
        "averager_answer": ([4001, ME.peer_id], AveragerPlace(4001, ME.peer_id)),
        "teach": (
            [swarm, digest, [[[1, 2], [[3], [70000]]]]],
            TeachRequest(swarm, digest, (AskedGroup((1, 2), ((3,), (70000,))),)),
        ),
        "teach_answer": (["tiny", 7, bytes.fromhex("00b800bc"), ""], answer_of("tiny", 7, (-0.5, -1.0))),
    }
    for name, (fields, message) in expected.items():
        assert umsgpack.packb(fields).hex() == msgspec.msgpack.encode(message).hex() == VECTORS["requests"][name]


@pytest.mark.parametrize("vector", VECTORS["invites"], ids=lambda vector: vector["name"])
def test_invites(vector: dict[str, Any]) -> None:
    psk = bytes.fromhex(vector["psk_hex"]) if vector["psk_hex"] else None
    token = bytes.fromhex(vector["token_hex"]) if "token_hex" in vector else None
    digest = bytes.fromhex(vector["manifest_digest_hex"])
    invite = Invite(digest, tuple(vector["bootstrap"]), psk, vector["name"], token)
    assert Invite.parse(vector["uri"]) == invite
    assert invite.to_uri() == vector["uri"]
    fields = [digest, vector["bootstrap"], psk, vector["name"]]
    frame = b"\x02" + umsgpack.packb([*fields, token]) if token else b"\x01" + umsgpack.packb(fields)
    text = base64.urlsafe_b64encode(frame + hashlib.sha256(frame).digest()[:4]).decode()
    assert vector["uri"] == "shoal:" + text.rstrip("=")


def test_listing() -> None:
    vector, sealed = VECTORS["listing"], bytes.fromhex(VECTORS["listing"]["sealed_hex"])
    manifest = MANIFESTS[vector["manifest"]]
    listing = open_listing(sealed, ME.peer_id, vector["issued"])
    assert listing == Listing(manifest, tuple(vector["addresses"]), vector["members"])
    assert (shard_of(manifest), directory_key(shard_of(manifest)).hex()) == (vector["shard"], vector["key_hex"])
    # the same from docs/protocol.md alone
    _, domain, _, issued, lifetime, packed, _ = umsgpack.unpackb(sealed)
    assert (domain, issued, lifetime) == (5, vector["issued"], 900)
    fields = [
        bytes.fromhex(VECTORS["manifests"][vector["manifest"]]["bytes_hex"]),
        vector["addresses"],
        vector["members"],
    ]
    assert zlib.decompress(packed, wbits=-15) == umsgpack.packb(fields)
    shard = manifest.digest[0] % 8
    assert hashlib.sha256(b"shoal/1/directory\n" + bytes([shard])).hexdigest() == vector["key_hex"]


def test_rounds() -> None:
    vector, manifest = VECTORS["rounds"], MANIFESTS[VECTORS["rounds"]["manifest"]]
    seed = bytes.fromhex(vector["seed_hex"])
    assert seed_for(ME, manifest.digest, vector["number"], vector["term"]) == seed
    assert commitment_of(seed).hex() == vector["commitment_hex"]
    assert rounds_topic(manifest.digest) == vector["topic"]
    for task in vector["tasks"]:
        assert round_task(manifest, seed, task["environment"], task["index"]) == TaskRef(
            task["environment"], task["version"], task["seed"], task["index"]
        )
    for name, kind in (("members", MemberList), ("board", Board)):
        raw = bytes.fromhex(vector[f"{name}_hex"])
        assert list_bytes(read_list(raw, kind, manifest.digest)) == (bytes.fromhex(vector[f"{name}_digest_hex"]), raw)
    sealed = VECTORS["envelopes"][2]
    opened, record = open_round(bytes.fromhex(sealed["sealed_hex"]), manifest, sealed["issued"])
    assert (opened.producer, record.seed, record.board.hex()) == (ME.peer_id, seed, vector["board_digest_hex"])
    for refused in vector["refused"]:
        with pytest.raises(Rejected, match=re.escape(refused["because"])):
            open_round(bytes.fromhex(refused["sealed_hex"]), manifest, sealed["issued"])


def test_rounds_by_the_document() -> None:
    vector = VECTORS["rounds"]
    digest = bytes.fromhex(VECTORS["manifests"][vector["manifest"]]["digest_hex"])
    key = nacl.signing.SigningKey(bytes.fromhex(WHO["seed_hex"]))
    place = vector["number"].to_bytes(8, "big") + vector["term"].to_bytes(4, "big")
    seed = hashlib.sha256(key.sign(b"shoal/1/round-seed\n" + digest + place).signature).digest()
    assert (seed.hex(), hashlib.sha256(seed).hexdigest()) == (vector["seed_hex"], vector["commitment_hex"])
    for task in vector["tasks"]:
        assert task["seed"] == hash64(b"shoal/1/round\n", digest, seed, task["environment"].encode()) >> 1
    assert vector["topic"] == f"/shoal/{digest.hex()[:32]}/rounds"
    record = umsgpack.unpackb(bytes.fromhex(VECTORS["envelopes"][2]["payload_hex"]))
    assert record[:3] == [digest, vector["number"], 3]
    lists = [vector[f"{name}_digest_hex"] for name in ("members", "board")]
    assert [field.hex() for field in record[12:16]] == [vector["commitment_hex"], vector["seed_hex"], *lists]
    for name, found in zip(("members", "board"), lists, strict=True):
        raw = bytes.fromhex(vector[f"{name}_hex"])
        assert hashlib.sha256(raw).hexdigest() == found
        assert umsgpack.packb(umsgpack.unpackb(raw)) == raw
