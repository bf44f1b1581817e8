"""Packed documents give the logits, loss and gradients that they give alone; lengths, labels and masks by rule."""

import copy
import random

import numpy as np
import pytest
import torch

from qdeepseek.data.chat import IGNORE, Encoded
from qdeepseek.data.packing import (
    PADDING,
    PackedDataset,
    additive_mask,
    block_causal_mask,
    check_length,
    collate_packed,
    fit_length,
    pack,
    real_tokens,
)
from qdeepseek.data.sources import DataError

PAD = 258


def document(length, seed=0, prompt=0, where="f:1"):
    """Random byte tokens; the first `prompt` of them without loss."""
    ids = np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
    labels = ids.copy()
    labels[:prompt] = IGNORE
    return Encoded(where, ids, labels)


# ---- bins


@pytest.mark.parametrize("seed", range(5))
def test_pack_holds_every_document_once_and_no_bin_overflows(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 100) for _ in range(300)]
    bins = pack(sizes, 100)
    assert sorted(i for b in bins for i in b) == list(range(300))
    assert all(sum(sizes[i] for i in b) <= 100 for b in bins)
    assert len(bins) <= 11 / 9 * -(-sum(sizes) // 100) + 1
    assert bins == pack(sizes, 100)


def test_pack_is_optimal_where_it_is_easy_and_refuses_what_cannot_fit():
    assert pack([5, 5, 4, 6, 10], 10) == [[4], [2, 3], [0, 1]]
    assert pack([], 10) == []
    with pytest.raises(DataError, match="document 1 has 11 tokens"):
        pack([3, 11], 10)


# ---- one item and its mask


def test_item_restarts_positions_and_masks_first_tokens_and_padding():
    data = PackedDataset([document(3, 1), document(4, 2)], length=9, pad_token_id=PAD)
    item = data[0]
    a, b = (torch.from_numpy(d.input_ids).long() for d in data.documents)
    assert torch.equal(item["input_ids"], torch.cat([a, b, torch.tensor([PAD, PAD])]))
    assert torch.equal(item["labels"], torch.tensor([IGNORE, *a[1:], IGNORE, *b[1:], IGNORE, IGNORE]))
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert item["document_ids"].tolist() == [0, 0, 0, 1, 1, 1, 1, -1, -1]
    assert {t.dtype for t in item.values()} == {torch.int64}
    assert data.stats.to_dict() == {
        "documents": 2, "truncated": 0, "split": 0, "dropped": 0, "tokens": 7, "trained_tokens": 5,
        "sequences": 1, "fill": 7 / 9,
    }  # fmt: skip


def test_mask_is_causal_inside_documents_and_never_empty():
    mask = block_causal_mask(torch.tensor([[0, 0, 1, -1, -1]]))
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]
    ]  # fmt: skip
    added = additive_mask(mask, torch.bfloat16)
    assert torch.equal(added == 0, mask) and added.isfinite().all() and added.dtype == torch.bfloat16


def test_collate_shapes():
    data = PackedDataset([document(5, s) for s in range(4)], length=6, pad_token_id=PAD)
    batch = collate_packed([data[0], data[1]])
    assert {k: tuple(v.shape) for k, v in batch.items()} == {
        "input_ids": (2, 6), "labels": (2, 6), "position_ids": (2, 6), "attention_mask": (2, 1, 6, 6)
    }  # fmt: skip
    assert "attention_mask" not in collate_packed([data[0]], with_mask=False)


# ---- length rules


def test_too_long_error_names_the_row():
    with pytest.raises(DataError, match=r"^chat\.jsonl:9: 13 tokens are more than data\.max_length=12.*too_long"):
        fit_length([document(12), document(13, where="chat.jsonl:9")], 12, "error")


def test_truncate_keeps_the_start_and_drops_what_lost_its_labels():
    kept, counts = fit_length([document(20, 1, prompt=5), document(20, 2, prompt=15)], 12, "truncate")
    assert [d.input_ids.tolist() for d in kept] == [document(20, 1).input_ids[:12].tolist()]
    assert counts == {"truncated": 2, "split": 0, "dropped": 1}


@pytest.mark.parametrize("size", range(13, 40))
def test_split_predicts_every_token_once(size):
    whole = document(size, size)
    pieces, counts = fit_length([whole], 12, "split")
    assert counts["split"] == 1 and all(2 <= len(p.input_ids) <= 12 for p in pieces)
    predicted = [token for p in pieces for token in p.labels[1:].tolist()]
    assert predicted == whole.labels[1:].tolist()


def test_single_tokens_are_dropped_and_nothing_left_is_an_error():
    assert fit_length([document(1), document(2)], 12, "error")[1]["dropped"] == 1
    with pytest.raises(DataError, match=r"no document with a token to train on is left of 1.*too_long=truncate"):
        PackedDataset([document(20, prompt=15)], 12, PAD, "truncate")


def test_wrong_options():
    with pytest.raises(DataError, match="too_long='cut': choose one of error, truncate, split"):
        fit_length([], 12, "cut")
    with pytest.raises(DataError, match=r"max_length=1024 is more than the model's max_position_embeddings 512"):
        check_length(1024, 512)
    with pytest.raises(DataError, match="at least 2 tokens"):
        check_length(1, None)
    check_length(512, 512)


# ---- equality with the documents alone, on the small DeepSeek-V3


def packed_batch():
    """Two sequences: three documents, a chat-like one among them, and one document with padding."""
    documents = [document(30, 1), document(21, 2, prompt=9), document(13, 3), document(55, 4, prompt=4)]
    data = PackedDataset(documents, length=64, pad_token_id=PAD)
    assert sorted(map(len, data.bins)) == [1, 3]
    return data, collate_packed([data[i] for i in range(len(data))])


def alone(model, doc):
    """Logits (T, V) and summed loss of one document without packing."""
    ids = torch.from_numpy(doc.input_ids).long()[None]
    out = model(input_ids=ids, labels=torch.from_numpy(doc.labels).long()[None], use_cache=False)
    return out.logits[0], out.loss * (doc.labels[1:] != IGNORE).sum()


def attend(model, implementation):
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    return model.eval()


@pytest.mark.parametrize("implementation, mask", [("sdpa", "bool"), ("sdpa", "none"), ("eager", "additive")])
def test_packed_equals_alone(tiny_model, implementation, mask):
    model = attend(tiny_model, implementation)
    data, batch = packed_batch()
    if mask == "additive":
        batch["attention_mask"] = additive_mask(batch["attention_mask"], torch.float32)
    elif mask == "none":
        del batch["attention_mask"]
    packed = model(**batch, use_cache=False)
    loss, count = 0.0, 0
    for row, members in enumerate(data.bins):
        start = 0
        for member in members:
            doc = data.documents[member]
            logits, total = alone(model, doc)
            end = start + len(doc.input_ids)
            torch.testing.assert_close(packed.logits[row, start:end], logits, atol=1e-5, rtol=0)
            loss, count, start = loss + total, count + int((doc.labels[1:] != IGNORE).sum()), end
    torch.testing.assert_close(packed.loss, loss / count, atol=1e-5, rtol=0)
    assert packed.logits.isfinite().all()


def test_packed_gradients_equal_the_sum_of_the_documents_alone(tiny_model):
    data, batch = packed_batch()
    tiny_model(**batch, use_cache=False).loss.backward()
    packed = {n: p.grad.clone() for n, p in tiny_model.named_parameters() if p.grad is not None}
    tiny_model.zero_grad()
    sum(alone(tiny_model, d)[1] for d in data.documents).div(data.stats.trained_tokens).backward()
    for name, parameter in tiny_model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(packed[name], parameter.grad, atol=1e-6, rtol=1e-3)


def test_the_equality_can_fail(tiny_model):
    """What goes wrong without this file: a plain causal mask, and a bool mask given to eager attention."""
    data, batch = packed_batch()
    row = next(i for i, members in enumerate(data.bins) if len(members) == 3)
    second = len(data.documents[data.bins[row][0]].input_ids)
    reference, _ = alone(tiny_model, data.documents[data.bins[row][1]])
    causal = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril().expand(len(data), -1, -1, -1)
    for implementation, mask in [("sdpa", causal), ("eager", batch["attention_mask"])]:
        out = attend(tiny_model, implementation)(**{**batch, "attention_mask": mask}, use_cache=False)
        assert (out.logits[row, second : second + len(reference)] - reference).abs().max() > 1e-3


# ---- which positions hold a token


def test_real_tokens_are_those_of_documents():
    documents = [document(3, 1), document(4, 2, prompt=2), document(9, 3), document(5, 4)]
    data = PackedDataset(documents, length=9, pad_token_id=0)  # a pad id that is a byte too
    items = [data[i] for i in range(len(data))]
    owner = torch.stack([item["document_ids"] for item in items])
    batch = collate_packed(items)
    assert torch.equal(real_tokens(batch), owner != PADDING) and bool((owner == PADDING).any())
    assert torch.equal(real_tokens(collate_packed(items, with_mask=False)), owner != PADDING)


def test_real_tokens_of_other_batches():
    ids = torch.arange(6).view(2, 3)
    assert real_tokens({"input_ids": ids, "labels": ids}).all()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert torch.equal(real_tokens({"input_ids": ids, "labels": ids, "attention_mask": mask}), mask.bool())
