"""Train a small residual network with normality normalization on CIFAR-10.

    python examples/train_cifar.py cifar-10-batches-py
    python examples/train_cifar.py --generated --steps 50

The folder is the one in CIFAR-10's archive "for Python": `data_batch_1` to
`data_batch_5` and `test_batch`, which are pickles, so load no one else's. The
network is written with PyTorch's batch norms, and `to_normality` converts it;
`--plain` leaves it as it is, to compare. Needs torch and normalnorm only.
"""

import argparse
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from normalnorm import to_normality
from normalnorm.layers.weight_decay import groups_by_type


class Block(nn.Module):
    "Two convolutions and a shortcut; a batch norm behind each convolution."

    def __init__(self, before, width):
        super().__init__()
        stride = width // before
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(before, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def resnet20():
    "The 20-layer network of He et al. (2016), with projecting shortcuts."
    widths = [16] * 4 + [32] * 3 + [64] * 3
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Block(*pair) for pair in zip(widths, widths[1:])),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def load(folder):
    "Images (N, 3, 32, 32) in uint8 and labels (N,), for training and testing."

    def read(names):
        images, labels = [], []
        for name in names:
            with open(Path(folder) / name, "rb") as file:
                batch = pickle.load(file, encoding="bytes")
            images.append(torch.as_tensor(batch[b"data"]))
            labels.append(torch.as_tensor(batch[b"labels"]))
        return torch.cat(images).reshape(-1, 3, 32, 32), torch.cat(labels)

    return read(f"data_batch_{i}" for i in range(1, 6)), read(["test_batch"])


def generate(train=1000, test=500):
    "The same shapes without CIFAR: ten coarse pictures under noise."
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(10, 3, 4, 4, generator=generator)
    pictures = F.interpolate(pictures, size=32, mode="bilinear")
    labels = torch.randint(10, (train + test,), generator=generator)
    noise = torch.randn(train + test, 3, 32, 32, generator=generator)
    images = (127 + 40 * (pictures[labels] + noise)).clamp(0, 255).byte()
    return (images[:train], labels[:train]), (images[train:], labels[train:])


def augment(images):
    "The batch moved by up to four pixels, every second image mirrored."
    down, right = torch.randint(9, (2,)).tolist()
    moved = F.pad(images, (4, 4, 4, 4))[..., down:, right:][..., :32, :32]
    mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, moved.flip(3), moved)


@torch.no_grad()
def accuracy(model, images, labels):
    "The share of images that get their label."
    model.eval()
    found = torch.cat([model(x).argmax(1) for x in images.split(500)])
    return (found == labels).float().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", help="of CIFAR-10's pickles")
    parser.add_argument("--generated", action="store_true", help="no CIFAR")
    parser.add_argument("--plain", action="store_true", help="batch norm")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--steps", type=int, help="so many, not epochs")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.1)
    args = parser.parse_args(arguments)
    if bool(args.folder) == args.generated:
        parser.error("give CIFAR-10's folder, or --generated")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    (images, labels), (test_images, test_labels) = (
        generate() if args.generated else load(args.folder)
    )
    std, mean = torch.std_mean(images.float(), (0, 2, 3), keepdim=True)
    images = ((images - mean) / std).to(device)
    test_images = ((test_images - mean) / std).to(device)
    labels, test_labels = labels.to(device), test_labels.to(device)

    model = resnet20().to(device)
    if not args.plain:
        to_normality(model)
    # no weight decay for the normalizers' γ and β
    optimizer = torch.optim.SGD(
        groups_by_type(model, 5e-4), args.rate, momentum=0.9, nesterov=True
    )
    in_epoch = -(-len(images) // args.batch)
    total = args.steps or args.epochs * in_epoch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for step in range(total):
        if step % in_epoch == 0:
            order = torch.randperm(len(images)).to(device)
        pick = order[step % in_epoch * args.batch :][: args.batch]
        model.train()
        loss = F.cross_entropy(model(augment(images[pick])), labels[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % in_epoch == 0 or step + 1 == total:
            right = accuracy(model, test_images, test_labels)
            print(f"step {step + 1}: loss {loss:.3f}, {right:.1%} right")
    return right


if __name__ == "__main__":
    main()
