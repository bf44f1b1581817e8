"""The byte tokenizer as transformers sees it, and a fresh copy of it under another chat template."""

import pytest

from qdeepseek.data.tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS, byte_tokenizer


def make_tokenizer(template=CHAT_TEMPLATE, eos=EOS, special=()):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token=BOS, eos_token=eos, pad_token=PAD,
        additional_special_tokens=[t for t in (*SPECIAL_TOKENS, *special) if t not in (BOS, eos, PAD)],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def byte_chat_tokenizer():
    return make_tokenizer()
