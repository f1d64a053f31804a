"""The small rows that decontamination and dedup work on: no source text, so a whole run fits in
one worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from dedup.signature import ngrams_of
from schemas.records import Admission, Rejection, RejectStage


@dataclass(frozen=True, kw_only=True)
class Row:
    """One admitted problem. `problem_id` is the hash of its code, so it is the content rank as
    well.
    """

    problem_id: str
    index: int
    operators: tuple[str, ...]
    ngrams: tuple[str, ...]
    ngrams_attributes: tuple[str, ...]

    @staticmethod
    def of(admission: Admission, index: int) -> Row:
        """The row of an admitted problem that was composed at `index`."""
        return Row(
            problem_id=admission.problem_id,
            index=index,
            operators=admission.operators,
            ngrams=admission.ngrams,
            ngrams_attributes=admission.ngrams_attributes,
        )

    @property
    def rank(self) -> tuple[str, int]:
        """Smallest is kept: the hash of the code, then the place in the run. Independent of
        arrival.
        """
        return (self.problem_id, self.index)

    @property
    def ngrams_effective(self) -> tuple[str, ...]:
        """Names only, without constant no-ops; the ends alone when nothing else is left."""
        return ngrams_of(self.operators)

    def rejection(self, stage: RejectStage, reason: str, detail: str) -> Rejection:
        return Rejection(
            problem_id=self.problem_id,
            stage=stage,
            reason=reason,
            detail=detail,
            kind=None,
            index=self.index,
        )


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A row that passed decontamination, with the benchmark problem nearest to it."""

    row: Row
    kernelbench_id: str | None
    kernelbench_similarity: float
    near_miss: bool
