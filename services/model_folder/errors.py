"""What can be wrong with a model folder."""

from __future__ import annotations


class ModelFolderError(Exception):
    """The folder holds no model Ullage can run; str() names the file or tensor and says what to do."""
