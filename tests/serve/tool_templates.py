"""Chat templates with tools, each after its family's and shortened to what the tests need."""

QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You help.' }}{%- endif %}
    {{- "\n\n# Tools\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nReturn a json object within <tool_call></tool_call> XML tags.<|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LLAMA = r"""
{%- set system_message = "" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none and tools is defined %}
    {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("only single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if tool_call.name == "brave_search" %}{{- "<|python_tag|>" + tool_call.name + ".call()" }}{%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
MISTRAL = r"""
{%- set loop_messages = messages %}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- macro checked(id) %}
    {%- if id|length != 9 %}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
    {{- id + '"}' }}
{%- endmacro %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + (system_message + "\n\n" if system_message is defined else "") + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- (tool_call.function|tojson)[:-1] + ', "id": "' + checked(tool_call.id) }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]</s>" }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + "</s>"}}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + checked(message.tool_call_id) }}
        {{- "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL}
SPECIAL = {
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eot_id|>"),
    "mistral": (
        *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        *("[/TOOL_RESULTS]", "</s>"),
    ),
}
"""Their special tokens; the last one ends an answer. Qwen's <tool_call> is in its vocabulary, but is not special."""
