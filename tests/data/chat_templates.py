"""Chat templates of the kinds that exist in the wild, cut to what matters for finding the assistant's tokens."""

from qdeepseek.data.tokenizer import CHAT_TEMPLATE

GENERATION = CHAT_TEMPLATE

# EOS outside the marked span, and white space between
GENERATION_EOS_OUTSIDE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}Assistant: "
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '\\n' + eos_token + '\\n' }}"
    "{% else %}{{ m['role'] + ': ' + m['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)

# DeepSeek-V2-Chat
V2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\\n\\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# deepseek-coder-instruct: the EOS is followed by a new line
CODER = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n' }}"
    "{% else %}{{ '### Response:\\n' + message['content'] + '\\n<|EOT|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)

# DeepSeek-R1 and R1-Distill: reasoning is stripped everywhere, the generation prompt opens <think>, only the
# last system message is kept and it comes first
R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)

# The first release of R1's template: reasoning stripped, nothing opened
R1_PLAIN = R1.replace("<think>\\n'}}", "'}}")

# DeepSeek-V3.1: `thinking` decides how the generation prompt ends; finished turns are always closed
V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{bos_token}}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{{m['content']}}{%- endif %}"
    "{%- if m['role'] == 'user' %}{{'<｜User｜>' + m['content']}}{%- endif %}"
    "{%- if m['role'] == 'assistant' %}{%- set content = m['content'] -%}{%- if '</think>' in content %}"
    "{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}"
    "{{'<｜Assistant｜></think>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{'<｜Assistant｜>'}}{%- if thinking %}{{'<think>'}}{%- else %}{{'</think>'}}"
    "{%- endif %}{%- endif %}"
)

# Qwen3: reasoning kept in the turns after the last question, stripped from older ones; ends with <|im_end|>\n
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m['role'] == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{{- '<|im_start|>' + m['role'] + '\\n' }}{%- set content = m['content'] %}"
    "{%- if m['role'] == 'assistant' and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- if loop.index0 > ns.last %}"
    "{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Llama 3: contents are trimmed
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|end|>\\n\\n' + m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"
)

# ends the assistant's turn with nothing at all
NO_END = (
    "{% for m in messages %}{{ '\\n[' + m['role'] + '] ' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n[assistant] ' }}{% endif %}"
)
