from __future__ import annotations

import gzip

import pytest
import torch

from sparsam.tasks import images
from sparsam.tasks.images import Shuffled, default_folder, normalise, read_images

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(tensor):
    sizes = b"".join(size.to_bytes(4, "big") for size in tensor.shape)
    return bytes((0, 0, 8, tensor.dim())) + sizes + tensor.numpy().tobytes()


def tensors(train=7, test=3):
    generator = torch.Generator().manual_seed(0)
    draw = {
        name: torch.randint(256 if "images" in name else 4, size, dtype=torch.uint8, generator=generator)
        for name, size in zip(NAMES, [(train, 4, 5), (train,), (test, 4, 5), (test,)], strict=True)
    }
    draw[NAMES[1]][0] = 3
    return draw


def write(folder, changed=None, zipped=True):
    for name, content in ({name: idx(tensor) for name, tensor in tensors().items()} | (changed or {})).items():
        if content is not None:
            (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_four_files_become_tensors(tmp_path, zipped):
    data, wanted = read_images(write(tmp_path, zipped=zipped)), tensors()
    assert torch.equal(data.train, wanted[NAMES[0]])
    assert torch.equal(data.train_labels, wanted[NAMES[1]].long())
    assert torch.equal(data.test, wanted[NAMES[2]])
    assert torch.equal(data.test_labels, wanted[NAMES[3]].long())
    assert data.train_labels.dtype == torch.int64
    assert data.classes == 4
    assert str(data) == "7 images of 4 x 5 in 4 classes, 3 held out"
    assert data.fingerprint == read_images(tmp_path).fingerprint
    data.train[0] = 0  # memory of its own


def test_pixels_are_normalised_by_the_training_images(tmp_path):
    data = read_images(write(tmp_path))
    x = normalise(data.train, data.mean, data.std)
    assert x.dtype == torch.float32
    assert x.shape == (7, 20)
    assert float(x.mean()) == pytest.approx(0, abs=1e-6)
    assert float(x.std(correction=0)) == pytest.approx(1, abs=1e-6)
    pixel = data.train[2, 1, 3].double() / 255
    assert float(x[2, 8]) == pytest.approx((float(pixel) - data.mean) / data.std, abs=1e-6)


def test_images_of_one_colour(tmp_path):
    data = read_images(write(tmp_path, {NAMES[0]: idx(torch.full((7, 4, 5), 51, dtype=torch.uint8))}))
    assert (data.mean, data.std) == (pytest.approx(0.2), 1.0)


def test_other_data_has_another_fingerprint(tmp_path):
    before = read_images(write(tmp_path)).fingerprint
    changed = tensors()[NAMES[3]]
    changed[1] ^= 1
    assert read_images(write(tmp_path, {NAMES[3]: idx(changed)})).fingerprint != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            NAMES[2],
            None,
            r"t10k-images-idx3-ubyte: expected this file, with \.gz or without, found none\. Run `make data`",
        ),
        (
            NAMES[1],
            b"",
            r"train-labels-idx1-ubyte\.gz: expected an idx file of bytes in 1 dimensions, .* with nothing\.",
        ),
        (
            NAMES[0],
            b"\x89PNG....",
            r"expected an idx file of bytes in 3 dimensions, got one that begins with 89504e47\.",
        ),
        (NAMES[0], idx(torch.zeros(7, dtype=torch.uint8)), "in 3 dimensions, got one that begins with 00000801"),
        (NAMES[0], idx(torch.zeros(7, 4, 5, dtype=torch.uint8))[:-1], r"expected 7 x 4 x 5 = 140 bytes .*, got 139\."),
        (NAMES[0], idx(torch.zeros(7, 4, 5, dtype=torch.uint8)) + b"0", "got 141"),
        (
            NAMES[0],
            idx(torch.zeros(0, 4, 5, dtype=torch.uint8)),
            "expected 0 x 4 x 5 = 0 bytes after the head, at least 1",
        ),
        (
            NAMES[1],
            idx(torch.zeros(6, dtype=torch.uint8)),
            "expected as many labels as images in the train files, got 6 and 7",
        ),
    ],
)
def test_files_that_are_refused(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_images(write(tmp_path, {name: content}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [1, 8, 30], ids=lambda size: f"{size} bytes")
def test_a_gzip_file_that_was_cut_off(tmp_path, cut):
    path = write(tmp_path) / f"{NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"expected a whole gzip file, got one that does not unpack .* Delete it"):
        read_images(tmp_path)


@pytest.mark.parametrize("content", [b"<html>not found</html>", b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff\xff"])
def test_a_file_that_is_no_gzip_file(tmp_path, content):
    (write(tmp_path) / f"{NAMES[3]}.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte\.gz: expected a whole gzip file") as error:
        read_images(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    write(tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ValueError, match=r"\.gz: expected a file that can be read, got: Permission denied\."):
        read_images(tmp_path)


def test_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_PLACES", (tmp_path / "one", tmp_path / "two"))
    with pytest.raises(ValueError, match=r"expected Fashion-MNIST in .*one or .*two, found neither\. Run `make data`"):
        read_images()
    (tmp_path / "two").mkdir()
    assert default_folder() == tmp_path / "two"
    write(tmp_path / "two")
    assert len(read_images().train) == 7


@pytest.mark.parametrize(("count", "size"), [(10, 5), (10, 4), (3, 8), (1, 1), (7, 7)])
def test_every_epoch_sees_every_row_once(count, size):
    batches = Shuffled(count, size, seed=5)
    rows = torch.cat([batches(step) for step in range(3 * count)]).view(-1, count)
    assert all(row.sort().values.equal(torch.arange(count)) for row in rows)
    assert count == 1 or not all(row.equal(rows[0]) for row in rows)


def test_a_batch_depends_on_seed_and_step_alone():
    one = Shuffled(50, 8, seed=1)
    forwards = [one(step) for step in range(30)]
    other = Shuffled(50, 8, seed=1)
    backwards = [other(step) for step in reversed(range(30))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not torch.equal(Shuffled(50, 8, seed=2)(0), forwards[0])


@pytest.mark.parametrize(("count", "size"), [(0, 4), (4, 0)])
def test_no_rows(count, size):
    with pytest.raises(ValueError, match=r"Shuffled: expected at least 1 row and 1 row in a batch, got"):
        Shuffled(count, size)
