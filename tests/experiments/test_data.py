"""Data: shipped, generated, from the system, from the hub or a folder;
augmentation; streams.

Every fault says what to do.
"""

import gzip
import hashlib
import importlib.util
import io
import json
import math
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from normalnorm.experiments import augmentation as aug
from normalnorm.experiments import (
    data,
    glyphs,
    hub,
    idx,
    mnist1d,
    models,
    streams,
    text,
)
from tests.experiments.known import missing, python
from tests.peers import FOLLOWS, installed
from tests.refusals import refusals
from tools import make_fashion_subset, make_stdlib_text

FASHION_SOURCE = Path("/usr/share/datasets/fashion-mnist")
pytestmark = pytest.mark.usefixtures("no_hub")
COLOUR = data.Info(
    "colour",
    "",
    "",
    "",
    tuple("0123456"),
    (3, 9, 11),
    255,
    {},
    "",
    (0.5, 0.4, 0.6),
    (0.2, 0.3, 0.25),
)


# ---- shipped files ----


@pytest.mark.parametrize(
    "name, split, expected",
    [
        ("fashion", "train", "16f345ba4b1ab4d4"),
        ("fashion", "validation", "520e805468ca75c7"),
        ("fashion", "test", "49626700bcfcf4d0"),
        ("digits", "train", "6776dcbd12e40004"),
        ("digits", "validation", "36db60be12489b7a"),
        ("digits", "test", "ae8a2edba568de99"),
        ("mnist1d", "train", "30d0dbff20861da8"),
        ("mnist1d", "validation", "b6fe90104b79afc4"),
        ("mnist1d", "test", "4352bd5c80929850"),
        ("glyphs", "validation", "ffd90ea8ce738c07"),
        ("stdlib", "validation", "6c9486d9dfe51fe8"),
        ("stdlib", "test", "d67fffb5a13660ca"),
    ],
)
def test_tensors_are_those_that_the_committed_results_were_made_with(
    name, split, expected
):
    content = hashlib.sha256()
    for tensor in data.load(name, split):
        content.update(tensor.numpy().tobytes())
    assert content.hexdigest()[:16] == expected


def test_licence_and_source_lie_beside_the_data():
    folder = data.data_folder()
    texts = {
        file: (folder / file).read_text(encoding="utf-8")
        for file in ("SOURCES.md", "PSF-LICENSE.md")
    }
    for name, largest in (
        ("fashion", 4e6),
        ("digits", 4e6),
        ("stdlib", 5e5 - len(texts["PSF-LICENSE.md"])),
    ):
        known = data.info(name)
        inside = data.read_archive(folder / known.file, known.sha256)["note"]
        texts[name] = known.licence + bytes(inside).decode()
        assert (folder / known.file).stat().st_size <= largest
    for of, words in {
        "SOURCES.md": ("Zalando", "MIT", "Alpaydin", "Python Software"),
        "PSF-LICENSE.md": ("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",),
        "digits": ("CC", "Licence", "Source"),
        "fashion": ("Licence", "Source"),
        "stdlib": ("Licence", "Source"),
    }.items():
        assert [word for word in words if word not in texts[of]] == []


@pytest.mark.parametrize(
    "name, script",
    [("digits", "make_fashion_subset"), ("stdlib", "make_stdlib_text")],
)
@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda c: c[:9000], "damaged"),
        (lambda c: c[:9000] + bytes([c[9000] ^ 1]) + c[9001:], "damaged"),
        (lambda c: b"", "damaged"),
        (lambda c: b"<html>404</html>", "damaged"),
        (lambda c: None, "does not exist"),
    ],
)
def test_damaged_files_are_refused(
    name, script, damage, words, tmp_path, monkeypatch
):
    content = damage((data.data_folder() / f"{name}.npz").read_bytes())
    if content is not None:
        (tmp_path / f"{name}.npz").write_bytes(content)
    monkeypatch.setenv("NORMALNORM_DATA", str(tmp_path))
    with pytest.raises(data.DataError, match=words) as error:
        data.load(name, "train", first=1)
    assert not missing(str(error.value), script, str(tmp_path))


@pytest.mark.parametrize("name", data.dataset_names())
def test_splits_do_not_change_with_first(name):
    x, y = data.dataset(name, "train")[torch.arange(10)]
    split = data.dataset(name, "train", first=10)
    inputs, targets = split[torch.tensor([7, 2])]
    assert len(split) == 10
    assert torch.equal(inputs, x[[7, 2]]) and torch.equal(targets, y[[7, 2]])
    for _ in range(2):  # callers cannot spoil each other's images
        part = data.load(name, "train", first=10)
        assert torch.equal(x, part[0]) and torch.equal(y, part[1])
        part[0].zero_()
    for wrong in (0, -1, 10**7):
        with pytest.raises(ValueError, match="examples"):
            data.dataset(name, "train", first=wrong)


@pytest.mark.parametrize(
    "name, first",
    [
        ("fashion", 500),
        ("fashion", 2000),
        ("digits", 600),
        ("mnist1d", 100),
        ("glyphs", 300),
        ("stdlib", 50),
    ],
)
def test_a_draw_is_decided_by_its_seed(name, first):
    whole = data.dataset(name, "train")  # of which images may be made
    part, labels = data.load(name, "train", first, draw=3)
    positions = data.drawn(whole, first, 3)
    assert len(set(positions.tolist())) == first
    assert all(map(torch.equal, (part, labels), whole[positions]))
    x, y = whole[torch.arange(first)]
    # classes as often as among the first; a text has none
    if name != "stdlib":
        assert torch.equal(labels.bincount(), y.bincount())
    other, _ = data.load(name, "train", first, draw=4)
    assert not torch.equal(other, part)
    prints = [
        data.data_hash(name, first=n, draw=seed)
        for n, seed in (
            (first, 3),
            (first, 4),
            (first - 1, 3),
            (None, 3),
            (first, None),
        )
    ]
    assert len(set(prints)) == 5 and prints[-1] == data.data_hash(name)
    split = data.dataset(name, "train", first, draw=3)
    assert len(split) == first
    assert torch.equal(split[torch.tensor([5, 2])][0], part[[5, 2]])
    assert torch.equal(split.to("cpu")[torch.tensor([-1])][1], labels[-1:])
    # the first images are what they were, and of all there is one draw
    assert torch.equal(data.load(name, "train", first)[0], x)
    if name != "glyphs":  # seconds
        assert torch.equal(data.load(name, "train", draw=9)[0][:first], x)


test_only_training_examples_are_drawn = refusals(
    [
        ("validation", 10, 0, "only training examples"),
        ("test", 10, 0, "only training examples"),
        ("trainn", 10, 0, "did you mean train"),
        ("train", 0, 0, "examples"),
        ("train", 1198, 0, "examples"),
        *(
            ("train", 10, seed, "expected a seed")
            for seed in (-1, 2**32, 1.5, "1", True)
        ),
    ],
    lambda split, first, seed: data.load("digits", split, first, draw=seed),
)


@pytest.mark.parametrize("name", data.dataset_names(True))
def test_every_set_is_described(name):
    about = data.info(name)
    assert (
        about.name == name
        and about.classes
        and set(about.sizes) == set(data.SPLITS)
        and all(n > 0 for n in about.sizes.values())
        and about.licence
    )
    assert (
        len(about.mean)
        == len(about.std)
        == (about.shape[0] if len(about.shape) == 3 else 0)
    )
    if name not in hub.ENTRIES:
        assert len(data.data_hash(name)) == 64


@pytest.mark.parametrize(
    "modules, use, absent",
    [
        (
            "experiments.hub experiments.streams experiments.augmentation",
            "",
            "datasets kornia PIL torchvision pyarrow",
        ),
        (
            "cli experiments.train experiments.results experiments.tables "
            "experiments.spread",
            "",
            "lightning_fabric ray kornia datasets",
        ),
        (
            "experiments.models",
            "module.model_names(); module.build('small_mlp')",
            "torchvision timm kornia lightning datasets ray matplotlib "
            "normalnorm.layers torch.utils.flop_counter",
        ),
        # what converts and deploys a model needs no engine, no symbolic
        # algebra and no compiler
        pytest.param(
            "layers.conversion layers.running_averages layers.folding "
            "layers.weight_decay layers.factory",
            "",
            "sympy torch._dynamo",
            marks=FOLLOWS,
        ),
    ],
)
def test_import_loads_nothing_slow_or_optional(modules, use, absent):
    program = (
        "import importlib, sys\n"
        f"for name in {modules.split()}:\n"
        "    module = importlib.import_module('normalnorm.' + name)\n"
        f"{use}\n"
        f"print([name for name in {absent.split()} if name in sys.modules])"
    )
    assert python("-c", program).stdout == "[]\n"


test_unknown_names_and_options_say_what_is_known = refusals(
    [
        *(
            (ask, name, hint)
            for name, hint in (
                ("fashon", "did you mean fashion"),
                ("digit", "did you mean digits"),
                ("cifar", "did you mean cifar10"),
                ("mnist", "mnist1d"),
            )
            for ask in (
                lambda name: data.load(name, "train"),
                data.info,
                data.data_hash,
                lambda name: data.dataset(name, "train"),
            )
        ),
        *(
            (
                lambda name: data.load(name, "validaton"),
                name,
                ValueError,
                "did you mean validation",
            )
            for name in (*data.dataset_names(), "fashion-mnist")
        ),
        *(
            (
                lambda name: data.dataset(name, "train", wide=3),
                name,
                TypeError,
                f"{name} has no option wide",
            )
            for name in data.dataset_names(True)
        ),
    ],
    lambda ask, name: ask(name),
    error=data.DataError,
)


# ---- the scripts that make the files ----


@pytest.mark.book
@pytest.mark.parametrize(
    "name, make",
    [
        pytest.param(
            "fashion",
            make_fashion_subset.fashion,
            marks=pytest.mark.skipif(
                not FASHION_SOURCE.exists(),
                reason="Debian's package is not installed: apt-get install "
                "dataset-fashion-mnist",
            ),
        ),
        ("digits", make_fashion_subset.digits),
        pytest.param(
            "stdlib",
            lambda: make_stdlib_text.text(make_stdlib_text.sources()),
            marks=pytest.mark.skipif(
                sys.version_info[:3] != (3, 11, 7),
                reason="the text is made of the sources of Python 3.11.7",
            ),
        ),
    ],
    ids=["fashion", "digits", "stdlib"],
)
def test_script_makes_the_file_byte_for_byte(name, make, monkeypatch):
    if name == "digits":
        installed("sklearn")
    monkeypatch.setattr(sys, "argv", ["make_stdlib_text"])
    assert hashlib.sha256(make()).hexdigest() == data.data_hash(name)


@pytest.mark.book
@pytest.mark.parametrize(
    "make, words",
    [
        (make_fashion_subset.fashion, "apt-get install dataset-fashion-mnist"),
        (make_stdlib_text.text, "is it the folder Lib of CPython 3.11.7"),
    ],
)
def test_script_says_what_is_missing(make, words, tmp_path):
    with pytest.raises(SystemExit, match=words):
        make(tmp_path)


# ---- glyphs ----


def test_all_glyphs_have_the_recorded_hash():
    content = hashlib.sha256()
    for split, size in data.info("glyphs").sizes.items():
        images = glyphs.generate(split, np.arange(size))
        labels = glyphs.labels_of(split)
        content.update(images.tobytes())
        content.update(labels.astype(np.uint8).tobytes())
        assert images.dtype == np.uint8 and len(labels) == size
        assert (np.bincount(labels) == size // 100).all()
    assert content.hexdigest() == data.data_hash("glyphs")


@pytest.mark.parametrize(
    "module, kept, step, wrong",
    [
        (mnist1d, "_whole", "gaussian_filter1d", lambda x, sigma, axis: x),
        (glyphs, "_checked", "curve", lambda points, count: points),
    ],
    ids=["mnist1d", "glyphs"],
)
def test_other_numbers_than_the_published_are_noticed(
    module, kept, step, wrong, monkeypatch
):
    (name,) = module.SOURCE.known
    getattr(module, kept).cache_clear()
    monkeypatch.setattr(module, step, wrong)
    with pytest.raises(data.DataError, match="came out differently"):
        data.load(name, "test", 1)
    monkeypatch.undo()
    assert data.load(name, "test", 1)[0].shape == (1, *data.info(name).shape)


# ---- text ----


def test_ends_of_the_text():
    "That windows cover it: the chapter."
    windows = data.dataset("stdlib", "test", length=49_999)
    assert torch.equal(
        windows[torch.tensor([-1])][0],
        windows[torch.tensor([len(windows) - 1])][0],
    )
    whole = "".join(text.VOCABULARY)
    assert text.decode(text.encode(whole)) == whole
    assert [
        len(data.dataset("stdlib", split)) for split in data.SPLITS
    ] == list(data.info("stdlib").sizes.values())


def test_mixed_parts_are_cut_from_all_of_the_text():
    whole = torch.cat([text.tokens(split) for split in data.SPLITS])
    blocks = dict(enumerate(whole.split(1024)))
    wanted = {"validation": 9, "test": 19}
    for split in data.SPLITS:
        mine = [
            block
            for number, block in blocks.items()
            if number % 20 == wanted.get(split)
            or split == "train"
            and number % 20 not in wanted.values()
        ]
        assert torch.equal(text.tokens(split, mixed=True), torch.cat(mine))
    windows = data.dataset("stdlib", "test", length=64, first=222, mixed=True)
    first, _ = windows[torch.arange(16)]  # a block
    assert torch.equal(first.flatten(), blocks[19].long())


test_what_is_no_part_of_the_text = refusals(
    [
        *(
            (lambda wrong=wrong: text.encode(wrong), "the vocabulary is")
            for wrong in ("é", "a\tb", "\x7f", "\x00")
        ),
        *(
            (
                lambda length=length: data.dataset(
                    "stdlib", "test", length=length
                ),
                "do not fill one window",
            )
            for length in (0, 50_000)
        ),
        (
            lambda: text.Windows(torch.arange(9), 4)[torch.tensor([2])],
            IndexError,
            "windows 2 to 2 of 2",
        ),
    ],
    error=data.DataError,
)


# ---- IDX files and the full Fashion-MNIST ----


def _idx(array):
    return (
        struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape)
        + array.tobytes()
    )


WHOLE = _idx(np.zeros((2, 3), np.uint8))
# no time in the header: it would be in the tests' names, which both workers
# must find alike
PACKED = gzip.compress(WHOLE, mtime=0)


@pytest.mark.parametrize(
    "content, options, words",
    [
        *((WHOLE[:-1] + end, {}, "but has") for end in (b"", b"xx")),
        (b"\0\0\x0c" + WHOLE[3:], {}, "not an IDX file"),
        (b"<html>", {}, "not an IDX file"),
        (b"", {}, "starts with nothing"),
        (WHOLE[:6], {}, "within its header"),
        (None, {"cure": "buy a new one"}, "does not exist: buy a new one"),
        *(
            (PACKED, {"shape": shape}, "2 × 3, expected")
            for shape in ((2,), (3, 3), (2, 3, 1))
        ),
        *(
            (content, {}, "damaged or cut short")
            for content in (
                PACKED[:-1],
                PACKED[:12],
                PACKED[:-5] + b"\0" + PACKED[-4:],
            )
        ),
    ],
)
def test_idx_files_that_lie_are_refused(content, options, words, tmp_path):
    "That whole ones are read: the chapter."
    packed = content is None or content[:2] == PACKED[:2]
    file = tmp_path / ("a.gz" if packed else "a")
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(data.DataError, match=words):
        idx.read_idx(file, **options)


def test_missing_fashion_mnist_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMALNORM_DATASETS", str(tmp_path))
    (tmp_path / "fashion-mnist").mkdir()
    with pytest.raises(
        data.DataError, match="apt-get install dataset-fashion-mnist"
    ):
        data.load("fashion-mnist", "train")
    # right shapes, other content
    for part, (images, labels, count) in idx._FILES.items():
        (tmp_path / "fashion-mnist" / images).write_bytes(
            gzip.compress(_idx(np.zeros((count, 28, 28), np.uint8)), 1)
        )
        (tmp_path / "fashion-mnist" / labels).write_bytes(
            gzip.compress(
                _idx(np.full(count, 9 + (part == "test"), np.uint8)), 1
            )
        )
    with pytest.raises(
        data.DataError, match="has the label 10, expected 0 to 9"
    ):
        data.load("fashion-mnist", "train")
    (tmp_path / "fashion-mnist" / idx._FILES["test"][1]).write_bytes(
        gzip.compress(_idx(np.zeros(10_000, np.uint8)), 1)
    )
    with pytest.raises(
        data.DataError, match="other images or labels than the published ones"
    ):
        data.load("fashion-mnist", "train")


def test_unseen_images_are_those_that_the_subset_lacks(tmp_path, monkeypatch):
    "Each image its number in the file; without files the subset and its hash."
    monkeypatch.setattr(
        idx,
        "_fashion",
        lambda folder: {
            part: (np.zeros((count, 1, 1), np.uint8), np.arange(count))
            for part, count in {"train": 60_000, "test": 10_000}.items()
        },
    )
    monkeypatch.setattr(idx, "fashion_folder", lambda: tmp_path)
    numbers = {
        split: data.load("fashion-unseen", split)[1].tolist()
        for split in data.SPLITS
    }
    assert numbers == {
        "train": list(range(5000, 59_000)),
        "validation": list(range(59_000, 60_000)),
        "test": list(range(5000, 10_000)),
    }
    assert data.data_hash("fashion-unseen") == idx._INFO.sha256
    monkeypatch.setattr(idx, "fashion_folder", lambda: tmp_path / "missing")
    with pytest.warns(
        UserWarning, match="not here, so the shipped subset.*apt"
    ):
        images, labels = data.load("fashion-unseen", "test", first=7)
    for one, other in zip((images, labels), data.load("fashion", "test", 7)):
        assert torch.equal(one, other)
    assert data.data_hash("fashion-unseen") == data.data_hash("fashion")


# ---- the hub's sets, from folders of the same schema ----

datasets = (
    pytest.importorskip("datasets", reason='pip install ".[experiments]"')
    if importlib.util.find_spec("datasets")
    else None
)
needs_datasets = pytest.mark.skipif(
    datasets is None or importlib.util.find_spec("PIL") is None,
    reason='pip install ".[experiments]"',
)


def encoded(pixels, form="PNG", mode=None):
    from PIL import Image

    picture, file = Image.fromarray(pixels), io.BytesIO()
    (picture.convert(mode) if mode else picture).save(file, form)
    return {"bytes": file.getvalue(), "path": None}


def pixels_of(side, count):
    "Images of that side, or each of a size of its own."
    random = np.random.default_rng(0)
    sizes = random.integers(40, 70, (count, 2))
    return [
        random.integers(0, 256, (side or h, side or w, 3), dtype=np.uint8)
        for h, w in sizes
    ]


def parquet(folder, rows, files, images=None, classes=None):
    """Files of these rows, as they are; `images`: the column that holds them;
    `classes`: their number, where labels are of the library's own type.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = datasets.Dataset.from_dict(rows)
    if images:
        whole = whole.cast_column(images, datasets.Image())
    if classes:
        whole = whole.cast_column(
            "label", datasets.ClassLabel(num_classes=classes)
        )
    for file in files:
        whole.to_parquet(folder / f"{file}.parquet")


def write(
    folder,
    name="cifar10",
    count=60,
    classes=None,
    label=lambda i, n: i * 7 % n,
    damage=None,
):
    """A folder as `hf download` leaves it: parquet files, for SVHN in the
    folder of their configuration.
    """
    entry = hub.ENTRIES[name]
    images = [encoded(p) for p in pixels_of(entry.side, count)]
    if damage:
        images[17] = damage(images[17])
    labels = [label(i, len(entry.classes)) for i in range(count)]
    parquet(
        folder / (entry.config or "data"),
        {entry.image: images, "label": labels},
        [f"{source}-00000-of-00001" for source in entry.examples],
        entry.image,
        classes or len(entry.classes),
    )


@needs_datasets
def test_the_identity_changes_with_labels_and_images(tmp_path):
    for folder, given in {
        "a": {},
        "b": {"label": lambda i, n: 3 if i == 11 else i * 7 % n},
        "c": {"damage": lambda _: encoded(np.zeros((32, 32, 3), np.uint8))},
        "d": {"count": 29},
    }.items():
        write(tmp_path / folder, **given)
    found = [
        data.data_hash("cifar10", folder=tmp_path / folder, partial=True)
        for folder in "abcda"
    ]
    assert len(set(found)) == 4
    assert found[0] == found[4]


def labelled(*labels):
    return lambda folder: parquet(
        folder,
        {"img": [encoded(p) for p in pixels_of(32, 2)], "label": labels},
        ["train"],
        "img",
    )


def without_images(name, split="train"):
    return lambda folder: parquet(folder, {name: [1], "label": [1]}, [split])


FAULTS = [
    (partial(write, classes=20), "has 20 classes .* expected 10"),
    (partial(write, label=lambda i, n: 9, classes=11), "has 11 classes"),
    (
        partial(
            write, damage=lambda image: image | {"bytes": image["bytes"][:700]}
        ),
        "row 17 cannot be decoded, it is damaged or cut short",
    ),
    (
        partial(write, damage=lambda image: image | {"bytes": b"not an image"}),
        "row 17 cannot be decoded",
    ),
    (
        partial(
            write, damage=lambda _: encoded(np.zeros((32, 31, 3), np.uint8))
        ),
        "row 17 has 31 × 32 pixels, expected 32 × 32",
    ),
    (
        labelled(0, 10),
        "0 to 10, expected whole numbers 0 to 9",
    ),
    (labelled(-1, 3), "-1 to 3"),
    (
        labelled(0.5, 1.0),
        "float.., expected whole numbers",
    ),
    (
        without_images("picture"),
        "the columns are picture, label; expected img and label",
    ),
    (
        without_images("img"),
        "expected encoded images",
    ),
    (
        without_images("img", "test"),
        "no readable split 'train'.*train-.*parquet",
    ),
    (
        lambda folder: folder.mkdir(),
        "no readable split.*hf download --repo-type dataset uoft-cs/cifar10",
    ),
    (lambda folder: None, "does not exist"),
]


@needs_datasets
@pytest.mark.parametrize("make, words", FAULTS, ids=range(len(FAULTS)))
def test_sets_that_are_not_what_they_should_be_are_refused(
    make, words, tmp_path
):
    make(tmp_path / "set")
    with pytest.raises(data.DataError, match=words):
        data.dataset("cifar10", "train", folder=tmp_path / "set", partial=True)


@needs_datasets
@pytest.mark.parametrize("keep", [0.5, 0.99, 0.0])
def test_a_parquet_file_cut_short_is_refused(keep, tmp_path):
    write(tmp_path / "svhn", "svhn")
    file = tmp_path / "svhn" / "cropped_digits" / "train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    with pytest.raises(
        data.DataError, match="svhn: .*(no readable split|damaged or cut short)"
    ):
        data.dataset("svhn", "train", folder=tmp_path / "svhn", partial=True)


@needs_datasets
@pytest.mark.parametrize("name", list(hub.ENTRIES))
def test_a_missing_set_says_which_files_to_put_where(name):
    entry = hub.ENTRIES[name]
    with pytest.raises(
        data.DataError, match=f"{name} is not on this machine"
    ) as error:
        (
            data.dataset(name, "train")
            if entry.mean
            else streams.text(name, "train", 4)
        )
    said = str(error.value)
    assert (
        entry.repository in said
        and "NORMALNORM_DATASETS=DIR" in said
        and all(f"{source}-*.parquet" in said for source in entry.examples)
        and entry.image in said
    )


@pytest.mark.parametrize(
    "library, ask",
    [
        ("datasets", lambda: data.dataset("cifar10", "train")),
        ("datasets", lambda: data.data_hash("svhn")),
        ("datasets", lambda: streams.images("imagenet", "train", 2)),
        # before training begins
        *(
            ("kornia", lambda entry=entry: aug.augmentation([entry], COLOUR))
            for entry in (
                "randaugment 2 9",
                "flip",
                ["either", "mixup", "rotate 5"],
            )
        ),
    ],
)
def test_without_a_library_the_error_says_what_to_install(
    library, ask, monkeypatch
):
    "Mixtures of images need none."
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        (data.DataError, ImportError),
        match=r'pip install "\.\[experiments\]" in the',
    ):
        ask()
    x, _ = aug.augmentation(["mixup 1", "cutmix 1"], COLOUR)(*_batch())
    assert x.isfinite().all()


@needs_datasets
def test_grey_transparent_and_four_colour_images_become_rgb():
    (pixels,) = pixels_of(32, 1)
    for mode, form in (
        ("L", "PNG"),
        ("RGBA", "PNG"),
        ("P", "PNG"),
        ("CMYK", "JPEG"),
        ("1", "PNG"),
        ("LA", "PNG"),
    ):
        assert hub.decode(encoded(pixels, form, mode)["bytes"], mode).shape == (
            3,
            32,
            32,
        ), mode
    np.testing.assert_array_equal(
        hub.decode(encoded(pixels)["bytes"], "a"), pixels.transpose(2, 0, 1)
    )
    for size in (7, 14, 224):
        for shape in ((20, 33, 3), (33, 20, 3), (500, 9, 3), (300, 300, 3)):
            assert hub.decode(
                encoded(np.zeros(shape, np.uint8))["bytes"], "a", size
            ).shape == (3, size, size)


def test_the_caltech_images_that_are_held_out_are_always_these():
    "What was published with this book must not move."
    _, test = hub.positions(hub.ENTRIES["caltech101"], "test", 8677)
    assert test[:5].tolist() == [2, 11, 41, 43, 53]


@needs_datasets
def test_an_image_file_that_is_gone_is_named():
    split = hub.Decoded(
        datasets.Dataset.from_dict(
            {"image": [{"bytes": None, "path": "gone.png"}]},
            features=datasets.Features({"image": datasets.Image(decode=False)}),
        ),
        "image",
        np.arange(1),
        np.zeros(1, np.int64),
        data.info("food101"),
        8,
    )
    with pytest.raises(data.DataError, match="row 0, gone.png, cannot be read"):
        split[torch.tensor([0])]


@needs_datasets
def test_threads_may_share_a_split(tmp_path):
    write(tmp_path / "set", "caltech101")
    split = data.dataset(
        "caltech101", "train", folder=tmp_path / "set", partial=True, size=16
    )
    index = torch.arange(len(split))
    reference = split[index][0]
    same = lambda k: torch.equal(split[index[k::3]][0], reference[k::3])
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(same, (0, 1, 2) * 3))


# ---- streams ----


def write_stream(folder, name):
    "Three files, whose examples tell their number."
    entry, counts = hub.ENTRIES[name], (23, 4, 31)
    for source in entry.examples:
        for file, count in enumerate(counts):
            start = sum(counts[:file])
            numbers = list(range(start, start + count))
            rows = {"text": [f"{source} {n} ü" for n in numbers]}
            if entry.mean:
                rows = {
                    "image": [
                        encoded(np.full((9, 8, 3), n, np.uint8))
                        for n in numbers
                    ],
                    "label": numbers,
                }
            parquet(
                folder / (entry.config or "data"),
                rows,
                [f"{source}-{file:05}-of-{len(counts):05}"],
                "image" if entry.mean else None,
            )


@needs_datasets
def test_the_state_of_a_stream_is_plain_numbers(tmp_path):
    "As a checkpoint keeps them. (That it continues: the chapter.)"
    stream = streams.text("lm1b", "train", 3, 0, _lm1b(tmp_path), length=10)
    next(iter(stream))
    state = stream.state_dict()
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(ValueError, match="the state of a stream has epoch"):
        stream.load_state_dict({"epoch": 1})


def _lm1b(tmp_path):
    write_stream(tmp_path / "lm1b", "lm1b")
    return tmp_path / "lm1b"


@needs_datasets
def test_faults_in_a_stream_are_named(tmp_path):
    write_stream(tmp_path / "imagenet", "imagenet")
    files = sorted((tmp_path / "imagenet" / "data").glob("train-*"))
    images = [
        encoded(np.zeros((9, 9, 3), np.uint8)),
        {"bytes": b"GIF89a", "path": None},
    ]
    for name, rows in (
        ("damaged", {"image": images, "label": [5, 6]}),
        ("labels", {"image": images[:1] * 2, "label": [5, -1]}),
    ):
        parquet(tmp_path, rows, [name], "image")
    for content, words in (
        ((tmp_path / "damaged.parquet").read_bytes(), "row 24 cannot be decod"),
        ((tmp_path / "labels.parquet").read_bytes(), "label in row 24 is -1"),
        (
            files[2].read_bytes()[:-300] + b"\0" * 300,
            "cannot be read on after example 23|no readable split",
        ),
    ):
        files[1].write_bytes(content)
        with pytest.raises(data.DataError, match=words):
            list(
                streams.images(
                    "imagenet", "train", 4, None, tmp_path / "imagenet", size=7
                )
            )


test_what_cannot_be_streamed_is_said = needs_datasets(
    refusals(
        [
            *(
                (ask, "can be streamed: known are")
                for ask in (
                    lambda: streams.images("lm1b", "train", 2),
                    lambda: streams.text("cifar10", "train", 2),
                    lambda: streams.images("nothing", "train", 2),
                )
            ),
            (lambda: data.dataset("lm1b", "train"), "streams.text"),
            (
                lambda: streams.images("imagenet", "valid", 2),
                "no split is called",
            ),
            (lambda: next(streams.ahead([1], 0)), "depth=0"),
        ]
    )
)


def test_batches_of_any_split():
    x, y = torch.arange(20.0).view(10, 2), torch.arange(10)

    class Slow:
        def __getitem__(self, index):
            return x[index], y[index]

    order = torch.randperm(10).split(3)
    for split in ((x, y), data.Tensors(x, y), Slow()):
        found = list(streams.batches(split, order))
        assert (
            len(found) == 4
            and torch.equal(torch.cat([b for _, b in found]), torch.cat(order))
            and torch.equal(
                torch.cat([a for a, _ in found]), x[torch.cat(order)]
            )
        )


# ---- augmentation ----

SPECS = [
    ["crop 2"],
    ["flip"],
    ["translate 0.2"],
    ["rotate 30"],
    ["jitter 0.4"],
    ["jitter 0.4 0.1"],
    ["resizedcrop 8"],
    ["resizedcrop 8 0.5"],
    ["resize 6"],
    ["centrecrop 5"],
    ["randaugment 2 9"],
    ["randaugment"],
    ["mixup 1"],
    ["cutmix 0.5"],
    [["either", "mixup", "cutmix"]],
    [
        ["crop", 2],
        "flip",
        "jitter 0.2",
        "translate 0.1",
        "rotate 15",
        "cutmix 1",
    ],
]


def _batch():
    pixels = torch.rand(8, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    mean, std = (
        torch.tensor(v)[:, None, None] for v in (COLOUR.mean, COLOUR.std)
    )
    return (pixels - mean) / std, torch.tensor([0, 1, 2, 3, 4, 5, 6, 0])


def _change(*spec, about=None):
    "What the entries make; by default pixel values are not standardized."
    pytest.importorskip("kornia")
    return aug.augmentation(
        spec, about or replace(COLOUR, mean=(0.0,), std=(1.0,))
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_augmentation_keeps_to_black_white_and_the_callers_batch(spec):
    "That the seed decides it: the chapter."
    change, (x, y) = _change(*spec, about=COLOUR), _batch()
    kept = x.clone()
    found, labels = change(x, y)
    assert torch.equal(x, kept) and found.dtype == x.dtype
    mean, std = torch.tensor([COLOUR.mean, COLOUR.std])[..., None, None]
    pixels = found * std + mean
    assert -1e-4 <= pixels.min() and pixels.max() <= 1 + 1e-4
    assert labels.shape == ((8, 7) if "mix" in str(spec) else (8,))


@pytest.mark.parametrize(
    "name, magnitude, expected",
    [
        ("brightness", -1.0, lambda v: 0.1 * v),
        ("bits", -1.0, lambda v: (v * 255 // 16) * 16 / 255),
        ("solarize", -0.3, lambda v: torch.where(v < 0.7, v, 1 - v)),
        ("stretch", 0.5, lambda v: (v - v.min()) / (v.max() - v.min())),
        # by 0.45 of 40 and of 20 pixels; by 0.3 of the other coordinate
        ("move x", 1.0, (10, 28)),
        ("move y", 1.0, (19, 10)),
        ("shear x", 1.0, (10, 13)),
        ("shear y", 1.0, (13, 10)),
    ],
)
def test_operations_of_full_magnitudes_and_with_a_sign(
    name, magnitude, expected
):
    "By hand; with a third of it against Pillow's: the chapter."
    pytest.importorskip("kornia")
    v = torch.zeros(2, 3, 20, 40)
    v[:, :, 10, 10] = 1
    if callable(expected):
        v[0] = torch.randint(20, 236, v[0, 0].shape) / 255
        v[1] = 0.6  # an even channel is not stretched
    found = aug.OPERATIONS[name](v, torch.full((2,), magnitude))
    if callable(expected):
        for image, changed in zip(v, found):
            wanted = (
                image
                if name == "stretch" and image.min() == image.max()
                else expected(image)
            )
            torch.testing.assert_close(changed, wanted, atol=1e-4, rtol=0)
    else:
        row, column = expected
        torch.testing.assert_close(found[:, :, row, column], torch.ones(2, 3))
        assert found.sum() < 6.001


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_augmentation_is_the_same_on_a_gpu(spec):
    x, y = _batch()
    torch.manual_seed(1)
    one = _change(*spec, about=COLOUR)(x, y)
    torch.manual_seed(1)
    two = _change(*spec, about=COLOUR)(x.cuda(), y.cuda())
    # a rounded byte may fall on the other side
    torch.testing.assert_close(
        two[0].cpu(),
        one[0],
        atol=0.05 if "randaugment" in str(spec) else 1e-4,
        rtol=0,
    )
    torch.testing.assert_close(two[1].cpu(), one[1])


test_wrong_entries_are_refused = refusals(
    [
        ("crops 4", "did you mean crop"),
        ("crop", "followed by 1 number"),
        ("crop -1", "not negative"),
        ("crop 2.5", "whole number"),
        ("flip x", "expected flip"),
        ("mixup 0", "expected mixup"),
        ("rotate nan", "expected rotate"),
        ("rotate 1 2", "expected rotate"),
        (["jitter"], "expected jitter"),
        (["either"], "not known"),
        ("jitter 0.1 0.1 0.1", "expected jitter followed by 1 to 2 numbers"),
        ("flip 0.5 0.5", "expected flip followed by 0 to 1 number, "),
        ("randaugment 2 9 1", "0 to 2 numbers"),
        (["either", "crop x"], "expected crop"),
        ([], "not known"),
        (3, "not known"),
        ("", "not known"),
        ("centrecrop 0", "expected centrecrop"),
        ("flip 2", "not negative, at most 1, for"),
        ("jitter 0.4 0.6", "not negative, the second at most 0.5, for"),
        ("randaugment 2 31", "whole number, the second at most 30, for"),
    ],
    lambda entry: aug.augmentation([entry], COLOUR),
)


def test_images_are_needed_for_all_but_mixup():
    assert (
        aug.augmentation([], COLOUR) is None
        and aug.augmentation((), data.info("mnist1d")) is None
    )
    x, y = aug.augmentation(["mixup 1"], data.info("mnist1d"))(
        *data.load("mnist1d", "train", first=6)
    )
    assert x.shape == (6, 1, 40) and y.shape == (6, 10)


test_without_images_and_with_small_ones = refusals(
    [
        (
            lambda: aug.augmentation(["mixup 1", "flip"], data.info("mnist1d")),
            "mnist1d has no images",
        ),
        (
            lambda: _change("centrecrop 10")(*_batch()),
            "cannot be cut from images of 9 × 11",
        ),
    ]
)


def test_linear_maps_in_a_row_are_one():
    """The composed map against a point followed through the single maps: a
    white pixel ends where the maps send it.
    """
    image = torch.zeros(1, 1, 41, 41, dtype=torch.float64)
    image[0, 0, 14, 25] = 1  # (right, down) from the centre: (5, −6)
    change = _change("translate 0.1", "rotate 40", "translate 0.05")
    for seed in range(5):
        torch.manual_seed(seed)
        out, _ = change(image, torch.zeros(1, dtype=torch.int64))
        torch.manual_seed(seed)
        first, turn, last = (2 * torch.rand(1, 2) - 1 for _ in range(3))
        point = (
            torch.tensor([5.0, -6.0], dtype=torch.float64) + 0.1 * 41 * first[0]
        )
        # clockwise with the vertical axis down
        angle = math.radians(40 * float(turn[0, 0]))
        point = (
            torch.stack(
                [
                    point[0] * math.cos(angle) - point[1] * math.sin(angle),
                    point[0] * math.sin(angle) + point[1] * math.cos(angle),
                ]
            )
            + 0.05 * 41 * last[0]
        )
        place = torch.arange(41, dtype=torch.float64) - 20
        centre = (
            torch.stack(
                [
                    (out[0, 0] * place[None]).sum(),
                    (out[0, 0] * place[:, None]).sum(),
                ]
            )
            / out.sum()
        )
        torch.testing.assert_close(centre, point, atol=0.35, rtol=0)


def test_a_probability_of_mirroring_is_taken():
    x, _ = _batch()
    assert torch.equal(_change("flip 1")(x, None)[0], x.flip(3))
    assert torch.equal(_change("flip 0")(x, None)[0], x)


def test_labels_that_are_probabilities_already_are_mixed_again():
    x, y = _batch()
    p = torch.nn.functional.one_hot(y, 7).float() * 0.9 + 0.1 / 7
    for spec in (["mixup 1", "cutmix 1"], ["cutmix 1"]):
        _, mixed = aug.augmentation(spec, COLOUR)(x, p)
        torch.testing.assert_close(mixed.sum(0), p.sum(0))
        torch.testing.assert_close(mixed.sum(1), torch.ones(8))


@pytest.mark.parametrize("entry", ["jitter 0.4 0.2", "randaugment 3 20"])
def test_a_grey_image_is_changed_as_one_in_colour(entry):
    grey, found = torch.rand(8, 1, 9, 11), []
    for x in (grey, grey.expand(8, 3, 9, 11)):
        torch.manual_seed(5)
        found.append(_change(entry)(x, None)[0])
    assert found[0].shape == (8, 1, 9, 11) and not torch.equal(found[0], grey)
    torch.testing.assert_close(found[0], found[1][:, :1])


@pytest.mark.parametrize("magnitude", [0.0, 9.0, 15.0, 30.0])
def test_magnitudes_of_randaugment_are_thirtieths(magnitude, monkeypatch):
    """As in the paper, which counts from 0 to 30: the operations get the share,
    with either sign, and `count` of them are done.
    """
    pytest.importorskip("kornia")
    seen = []
    monkeypatch.setattr(
        aug,
        "OPERATIONS",
        {name: lambda v, m: (seen.append(m), v)[1] for name in "abc"},
    )
    x = torch.rand(60, 3, 4, 5)
    assert torch.equal(aug.rand_augment(x, 4, magnitude), x)
    drawn = torch.cat(seen)
    assert (
        len(drawn) == 4 * 60
        and torch.equal(drawn.abs(), torch.full_like(drawn, magnitude / 30))
        and (magnitude == 0 or len(drawn.unique()) == 2)
    )
    seen.clear()
    aug.rand_augment(x)
    # the defaults: twice, 9
    assert torch.equal(torch.cat(seen).abs(), torch.full((2 * 60,), 0.3))


@needs_datasets
def test_text_comes_in_windows_of_the_length_that_the_small_models_read(
    tmp_path,
):
    (length,) = models.architecture("gpt").inputs
    shapes = [
        tuple(part.shape)
        for pair in streams.text("lm1b", "train", 1, folder=_lm1b(tmp_path))
        for part in pair
    ]
    assert len(shapes) > 2
    assert set(shapes) == {(1, length)} == {(1, 128)}


# ---- what is published about the sets ---------------------------------------

# examples that train and those that test; classes; shape: from the pages of the
# sets
PUBLISHED = {
    "cifar10": (50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": (50_000, 10_000, 100, (3, 32, 32)),
    "svhn": (73_257, 26_032, 10, (3, 32, 32)),
    "stl10": (5_000, 8_000, 10, (3, 96, 96)),
    "tinyimagenet": (100_000, 10_000, 200, (3, 64, 64)),
    "caltech101": (8_677, None, 101, None),
    "food101": (75_750, 25_250, 101, None),
    "imagenet": (1_281_167, 50_000, 1000, None),
    "lm1b": (30_301_028, 306_688, 256, None),
}


@pytest.mark.parametrize("name", hub.ENTRIES)
def test_sizes_and_classes_are_the_published_ones(name):
    train, test, classes, shape = PUBLISHED[name]
    entry, known = hub.ENTRIES[name], data.info(name)
    assert (
        list(entry.examples.values()) == [n for n in (train, test) if n]
        and len(known.classes) == classes
    )
    assert shape is None or known.shape == shape
    parts = known.sizes
    assert parts["train"] + parts["validation"] + (
        parts["test"] if test is None else 0
    ) == train and parts["test"] == (test or parts["test"])


def test_sets_without_a_hub_say_their_shape_and_range():
    for name, shape, largest, sizes in (
        ("fashion-mnist", (1, 28, 28), 255, (55_000, 5_000, 10_000)),
        ("fashion-unseen", (1, 28, 28), 255, (54_000, 1000, 5000)),
        ("fashion", (1, 28, 28), 255, (4000, 1000, 5000)),
        ("digits", (1, 8, 8), 16, (1197, 300, 300)),
        ("mnist1d", (1, 40), 0, (3200, 800, 1000)),
        ("glyphs", (3, 32, 32), 255, (20_000, 1000, 3000)),
    ):
        known = data.info(name)
        assert (
            known.shape,
            known.largest,
            tuple(known.sizes[s] for s in data.SPLITS),
        ) == (shape, largest, sizes)


@pytest.mark.parametrize("more", [0, 1])
def test_a_set_too_large_for_memory_is_not_loaded(more, monkeypatch):
    "Four gigabytes of float32 are the limit: 2³⁰ numbers."
    count = 2**30 // math.prod(data.info("imagenet").shape) + more

    class Large(list):
        def __getitem__(self, index):
            return torch.zeros(len(index), 1), index

    monkeypatch.setattr(data, "dataset", lambda *_, **__: Large(range(count)))
    if more:
        with pytest.raises(data.DataError, match="as float32. Take fewer ex"):
            data.load("imagenet", "train")
    else:
        assert len(data.load("imagenet", "train")[1]) == count


@needs_datasets
def test_the_identity_of_a_stream_is_that_of_its_first_examples(tmp_path):
    for words in ("one", "two"):
        parquet(
            tmp_path / words,
            {"text": [f"{words} {n}" for n in range(9)]},
            hub.ENTRIES["lm1b"].examples,
        )
    one, again, two = (
        hub.fingerprint("lm1b", tmp_path / words)
        for words in ("one", "one", "two")
    )
    assert one == again != two
