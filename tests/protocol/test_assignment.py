from collections import Counter

import msgspec
import pytest

from protocol.assignment import held_out_task, is_assigned, own_task, shared_task
from protocol.manifest import EnvironmentSpec, embedded_manifest, make_manifest

MANIFEST = embedded_manifest("test", 1_800_000_000)
PEERS = ("12D3KooWA", "12D3KooWB")


def test_own_tasks_are_assigned_to_their_owner_in_their_epoch_only() -> None:
    task = own_task(MANIFEST, 3, PEERS[0], 17)
    assert task.index == 17
    assert is_assigned(MANIFEST, 3, PEERS[0], task)
    assert not is_assigned(MANIFEST, 3, PEERS[1], task)
    assert not is_assigned(MANIFEST, 4, PEERS[0], task)
    assert not is_assigned(embedded_manifest("other", 1_800_000_000), 3, PEERS[0], task)


def test_shared_tasks_are_assigned_to_everybody() -> None:
    task = shared_task(MANIFEST, 3, 5)
    assert all(is_assigned(MANIFEST, 3, peer, task) for peer in PEERS)
    assert not is_assigned(MANIFEST, 2, PEERS[0], task)


def test_the_index_is_bounded_by_the_slots() -> None:
    last = own_task(MANIFEST, 0, PEERS[0], MANIFEST.slots_per_epoch - 1)
    assert is_assigned(MANIFEST, 0, PEERS[0], last)
    for index in range(4096, 4128):
        for name in (spec.name for spec in MANIFEST.environments):
            beyond = msgspec.structs.replace(last, index=index, environment=name)
            assert not is_assigned(MANIFEST, 0, PEERS[0], beyond)
    with pytest.raises(ValueError, match="4096"):
        own_task(MANIFEST, 0, PEERS[0], 4096)
    with pytest.raises(ValueError, match="shared_slots"):
        shared_task(MANIFEST, 0, 64)


def test_a_producer_cannot_pick_an_easier_environment() -> None:
    task = own_task(MANIFEST, 0, PEERS[0], 0)
    others = [spec.name for spec in MANIFEST.environments if spec.name != task.environment]
    assert len(others) == 3
    for name in others:
        assert not is_assigned(MANIFEST, 0, PEERS[0], msgspec.structs.replace(task, environment=name))


def test_seeds_fit_in_63_bits_and_differ() -> None:
    seeds = {own_task(MANIFEST, epoch, peer, 0).seed for epoch in range(50) for peer in PEERS}
    seeds |= {shared_task(MANIFEST, epoch, 0).seed for epoch in range(50)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_environments_come_by_weight() -> None:
    specs = (EnvironmentSpec("a", "1", 3, {}), EnvironmentSpec("b", "1", 1, {}))
    manifest = make_manifest("m", 0, specs)
    drawn = Counter(own_task(manifest, 0, PEERS[0], slot).environment for slot in range(4000))
    assert drawn["a"] == pytest.approx(3000, abs=120)
    assert drawn["a"] + drawn["b"] == 4000


def test_held_out_tasks_are_never_assigned() -> None:
    for spec in MANIFEST.environments:
        for index in (0, 1, 63):
            task = held_out_task(MANIFEST, spec.name, index)
            assert (task.environment, task.version, task.index) == (spec.name, spec.version, index)
            assert not any(is_assigned(MANIFEST, epoch, peer, task) for epoch in range(200) for peer in PEERS)
    with pytest.raises(ValueError, match="letter_counting, chain_sum"):
        held_out_task(MANIFEST, "n_queens", 0)
