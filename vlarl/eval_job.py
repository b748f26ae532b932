"""One evaluation as data, and the way from there to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, Literal, cast

from pydantic import AfterValidator, Field

from vlarl import eval_journal, registry
from vlarl.assets import store
from vlarl.atomic import check_writable
from vlarl.comparison import differences, protocol_differences
from vlarl.config.explain import validate
from vlarl.config.schema import (
    Bool,
    ComputeSection,
    EnvSection,
    EnvT,
    Int,
    PolicySection,
    PolicyT,
    Section,
    Temperature,
)
from vlarl.distributed.precision import autocast
from vlarl.distributed.world import World, require_device
from vlarl.episode import Episode
from vlarl.errors import ConfigError, SpecMismatch
from vlarl.evaluate import (
    checkpoint_hash,
    episode_result,
    evaluate,
    make_protocol,
    settings_protocol,
)
from vlarl.protocol import leaves
from vlarl.results import EpisodeKey, EvalResult, counted, name_some, plan_hash
from vlarl.rollout.plan import Trials, eval_plan
from vlarl.rollout.play import Outcome
from vlarl.specs import EnvSpec, check_temperature, match
from vlarl.video import Clip, write_grid


def _check_shard(text: str) -> str:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"'{text}' is no part of a plan; for the second of four write 2/4")
    return text


def _check_out(path: Path) -> Path:
    # Journals, partial results and videos lie beside it under the rest of its name.
    if path.suffix != ".json" or path.stem in ("", ".json"):
        raise ValueError(f"a result file's name ends in .json; got '{path}'")
    return path


class EvalJob(Section, Generic[EnvT, PolicyT]):
    """Everything an evaluation is made of."""

    env: EnvT
    policy: PolicyT
    compute: ComputeSection = ComputeSection()
    split: Literal["eval", "train"] = "eval"
    """Held-out trials or training trials."""
    episodes: Annotated[Int, Field(ge=1)] | None = None
    """Trials per task; none means all of them."""
    repeats: Annotated[Int, Field(ge=1, le=1000)] = 1
    """Episodes per trial; more than one only tells something when sampling."""
    temperature: Annotated[Temperature, Field(ge=0)] = 0.0
    """Sampling temperature, 0 = greedy."""
    seed: Annotated[Int, Field(ge=0)] = 0
    """Root of the sampling noise."""
    shard: Annotated[str, AfterValidator(_check_shard)] = "1/1"
    """I/N plays the I-th of N parts of the plan; `vlarl merge` puts them together."""
    stages: Annotated[Int, Field(ge=1)] = 2
    """Groups of slots that take turns; changes speed, not results."""
    video: Literal["none", "failures", "all"] = "none"
    """Episodes to write as MP4, next to the result file."""
    out: Annotated[Path, AfterValidator(_check_out)]
    """The result file, NAME.json."""
    overwrite: Bool = False
    """Replace the result file if it exists."""
    resume: Bool = False
    """Go on with what a stopped evaluation left beside the result file."""

    @property
    def part(self) -> tuple[int, int]:
        """`shard` as numbers."""
        number, _, count = self.shard.partition("/")
        return int(number), int(count)

    @property
    def video_dir(self) -> Path:
        """Folder of the videos."""
        return self.out.with_suffix("")


def build_job(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> EvalJob:
    """The validated job. values: nested plain values with env.name and policy.name.

    Raises ConfigError with every problem, one a line.
    """
    env = registry.module("env", values["env"]["name"]).Config
    policy = registry.module("policy", values["policy"]["name"]).Config
    model = cast("type[EvalJob]", EvalJob.__class_getitem__((env, policy)))
    return validate(model, values, sources)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that was found to fit together. Nothing heavy is loaded yet.

    plan: all episodes. share: those of this job's part of it that are left to play. groups: name ->
    tasks, for averages. train_trials: those of the env. before: what a stopped evaluation left.
    """

    job: EvalJob[EnvSection, PolicySection]
    env_module: ModuleType
    policy_module: ModuleType
    env_spec: EnvSpec
    plan: tuple[Episode, ...]
    share: tuple[Episode, ...]
    train_trials: Trials
    groups: Mapping[str, Sequence[str]]
    before: EvalResult | None


def prepare(job: EvalJob, before: EvalResult | None = None) -> Prepared:
    """Look everything up, without loading weights or starting a simulator.

    before: what a stopped evaluation left, when the job is to go on with it.

    Raises:
        SpecMismatch: policy and env disagree; every reason is listed.
        ConfigError: unknown tasks, fewer trials than asked for, the result file is taken, or what
            is to be resumed is of another plan.
        DeviceMissing: no GPU although one is asked for, or nothing to render with.
    """
    check_writable(job.out, overwrite=job.overwrite)
    if job.repeats > 1 and job.temperature == 0:
        raise ConfigError(
            f"repeats: at temperature 0 all {job.repeats} episodes of a trial are the same one; "
            "set a --temperature, or leave out --repeats"
        )
    require_device(job.compute)
    env_module = registry.module("env", job.env.name)
    policy_module = registry.module("policy", job.policy.name)
    if hasattr(env_module, "require_device"):
        env_module.require_device(job.env)
    env_spec = env_module.spec(job.env)
    policy_spec = policy_module.spec(job.policy)
    check_temperature(policy_spec, job.temperature)
    problems = match(policy_spec, env_spec)
    if problems:
        raise SpecMismatch("\n".join(problems))
    trials = env_module.trials(job.env, job.split)
    plan = eval_plan(
        trials,
        episodes=job.episodes,
        repeats=job.repeats,
        record=0 if job.video == "none" else job.repeats * sum(map(len, trials.values())),
    )
    share = _share(plan, job)
    if before is not None:
        share = _left(job, before, plan, share)
    return Prepared(
        job=job,
        env_module=env_module,
        policy_module=policy_module,
        env_spec=env_spec,
        plan=tuple(plan),
        share=share,
        train_trials=env_module.trials(job.env, "train"),
        groups=env_module.groups(job.env),
        before=before,
    )


def _left(
    job: EvalJob, before: EvalResult, plan: Sequence[Episode], share: Sequence[Episode]
) -> tuple[Episode, ...]:
    """The episodes of a part that were not played before.

    Raises ConfigError when those that were played are of another plan or were played otherwise, as
    far as it can be told before anything is loaded.
    """
    # What is left at none is known when the policy is loaded, and compared then.
    chosen = settings_protocol(
        job.env, job.policy, temperature=job.temperature, seed=job.seed, split=job.split
    )
    asked = {key: value for key, value in leaves(chosen) if value is not None}
    then = {key: value for key, value in leaves(before.protocol) if key in asked}
    _refuse_another(job, protocol_differences(then, asked))
    if before.plan_hash != plan_hash(map(EpisodeKey.of, plan)):
        raise ConfigError(
            f"--resume: what a stopped evaluation left for {job.out} is of a plan of "
            f"{counted(len(before.plan), 'episode')}, {name_some(before.plan, 1)}, and this "
            f"command plans {len(plan)}; give the options it had, or start anew with --overwrite"
        )
    missing = set(before.missing)
    left = tuple(e for e in share if EpisodeKey.of(e) in missing)
    if not left:  # then nobody will load the checkpoint and see whether it is the same one
        now = checkpoint_hash(store.resolve(job.policy.checkpoint))
        then = before.protocol.get("checkpoint", {}).get("sha256")
        _refuse_another(job, [f"checkpoint.sha256: {then} | {now}"] if then != now else [])
    return left


def _share(plan: Sequence[Episode], job: EvalJob) -> tuple[Episode, ...]:
    number, count = job.part
    if count > len(plan):
        raise ConfigError(f"shard: {len(plan)} episodes cannot be cut in {count} parts")
    return tuple(plan[number - 1 :: count])


def play(
    prepared: Prepared,
    world: World,
    *,
    on_episode: Callable[[Outcome], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> EvalResult:
    """Load the policy, start the simulators and play the plan; the same result on every rank.

    Written are the journals in the job's work folder, which has to be there, and videos, by the
    rank that played the episode. Raises ConfigError when what is to be resumed was played under
    another protocol.
    """
    job = prepared.job
    work = eval_journal.work_dir(job.out)
    policy = prepared.policy_module.load(
        job.policy, device=world.device, needs_value=False, train=False
    )
    share = -(-len(prepared.share) // world.size)
    env = prepared.env_module.make(
        job.env, num_slots=min(job.env.num_slots, share), final_frames=False
    )
    try:
        protocol = make_protocol(
            env,
            policy,
            prepared.plan,
            env_section=job.env,
            policy_section=job.policy,
            temperature=job.temperature,
            seed=job.seed,
            split=job.split,
            train_trials=prepared.train_trials,
            checkpoint=store.resolve(job.policy.checkpoint),
            num_ranks=world.size,
        )
        with autocast(world, job.compute), eval_journal.writer(work, world.rank) as note:

            def ended(outcome: Outcome) -> None:
                note(episode_result(outcome))
                if on_episode is not None:
                    on_episode(outcome)

            return evaluate(
                env,
                policy,
                prepared.plan,
                temperature=job.temperature,
                seed=job.seed,
                world=world,
                stages=job.stages,
                shard=job.part,
                protocol=protocol,
                groups=prepared.groups,
                before=prepared.before,
                on_start=lambda empty: _begin(prepared, world, empty),
                on_episode=ended,
                on_frames=lambda outcome: _write_video(prepared, outcome),
                should_stop=should_stop,
            )
    finally:
        env.close()


def _begin(prepared: Prepared, world: World, empty: EvalResult) -> None:
    """Check what is to be resumed against the protocol in force, then say what is played."""
    if prepared.before is not None:
        _refuse_another(prepared.job, differences(prepared.before, empty))
    if world.is_main:
        eval_journal.begin(eval_journal.work_dir(prepared.job.out), empty)


def _refuse_another(job: EvalJob, different: Sequence[str]) -> None:
    """Raise ConfigError when what is to be resumed differs: `key: value then | value now`."""
    if different:
        raise ConfigError(
            f"--resume: what a stopped evaluation left for {job.out} was played otherwise: "
            f"{'; '.join(different)}; give the options it had, or start anew with --overwrite"
        )


def _write_video(prepared: Prepared, outcome: Outcome) -> None:
    job, episode = prepared.job, outcome.episode
    if outcome.frames is None or (job.video == "failures" and outcome.success):
        return
    ending = "success" if outcome.success else "failure"
    name = f"{episode.index:04d}_{episode.task}_t{episode.trial}_r{episode.member}_{ending}.mp4"
    clip = Clip.of(outcome, prepared.env_spec)
    fps = prepared.env_spec.control_hz / prepared.env_spec.video_every
    write_grid([clip], job.video_dir / name, fps=fps, overwrite=job.overwrite or job.resume)


def save(job: EvalJob, result: EvalResult) -> Path:
    """Write the result file, or the partial one of an interrupted evaluation; which one it was."""
    partial = eval_journal.partial_file(job.out)
    if not is_finished(job, result):
        result.save(partial, overwrite=True)
        return partial
    result.save(job.out, overwrite=job.overwrite)
    partial.unlink(missing_ok=True)
    return job.out


def is_finished(job: EvalJob, result: EvalResult) -> bool:
    """Whether every episode of the job's part was played."""
    number, count = job.part
    return not set(result.plan[number - 1 :: count]) & set(result.missing)
