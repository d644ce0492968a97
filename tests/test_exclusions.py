"""Every reason to leave a node out has words."""

from __future__ import annotations

from services import exclusions
from ullage.v1 import model_pb2


def test_every_reason_has_words_of_its_own() -> None:
    reasons = [reason for reason in model_pb2.Exclusion.values() if reason != model_pb2.EXCLUSION_UNSPECIFIED]
    said = {exclusions.words(reason) for reason in reasons}
    assert len(said) == len(reasons)
    assert exclusions.words(model_pb2.EXCLUSION_UNSPECIFIED) not in said
