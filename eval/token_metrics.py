"""What a model predicts on held-out tokens, and how far it is from a reference: sums per unit of resampling.

For a token t with next token y, student p = softmax(z) and teacher q:
    nll_t = −log p(y)      correct_t = [argmax z = y]
    kl_t  = Σ_v q_v (log q_v − log p_v)      agree_t = [argmax z = argmax z_teacher]
summed over the scored tokens (label ≠ −100) of each unit. A unit is a document where batches carry
`document_ids`, else a row: windows of one file are correlated, so intervals over rows would be too narrow.

One pass serves several models: the teacher's logits are computed once a batch. Heads are applied to chunks of
tokens, so that logits (T, V) of a large vocabulary never exist whole; softmax and differences are fp32, sums
are fp64.   B rows, L positions, T scored tokens, H hidden, V vocabulary, U units.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

IGNORED = -100
MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask")


@dataclass(frozen=True)
class TokenMetrics:
    """Sums per unit, fp64 on the CPU; `kl_U` and `agree_U` are None without a teacher."""

    unit: str  # "document" or "sequence"
    ids_U: Tensor  # int64, ascending
    tokens_U: Tensor
    nll_U: Tensor
    correct_U: Tensor
    kl_U: Tensor | None = None
    agree_U: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.tokens_U.sum())

    def _mean(self, sums_U: Tensor | None) -> float | None:
        return None if sums_U is None else float(sums_U.sum() / self.tokens_U.sum())

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood in nats a token."""
        return float(self.nll_U.sum() / self.tokens_U.sum())

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def accuracy(self) -> float:
        """Share of tokens whose most likely prediction is the next token."""
        return float(self.correct_U.sum() / self.tokens_U.sum())

    @property
    def kl(self) -> float | None:
        """Mean KL(teacher ‖ model) in nats a token."""
        return self._mean(self.kl_U)

    @property
    def agreement(self) -> float | None:
        """Share of tokens for which model and teacher have the same most likely prediction."""
        return self._mean(self.agree_U)


def score(logits_TV: Tensor, labels_T: Tensor, teacher_TV: Tensor | None) -> Tensor:
    """Columns nll, correct, kl, agree for every token, (T, 4) fp64; the last two are 0 without a teacher."""
    log_p_TV = F.log_softmax(logits_TV.float(), -1)
    top_T = logits_TV.argmax(-1)
    nll_T = -log_p_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    kl_T, agree_T = torch.zeros_like(nll_T), torch.zeros_like(top_T)
    if teacher_TV is not None:
        log_q_TV = F.log_softmax(teacher_TV.float(), -1)
        kl_T = F.kl_div(log_p_TV, log_q_TV, reduction="none", log_target=True).sum(-1)
        agree_T = top_T == teacher_TV.argmax(-1)
    return torch.stack([x.double() for x in (nll_T, top_T == labels_T, kl_T, agree_T)], -1)


def hidden_states(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Final hidden states (B, L, H) of a transformers causal language model on its own device."""
    device = next(model.parameters()).device
    inputs = {k: batch[k].to(device) for k in MODEL_INPUTS if k in batch}
    return model.base_model(**inputs, use_cache=False).last_hidden_state


@contextmanager
def inference(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own training flag is put back afterwards."""
    modules = [m for model in models for m in model.modules()]
    flags = [m.training for m in modules]
    try:
        for module in modules:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, flag in zip(modules, flags):
            module.training = flag


def batch_units(batch: Mapping[str, Tensor], first_row: int) -> Tensor:
    """Unit of every predicted token, (B, L−1): the document of the label, or the row's running number."""
    labels_BL = batch["labels"]
    if "document_ids" in batch:
        return batch["document_ids"][:, 1:]
    rows = torch.arange(first_row, first_row + len(labels_BL))
    return rows[:, None].expand(-1, labels_BL.shape[1] - 1)


def output_head(model: PreTrainedModel) -> nn.Module:
    """The module that maps hidden states to logits."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head; load it as a causal language model")
    return head


def score_batch(
    models: Mapping[str, PreTrainedModel],
    teacher: PreTrainedModel | None,
    batch: Mapping[str, Tensor],
    max_logits: int,
    known_TH: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Scores (T, 4) of each model at the scored tokens, heads applied `max_logits` elements at a time; and the
    teacher's hidden states (T, H) there, which are taken from `known_TH` where they are given."""
    labels_BL = batch["labels"][:, 1:]
    scored_BL = labels_BL != IGNORED

    def scored_hidden(model: PreTrainedModel) -> Tensor:
        hidden_BLH = hidden_states(model, batch)
        return hidden_BLH[:, :-1][scored_BL.to(hidden_BLH.device)]

    everyone = {id(m): m for m in [*models.values(), *([teacher] if teacher is not None else [])]}
    hidden = {} if teacher is None or known_TH is None else {id(teacher): known_TH}
    hidden |= {key: scored_hidden(model) for key, model in everyone.items() if key not in hidden}
    heads = {key: output_head(model) for key, model in everyone.items()}
    labels_T = labels_BL[scored_BL]
    pieces: dict[str, list[Tensor]] = {name: [torch.zeros(0, 4, dtype=torch.float64)] for name in models}
    rows = max(1, max_logits // max(m.config.vocab_size for m in everyone.values()))
    for start in range(0, len(labels_T), rows):
        part = slice(start, start + rows)
        teacher_TV = None if teacher is None else heads[id(teacher)](hidden[id(teacher)][part])
        for name, model in models.items():
            if teacher_TV is not None and model is teacher:
                logits_TV = teacher_TV
            else:
                logits_TV = heads[id(model)](hidden[id(model)][part])
            reference = None if teacher_TV is None else teacher_TV.to(logits_TV.device)
            pieces[name].append(score(logits_TV, labels_T[part].to(logits_TV.device), reference).cpu())
    return {name: torch.cat(parts) for name, parts in pieces.items()}, hidden.get(id(teacher))


def sum_by_unit(scores_TC: Tensor, units_T: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending unit ids (U,) and the sums (U, C) of the rows that belong to each."""
    ids_U, where_T = units_T.unique(return_inverse=True)
    sums_UC = torch.zeros(len(ids_U), scores_TC.shape[1], dtype=torch.float64)
    return ids_U, sums_UC.index_add_(0, where_T, scores_TC)


def token_metrics(
    models: Mapping[str, PreTrainedModel],
    batches: Iterable[Mapping[str, Tensor]],
    *,
    teacher: PreTrainedModel | None = None,
    max_logits: int = 2**25,
    remember: list[Tensor | None] | None = None,
) -> dict[str, TokenMetrics]:
    """Score several causal language models in one pass over `batches`.

    Args:
        models: name -> transformers causal LM; may contain `teacher` itself (its KL is then exactly 0).
        batches: dicts with input_ids (B, L), labels (B, L) with −100 = not scored and not shifted, optionally
            position_ids, attention_mask, and document_ids (B, L) int64.
        teacher: unquantised model of the same vocabulary, on any device.
        max_logits: elements of one chunk of logits.
        remember: the teacher's hidden states of every batch, filled by the first call and read by the next ones,
            which must get the same batches and teacher; 4·T·H bytes in all.

    Raises ValueError without a scored token, FloatingPointError where a model's loss is not finite.
    """
    summed: dict[str, list[Tensor]] = {name: [] for name in models}
    units: list[Tensor] = []
    rows, unit = 0, "sequence"
    with inference([*models.values(), *([teacher] if teacher is not None else [])]):
        for number, batch in enumerate(batches):
            scored_BL = batch["labels"][:, 1:] != IGNORED
            units_T = batch_units(batch, rows)[scored_BL]
            ids_U = units_T.unique()
            known_TH = remember[number] if remember is not None and number < len(remember) else None
            found, teacher_TH = score_batch(models, teacher, batch, max_logits, known_TH)
            if remember is not None and number == len(remember):
                remember.append(teacher_TH)
            for name, scores_TC in found.items():
                counted_TC = torch.cat([torch.ones(len(units_T), 1, dtype=torch.float64), scores_TC], 1)
                summed[name].append(sum_by_unit(counted_TC, units_T)[1])
            units.append(ids_U)
            rows, unit = rows + len(scored_BL), "document" if "document_ids" in batch else "sequence"
    if not sum(len(u) for u in units):
        raise ValueError(
            f"no token to score in {rows} sequences: every label is −100 or the data is empty; "
            f"check the held-out split and, for chat data, that assistant turns survive truncation"
        )
    return {name: _collect(name, unit, torch.cat(units), torch.cat(s), teacher) for name, s in summed.items()}


def _collect(name: str, unit: str, units: Tensor, sums: Tensor, teacher: PreTrainedModel | None) -> TokenMetrics:
    ids_U, sums_UC = sum_by_unit(sums, units)
    tokens_U, nll_U, correct_U, kl_U, agree_U = sums_UC.unbind(1)
    if not bool(sums_UC.isfinite().all()):
        bad = int((~sums_UC.isfinite().all(1)).sum())
        raise FloatingPointError(
            f"model {name!r}: the loss is not finite in {bad} of {len(ids_U)} {unit}s; training diverged or "
            f"a scale overflowed, look at the loss curve and the quantiser scales before exporting"
        )
    without = teacher is None
    return TokenMetrics(
        unit, ids_U, tokens_U, nll_U, correct_U, None if without else kl_U, None if without else agree_U
    )
