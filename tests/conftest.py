"""Golden files: one readable file a test and format, in ``__snapshots__`` beside the test."""

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


@pytest.fixture
def one_thread():
    """What tiny models take a step with soonest."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
