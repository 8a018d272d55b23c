"""Datasets and their partitions over workers: host code on NumPy arrays, see `docs/data.md`."""

from cafcor_jax.data.dataset import Dataset as Dataset
from cafcor_jax.data.dataset import FederatedData as FederatedData
from cafcor_jax.data.dataset import federate as federate
from cafcor_jax.data.partitions import PARTITIONS as PARTITIONS
from cafcor_jax.data.partitions import partition as partition
from cafcor_jax.data.sources import NAMES as NAMES
from cafcor_jax.data.sources import load as load

__all__ = ["NAMES", "PARTITIONS", "Dataset", "FederatedData", "federate", "load", "partition"]
