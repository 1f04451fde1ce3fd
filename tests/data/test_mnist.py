"""IDX files: the good, the truncated and the foreign."""

import gzip
import struct

import pytest

from paceline.data.mnist import check_mnist, find_idx, read_idx, read_mnist
from paceline.errors import UsageError


def idx(*shape: int, kind: int = 8, extra: bytes = b"") -> bytes:
    size = 1
    for n in shape:
        size *= n
    return (
        bytes([0, 0, kind, len(shape)])
        + struct.pack(f">{len(shape)}I", *shape)
        + bytes(range(256)) * (size // 256)
        + bytes(size % 256)
        + extra
    )


def folder_of(tmp_path, **changed):
    files = {
        "train-images-idx3-ubyte": idx(4, 2, 3), "train-labels-idx1-ubyte": idx(4),
        "t10k-images-idx3-ubyte": idx(2, 2, 3), "t10k-labels-idx1-ubyte": idx(2),
    }  # fmt: skip
    for name, data in {**files, **changed}.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    return tmp_path


def test_the_packaged_files_are_the_real_mnist():
    images, labels = read_mnist("test")
    assert images.shape == (10_000, 28, 28)
    assert list(labels.data[:10]) == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]  # the test set's well-known beginning


def test_plain_and_gzipped_files_are_the_same(tmp_path):
    (tmp_path / "plain").write_bytes(idx(3, 2, 2))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(idx(3, 2, 2)))
    assert read_idx(tmp_path / "plain", dimensions=3) == read_idx(tmp_path / "packed.gz", dimensions=3)


def test_emnist_names_are_found(tmp_path):
    path = tmp_path / "emnist-digits-test-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(1, 2, 2)))
    assert find_idx(tmp_path, "t10k-images-idx3-ubyte") == path


def test_two_candidates_are_refused(tmp_path):
    for name in ("emnist-digits-train-images-idx3-ubyte", "emnist-letters-train-images-idx3-ubyte"):
        (tmp_path / name).write_bytes(idx(1, 2, 2))
    with pytest.raises(UsageError, match="several files"):
        find_idx(tmp_path, "train-images-idx3-ubyte")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "starts with nothing"),
        (b"\0\0", "not an IDX file"),
        (b"PK\3\4" + bytes(100), "starts with 50 4b 03 04"),
        (idx(4, 2, 3, kind=0x0D), "unsigned bytes"),
        (idx(4), "3 dimensions"),
        (idx(4, 2, 3)[:9], "within its header"),
        (idx(4, 2, 3)[:-1], "truncated"),
        (idx(4, 2, 3, extra=b"x"), "too long"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, data, words):
    (tmp_path / "images").write_bytes(data)
    with pytest.raises(UsageError, match=words):
        read_idx(tmp_path / "images", dimensions=3)


@pytest.mark.parametrize("cut", [5, 30, -5])
def test_damaged_gzip(tmp_path, cut):
    (tmp_path / "images.gz").write_bytes(gzip.compress(idx(64, 28, 28))[:cut])
    with pytest.raises(UsageError, match=r"images\.gz cannot be read"):
        read_idx(tmp_path / "images.gz", dimensions=3)


def test_a_flipped_bit_in_a_gzip_is_found(tmp_path):
    data = bytearray(gzip.compress(bytes(16) + bytes(range(256)) * 50))
    data[len(data) // 2] ^= 1
    (tmp_path / "images.gz").write_bytes(data)
    with pytest.raises(UsageError):
        read_idx(tmp_path / "images.gz", dimensions=3)


def test_whole_folders(tmp_path):
    check_mnist(folder_of(tmp_path))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train-labels-idx1-ubyte": None}, "no train-labels"),
        ({"train-labels-idx1-ubyte": idx(3)}, "4 train images but 3 labels"),
        ({"t10k-images-idx3-ubyte": idx(0, 2, 3), "t10k-labels-idx1-ubyte": idx(0)}, "hold no images"),
    ],
)
def test_bad_folders(tmp_path, changed, words):
    with pytest.raises(UsageError, match=words):
        check_mnist(folder_of(tmp_path, **changed))


def test_a_missing_folder(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        check_mnist(tmp_path / "nowhere")
