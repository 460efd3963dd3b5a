"""Chat templates: what they see, and that a hostile one ends."""

import pytest

from jaxlayers.weights.chat import ChatTemplate


def test_templates_see_what_transformers_gives_them():
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "{{ m.content|trim ~ '!' }}{{ loop.length }}{% generation %}y{% endgeneration %}{% endfor %}"
        "{{ {'a<': 'é'}|tojson }}{{ strftime_now('%Y')|length }}{{ nothing }}{{ '%s-%d'|format('a', 3) }}"
        "{{ messages|map(attribute='content')|join(',') }}"
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}x{% endif %}"
        "{% endmacro %}{{ f(3) }}"
    )
    messages = [{"content": " a "}, {"content": "b"}]
    assert template.render(messages) == '\nb!2y{"a<": "é"}4a-3 a ,bxxx'.lstrip("\n")


HOSTILE = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**10**10 }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '{:1000000000}'.format(3) }}",
    "{{ '%1000000000d'|format(3) }}",
    "{{ '%1000000000d' % 3 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x|replace('a', n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set q %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = q %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(9) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__ }}{{ messages.append(1) }}",
    "{{ raise_exception('no system\nrole') }}",
    "{% for x in ",
    "{{ " + "(" * 5000,
    "{{ messages[0]['a']['b'] }}",
    "{{ 1 / 0 }}",
    "{% include 'x' %}",
]


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_templates_end_in_one_sentence(source):
    with pytest.raises(ValueError, match="chat template") as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)
