"""The policy part of vectors.json, by the code and by a second implementation written from docs/protocol.md alone."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import nacl.signing
import numpy as np
import umsgpack

from node.federation.changes import changes_between
from node.federation.weights_file import Tensor, digest_of
from protocol.identity import Identity
from protocol.policy import PieceRequest, PolicyRequest, check_head, check_record, claim_of, rendezvous

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
POLICY, WHO = VECTORS["policy"], VECTORS["identity"]
ME = Identity.from_seed(bytes.fromhex(WHO["seed_hex"]))
SWARM = bytes.fromhex(VECTORS["manifests"][0]["digest_hex"])
WEIGHTS, HEAD = POLICY["weights"], POLICY["head"]


def words(when: str) -> dict[str, Any]:
    return {name: np.frombuffer(bytes.fromhex(t["words_hex"]), "<u2") for name, t in WEIGHTS[when].items()}


def test_weights_and_what_changes_them() -> None:
    for when in ("before", "after"):
        tensors = ((Tensor(name, tuple(WEIGHTS[when][name]["shape"]), 0, 0), w) for name, w in words(when).items())
        assert digest_of("bfloat16", tensors).hex() == WEIGHTS[f"state_{when}_hex"]
    old, new = words("before"), words("after")
    made = b"".join(b"".join(changes_between(old[name], new[name])) for name in sorted(old))
    assert made.hex() == POLICY["changes_hex"]


def test_weights_and_what_changes_them_by_the_document() -> None:
    for when in ("before", "after"):
        said = b""
        for name in sorted(WEIGHTS[when], key=str.encode):
            tensor = WEIGHTS[when][name]
            shape = ",".join(str(size) for size in tensor["shape"])
            said += f"{name}\nbfloat16\n{shape}\n".encode() + bytes.fromhex(tensor["words_hex"])
        assert hashlib.sha256(said).hexdigest() == WEIGHTS[f"state_{when}_hex"]
    rest = bytes.fromhex(POLICY["changes_hex"])
    for name in sorted(WEIGHTS["before"], key=str.encode):
        values = [int(word) for word in words("before")[name]]
        count, gap_bytes, bit_bytes = (int.from_bytes(rest[i : i + 4], "little") for i in (0, 4, 8))
        gaps = zlib.decompress(rest[12 : 12 + gap_bytes], wbits=-15)
        bits = zlib.decompress(rest[12 + gap_bytes : 12 + gap_bytes + bit_bytes], wbits=-15)
        rest = rest[12 + gap_bytes + bit_bytes :]
        position, number = -1, 0
        for byte in gaps:
            position += byte
            if byte < 255:
                position += 1
                values[position] ^= bits[number] | bits[count + number] << 8
                number += 1
        assert number == count
        assert values == words("after")[name].tolist()
    assert rest == b""


def test_the_head_and_its_record() -> None:
    known = check_head(bytes.fromhex(HEAD["sealed_hex"]), leader=ME.peer_id, swarm=SWARM, now=HEAD["issued"])
    whole, changed = known.head.items
    assert (whole.version, whole.base, changed.version, changed.base) == (7, None, 8, 7)
    record = check_record(bytes.fromhex(POLICY["record_hex"]), changed)
    assert record.state.hex() == WEIGHTS["state_after_hex"]
    assert rendezvous(SWARM, ME.peer_id).hex() == POLICY["rendezvous_hex"]
    claim = claim_of(POLICY["model"])
    assert claim is not None
    assert (claim.leader, claim.state) == (ME.peer_id[-8:], WEIGHTS["state_after_hex"][:16])
    piece = record.pieces[0]
    assert msgspec.msgpack.encode(PolicyRequest(ME.public_key)).hex() == POLICY["requests"]["head"]
    assert msgspec.msgpack.encode(PieceRequest(piece, 1000)).hex() == POLICY["requests"]["piece"]


def test_the_head_and_its_record_by_the_document() -> None:
    version, domain, producer, issued, lifetime, packed, signature = umsgpack.unpackb(bytes.fromhex(HEAD["sealed_hex"]))
    assert (version, domain, producer.hex()) == (2, 8, WHO["public_key_hex"])
    assert (issued, lifetime) == (HEAD["issued"], HEAD["lifetime"])
    signed = b"shoal/2/policy\n" + producer + issued.to_bytes(8, "big") + lifetime.to_bytes(4, "big") + packed
    nacl.signing.VerifyKey(producer).verify(signed, signature)
    payload = zlib.decompress(packed, wbits=-15)
    assert payload.hex() == HEAD["payload_hex"]
    swarm, model, items = umsgpack.unpackb(payload)
    assert (swarm, model) == (SWARM, "0123456789abcdef-134515008")
    changes = bytes.fromhex(POLICY["changes_hex"])
    pieces = [hashlib.sha256(changes).digest()]
    before, after = (bytes.fromhex(WEIGHTS[f"state_{when}_hex"]) for when in ("before", "after"))
    raw = umsgpack.packb([8, 7, before, "bfloat16", after, len(changes), 65536, pieces])
    assert raw.hex() == POLICY["record_hex"]
    assert items[1] == [8, 7, hashlib.sha256(raw).digest(), len(raw), len(changes)]
    key = hashlib.sha256(b"shoal/1/policy\n" + SWARM + producer).hexdigest()
    assert key == POLICY["rendezvous_hex"]
    assert POLICY["model"] == f"SmolLM2-135M-Instruct@{WHO['peer_id'][-8:]}.{after.hex()[:16]}"
    assert umsgpack.packb([producer]).hex() == POLICY["requests"]["head"]
    assert umsgpack.packb([pieces[0], 1000]).hex() == POLICY["requests"]["piece"]
