"""Golden files: one readable file a test and format, in ``__snapshots__`` beside the test. What all tests run on."""

import gc
import sys

import pytest
import torch
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode


class TextFile(SingleFileSnapshotExtension):
    _write_mode = WriteMode.TEXT
    file_extension = "txt"


class JsonFile(TextFile):
    file_extension = "json"


class SvgFile(TextFile):
    file_extension = "svg"


@pytest.fixture
def golden(snapshot):
    return snapshot.use_extension(TextFile)


@pytest.fixture
def golden_json(snapshot):
    return snapshot.use_extension(JsonFile)


@pytest.fixture
def golden_svg(snapshot):
    return snapshot.use_extension(SvgFile)


torch.set_num_threads(1)  # what tiny models take a step with soonest


@pytest.fixture(autouse=True, scope="module")
def seen_modules():
    """The modules that the collector was spared; in the end it sees all of them again."""
    seen = set()
    yield seen
    gc.unfreeze()


@pytest.fixture(autouse=True)
def collector_without_imports(seen_modules):
    """Spare the collector, which many tests call, all that was imported: it takes most of the time else."""
    if not seen_modules.issuperset(sys.modules):  # models of transformers are imported on use
        seen_modules.update(sys.modules)
        gc.collect()
        gc.freeze()
