import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from vlarl.errors import AssetMissing, CorruptFile
from vlarl.safe_pickle import load_object_array, load_saved_array

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectories"


def objects(*items):
    array = np.empty(len(items), object)
    array[:] = items
    return array


def save(path: Path, *items) -> Path:
    np.save(path, objects(*items), allow_pickle=True)
    return path


def with_payload(path: Path, payload: bytes) -> Path:
    """A file with a proper header and any pickle."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "|O", "fortran_order": False, "shape": (1,)}
    )
    path.write_bytes(buffer.getvalue() + payload)
    return path


class Calls:
    def __init__(self, function, *args):
        self.what = function, args

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize("name", ["seed_0_traj_0.npy", "step_0_seed_0_traj_1_kir.npy"])
def test_files_of_numpy_1_and_2_load_as_numpy_loads_them(name):
    expected = np.load(GOLDEN / name, allow_pickle=True)
    got = load_object_array(GOLDEN / name)
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert type(ours[key]) is type(value)
            np.testing.assert_array_equal(ours[key], value)


def test_every_plain_value_survives(tmp_path):
    item = {
        "f": np.arange(6, dtype=">f8").reshape(2, 3, order="F"),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "empty": np.zeros((0, 4), np.uint8),
        "text": np.array(["ab", "cde"]),
        "bytes": np.array([b"xy", b"z"]),
        "flag": np.array([True, False]),
        "scalar": np.float32(2.5),
        "word": np.str_("wörd"),
        "zero": np.array(7, np.int64),
        "nested": [(1, 2.5, None, True), {"x": {3, 4}}, b"raw", objects(np.ones(2), "x")],
    }
    path = save(tmp_path / "a.npy", item)
    (got,) = load_object_array(path)
    (expected,) = np.load(path, allow_pickle=True)  # numpy turns foreign byte order into its own
    for key, value in item.items():
        if key == "nested":
            continue
        assert type(got[key]) is type(value), key
        assert got[key].dtype == expected[key].dtype, key
        np.testing.assert_array_equal(got[key], value)
    plain, odd, raw, inner = got["nested"]
    assert (plain, odd, raw) == ((1, 2.5, None, True), {"x": {3, 4}}, b"raw")
    assert type(inner) is np.ndarray
    assert type(inner[0]) is np.ndarray


def test_the_hostile_example_is_refused_by_name_and_not_run(capsys):
    with pytest.raises(CorruptFile, match=r"builtins\.print"):
        load_object_array(GOLDEN / "hostile" / "malicious.npy")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (eval, ("1",), r"builtins\.eval"),
        (getattr, ("x", "join"), r"builtins\.getattr"),
        (np.load, ("x",), r"numpy\.load"),
        (np.frombuffer, (b"x",), r"numpy.*frombuffer"),
        (Path, ("x",), r"pathlib.*Path"),
        (bytearray, (10,), r"builtins\.bytearray"),
    ],
)
def test_any_other_name_is_refused(tmp_path, function, args, name):
    with pytest.raises(CorruptFile, match=name):
        load_object_array(save(tmp_path / "a.npy", Calls(function, *args)))


def test_a_reference_outside_the_file_is_refused(tmp_path):
    with pytest.raises(CorruptFile, match="persistent object"):
        load_object_array(with_payload(tmp_path / "a.npy", b"Pname\n."))


def forged(array_state: bytes) -> bytes:
    """Pickle opcodes: an array rebuilt with the given state."""
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
        + array_state
        + b"b."
    )


DTYPE = b"cnumpy\ndtype\n(V%s\nI00\nI01\ntR"
PLAIN = b"(K\x03V<\nNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        # Object pointers made of bytes: numpy's own classes take them when the dtype says so.
        (b"(K\x01(K\x01t" + DTYPE % b"O8" + PLAIN + b"I00\nC\x08AAAAAAAAt", "number of objects"),
        # More pixels than bytes.
        (b"(K\x01(K\x09t" + DTYPE % b"u1" + PLAIN + b"I00\nC\x01At", "number of bytes"),
        # The product is right, the shape is not.
        (b"(K\x01(J\xff\xff\xff\xffJ\xff\xff\xff\xfft" + DTYPE % b"u1" + b"I00\nC\x01At", "counts"),
        (b"(K\x01(K\x01t" + DTYPE % b"V8" + b"I00\nC\x08AAAAAAAAt", "not a plain one"),
        (b"(K\x01(K\x01tNI00\nC\x01At", "a dtype was expected"),
    ],
)
def test_forged_arrays_are_refused(tmp_path, state, reason):
    with pytest.raises(CorruptFile, match=reason):
        load_object_array(with_payload(tmp_path / "a.npy", forged(state)))


def test_a_structured_dtype_cannot_smuggle_objects(tmp_path):
    fields = (
        b"(K\x03V<\nN(Va\nt}Va\n("
        + DTYPE % b"O8"
        + b"K\x00tsJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    state = b"(K\x01(K\x01t" + DTYPE % b"u8" + fields + b"I00\nC\x08AAAAAAAAt"
    with pytest.raises(CorruptFile, match="not a plain one"):
        load_object_array(with_payload(tmp_path / "a.npy", forged(state)))


def test_the_loader_itself_cannot_be_changed_from_a_file(tmp_path):
    # BUILD on an admitted name: with a function it would set attributes, `__code__` among them.
    payload = b"cnumpy.core.multiarray\nscalar\n(N}Vx\nK\x01stb."
    with pytest.raises(CorruptFile, match="a state for a function"):
        load_object_array(with_payload(tmp_path / "a.npy", payload))


def test_every_truncation_is_noticed(tmp_path):
    whole = save(tmp_path / "a.npy", {"image": np.arange(60, dtype=np.uint8), "instruction": "x"})
    content = whole.read_bytes()
    part = tmp_path / "b.npy"
    for length in range(len(content)):
        part.write_bytes(content[:length])
        with pytest.raises(CorruptFile):
            load_object_array(part)


def test_bytes_after_the_end_are_noticed(tmp_path):
    path = save(tmp_path / "a.npy", {"x": 1})
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CorruptFile, match="after the end"):
        load_object_array(path)


def test_other_kinds_of_files_are_named_as_such(tmp_path):
    np.save(tmp_path / "numbers.npy", np.zeros((3, 2)))
    with pytest.raises(CorruptFile, match=r"array of float64 with shape \(3, 2\)"):
        load_object_array(tmp_path / "numbers.npy")
    (tmp_path / "text.npy").write_text("hello, this is no array at all")
    with pytest.raises(CorruptFile, match="not a readable object array"):
        load_object_array(tmp_path / "text.npy")
    (tmp_path / "only_pickle.npy").write_bytes(pickle.dumps([1]))
    with pytest.raises(CorruptFile):
        load_object_array(tmp_path / "only_pickle.npy")
    with_payload(tmp_path / "list.npy", pickle.dumps([1]))
    with pytest.raises(CorruptFile, match="header promises"):
        load_object_array(tmp_path / "list.npy")
    with pytest.raises(AssetMissing, match="no file"):
        load_object_array(tmp_path / "absent.npy")


def test_an_encrypted_archive_is_named_like_any_other_damage(tmp_path):
    path = tmp_path / "states.pruned_init"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag of an encrypted member
    data[6] |= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=r"states\.pruned_init is not a saved array"):
        load_saved_array(path)
