"""The grid of ranks: pure arithmetic, so every rank of every mesh up to 24 ranks is tried."""

import dataclasses
import itertools

import pytest

import rankloom as rl

AXES = ["pipe", "replicate", "shard", "context", "tensor", "expert"]
MESHES = [rl.Mesh(), rl.Mesh(replicate=3), rl.Mesh(replicate=2, shard=2), rl.Mesh(pipe=2, tensor=3), rl.Mesh(pipe=2, replicate=3, expert=4),
          rl.Mesh(shard=3, context=2, tensor=2)]
SEVERAL = [combination for n in (1, 2, 3) for combination in itertools.combinations(AXES, n)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_stands_at_its_own_place(mesh):
    places = [tuple(mesh.coords(rank).items()) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert all(0 <= at < mesh.sizes()[axis] for place in places for axis, at in place)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_last_axis_varies_fastest(mesh):
    places = [tuple(mesh.coords(rank).values()) for rank in range(mesh.size)]
    assert places == sorted(places)
    assert list(mesh.coords(0)) == AXES


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("axes", SEVERAL, ids="+".join)
def test_the_groups_along_axes_are_a_partition_of_the_ranks(mesh, axes):
    groups = {mesh.peers(rank, *axes) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for rank in range(mesh.size):
        assert rank in mesh.peers(rank, *axes)
        for peer in mesh.peers(rank, *axes):
            different = {axis for axis in AXES if mesh.coords(rank)[axis] != mesh.coords(peer)[axis]}
            assert different <= set(axes)


def test_peers_are_found_without_a_look_at_other_ranks(monkeypatch):
    asked, coords = [], rl.Mesh.coords
    monkeypatch.setattr(rl.Mesh, "coords", lambda self, rank: asked.append(rank) or coords(self, rank))
    assert rl.Mesh(replicate=512, tensor=2).peers(7, "tensor") == (6, 7) and asked == [7]


def test_peers_along_all_axes_are_all_ranks_and_along_none_only_oneself():
    mesh = rl.Mesh(pipe=2, replicate=3)
    assert mesh.peers(4, *AXES) == tuple(range(6))
    assert mesh.peers(4) == (4,)


def test_the_order_in_which_axes_are_named_does_not_matter():
    mesh = rl.Mesh(pipe=2, replicate=2, tensor=2)
    assert mesh.peers(3, "tensor", "pipe") == mesh.peers(3, "pipe", "tensor")


def test_an_unknown_axis_is_named_with_the_nearest_known_one():
    with pytest.raises(rl.MeshError, match="no mesh axis 'tenosr'. Did you mean 'tensor'"):
        rl.Mesh().peers(0, "tenosr")


@pytest.mark.parametrize("size", [0, -2, 1.0, "2", None, True])
def test_an_axis_that_is_no_number_of_ranks_is_refused_by_name(size):
    with pytest.raises(rl.ConfigError, match=r"mesh axis 'shard' is .*1 or more"):
        rl.Mesh(shard=size)


def test_a_mesh_that_does_not_fit_shows_the_arithmetic():
    with pytest.raises(rl.MeshError, match=r"pipe 2 x tensor 3 = 6 ranks, but there are 4"):
        rl.Mesh(pipe=2, tensor=3).expect_ranks(4)
    rl.Mesh(pipe=2, tensor=3).expect_ranks(6)


def test_a_mesh_is_a_value():
    assert rl.Mesh(shard=2) == rl.Mesh(shard=2) != rl.Mesh(replicate=2)
    assert len({rl.Mesh(shard=2), rl.Mesh(shard=2)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        rl.Mesh().shard = 2
    assert str(rl.Mesh(pipe=2, tensor=2)) == "Mesh(pipe=2, tensor=2)" and str(rl.Mesh()) == "Mesh()"


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there_has_no_place(rank):
    with pytest.raises(rl.MeshError, match=f"no rank {rank} in .*: its ranks are 0 to 3"):
        rl.Mesh(replicate=2, shard=2).coords(rank)
