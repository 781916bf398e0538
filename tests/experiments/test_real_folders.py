"""Each set of the hub from folders that the library `datasets` itself makes:
its own encoding of pictures, its own types, its own ways to write, laid out and
described as the set's page on the hub does it. What is expected is what the
library reads back.
"""

import importlib.util
import io

import numpy as np
import pytest
import torch

from normalnorm.experiments import data, hub, streams

datasets = pytest.importorskip(
    "datasets", reason='pip install ".[experiments]"'
)
if importlib.util.find_spec("PIL") is None:
    pytest.skip('pip install ".[experiments]"', allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_hub")
COUNT = 60  # ImageNet holds every fiftieth out
IMAGES = [name for name, entry in hub.ENTRIES.items() if entry.mean]
STREAMED = [name for name in IMAGES if not hub.ENTRIES[name].held_out]
# As the pictures are stored there, and the folder that the files are in.
STORED = {
    "cifar10": ("PNG", "plain_text"),
    "cifar100": ("PNG", "cifar100"),
    "svhn": ("PNG", "cropped_digits"),
    "stl10": ("PNG", "data"),
    "tinyimagenet": ("JPEG", "data"),
    "caltech101": ("JPEG", "data"),
    "food101": ("JPEG", "data"),
    "imagenet": ("JPEG", "data"),
}


def picture(name, form, number):
    """One that the library gets as a picture and encodes by itself; every
    fifth grey, as some are in ImageNet and its kin, one there CMYK.
    """
    from PIL import Image

    random = np.random.default_rng(number)
    side = hub.ENTRIES[name].side
    size = (side, side) if side else tuple(random.integers(40, 70, 2))
    # smooth, so that JPEG keeps something of it
    pixels = np.asarray(
        Image.fromarray(
            random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        ).resize(size)
    )
    found = Image.fromarray(pixels)
    if form == "JPEG" and number % 5 == 3:
        found = found.convert("CMYK" if number == 3 and not side else "L")
    if form == "JPEG":
        file = io.BytesIO()
        found.save(file, form)
        found = Image.open(io.BytesIO(file.getvalue()))
        assert found.format == "JPEG"  # which the library keeps
    return found


def made(name):
    "The set as the library holds it: named classes, all columns of the page."
    entry, (form, _) = hub.ENTRIES[name], STORED[name]
    names = [f"class {label}" for label in range(len(entry.classes))]
    found = {}
    for start, source in enumerate(entry.examples):
        label = [names[(7 * i + start) % len(names)] for i in range(COUNT)]
        rows = {
            entry.image: [
                picture(name, form, 1000 * start + i) for i in range(COUNT)
            ],
            entry.label: label,
        }
        features = {
            entry.image: datasets.Image(),
            entry.label: datasets.ClassLabel(names=names),
        }
        if name == "cifar100":
            rows["coarse_label"] = [i % 20 for i in range(COUNT)]
            features["coarse_label"] = datasets.ClassLabel(num_classes=20)
        if name == "caltech101":
            rows["filename"] = [f"image_{i:04}.jpg" for i in range(COUNT)]
            features["filename"] = datasets.Value("string")
        found[source] = datasets.Dataset.from_dict(
            rows, features=datasets.Features(features)
        )
    return datasets.DatasetDict(found)


def as_downloaded(name, folder):
    """The set, and in the folder what `hf download` brings: parquet files by
    the library, in pieces, and the page's description of them, of which the
    library makes its splits.
    """
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData

    whole, (_, inside) = made(name), STORED[name]
    (folder / inside).mkdir(parents=True)
    for source, part in whole.items():
        pieces = 2 if source == "train" else 1
        for piece in range(pieces):
            part.shard(pieces, piece, contiguous=True).to_parquet(
                folder / inside / f"{source}-{piece:05}-of-{pieces:05}.parquet"
            )
    card = DatasetCardData()
    MetadataConfigs(
        {
            hub.ENTRIES[name].config or "default": {
                "data_files": [
                    {"split": source, "path": f"{inside}/{source}-*"}
                    for source in whole
                ]
            }
        }
    ).to_dataset_card_data(card)
    DatasetCard(f"---\n{card}\n---\n").save(folder / "README.md")
    return whole


def as_files(whole, folder, name):
    "A folder of image files for each class, which the library reads as well."
    entry = hub.ENTRIES[name]
    for source, part in whole.items():
        label = part.features[entry.label]
        for title in label.names:
            (folder / source / title).mkdir(parents=True)
        stored = part.cast_column(entry.image, datasets.Image(decode=False))
        for i, row in enumerate(stored):
            (
                folder
                / source
                / label.int2str(row[entry.label])
                / f"{i:03}.{STORED[name][0].lower()}"
            ).write_bytes(row[entry.image]["bytes"])


def standardized(name, opened, size):
    "Of a picture as the library decodes it, by PIL and numpy."
    from PIL import Image

    entry, rgb = hub.ENTRIES[name], opened.convert("RGB")
    if not entry.side:
        short = round(size * 8 / 7)
        scale = short / min(rgb.size)
        rgb = rgb.resize(
            [max(short, int(side * scale)) for side in rgb.size],
            Image.Resampling.BILINEAR,
        )
        left, top = (round((side - size) / 2) for side in rgb.size)
        rgb = rgb.crop((left, top, left + size, top + size))
    return ((np.asarray(rgb) / 255 - entry.mean) / entry.std).transpose(2, 0, 1)


def small(name):
    "The option that brings images of any size to 24 pixels a side."
    return {} if hub.ENTRIES[name].side else {"size": 24}


def compare(name, folder, whole):
    "Every split, through our loader and through the library."
    entry = hub.ENTRIES[name]
    options = {"folder": folder, "partial": True} | small(name)
    for split in data.SPLITS:
        source, rows = hub.positions(entry, split, COUNT)
        x, y = data.load(name, split, **options)
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert len(data.dataset(name, split, first=1, **options)) == 1
        assert y.tolist() == [whole[source][int(i)][entry.label] for i in rows]
        for place in (0, len(rows) // 2, len(rows) - 1):
            np.testing.assert_allclose(
                x[place],
                standardized(
                    name, whole[source][int(rows[place])][entry.image], 24
                ),
                atol=1e-5,
            )


@pytest.mark.parametrize("name", IMAGES)
def test_each_set_of_images_from_folders_of_the_library(
    name, tmp_path, monkeypatch
):
    entry = hub.ENTRIES[name]
    whole = as_downloaded(name, tmp_path / "hub" / name)
    stored = whole["train"].cast_column(
        entry.image, datasets.Image(decode=False)
    )[0][entry.image]["bytes"]
    begins = {"PNG": b"\x89PNG", "JPEG": b"\xff\xd8"}[STORED[name][0]]
    assert stored.startswith(begins)
    # the library itself finds the splits in it
    alone = datasets.load_dataset(str(tmp_path / "hub" / name), entry.config)
    assert {s: len(part) for s, part in alone.items()} == dict.fromkeys(
        entry.examples, COUNT
    )
    whole.save_to_disk(tmp_path / "disk")
    monkeypatch.setenv("NORMALNORM_DATASETS", str(tmp_path / "hub"))
    with pytest.raises(data.DataError, match="60 examples, expected"):
        data.dataset(name, "train")
    hashes = {data.data_hash(name, first=3, draw=1, partial=True)}
    for folder in (None, tmp_path / "disk"):
        compare(name, folder, whole)
        hashes.add(data.data_hash(name, folder=folder, partial=True))
    assert [len(found) for found in hashes] == [64, 64]
    x, y = data.load(name, "train", partial=True, **small(name))
    positions = data.drawn(data.Tensors(x, y), 3, 1)
    drawn = data.load(name, "train", 3, draw=1, partial=True, **small(name))
    assert torch.equal(drawn[0], x[positions])
    assert torch.equal(drawn[1], y[positions])


@pytest.mark.parametrize("name", STREAMED)
def test_each_stream_of_images_from_a_folder_of_the_library(name, tmp_path):
    entry = hub.ENTRIES[name]
    whole = as_downloaded(name, tmp_path / "set")
    for split in data.SPLITS:
        source, rows = hub.positions(entry, split, COUNT)
        found = list(
            streams.images(name, split, 8, folder=tmp_path / "set", size=24)
        )
        x, y = (torch.cat(part) for part in zip(*found, strict=True))
        indexed = data.load(
            name, split, folder=tmp_path / "set", partial=True, **small(name)
        )
        assert torch.equal(x, indexed[0]) and torch.equal(y, indexed[1])
        assert y.tolist() == [whole[source][int(i)][entry.label] for i in rows]
        np.testing.assert_allclose(
            x[-1],
            standardized(name, whole[source][int(rows[-1])][entry.image], 24),
            atol=1e-5,
        )


def test_folders_of_image_files(tmp_path):
    "Files in another order, by class; the library numbers the classes."
    name, folder = "cifar10", tmp_path / "files"
    as_files(made(name), folder, name)
    x, y = data.load(name, "test", folder=folder, partial=True)
    theirs = datasets.load_dataset(str(folder), split="test")
    assert y.tolist() == theirs["label"]
    np.testing.assert_allclose(
        x[0], standardized(name, theirs[0]["image"], 24), atol=1e-5
    )


def test_parquet_of_another_writer(tmp_path):
    "No types of the library, labels plain integers."
    import pyarrow
    import pyarrow.parquet

    whole = made("cifar10")
    whole.save_to_disk(tmp_path / "disk")
    (tmp_path / "bare").mkdir()
    for source, part in whole.items():
        table = part.data.table.replace_schema_metadata(None)
        columns = {name: table[name] for name in table.column_names}
        pyarrow.parquet.write_table(
            pyarrow.table(columns), tmp_path / "bare" / f"{source}.parquet"
        )
    compare("cifar10", tmp_path / "bare", whole)
    of_disk, of_bare = (
        data.data_hash("cifar10", folder=tmp_path / kind, partial=True)
        for kind in ("disk", "bare")
    )
    assert of_disk == of_bare


def test_the_text_from_a_folder_of_the_library(tmp_path):
    """The layout of the hub's converted files: a folder for each split, files
    that are numbers.
    """
    folder, seen = tmp_path / "lm1b", {}
    lines = {
        source: [f"{source} line {i} – ü" for i in range(600)]
        for source in hub.ENTRIES["lm1b"].examples
    }
    for source, text in lines.items():
        inside = folder / "plain_text" / source
        inside.mkdir(parents=True)
        whole = datasets.Dataset.from_dict({"text": text})
        for piece in range(2):
            whole.shard(2, piece, contiguous=True).to_parquet(
                inside / f"{piece:04}.parquet"
            )
    for split in data.SPLITS:
        source, keep = hub.belongs(hub.ENTRIES["lm1b"], split)
        kept = [line for i, line in enumerate(lines[source]) if keep(i)]
        joined = "".join(f"{line}\n" for line in kept).encode()
        stream = streams.text(
            "lm1b", split, 4, length=10, block=10_000, folder=folder
        )
        x, y = (torch.cat(part) for part in zip(*stream, strict=True))
        found = bytes(x.flatten().tolist())
        # windows follow each other; what is left at the end is not used
        assert joined.startswith(found)
        assert len(joined) - len(found) <= 10
        assert torch.equal(x[:, 1:], y[:, :-1])
        seen[split] = len(found)
    assert seen["validation"] < seen["train"]
    assert len(data.data_hash("lm1b", folder=folder)) == 64
