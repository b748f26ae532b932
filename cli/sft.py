"""`vlarl sft`: supervised warm start from trajectories."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlarl.signals import INTERRUPTED, stop_on_signals

from .options import DryRunOpt, JsonOpt, OverridesArg, PresetOpt, QuietOpt, SeedOpt, merge_overrides
from .output import Output, print_stderr, talk

if TYPE_CHECKING:
    from vlarl.sft import Progress

EXAMPLES = (
    "vlarl sft --preset tiny_metaworld_sft",
    "vlarl sft --preset tiny_metaworld_sft 'data=[data/mine]' optim.steps=2000 init.layers=6",
    "vlarl sft --preset tiny_metaworld_sft init=null policy.checkpoint=tiny-oft-metaworld",
)


def sft(
    preset: PresetOpt,
    overrides: OverridesArg = None,
    seed: SeedOpt = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="Folder of the run; same as run_dir=DIR.",
            rich_help_panel="Output",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace a run that is there.", rich_help_panel="Output"),
    ] = False,
    dry_run: DryRunOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Teach a policy to imitate trajectories; writes a checkpoint that train and eval take."""
    from vlarl.config.compose import compose
    from vlarl.sft import prepare
    from vlarl.sft_config import build

    out = Output(json=json, quiet=quiet)
    composed = compose(preset, merge_overrides(overrides, seed=seed, run_dir=run_dir))
    cfg = build(composed)
    prepared = prepare(cfg)
    start = "a fresh network" if cfg.init is not None else cfg.policy.checkpoint
    out.hint(
        f"{cfg.policy.name} from {start}: {prepared.num_episodes} episodes, "
        f"{prepared.num_samples} samples, {cfg.optim.steps} steps of {cfg.optim.batch} "
        f"-> {cfg.folder}"
    )
    from vlarl import run_dir as runs

    if dry_run:
        runs.check(cfg.folder, overwrite=overwrite)
        found = {"run_dir": cfg.folder, "config": cfg.model_dump(mode="json")}
        out.result(found, text=f"would train into {cfg.folder}", ident=cfg.folder)
        return
    from vlarl.distributed.world import init_world
    from vlarl.sft import train_sft

    folder = runs.create(cfg.folder, overwrite=overwrite)
    bar = _Bar(quiet=quiet)
    with runs.RunLock(folder), stop_on_signals() as should_stop:
        checkpoint = train_sft(
            prepared,
            folder,
            init_world(cfg.compute),
            sources=composed.sources,
            on_progress=bar.show,
            should_stop=should_stop,
        )
        stopped = should_stop() and bar.last_step < cfg.optim.steps
    document = {"run_dir": folder.path, "checkpoint": checkpoint, "metrics": bar.metrics}
    out.result(document, text=str(checkpoint), ident=checkpoint)
    if stopped:
        out.warn(f"interrupted after {bar.last_step} steps; the checkpoint holds what was learned")
        raise typer.Exit(INTERRUPTED)
    out.hint(f"next: vlarl eval {checkpoint} --suite SUITE")


class _Bar:
    """Loss, accuracy and time left, on stderr: a moving line on a terminal, lines elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._moves = sys.stderr.isatty()
        self._start = time.monotonic()
        self.metrics: dict[str, float] = {}
        self.last_step = 0

    def show(self, progress: Progress) -> None:
        """The latest metrics line; accuracies stay on screen until the next validation."""
        self.metrics |= progress.metrics
        self.last_step = progress.step
        if self._quiet:
            return
        left = (time.monotonic() - self._start) / progress.step * (progress.steps - progress.step)
        words = [f"step {progress.step}/{progress.steps}", f"loss {self.metrics['sft/loss']:.3f}"]
        for name, label in (
            ("sft/token_accuracy", "token accuracy"),
            ("sft/val/loss", "held-out loss"),
            ("sft/val/token_accuracy", "held-out accuracy"),
        ):
            if name in self.metrics:
                value = self.metrics[name]
                words.append(
                    f"{label} {value:.1%}" if "accuracy" in name else f"{label} {value:.3f}"
                )
        words.append(f"{left:.0f} s left")
        text = "  ".join(words)
        if self._moves:
            end = "\n" if progress.step == progress.steps else ""
            talk(f"\r\033[K{text}{end}")
        elif "sft/token_accuracy" in progress.metrics:
            print_stderr(text)
