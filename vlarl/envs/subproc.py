"""One process per slot: starts simulator workers, calls them, brings lost ones back. Torch-free.

A worker is a fresh interpreter (no fork, no import of the user's `__main__`, so notebooks and
scripts without a main guard work) and inherits exactly two descriptors: a socket for calls and
answers, and anonymous memory for frames. Both vanish with the last process that holds them: nothing
is left behind in /dev/shm, whoever is killed.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from vlarl import errors
from vlarl.envs.sim_worker import ALIVE

log = logging.getLogger(__name__)

Request = tuple[str, tuple[Any, ...]]
"""A method of the served object and its arguments; both must pickle."""

_LAST_WORDS = 2000
"""Bytes of a lost worker's output that go into the message."""
_EXIT_S = 2.0
"""Seconds a worker whose socket closed gets to exit by itself."""


@dataclass(slots=True)
class _Worker:
    """One slot's process. `request` is set while an answer is owed."""

    process: subprocess.Popen[bytes]
    conn: Connection
    stderr: IO[bytes]
    request: Request | None = None
    recovery: Callable[[], Request] | None = None
    deadline: float = 0.0
    failures: int = 0

    def end(self, patience_s: float) -> str:
        """Close the socket, wait for the exit and force it if need be. Returns the last words."""
        self.conn.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.stderr.closed:
            return ""
        with self.stderr:
            self.stderr.seek(max(0, os.fstat(self.stderr.fileno()).st_size - _LAST_WORDS))
            return self.stderr.read().decode(errors="replace").strip() or "(none)"


@dataclass(slots=True)
class _Slot:
    """Memory that outlives the slot's processes."""

    descriptor: int
    memory: mmap.mmap
    worker: _Worker | None = field(default=None)


class SubprocPool:
    """Calls methods of one served object per slot, each in its own process.

    target: "module:callable"; a worker calls it with its frame memory (a writable memoryview of
    `num_bytes`) and `arguments`, and serves the methods of what it returns.
    timeout_s: how long a worker may be silent during a call, start-up included, before it counts
    as hung.
    """

    def __init__(
        self,
        target: str,
        arguments: tuple[Any, ...],
        *,
        num_slots: int,
        num_bytes: int,
        timeout_s: float,
    ) -> None:
        self._init = (target, arguments, num_bytes)
        self._timeout_s = timeout_s
        self._slots = [_new_slot(num_bytes) for _ in range(num_slots)]
        self._finalizer = weakref.finalize(self, _close, self._slots)
        for slot in range(num_slots):
            self._slots[slot].worker = self._start(slot)

    def memory(self, slot: int) -> memoryview:
        """The frame memory of a slot, shared with its worker."""
        return memoryview(self._slots[slot].memory)

    def pids(self) -> list[int]:
        """Process ids of the workers, by slot."""
        return [self._worker(slot).process.pid for slot in range(len(self._slots))]

    def is_busy(self, slot: int) -> bool:
        """Whether the slot owes an answer."""
        return self._worker(slot).request is not None

    def submit(
        self, slot: int, request: Request, *, recovery: Callable[[], Request] | None = None
    ) -> None:
        """Start a call; its answer comes through `wait`.

        recovery: makes the call that gives the same answer in a fresh process. None says that
        `request` itself does: it starts a new episode, and a new budget of one restart.
        """
        worker = self._worker(slot)
        assert worker.request is None, f"slot {slot} has a call under way"
        if recovery is None:
            worker.failures = 0
        worker.request, worker.recovery = request, recovery
        self._call(slot, request)

    def wait(self, count: int, among: Collection[int] | None = None) -> dict[int, Any]:
        """Answers of all slots that are ready, at least `count` of those under way, in slot order.

        among: look at these slots only. Raises what the worker raised when that was a VlarlError,
        and WorkerDied when a restarted worker died or hung again.
        """
        answers: dict[int, Any] = {}
        while True:
            owed = self._under_way(among)
            missing = min(count - len(answers), len(owed))
            patience = _patience(owed.values()) if missing > 0 else 0.0
            ready = set(wait([worker.conn for worker in owed.values()], patience))
            for slot, worker in owed.items():
                if worker.conn in ready:
                    self._receive(slot, answers)
            if not ready and missing <= 0:
                return dict(sorted(answers.items()))
            if not ready:
                self._end_hung(owed)

    def close(self) -> None:
        """End all workers and free their memory. Safe to call twice."""
        self._finalizer()

    def _under_way(self, among: Collection[int] | None) -> dict[int, _Worker]:
        slots = range(len(self._slots)) if among is None else among
        workers = {slot: self._worker(slot) for slot in slots}
        return {slot: worker for slot, worker in workers.items() if worker.request is not None}

    def _worker(self, slot: int) -> _Worker:
        worker = self._slots[slot].worker
        assert worker is not None, "the pool is closed"
        return worker

    def _start(self, slot: int) -> _Worker:
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _Worker.end
        descriptor = self._slots[slot].descriptor
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vlarl.envs.sim_worker",
                    str(theirs.fileno()),
                    str(descriptor),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=(theirs.fileno(), descriptor),
                env=_environment(len(self._slots)),
            )
        worker = _Worker(process, Connection(ours.detach()), stderr)
        # A process that is already gone is found, and reported, at its first call.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.conn.send(self._init)
        return worker

    def _call(self, slot: int, request: Request) -> None:
        worker = self._worker(slot)
        worker.deadline = time.monotonic() + self._timeout_s
        try:
            worker.conn.send(request)
        except (BrokenPipeError, ConnectionResetError):
            self._restart(slot)

    def _receive(self, slot: int, answers: dict[int, Any]) -> None:
        worker = self._worker(slot)
        try:
            message = worker.conn.recv()
        except (EOFError, OSError):
            self._restart(slot)
            return
        if message == ALIVE:
            worker.deadline = time.monotonic() + self._timeout_s
            return
        ok, answer = message
        if not ok:
            raise errors.rebuilt(*answer) or errors.RunFailed(f"{answer[0]}: {answer[1]}")
        worker.request = worker.recovery = None
        answers[slot] = answer

    def _end_hung(self, owed: Mapping[int, _Worker]) -> None:
        now = time.monotonic()
        for slot, worker in owed.items():
            if worker.deadline <= now:
                worker.process.kill()
                self._restart(slot, hung=True)

    def _restart(self, slot: int, *, hung: bool = False) -> None:
        old = self._worker(slot)
        words = old.end(_EXIT_S)
        what = f"died (exit status {old.process.returncode})"
        if hung:
            what = f"was silent for {self._timeout_s:g} s and was stopped"
        if old.failures:
            raise errors.WorkerDied(
                f"the simulator process of slot {slot} {what}, again after a restart. Its last "
                f"words:\n{words}"
            )
        log.warning(
            "the simulator process of slot %d %s; restarting it and replaying its episode. "
            "Its last words: %s",
            slot,
            what,
            words,
        )
        request = old.recovery() if old.recovery else old.request
        assert request is not None
        fresh = self._start(slot)
        fresh.request, fresh.recovery, fresh.failures = request, old.recovery, old.failures + 1
        self._slots[slot].worker = fresh
        self._call(slot, request)


def _patience(workers: Iterable[_Worker]) -> float:
    """Seconds until the first call under way counts as hung."""
    return max(0.0, min(worker.deadline for worker in workers) - time.monotonic())


def _new_slot(num_bytes: int) -> _Slot:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("vlarl-frames")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return _Slot(descriptor, mmap.mmap(descriptor, num_bytes))


def _environment(num_workers: int) -> dict[str, str]:
    """Workers find the modules this process finds, and together start a thread per core at most."""
    path = [entry or os.getcwd() for entry in sys.path]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Mesa's software renderer would start a thread per core in every worker.
    renderer = {"LP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_workers))}
    modules = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    return renderer | dict(os.environ) | single | modules


def _close(slots: Sequence[_Slot]) -> None:
    workers = [slot.worker for slot in slots if slot.worker is not None]
    for worker in workers:
        worker.conn.close()
    deadline = time.monotonic() + _EXIT_S
    for worker in workers:
        worker.end(max(0.0, deadline - time.monotonic()))
    for slot in slots:
        slot.worker = None
        os.close(slot.descriptor)
