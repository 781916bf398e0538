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


def fashion(source: Path = SOURCE) -> bytes:
    "The subset of Fashion-MNIST: 5000 training and 5000 test images."
    if not (source / "train-images-idx3-ubyte.gz").exists():
        raise SystemExit(
            f"no Fashion-MNIST in {source}: apt-get install "
            "dataset-fashion-mnist"
        )
    arrays = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"{split}_images"] = read_idx(
            source / f"{prefix}-images-idx3-ubyte.gz"
        )[:5000]
        arrays[f"{split}_labels"] = read_idx(
            source / f"{prefix}-labels-idx1-ubyte.gz"
        )[:5000]
    return archive(
        arrays | {"note": np.frombuffer(FASHION_NOTE.encode(), np.uint8)}
    )


def digits() -> bytes:
    "scikit-learn's digits: 1797 images of 8 × 8 pixels."
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "digits come from scikit-learn: pip install scikit-learn"
        ) from None
    data = load_digits()
    images, labels = data.images.astype(np.uint8), data.target.astype(np.uint8)
    assert (images == data.images).all() and images.max() == 16
    return archive(
        {
            "train_images": images[:1497],
            "train_labels": labels[:1497],
            "test_images": images[1497:],
            "test_labels": labels[1497:],
            "note": np.frombuffer(DIGITS_NOTE.encode(), np.uint8),
        }
    )


def write(name: str, content: bytes) -> None:
    "A file of the package's data."
    (OUT / name).write_bytes(content)
    print(
        f"{OUT / name}  {len(content) / 1e6:.2f} MB  sha256 "
        f"{hashlib.sha256(content).hexdigest()}"
    )


if __name__ == "__main__":
    write("digits.npz", digits())
    write("fashion_mnist_subset.npz", fashion())
