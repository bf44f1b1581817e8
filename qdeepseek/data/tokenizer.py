"""A byte-level tokenizer with DeepSeek's special tokens and a chat template.

Id b is byte b for b < 256 (GPT-2's printable alphabet, no merges), so any text round-trips and nothing has to
be learned; ids 256.. are the special tokens of DeepSeek-V3 and R1. The template marks the assistant's turn with
`{% generation %}`, which lets a tokenizer return the mask of trained tokens.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL_TOKENS = (BOS, EOS, PAD, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<|EOT|>")
VOCAB_SIZE = 288  # 256 bytes + 8 special tokens, padded to a multiple of 32

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{ message['content'] }}"
    "{%- elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' }}"
    "{%- generation %}{{ message['content'] + eos_token }}{%- endgeneration %}"
    "{%- else %}{{ raise_exception('unknown role ' + message['role']) }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{%- endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte 0..255 in GPT-2's byte-level encoding."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Tokenizer of 256 bytes and the special tokens; ids of special tokens follow `SPECIAL_TOKENS`."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer
