"""Chat templates in the manner of those that models have."""

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
