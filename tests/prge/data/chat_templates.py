"""Chat templates like those of common models."""

from __future__ import annotations

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
{{- "<|start|>system<|end|>\n\n" + system + eos_token }}
{%- for message in rest %}
    {{- '<|start|>' + message.role + '<|end|>\n\n' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\n\n' }}
{%- endif %}
"""

TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {{- raise_exception('no system role') }}
{%- endif %}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (message['content'] | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

EVERYTHING = """{% set ns = namespace(count=0) %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}{% continue %}{% endif %}
  {%- set ns.count = ns.count + 1 %}
  {%- if message.role == 'assistant' %}
a: {% generation %}{{ message.content }}{{ eos_token }}
{% endgeneration %}
  {%- else %}
{{ message | tojson }} {{ tools is none }} {{ {'k': '<ü>'} | tojson(indent=1) }}
  {%- endif %}
  {%- if loop.index > 5 %}{% break %}{% endif %}
{%- endfor %}{{ strftime_now('%Y') | length }} {{ ns.count }}{% if add_generation_prompt %}
a: {% endif %}"""


# Templates that render a turn differently once another follows.

THINKS = """{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\n' ~ tools | tojson ~ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > last.question %}
        {{- '<think>\n' ~ (message.reasoning_content or '') ~ '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

ENDS_WITH_EOS = """{% for message in messages %}
{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

FOLDS_SYSTEM = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set said = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- set before = said ~ '\n\n' if said is defined and loop.last else '' %}
        {{- '[INST] ' ~ before ~ message.content ~ ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ message.content ~ eos_token }}
    {%- endif %}
{%- endfor %}"""

DATED = """{{- bos_token }}{{ 'Today is ' ~ strftime_now('%d %b %Y') ~ '.\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

TAGGED = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Like templates of multimodal models, which read contents only as parts.
OF_PARTS = """{%- for message in messages %}
    {{- message.role ~ ':' }}
    {%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
