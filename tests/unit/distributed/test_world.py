import pytest
import torch

from vlarl.config.schema import ComputeSection
from vlarl.distributed.world import init_world
from vlarl.errors import ConfigError, DeviceMissing


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_without_torchrun_a_process_is_alone_and_talks_to_itself():
    world = init_world(ComputeSection(device="cpu"), {})
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert not torch.distributed.is_initialized()
    x = torch.tensor([1.5, 2.5])
    total = world.all_sum(x)
    total += 1
    assert x.tolist() == [1.5, 2.5], "the result must not share memory with the argument"
    assert world.gather_object("a") == ["a"]
    assert world.broadcast_object({"b": 1}) == {"b": 1}
    world.barrier()
    world.close()


def test_threads_are_set():
    init_world(ComputeSection(device="cpu", threads=1), {})
    assert torch.get_num_threads() == 1


def test_a_half_set_environment_is_refused():
    with pytest.raises(ConfigError, match="LOCAL_RANK, LOCAL_WORLD_SIZE not set although RANK"):
        init_world(ComputeSection(device="cpu"), {"RANK": "1", "WORLD_SIZE": "2"})


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceMissing) as caught:
        init_world(ComputeSection(device="cuda"), {})
    assert caught.value.fix == "vlarl doctor"
    assert init_world(ComputeSection(device="auto"), {}).device.type == "cpu"


def test_more_ranks_than_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environ = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    with pytest.raises(
        DeviceMissing, match="rank 2 of this host has no GPU of its own: there are 2"
    ):
        init_world(ComputeSection(device="auto"), environ)
