#!/usr/bin/env python3
"""Make the image data that normalnorm ships: a subset of Fashion-MNIST, and
scikit-learn's digits.

    python -m tools.make_fashion_subset

Fashion-MNIST comes from Debian's package (apt-get install
dataset-fashion-mnist), digits from an installed scikit-learn.
The same input gives the same bytes: fixed indices, fixed time stamps in the
archive, one compressor (LZMA, whose output does not depend on the zlib that
this Python was built with). Prints the SHA-256 that normalnorm.experiments.data
records.
"""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np

from normalnorm.experiments.idx import read_idx

SOURCE = Path("/usr/share/datasets/fashion-mnist")
OUT = (
    Path(__file__).resolve().parents[1]
    / "normalnorm"
    / "experiments"
    / "data_files"
)

FASHION_NOTE = """Fashion-MNIST, a subset: images 0..4999 of the training file \
and 0..4999 of the test file (t10k), in their order.
Of the training images the first 4000 are for training, the last 1000 for \
validation.
Source: https://github.com/zalandoresearch/fashion-mnist, by way of Debian's \
dataset-fashion-mnist 0.0~git20200523.55506a9-1.
H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST: a Novel Image Dataset for \
Benchmarking Machine Learning Algorithms, arXiv:1708.07747, 2017.
Copyright 2017 Zalando SE. Licence: MIT (text in SOURCES.md beside this file).
"""
DIGITS_NOTE = """Optical recognition of handwritten digits, the 1797 images of \
the data set's test file, as scikit-learn ships them, in their order.
The first 1197 are for training, the next 300 for validation, the last 300 for \
testing. Values are 0..16.
Source: E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI \
Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49.
Licence: Creative Commons Attribution 4.0.
"""


def archive(arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz archive (numpy.load reads it) whose bytes depend on the arrays
    only.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(
                member,
                np.ascontiguousarray(array),
                version=(1, 0),
                allow_pickle=False,
            )
            info = zipfile.ZipInfo(
                f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0)
            )
            info.compress_type, info.create_system, info.external_attr = (
                zipfile.ZIP_LZMA,
                3,
                0o644 << 16,
            )
            file.writestr(info, member.getvalue())
    return buffer.getvalue()


def note(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def fashion() -> bytes:
    "The subset of Fashion-MNIST: 5000 training and 5000 test images."
    files = {
        f"{split}_{what}s": SOURCE / f"{prefix}-{what}s-idx{axes}-ubyte.gz"
        for split, prefix in (("train", "train"), ("test", "t10k"))
        for what, axes in (("image", 3), ("label", 1))
    }
    arrays = {name: read_idx(path)[:5000] for name, path in files.items()}
    return archive(arrays | {"note": note(FASHION_NOTE)})


def digits() -> bytes:
    "scikit-learn's digits: 1797 images of 8 × 8 pixels."
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = data.images.astype(np.uint8), data.target.astype(np.uint8)
    assert (images == data.images).all() and images.max() == 16
    return archive(
        {
            "train_images": images[:1497],
            "train_labels": labels[:1497],
            "test_images": images[1497:],
            "test_labels": labels[1497:],
            "note": note(DIGITS_NOTE),
        }
    )


def write(name: str, content: bytes) -> None:
    "Into the package's data; prints the hash that the package records."
    path = OUT / name
    path.write_bytes(content)
    print(
        f"{path}  {len(content) / 1e6:.2f} MB  sha256 "
        f"{hashlib.sha256(content).hexdigest()}"
    )


if __name__ == "__main__":
    write("fashion_mnist_subset.npz", fashion())
    write("digits.npz", digits())
