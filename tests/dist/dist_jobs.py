"""What the ranks of tests/dist do: `dist_jobs.py JOBS FOLDER MODE`, one process a rank.

JOBS is a list with commas; every job runs on all ranks and rank 0 writes FOLDER/JOB.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from vlarl.batch import Observation
from vlarl.config.schema import ComputeSection
from vlarl.distributed import checkpoint
from vlarl.distributed.shard import (
    clip_grad_norm,
    full_state_dict,
    full_weights,
    reduce_gradients,
    shard,
)
from vlarl.distributed.world import World, init_world

if TYPE_CHECKING:
    from vlarl.policies.oft_policy import OftPolicy


class Block(nn.Module):
    """A residual unit; the odd width makes shards uneven."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Units, a root part, a frozen part, and a head that some steps leave out."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 3)
        self.value = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, value: bool = False) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x)
        return self.value(x) if value else self.head(x)


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in params.items() if "value" not in n], "lr": 1e-2},
            {"params": [p for n, p in params.items() if "value" in n], "lr": 3e-2},
        ]
    )


def trainable(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def backward(net: nn.Module, world: World, step: int, micro: int = 3) -> torch.Tensor:
    """One additive loss over 12 rows, rows dealt to ranks, in micro-batches."""
    x, y = data(step)
    x, y = x[world.rank :: world.size], y[world.rank :: world.size]
    total = torch.zeros(())
    for rows_x, rows_y in zip(x.split(micro), y.split(micro), strict=True):
        loss = ((net(rows_x) - rows_y) ** 2).sum() / 12
        loss.backward()
        total += loss.detach()
    return world.all_sum(total)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, world: World, step: int) -> dict:
    optimizer.zero_grad(set_to_none=True)
    loss = backward(net, world, step)
    reduce_gradients(trainable(net), world)
    norm = clip_grad_norm(trainable(net), 0.5, world)
    optimizer.step()
    return {"loss": loss, "norm": norm}


def full_grads(net: nn.Module) -> dict[str, torch.Tensor | None]:
    full = {}
    for name, p in net.named_parameters():
        grad = p.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        full[name] = None if whole is None else whole.clone()
    return full


def prepared(world: World, compute: ComputeSection) -> Net:
    # Ranks start apart on purpose: sharing rank 0's weights is the job of `shard`.
    net = make(seed=world.rank)
    shard(net, (Block,), world, compute)
    return net


# --- jobs ----------------------------------------------------------------------------------------


def job_gradients(world: World, compute: ComputeSection, folder: Path) -> object:
    net = prepared(world, compute)
    loss = backward(net, world, step=0)
    reduce_gradients(trainable(net), world)
    grads = full_grads(net)
    norm = clip_grad_norm(trainable(net), 0.5, world)
    return {"loss": loss, "norm": norm, "grads": grads, "clipped": full_grads(net)}


def job_train(world: World, compute: ComputeSection, folder: Path) -> object:
    net = prepared(world, compute)
    optimizer = adam(net)
    log = [train_step(net, optimizer, world, step) for step in range(4)]
    return {"log": log, "state": full_state_dict(net, world)}


def job_uneven_rollout(world: World, compute: ComputeSection, folder: Path) -> object:
    """Ranks run 1, 4, ... forwards between updates; the answers are those of the full weights."""
    net = prepared(world, compute)
    optimizer = adam(net)
    answers = []
    for step in range(3):
        with full_weights(net), torch.no_grad():
            for _ in range(1 + 3 * world.rank):
                answer = net(data(0)[0])
        answers.append(answer.clone())
        train_step(net, optimizer, world, step)
    everyone = world.all_gather_object(answers)
    assert all(torch.equal(a, b) for other in everyone for a, b in zip(answers, other, strict=True))
    return {"answers": answers, "state": full_state_dict(net, world)}


def job_one_sided_gradient(world: World, compute: ComputeSection, folder: Path) -> object:
    """Only rank 1 has a gradient for the value head, and nobody has one for the frozen part."""
    net = prepared(world, compute)
    x = data(0)[0]
    (net(x).sum() if world.rank == 0 else net(x, value=True).sum()).backward()
    reduce_gradients(list(net.parameters()), world)
    return full_grads(net)


def job_world(world: World, compute: ComputeSection, folder: Path) -> object:
    mine = torch.tensor([world.rank + 1, 10 * (world.rank + 1)])
    gathered = world.gather_object({"rank": world.rank})
    assert (gathered is None) == (world.rank != 0)
    world.barrier()
    return {
        "sum": world.all_sum(mine),
        "max": world.all_max(-mine),
        "mine": mine,
        "gather": gathered,
        "all": world.all_gather_object(world.rank),
        "box": world.broadcast_object(f"from {world.rank}"),
    }


def _save(net: nn.Module, optimizer: torch.optim.Optimizer, world: World, folder: Path) -> None:
    def policy_saver(path: Path, state: object) -> None:
        path.mkdir()
        torch.save(net.state_dict() if state is None else state, path / "weights.pt")

    checkpoint.save(
        folder, module=net, optimizer=optimizer, state={"step": 2}, world=world,
        policy_saver=policy_saver,
    )  # fmt: skip


def job_save(world: World, compute: ComputeSection, folder: Path) -> object:
    """Two steps, a checkpoint in FOLDER, two more steps."""
    net = prepared(world, compute)
    optimizer = adam(net)
    log = [train_step(net, optimizer, world, step) for step in range(2)]
    _save(net, optimizer, world, folder / "step_000002")
    draw = torch.rand(3)
    log += [train_step(net, optimizer, world, step) for step in range(2, 4)]
    draws = world.all_gather_object(draw)
    return {"log": log, "draws": draws, "state": full_state_dict(net, world)}


def job_resume(world: World, compute: ComputeSection, folder: Path) -> object:
    """A fresh process that goes on from the checkpoint in FOLDER."""
    net = make(seed=77)
    shard(net, (Block,), world, compute)
    optimizer = adam(net)
    state = checkpoint.load(folder / "step_000002", module=net, optimizer=optimizer, world=world)
    draws = world.all_gather_object(torch.rand(3))
    log = [train_step(net, optimizer, world, step) for step in range(state["step"], 4)]
    return {"log": log, "draws": draws, "state": full_state_dict(net, world)}


def job_one_rank_fails(world: World, compute: ComputeSection, folder: Path) -> object:
    """Rank 1 cannot write its random state: every rank hears of it, nobody hangs."""
    net = prepared(world, compute)
    optimizer = adam(net)
    work = checkpoint._save_rng
    if world.rank == 1:
        checkpoint._save_rng = lambda *_: (_ for _ in ()).throw(OSError("disk of rank 1 is full"))
    try:
        _save(net, optimizer, world, folder / "step_000099")
        mine = "saved"
    except checkpoint.RunFailed as error:
        mine = str(error)
    checkpoint._save_rng = work
    return world.all_gather_object(mine)


def _policy(folder: Path, world: World, compute: ComputeSection, lora: bool) -> OftPolicy:
    # Here, since most jobs do without and the import takes longer than the jobs.
    from vlarl.models.openvla_oft.tiny import TinySizes, init_tiny
    from vlarl.policies.openvla_oft import LoraSection, OftConfig, load

    path = folder / f"tiny-{world.rank}"
    if not path.exists():
        bounds = {"q01": [-1.0] * 4, "q99": [1.0] * 4, "mask": [True] * 4}
        init_tiny(
            path, prompts=["push the button", "reach"],
            statistics={"action": bounds}, key="made_up",
            action_dims=4, chunk=2, image_size=28, seed=world.rank,
            sizes=TinySizes(hidden=32, mlp=48, layers=2, heads=2, vision_dim=16, vision_depth=1,
                            vision_heads=2, vision_mlp=24, max_vocab=320),
        )  # fmt: skip
    cfg = OftConfig(checkpoint=str(path), lora=LoraSection(rank=2) if lora else None)
    policy = load(cfg, device=torch.device("cpu"), needs_value=True)
    shard(policy.module, policy.shard_units, world, compute)
    return policy


def _observation(n: int) -> Observation:
    generator = torch.Generator().manual_seed(3)
    frames = torch.randint(0, 256, (n, 28, 28, 3), generator=generator, dtype=torch.uint8)
    words = tuple("push the button" if i % 2 else "reach" for i in range(n))
    return Observation(images={"front": frames}, state=torch.zeros(n, 0), instruction=words)


def job_policy(world: World, compute: ComputeSection, folder: Path) -> object:
    """OpenVLA-OFT: act, score what was sampled, sum the gradients; with and without adapters."""
    result = {}
    for lora in (False, True):
        policy = _policy(folder, world, compute, lora)
        params = [p for group in policy.param_groups().values() for p in group]
        obs, keys = _observation(8), torch.arange(8)
        with full_weights(policy.module):
            for _ in range(world.rank + 1):  # ranks act different numbers of times
                acted = policy.act(obs, temperature=1.0, keys=keys)
        mine = torch.arange(8)[world.rank :: world.size]
        trace = {name: x[mine] for name, x in acted.trace.items()}
        scored = policy.evaluate(obs.select(mine), trace, temperature=1.0)
        loss = (scored.logprob.mean(dim=(1, 2)) * mine).sum() + scored.value.square().sum()
        loss.backward()
        reduce_gradients(params, world)
        norm = clip_grad_norm(params, 1e9, world)
        result[f"lora={lora}"] = {
            "token": acted.trace["token"],
            "drift": world.all_max((scored.logprob - acted.logprob[mine]).abs().max()),
            "loss": world.all_sum(loss.detach()),
            "norm": norm,
            "grads": {n: g for n, g in full_grads(policy.module).items() if g is not None},
        }
        out = folder / f"saved-{lora}"
        full = full_state_dict(policy.module, world)
        if world.is_main:
            policy.save(out, full)
    return result


def main() -> None:
    jobs, folder, mode = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3]
    compute = ComputeSection(
        device="cpu",
        threads=1,
        shard="none" if mode == "none" else "fsdp2",
        activation_checkpointing=mode == "fsdp2+recompute",
        param_dtype="bf16" if mode == "fsdp2+bf16" else "fp32",
    )
    world = init_world(compute)
    for job in jobs:
        result = globals()[f"job_{job}"](world, compute, folder)
        if world.is_main:
            torch.save(result, folder / f"{job}.pt")
    world.barrier()
    world.close()


if __name__ == "__main__":
    main()
