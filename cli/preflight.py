"""What `vlarl train` checks before anything starts, and what its --dry-run says."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlarl.errors import AssetMissing, DeviceMissing, MissingError

from .output import Output, format_table

if TYPE_CHECKING:
    from vlarl.config.schema import RunConfig
    from vlarl.train.memory import Estimate
    from vlarl.train.preflight import Division
    from vlarl.train.setup import Parts

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that can start, or, in a dry run, what it still lacks on this machine."""

    parts: Parts
    division: Division
    missing: tuple[MissingError, ...]


def check(run: RunConfig, num_ranks: int, *, dry_run: bool, device: bool) -> Checked:
    """Everything that can be known before a process starts or weights load.

    dry_run: collect what is not on this machine instead of raising it. device: whether the run is
    for this machine's devices.
    """
    from vlarl import metrics
    from vlarl.train.preflight import divide
    from vlarl.train.setup import resolve

    lacking = _lacking_devices(run) if device else []
    try:
        parts = resolve(run, without_files=dry_run)
    except AssetMissing as error:
        also = [f"also missing: {other}" for other in lacking]
        raise AssetMissing("\n".join([str(error), *also]), fix=error.fix) from None
    missing: list[MissingError] = [] if parts.missing is None else [parts.missing]
    if parts.missing is None:
        try:
            parts.policy_module.check(run.policy, needs_value=parts.algo.needs_value, train=True)
        except AssetMissing as error:
            if not dry_run:
                raise
            missing.append(error)
    metrics.require(run.log)
    division = divide(run, parts, ranks=num_ranks)
    if lacking and not dry_run:
        raise lacking[0]
    missing += lacking
    return Checked(parts, division, tuple(missing))


def _lacking_devices(run: RunConfig) -> list[MissingError]:
    """Why the network or the env cannot run on this machine."""
    from vlarl import registry
    from vlarl.distributed.world import require_device

    lacking: list[MissingError] = []
    try:
        require_device(run.compute)
    except DeviceMissing as error:
        lacking.append(error)
    try:
        module = registry.module("env", run.env.name)
        if hasattr(module, "require_device"):
            module.require_device(run.env)
    except DeviceMissing as error:
        lacking.append(error)
    return lacking


def explain(
    output: Output, run: RunConfig, checked: Checked, folder: Path, command: list[str]
) -> None:
    """What the run would do, need and lack."""
    import torch

    from vlarl.train.memory import estimate

    on_gpu = run.compute.device == "cuda" or (
        run.compute.device == "auto" and torch.cuda.device_count() > 0
    )
    memory = estimate(run, checked.parts, ranks=checked.division.ranks, on_gpu=on_gpu)
    text = [
        f"{run.name}: {run.max_steps} iterations of {run.rollout.episodes} episodes",
        f"run directory: {folder}",
        f"command: {shlex.join(command)}",
        *_division(checked.division, run.eval.ends or run.eval.every > 0),
        *(_memory(memory, checked.division.ranks) if memory else ()),
        *(_too_little(memory, checked.division.ranks) if memory else ()),
        *_missing(run, checked),
    ]
    output.result(
        {
            "config": run.model_dump(mode="json"),
            "run_dir": str(folder),
            "command": command,
            "division": dataclasses.asdict(checked.division),
            "memory": None if memory is None else dataclasses.asdict(memory),
            "missing": [{"what": str(e), "fix": e.fix} for e in checked.missing],
        },
        text="\n".join(text),
        ident=folder,
    )


def _division(d: Division, evaluates: bool) -> list[str]:
    return [
        f"each iteration: {d.episodes} episodes, {d.rank_episodes} on each of {d.ranks} ranks"
        if d.ranks > 1
        else f"each iteration: {d.episodes} episodes on one rank (--nproc N plans for N)",
        f"each update: {d.steps} optimizer steps on at most {d.step_decisions:,} of "
        f"{d.decisions:,} decisions, {d.micro_batches} forward and backward passes of a rank",
        *([f"each evaluation: {d.eval_episodes} episodes"] if evaluates else []),
        *(f"note: {note}" for note in d.notes),
    ]


def _memory(memory: Estimate, ranks: int) -> list[str]:
    """A table in GiB: rows are what takes it, columns the phases."""
    from vlarl.train.memory import PHASES

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for place in ("gpu", "host"):
        own = [item for item in memory.items if item.place == place]
        for item in own:
            row = rows.setdefault((place, item.what), _row(place, item.what))
            row[item.phase] = f"{item.num_bytes / _GIB:.1f}"
        if own:
            total = rows.setdefault((place, ""), _row(place, "total"))
            for phase in PHASES:
                total[phase] = f"{memory.total(phase, place) / _GIB:.1f}"
    title = "memory, GiB, estimated" + (f", of rank 0 of {ranks}" if ranks > 1 else "")
    table = format_table(list(rows.values())).splitlines()
    lines = [f"{title}:", *(f"  {line}" for line in table)]
    if ranks > 1:
        host = memory.machine(ranks) / _GIB
        lines.append(f"  a machine with all {ranks} ranks needs {host:.0f} GiB of its own memory")
    return [*lines, f"  assumed: {'; '.join(memory.assumes)}"]


def _too_little(memory: Estimate, ranks: int) -> list[str]:
    """A line when this machine has less memory of its own than the estimate."""
    from vlarl.doctor import memory_bytes

    need, have = memory.machine(ranks), memory_bytes()
    if have is None or need <= have:
        return []
    of = f" for {ranks} ranks" if ranks > 1 else ""
    return [
        f"  too little here: this machine has {have / _GIB:.0f} of the {need / _GIB:.0f} GiB{of}"
    ]


def _row(place: str, what: str) -> dict[str, Any]:
    from vlarl.train.memory import PHASES

    return {"where": place, "what": what, **dict.fromkeys(PHASES)}


def _missing(run: RunConfig, checked: Checked) -> list[str]:
    """What the run lacks here, and the commands that get it."""
    from vlarl.assets import manifest

    lines = []
    for error in checked.missing:
        lines += [f"missing: {error}", f"  run: {error.fix}"]
        name = str(getattr(run.policy, "checkpoint", ""))
        if isinstance(error, AssetMissing) and name in manifest.names():
            asset = manifest.get(name)
            lines.append(f"  files: {', '.join(f.label for f in asset.files)}. {asset.note}")
    if checked.parts.missing is not None:
        lines.append("not checked without it: statistics, head, tokenizer and weights")
    if checked.missing:
        lines.append("nothing else is missing; the run itself would end with exit code 3")
    return lines
