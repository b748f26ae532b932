"""A VecEnv over single-step simulators: one process per slot, one message per chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vlarl.batch import EnvStep, Observation, require_finite
from vlarl.envs.chunked import Demonstration, PlayConfig, Played
from vlarl.envs.subproc import SubprocPool
from vlarl.episode import Episode
from vlarl.specs import EnvSpec
from vlarl.trajectories import Trajectory


class SimulatorEnv:
    """Plays episodes in worker processes; implements vlarl.interfaces.VecEnv.

    sim: "module:callable" that makes a vlarl.envs.chunked.Sim from `sim_config` inside a worker;
    its module must not import torch. instructions: task -> what the policy is told.
    """

    def __init__(
        self,
        sim: str,
        sim_config: object,
        *,
        spec: EnvSpec,
        play: PlayConfig,
        instructions: Mapping[str, str],
        num_slots: int,
        timeout_s: float,
    ) -> None:
        self.spec = spec
        self.num_slots = num_slots
        self._play = play
        self._instructions = instructions
        self._pool = SubprocPool(
            "vlarl.envs.chunked:serve",
            (sim, sim_config, play),
            num_slots=num_slots,
            num_bytes=int(np.prod(play.frames_shape)),
            timeout_s=timeout_s,
        )
        self._frames = [
            np.frombuffer(self._pool.memory(slot), np.uint8).reshape(play.frames_shape)
            for slot in range(num_slots)
        ]
        self._episodes: dict[int, Episode] = {}
        self._history: dict[int, list[np.ndarray]] = {slot: [] for slot in range(num_slots)}
        self._chunk = 1

    def pids(self) -> list[int]:
        """Process ids of the workers, by slot."""
        return self._pool.pids()

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start episodes[i] in slots[i]; all at once, each in its own process."""
        for slot, episode in zip(slots, episodes, strict=True):
            self._episodes[slot] = episode
            self._history[slot] = []
            self._pool.submit(slot, ("play", (episode, ())))

    def send(self, slots: Sequence[int], action: Tensor) -> None:
        """Play action[i] ([n, C, A] float32) in slots[i]."""
        chunks = action.detach().cpu().numpy()
        assert chunks.shape[0] == len(slots), (chunks.shape, slots)
        require_finite(action, [self._episodes[slot] for slot in slots])
        self._chunk = chunks.shape[1]
        for slot, chunk in zip(slots, chunks.astype(np.float32), strict=True):
            self._history[slot].append(chunk)
            self._pool.submit(
                slot, ("play", (None, (chunk,))), recovery=partial(self._replay, slot)
            )

    def recv(self, min_slots: int, among: Sequence[int] | None = None) -> tuple[list[int], EnvStep]:
        """Wait for at least min_slots of the slots under way; all that are ready, in slot order."""
        answers = self._pool.wait(min_slots, among)
        slots = list(answers)
        assert slots, "recv without a slot under way"
        return slots, self._step(slots, list(answers.values()))

    def renderer(self) -> str | None:
        """What draws slot 0's frames, e.g. "llvmpipe (...)"; None before the first frame, or while
        the slot plays.
        """
        if self._pool.is_busy(0):
            return None
        self._pool.submit(0, ("renderer", ()))
        return self._pool.wait(1, [0])[0]

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        self._pool.close()

    def demonstrate(
        self, episodes: Sequence[Episode], *, noise_std: float, seed: int
    ) -> Iterator[Trajectory]:
        """Whole episodes of the scripted expert, in the order given, played in parallel."""
        results: dict[int, Demonstration] = {}
        playing: dict[int, int] = {}
        started = 0
        for wanted, episode in enumerate(episodes):
            while wanted not in results:
                for slot in range(self.num_slots):
                    # Slots stay at most one round ahead of the reader, so memory stays bounded.
                    ahead = started < min(len(episodes), wanted + 2 * self.num_slots)
                    if slot not in playing and ahead:
                        request = ("demonstrate", (episodes[started], noise_std, seed))
                        self._pool.submit(slot, request)
                        playing[slot] = started
                        started += 1
                for slot, demonstration in self._pool.wait(1).items():
                    results[playing.pop(slot)] = demonstration
            yield self._trajectory(episode, results.pop(wanted))

    def _replay(self, slot: int) -> tuple[str, tuple[object, ...]]:
        return "play", (self._episodes[slot], tuple(self._history[slot]))

    def _trajectory(self, episode: Episode, demonstration: Demonstration) -> Trajectory:
        return Trajectory(
            task=episode.task,
            trial=episode.trial,
            instruction=self._instructions[episode.task],
            frames=demonstration.frames,
            state=demonstration.state,
            action=demonstration.action,
            target=demonstration.target,
            reward=demonstration.reward,
            success=demonstration.success,
        )

    def _step(self, slots: list[int], played: list[Played]) -> EnvStep:
        frames = np.stack([self._frames[slot] for slot in slots])
        first = [len(answer.reward) == 0 for answer in played]
        videos = None
        if any(answer.video is not None for answer in played):
            none = np.zeros((0, *self._play.video_size, 3), np.uint8)
            videos = tuple(torch.from_numpy(none if a.video is None else a.video) for a in played)
        return EnvStep(
            obs=Observation(
                images={
                    camera: torch.from_numpy(frames[:, i])
                    for i, camera in enumerate(self._play.cameras)
                },
                state=torch.from_numpy(np.stack([answer.state for answer in played])),
                instruction=tuple(self._instructions[self._episodes[s].task] for s in slots),
            ),
            reward=self._rows([answer.reward for answer in played], np.float32),
            terminated=self._rows([answer.terminated for answer in played], np.bool_),
            truncated=self._rows([answer.truncated for answer in played], np.bool_),
            first=torch.tensor(first),
            num_clipped=torch.tensor([a.num_clipped for a in played], dtype=torch.int32),
            diverged=torch.tensor([a.diverged for a in played]),
            frames=videos,
        )

    def _rows(self, rows: list[np.ndarray], dtype: type) -> Tensor:
        """[n, C]; rows of resets are empty and become zeros."""
        width = max(map(len, rows)) or self._chunk
        out = np.zeros((len(rows), width), dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return torch.from_numpy(out)
