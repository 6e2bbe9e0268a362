"""What a patching sweep measures: an answer's log-probability, a difference of two, or a function of the last logits.

Conventions. Log-probabilities are natural, in float32. Only an answer's last token is predicted and never fed back, so the
prompt gets all others behind it; answers that share those (single tokens share none) cost one forward together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..batch import PreparedBatch
from ..errors import ArgumentError
from .answers import Answer, answer_ids, answered

if TYPE_CHECKING:
    from ..session import Session

Metric = Callable[[torch.Tensor], torch.Tensor] | Answer | tuple[Answer, Answer]
Terms = list[tuple[float, tuple[int, ...]]]


class Variant(NamedTuple):
    """The two runs with the first tokens of an answer behind; `terms` (sign, token ids) are predicted from there."""

    runs: tuple[PreparedBatch, PreparedBatch]
    terms: Terms


class Asked:
    """The metric in words, and the batches it needs: one of `variants` for each beginning that its answers have."""

    def __init__(self, session: Session, runs: tuple[PreparedBatch, PreparedBatch], metric: Metric) -> None:
        self.function: Callable | None = metric if callable(metric) else None
        self.prompt_width = runs[1].width
        self.variants: list[Variant] = []
        if self.function is not None:
            self.name = f"{getattr(metric, '__module__', '')}.{getattr(metric, '__qualname__', type(metric).__name__)}"
            self.variants = [Variant(runs, [])]
        else:
            is_pair = (
                isinstance(metric, tuple)
                and len(metric) == 2
                and not all(isinstance(m, (int, np.integer)) for m in metric)
            )
            answers: Any = metric if is_pair else (metric,)
            ids = [answer_ids(session, runs[0], [answer])[0] for answer in answers]
            texts = [repr(session.processor.tokenizer.decode(list(mine))) for mine in ids]
            self.name = "log-probability of " + " minus that of ".join(texts)
            heads: dict[tuple[int, ...], list] = {}
            for sign, mine in zip((1.0, -1.0), ids, strict=False):
                heads.setdefault(mine[:-1], []).append((sign, mine))
            for head, terms in heads.items():
                pair = [answered(session, run, head) if head else run for run in runs]
                self.variants.append(Variant((pair[0], pair[1]), terms))
        self.width = max(variant.runs[1].width for variant in self.variants)

    def score(self, logits: torch.Tensor, terms: Terms) -> torch.Tensor:
        """Logits [B, k, V] of the last k positions -> what they add to the metric [B], float64 on the CPU.

        Raises: ArgumentError for a function that returns anything but one number a request.
        """
        if self.function is not None:
            value = self.function(logits[:, -1].float())
            if not isinstance(value, torch.Tensor) or value.shape != logits.shape[:1]:
                got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise _bad(
                    f"the metric returned {got} for logits [{len(logits)}, V]; it must return [{len(logits)}]", "metric"
                )
            return value.detach().double().cpu()
        total = torch.zeros(len(logits), dtype=torch.float64)
        for sign, ids in terms:
            logprobs = logits[:, -len(ids) :].float().log_softmax(-1)
            wanted = torch.tensor(ids, device=logits.device).expand(len(logits), -1)[..., None]
            total += sign * logprobs.gather(2, wanted)[..., 0].sum(1).double().cpu()
        return total


def _bad(what: str, source: str) -> ArgumentError:
    return ArgumentError(what, code="bad_argument", source=source)
