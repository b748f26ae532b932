"""Supervised warm start: a policy learns to imitate the trajectories of a data set."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlarl import dataset, registry, run_dir, sft_data
from vlarl.assets import companion
from vlarl.atomic import write_atomic
from vlarl.batch import Observation
from vlarl.config.resolved import dump
from vlarl.distributed.precision import autocast
from vlarl.distributed.shard import shard
from vlarl.distributed.world import World
from vlarl.errors import ConfigError, NonFiniteLoss, SpecMismatch
from vlarl.interfaces import MetricSink, Policy
from vlarl.metrics import open_sinks, require
from vlarl.models.openvla_oft.action_tokens import ActionCodec
from vlarl.models.openvla_oft.tiny import TinySizes, init_tiny
from vlarl.noise import stream
from vlarl.policies.openvla_oft import OftConfig
from vlarl.run_dir import RunDir
from vlarl.sft_config import SftConfig, SftOptimSection
from vlarl.sft_data import Batches, Samples
from vlarl.specs import PolicySpec

log = logging.getLogger(__name__)

_GRIPPERS_AS_STORED = ("close_positive",)
"""Conventions whose gripper number is 0 or 1 in the data set and is not normalised."""


@runtime_checkable
class Imitator(Policy, Protocol):
    """A policy that can be taught."""

    def sft_loss(self, obs: Observation, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean loss over the actions that count, [n, C, A] canonical with mask [n, C]."""
        ...

    def encode(self, action: Tensor) -> Tensor:
        """[..., A] canonical actions -> the tokens that stand for them."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the training is. metrics: the latest line."""

    step: int
    steps: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that was found to fit together; nothing is written yet."""

    cfg: SftConfig
    data: tuple[dataset.DataSet, ...]
    num_episodes: int
    num_samples: int


def prepare(cfg: SftConfig) -> Prepared:
    """Open the data sets and match them with the policy; reads no frames, writes nothing.

    Raises:
        AssetMissing: a data set, a file of one, or the checkpoint is not there.
        ConfigError: a data set without episodes, or named twice.
        SpecMismatch: data sets of different envs, or a policy that cannot emit such actions.
        ExtraMissing: a metrics backend is not installed.
    """
    require(cfg.log)
    if not cfg.data:
        raise ConfigError("data: name at least one folder written by `vlarl collect`")
    data = tuple(dataset.open_(folder) for folder in cfg.data)
    for one in data:
        one.check_matches(data[0].origin.spec)
        if not one.kept:
            raise ConfigError(f"{one.folder} has no episodes; continue it with `vlarl collect`")
        if [other.folder.resolve() for other in data].count(one.folder.resolve()) > 1:
            raise ConfigError(f"data: {one.folder} is named twice; its episodes would count twice")
        one.check_files()
    if cfg.init is None:
        _check_policy(registry.module("policy", cfg.policy.name).spec(cfg.policy), data[0])
    kept = [entry for one in data for entry in one.kept]
    return Prepared(cfg, data, len(kept), sum(entry.num_steps for entry in kept))


def _check_policy(spec: PolicySpec, data: dataset.DataSet) -> None:
    mine, theirs = spec.action, data.origin.spec.action
    if mine != theirs:
        raise SpecMismatch(
            f"policy '{spec.name}' emits {mine}, but {data.folder} holds {theirs}; choose a "
            f"checkpoint for this env, or start a fresh one with init={{}}"
        )
    if spec.state_dims not in (0, data.origin.spec.state_dims):
        raise SpecMismatch(
            f"policy '{spec.name}' reads {spec.state_dims} state numbers, but {data.folder} has "
            f"{data.origin.spec.state_dims}"
        )


def train_sft(
    prepared: Prepared,
    folder: RunDir,
    world: World,
    *,
    sources: dict[str, str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Path:
    """Train, and return the folder of the checkpoint, in the policy's own public layout.

    folder: a fresh run directory; config.json, metrics.jsonl and ckpt/step_N/policy appear in it.
    should_stop: asked after every step; once true the training ends early, with a checkpoint.

    Raises:
        NonFiniteLoss: the loss or gradient is not finite.
    """
    cfg = prepared.cfg
    write_atomic(folder.config, dump(cfg, sources or {}))
    module = registry.module("policy", cfg.policy.name)
    num_cameras = module.spec(cfg.policy).cameras if cfg.init is None else _oft(cfg).num_images or 1
    samples = sft_data.load(prepared.data, num_cameras)
    train_rows, held_rows = sft_data.split(samples, cfg.validation.fraction, cfg.seed)
    section = cfg.policy
    if cfg.init is not None:
        fresh = _make_fresh(cfg, samples, folder.ckpt / "init", prepared.data[0])
        section = section.model_copy(update={"checkpoint": str(fresh)})
    policy = module.load(section, device=world.device, needs_value=False, train=True)
    if not isinstance(policy, Imitator):
        raise ConfigError(f"policy '{cfg.policy.name}' has no supervised loss")
    shard(policy.module, policy.shard_units, world, cfg.compute)
    values = cfg.model_dump(mode="json")
    sink = open_sinks(folder, cfg.log, values, resume_step=None)
    try:
        step = _Trainer(cfg, policy, samples, world, sink, on_progress).run(
            train_rows, _spread(held_rows, cfg.validation.samples), should_stop
        )
    finally:
        sink.close()
    return _save(policy, folder, step, prepared.data[0].origin.env)


def _oft(cfg: SftConfig) -> OftConfig:
    """The policy's section where `init` makes the network, which is an OpenVLA-OFT."""
    assert isinstance(cfg.policy, OftConfig), cfg.policy.name
    return cfg.policy


def _make_fresh(cfg: SftConfig, samples: Samples, to: Path, data: dataset.DataSet) -> Path:
    """A random checkpoint whose statistics are those of the data."""
    init = cfg.init
    assert init is not None
    spec, dims = data.origin.spec, samples.target.shape[1]
    unit = {"q01": [-1.0] * dims, "q99": [1.0] * dims}
    codec = ActionCodec(unit, normalisation="q99", action_format=None)
    if codec.spec.format != spec.action.format or codec.spec.gripper != spec.action.gripper:
        raise SpecMismatch(
            f"a fresh network with {dims} numbers per action emits {codec.spec}, but {data.folder} "
            f"holds {spec.action}"
        )
    statistics: dict[str, Any] = sft_data.statistics(
        codec.from_canonical(samples.target), samples.state
    )
    if spec.action.gripper in _GRIPPERS_AS_STORED:
        statistics["action"]["mask"][-1] = False
    init_tiny(
        to,
        prompts=samples.instructions,
        statistics=statistics,
        key=init.statistics_key,
        action_dims=dims,
        chunk=_oft(cfg).chunk or 8,
        image_size=init.image_size,
        seed=init.seed,
        sizes=TinySizes(
            **init.model_dump(exclude={"seed", "statistics_key", "image_size"}),
        ),
    )
    return to


class _Trainer:
    """The loop's fixed parts."""

    def __init__(
        self,
        cfg: SftConfig,
        policy: Imitator,
        samples: Samples,
        world: World,
        sink: MetricSink,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.cfg = cfg
        self.policy = policy
        self.samples = samples
        self.world = world
        self.sink = sink
        self.on_progress = on_progress
        self.params = policy.param_groups()["actor"]
        matrices = [p for p in self.params if p.ndim >= 2]
        vectors = [p for p in self.params if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": cfg.optim.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=cfg.optim.lr,
            betas=cfg.optim.betas,
        )

    def run(self, rows: Tensor, held: Tensor, should_stop: Callable[[], bool] | None) -> int:
        """Train on these rows; returns the number of steps made."""
        cfg, optim = self.cfg, self.cfg.optim
        batches = Batches(rows, optim.batch, cfg.seed)
        sums = {"sft/loss": 0.0, "sft/grad_norm": 0.0}
        since, start = 0, time.monotonic()
        for step in range(1, optim.steps + 1):
            rate = learning_rate(optim, step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss, norm = self.update(batches[step - 1], step)
            sums["sft/loss"] += loss
            sums["sft/grad_norm"] += norm
            since += 1
            stop = should_stop is not None and should_stop()
            last = stop or step == optim.steps
            validate_now = last or step % cfg.validation.every == 0
            if last or validate_now or step % cfg.log_every == 0:
                seconds = (time.monotonic() - start) / since
                line = {name: total / since for name, total in sums.items()}
                line |= {"sft/lr": rate, "time/sft_step_s": seconds}
                if validate_now:
                    line |= self.measure("sft", batches[step - 1])
                    if len(held):
                        line |= self.measure("sft/val", held, with_loss=True)
                self.sink.write(step, line)
                if self.on_progress is not None:
                    self.on_progress(Progress(step, optim.steps, line))
                sums, since, start = dict.fromkeys(sums, 0.0), 0, time.monotonic()
            if stop:
                return step
        return optim.steps

    def update(self, rows: Tensor, step: int) -> tuple[float, float]:
        """One optimizer step; returns loss and gradient norm."""
        cfg = self.cfg
        target, mask = self.samples.chunks(rows, self.policy.spec.chunk)
        obs = self._augmented(rows, step)
        size = cfg.optim.micro_batch or len(rows)
        total = float(mask.sum())
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for start in range(0, len(rows), size):
            part = slice(start, min(start + size, len(rows)))
            # The policy averages over what counts in its part; the batch is the weighted mean.
            share = float(mask[part].sum()) / total
            one = obs if size >= len(rows) else obs.select(range(part.start, part.stop))
            value = share * self._loss(one, target[part], mask[part])
            value.backward()
            loss += float(value.detach())
        norm = float(nn.utils.clip_grad_norm_(self.params, cfg.optim.grad_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLoss(
                f"step {step}: loss {loss}, gradient norm {norm}; lower optim.lr ({cfg.optim.lr})"
            )
        self.optimizer.step()
        return loss, norm

    def _loss(self, obs: Observation, target: Tensor, mask: Tensor) -> Tensor:
        device = self.world.device
        with autocast(self.world, self.cfg.compute):
            return self.policy.sft_loss(obs.to(device), target.to(device), mask.to(device))

    def _augmented(self, rows: Tensor, step: int) -> Observation:
        obs, wanted = self.samples.observation(rows), self.cfg.augment
        if wanted.shift == wanted.brightness == wanted.contrast == 0:
            return obs
        images = {
            name: sft_data.augment(
                frames,
                shift=wanted.shift,
                brightness=wanted.brightness,
                contrast=wanted.contrast,
                key=stream(self.cfg.seed, "sft-augment", step, name),
            )
            for name, frames in obs.images.items()
        }
        return Observation(images=images, state=obs.state, instruction=obs.instruction)

    def measure(self, prefix: str, rows: Tensor, *, with_loss: bool = False) -> dict[str, float]:
        """How well the greedy policy imitates these samples, frames as they are.

        token_accuracy: share of tokens that are the teacher's. action_error: mean absolute
        difference of the actions, in action units. Only actions that count.
        """
        target, mask = self.samples.chunks(rows, self.policy.spec.chunk)
        hits = errors = loss = 0.0
        size = self.cfg.optim.micro_batch or self.cfg.optim.batch
        with torch.no_grad():
            for start in range(0, len(rows), size):
                part = slice(start, min(start + size, len(rows)))
                obs = self.samples.observation(rows[part])
                with autocast(self.world, self.cfg.compute):
                    decided = self.policy.act(obs.to(self.world.device), temperature=0.0)
                token = decided.trace["token"].cpu()
                counts = mask[part][..., None]
                hits += float(((token == self.policy.encode(target[part])) & counts).float().sum())
                off = (decided.action.cpu() - target[part]).abs() * counts
                errors += float(off.sum())
                if with_loss:
                    share = float(mask[part].sum()) / float(mask.sum())
                    loss += share * float(self._loss(obs, target[part], mask[part]))
        number = float(mask.sum())
        found = {
            f"{prefix}/token_accuracy": hits / (number * token.shape[-1]),
            f"{prefix}/action_error": errors / (number * target.shape[-1]),
        }
        return found | ({f"{prefix}/loss": loss} if with_loss else {})


def learning_rate(optim: SftOptimSection, step: int) -> float:
    """Of step 1, 2, ...: linear warm-up, then a cosine from lr down to final_lr * lr."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    span = max(1, optim.steps - optim.warmup_steps)
    done = (step - optim.warmup_steps) / span
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * (1 + math.cos(math.pi * done)) / 2)


def _spread(rows: Tensor, count: int) -> Tensor:
    """At most `count` of the rows, evenly spread."""
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count).round().long()]


def _save(policy: Policy, folder: RunDir, step: int, env: Mapping[str, Any]) -> Path:
    """ckpt/step_N/policy. The manifest comes last: it makes the checkpoint complete."""
    target = folder.checkpoint(step)
    target.mkdir(parents=True)
    policy.save(target / "policy")
    companion.write_env(target / "policy", env)
    manifest = {"kind": "sft", "step": step}
    write_atomic(target / run_dir.MANIFEST, json.dumps(manifest, indent=1))
    return target / "policy"
