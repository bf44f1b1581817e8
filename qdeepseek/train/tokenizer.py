"""The byte-level tokenizer as a transformers tokenizer that `save_pretrained` writes and AutoTokenizer reads."""

from transformers import PreTrainedTokenizerFast

from qdeepseek.data.tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS, byte_tokenizer


def pretrained_byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Byte tokenizer with DeepSeek's special tokens, its chat template, and `max_length` as its limit."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (BOS, EOS, PAD)],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
